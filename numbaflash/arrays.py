"""Foreign arrays: adopt them as pointer, shape, strides and dtype; give back the caller's kind."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float32 = np.dtype(np.float32)
float64 = np.dtype(np.float64)
FLOATING = (float16, bfloat16, float32, float64)
FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))

_DEVICE_ATTRIBUTES = ("__cuda_array_interface__", "__dlpack__")


class Operand(NamedTuple):
    """An array as the kernels see it.

    Attributes
    ----------
    pointer : int
        Address of element (0, ..., 0).
    shape, strides : tuple of int
        Strides are in bytes, may be negative or 0.
    dtype : numpy.dtype
    array : ndarray
        The view that pointer, shape and strides describe; it keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    array: Any


def operand(array: np.ndarray) -> Operand:
    """Describe a NumPy array (or a view made of one) without copying it."""
    return Operand(array.__array_interface__["data"][0], array.shape, array.strides, array.dtype, array)


def adopt(name: str, array: Any) -> np.ndarray:
    """The caller's array, or a TypeError / NotImplementedError that names the argument.

    Lists and scalars are refused on purpose: an attention call on converted copies would be slow in silence and
    could not hand gradients back in the caller's dtype.
    """
    if type(array) is np.ndarray:
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; pass its data, and hide entries through mask=")
    if isinstance(array, np.ndarray):
        return array.view(np.ndarray)
    if any(hasattr(array, attribute) for attribute in _DEVICE_ATTRIBUTES):
        raise NotImplementedError(
            f"{name} is a {type(array).__module__}.{type(array).__qualname__}; this version takes NumPy arrays only"
        )
    raise TypeError(f"{name} must be a NumPy array, not {type(array).__qualname__}")
