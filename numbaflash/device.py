"""Arrays on a device, described by NumPy views that nobody can read by accident."""

import ctypes
from typing import Any

import numpy as np


class DeviceView(np.ndarray):
    """Shape, strides and dtype of device memory, with the address of its element 0.

    Transposing, indexing and broadcasting work, because they only move the address and the strides. Whatever
    would read or write an element raises TypeError: the address means nothing on the host.
    """

    __array_ufunc__ = None

    def __array_function__(self, function: Any, kinds: Any, arguments: Any, keywords: Any) -> Any:
        if function in (np.broadcast_to, np.ndim, np.shape, np.lib.array_utils.byte_bounds):
            return super().__array_function__(function, kinds, arguments, keywords)
        raise TypeError(f"numpy.{function.__name__} cannot read the memory of a device")

    def _refuse(self, *arguments: Any, **keywords: Any) -> Any:
        raise TypeError("the memory of a device cannot be read on the host")

    astype = copy = tolist = tobytes = item = sum = max = min = all = any = fill = _refuse
    __setitem__ = __bool__ = __float__ = __int__ = __index__ = __iter__ = __contains__ = _refuse

    def __repr__(self) -> str:
        return f"DeviceView(shape={self.shape}, strides={self.strides}, dtype={self.dtype})"

    __str__ = __repr__


def device_view(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype, owner: Any = None
) -> DeviceView:
    """Describe device memory.

    Parameters
    ----------
    pointer : int
        Address of element (0, ..., 0).
    shape : tuple of int
    strides : tuple of int or None
        In bytes; None is C order.
    dtype : numpy.dtype
    owner : object, optional
        Kept alive as long as the view and the views made of it.
    """
    return _view(DeviceView, pointer, shape, strides, dtype, owner)


def host_view(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype, owner: Any = None
) -> np.ndarray:
    """Describe host memory of another library; arguments as :func:`device_view`."""
    return _view(np.ndarray, pointer, shape, strides, dtype, owner)


def _view(
    kind: type, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype, owner: Any
) -> np.ndarray:
    dtype = np.dtype(dtype)
    if strides is None:
        strides, step = (), dtype.itemsize
        for size in reversed(shape):
            strides = (step, *strides)
            step *= max(size, 1)
    reach = [(size - 1) * stride for size, stride in zip(shape, strides)] if 0 not in shape else []
    before = -sum(step for step in reach if step < 0)
    after = sum(step for step in reach if step > 0) + dtype.itemsize
    if not reach and 0 in shape:
        return kind(shape, dtype)
    memory = (ctypes.c_char * (before + after)).from_address(pointer - before)
    memory.owner = owner
    return kind(shape, dtype, memory, before, strides)
