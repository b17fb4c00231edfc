"""Foreign arrays: adopt them as NumPy views without importing their library, give back the caller's kind."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .device import DeviceView, device_view, host_view

float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float32 = np.dtype(np.float32)
float64 = np.dtype(np.float64)
FLOATING = (float16, bfloat16, float32, float64)
FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))


class Operand(NamedTuple):
    """An array as the kernels see it.

    Attributes
    ----------
    pointer : int
        Address of element (0, ..., 0).
    shape, strides : tuple of int
        Strides are in bytes, may be negative or 0.
    dtype : numpy.dtype
    array : ndarray or DeviceView
        The view that pointer, shape and strides describe; it keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    array: Any


def _address_by_interface(array: Any) -> int:
    return array.__array_interface__["data"][0]


def _address_by_structure(array: Any) -> int:
    """The first field behind the object header of a ``PyArrayObject``: NumPy's ABI, and a fifth of the time."""
    if type(array) in (np.ndarray, DeviceView):
        return ctypes.c_void_p.from_address(id(array) + object.__basicsize__).value or 0
    return array.__array_interface__["data"][0]


def _fastest_address() -> Callable[[Any], int]:
    """Read the structure only where it is known to lie as expected, and arrays of all kinds say so."""
    usual = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
    samples = [np.empty(5), np.empty((3, 4), np.float16)[1:, ::-2], np.empty((0, 7)), np.empty(9, bfloat16)[::3]]
    samples += [array.view(DeviceView) for array in samples]
    if usual and all(_address_by_structure(array) == _address_by_interface(array) for array in samples):
        return _address_by_structure
    return _address_by_interface


address = _fastest_address()
"""``address(array)``: where element (0, ..., 0) of a NumPy array or device view lies."""


def operand(array: np.ndarray) -> Operand:
    """Describe a NumPy array or device view without copying it."""
    return Operand(address(array), array.shape, array.strides, array.dtype, array)


class NumPy:
    """NumPy arrays; also the base of the other libraries' adapters.

    An adapter answers four questions: the memory of an array as a view, the device it lies on (None: the host),
    new arrays beside it, and the stream its library is working on there.
    """

    name = "numpy"

    def view(self, array: Any) -> np.ndarray:
        return array if type(array) is np.ndarray else array.view(np.ndarray)

    def device(self, array: Any) -> int | None:
        return None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, like: Any) -> tuple[Any, np.ndarray]:
        """A new array of this library, and its view."""
        array = np.empty(shape, dtype)
        return array, array

    def finish(self, array: Any, like: Any) -> Any:
        """What the caller gets for an array made by :meth:`empty`, once it is written."""
        return array

    def as_float64(self, array: Any) -> np.ndarray:
        """A view of the values as contiguous float64, on the array's own device."""
        return np.ascontiguousarray(array, np.float64)

    def astype(self, array: Any, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
        """An array of this library in another dtype and shape, on its own device."""
        return array.astype(dtype).reshape(shape)

    def stream(self, device: int) -> int:
        """Handle of the library's current stream on a device."""
        return 0


class Torch(NumPy):
    """PyTorch tensors, on the host and on CUDA devices."""

    name = "torch"

    def view(self, array: Any) -> np.ndarray:
        if array.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise NotImplementedError(
                "a tensor that requires grad needs the autograd bridge, which is not available in this version; "
                "call under torch.no_grad(), or use attention_vjp on detached tensors"
            )
        if array.device.type not in ("cpu", "cuda"):
            raise TypeError(f"tensors on {array.device.type!r} are not supported; cpu and cuda are")
        if array.layout != sys.modules["torch"].strided:
            raise TypeError(f"tensors of layout {array.layout} are not supported; strided ones are")
        array = array.resolve_neg()  # a lazy minus sign is not in the memory
        name = str(array.dtype).removeprefix("torch.")
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        strides = tuple(step * dtype.itemsize for step in array.stride())
        make = host_view if array.device.type == "cpu" else device_view
        return make(array.data_ptr(), tuple(array.shape), strides, dtype, array)

    def device(self, array: Any) -> int | None:
        return array.device.index if array.device.type == "cuda" else None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, like: Any) -> tuple[Any, np.ndarray]:
        torch = sys.modules["torch"]
        array = torch.empty(shape, dtype=getattr(torch, dtype.name), device=like.device)
        return array, self.view(array)

    def as_float64(self, array: Any) -> np.ndarray:
        return self.view(array.detach().double().contiguous())

    def astype(self, array: Any, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
        return array.to(getattr(sys.modules["torch"], dtype.name)).reshape(shape)

    def stream(self, device: int) -> int:
        return sys.modules["torch"].cuda.current_stream(device).cuda_stream


class CuPy(NumPy):
    """CuPy arrays."""

    name = "cupy"

    def view(self, array: Any) -> np.ndarray:
        return device_view(array.data.ptr, array.shape, array.strides, array.dtype, array)

    def device(self, array: Any) -> int | None:
        return array.device.id

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, like: Any) -> tuple[Any, np.ndarray]:
        with like.device:
            array = sys.modules["cupy"].empty(shape, dtype)
        return array, self.view(array)

    def as_float64(self, array: Any) -> np.ndarray:
        return self.view(sys.modules["cupy"].ascontiguousarray(array, np.float64))

    def stream(self, device: int) -> int:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            return cupy.cuda.get_current_stream().ptr


