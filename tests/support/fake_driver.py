"""A CUDA driver that does nothing and remembers everything: for machines without a GPU."""

import ctypes
from typing import Any

from cuda.bindings import driver as real

ANSWERS = {
    "cuDeviceGetCount": 1,
    "cuDeviceGet": 0,
    "cuDevicePrimaryCtxRetain": 17,
    "cuLibraryGetKernel": 23,
    "cuPointerGetAttribute": 0,
}
LARGE_SHARED = 227 << 10


class FakeDriver:
    """Stands in for ``cuda.bindings.driver``; `calls` holds (name, arguments) of every call.

    Device memory is host memory, so that copies there and back can be followed.
    """

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.capability, self.calls, self.memory = capability, [], {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)

        def function(*arguments: Any) -> tuple:
            self.calls.append((name, arguments))
            answer = getattr(self, "_" + name, None)
            value = answer(*arguments) if answer else ANSWERS.get(name)
            return (real.CUresult.CUDA_SUCCESS,) if value is None else (real.CUresult.CUDA_SUCCESS, value)

        return function

    def called(self, name: str) -> list[tuple]:
        """The arguments of each call of a function."""
        return [arguments for called, arguments in self.calls if called == name]

    def _cuDeviceGetAttribute(self, attribute: Any, handle: int) -> int:
        major, minor = self.capability
        return {
            real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: major,
            real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: minor,
        }.get(attribute, LARGE_SHARED)

    def _cuLibraryLoadData(self, code: bytes, *arguments: Any) -> int:
        return 1 + len(self.called("cuLibraryLoadData"))

    def _cuMemAllocAsync(self, size: int, stream: int) -> int:
        buffer = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def _cuMemFreeAsync(self, pointer: int, stream: int) -> None:
        del self.memory[pointer]

    def _cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        ctypes.memmove(target, source, size)

    _cuMemcpyDtoHAsync = _cuMemcpyHtoDAsync