class Numba(NumPy):
    """Numba's device arrays."""

    name = "numba"

    def view(self, array: Any) -> np.ndarray:
        interface = array.__cuda_array_interface__
        return device_view(interface["data"][0], array.shape, array.strides, array.dtype, array)

    def device(self, array: Any) -> int | None:
        from .cuda.driver import device_of

        return device_of(array.__cuda_array_interface__["data"][0])

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, like: Any) -> tuple[Any, np.ndarray]:
        cuda = sys.modules["numba"].cuda
        with cuda.gpus[self.device(like)]:
            array = cuda.device_array(shape, dtype)
        return array, self.view(array)

    def as_float64(self, array: Any) -> np.ndarray:
        return array.copy_to_host().astype(np.float64)

    def astype(self, array: Any, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
        cuda = sys.modules["numba"].cuda
        with cuda.gpus[self.device(array)]:
            return cuda.to_device(array.copy_to_host().astype(dtype).reshape(shape))


class Jax(NumPy):
    """JAX arrays, on the host and on CUDA devices; results are finished before they are handed back."""

    name = "jax"

    def view(self, array: Any) -> np.ndarray:
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise TypeError("traced JAX values have no memory; call outside jit, grad and vmap")
        if self.device(array) is None:
            return np.asarray(array)
        array.block_until_ready()
        return device_view(array.unsafe_buffer_pointer(), array.shape, None, array.dtype, array)

    def device(self, array: Any) -> int | None:
        (device,) = array.devices()
        return device.local_hardware_id if device.platform == "gpu" else None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, like: Any) -> tuple[Any, np.ndarray]:
        if self.device(like) is None:
            return super().empty(shape, dtype, like)
        jax = sys.modules["jax"]
        array = jax.device_put(jax.numpy.zeros(shape, dtype), *like.devices()).block_until_ready()
        return array, self.view(array)

    def finish(self, array: Any, like: Any) -> Any:
        if isinstance(array, np.ndarray):
            return sys.modules["jax"].device_put(array, *like.devices())
        from .cuda.driver import synchronize

        synchronize(self.device(like))
        return array

    def as_float64(self, array: Any) -> np.ndarray:
        return np.asarray(array).astype(np.float64)


NUMPY = NumPy()
LIBRARIES = {
    "numpy": NUMPY, "torch": Torch(), "cupy": CuPy(), "numba": Numba(), "jax": Jax(), "jaxlib": Jax(),
}
"""Adapters by the package that an array's class comes from."""


class Home(NamedTuple):
    """Where the arrays of a call live.

    Attributes
    ----------
    library : NumPy
        The adapter of their library.
    device : int or None
        Number of their GPU; None is host memory.
    like : array
        One of them, beside which results are made.
    """

    library: NumPy
    device: int | None
    like: Any = None


HOST = Home(NUMPY, None)


@cache
def _library_of(kind: type) -> NumPy | None:
    for base in kind.__mro__:
        library = LIBRARIES.get(base.__module__.partition(".")[0])
        if library is not None and base not in (np.generic,) and not issubclass(base, np.generic):
            return library
    return None


def home_of(name: str, array: Any) -> Home:
    """The home of an array, or a TypeError that names the argument.

    Lists and scalars are refused on purpose: an attention call on converted copies would be slow in silence and
    could not hand gradients back in the caller's dtype.
    """
    if type(array) is np.ndarray:
        return HOST
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; pass its data, and hide entries through mask=")
    library = _library_of(type(array))
    if library is None or not hasattr(array, "shape"):
        raise TypeError(
            f"{name} must be an array of NumPy, CuPy, PyTorch, JAX or Numba, not {type(array).__qualname__}"
        )
    return Home(library, library.device(array), array)


def adopt(name: str, array: Any, home: Home = HOST) -> np.ndarray:
    """The view of an array that must live where the call's arrays live; TypeError otherwise."""
    if type(array) is np.ndarray and home is HOST:
        return array
    own = home_of(name, array)
    if own.library.name != home.library.name:
        raise TypeError(
            f"{name} is a {own.library.name} array and q is a {home.library.name} one; one call takes one kind"
        )
    if own.device != home.device:
        raise TypeError(f"{name} lies on {_place(own)} and q on {_place(home)}; one call takes one device")
    return own.library.view(array)


def host_values(name: str, values: Any) -> np.ndarray:
    """Small tables (lengths, offsets, slopes) as a host array, whatever they come as."""
    library = None if isinstance(values, (np.ndarray, np.generic)) else _library_of(type(values))
    if library is None:
        try:
            return np.asarray(values)
        except ValueError:
            raise ValueError(f"{name} is no array: its rows differ in length") from None
    if library.name == "numba":
        return values.copy_to_host()
    view = library.view(values)
    if not isinstance(view, DeviceView):
        return view
    return values.cpu().numpy() if library.name == "torch" else np.asarray(getattr(values, "get", lambda: values)())


def _place(home: Home) -> str:
    return "the host" if home.device is None else f"GPU {home.device}"
