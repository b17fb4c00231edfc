"""The functions of the CUDA driver that `numbaflash.cuda.driver` calls, on host memory.

A launch reads its parameters as a GPU would, from the table of addresses it is given, and hands them to the
Python function that stands for the kernel.
"""

import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")
FAILURE = SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")
OPTIN = 100 << 10


class Driver:
    """Stands for ``cuda.bindings.driver``.

    Attributes
    ----------
    kernels : dict
        Entry name -> (struct codes, function of the parameters).
    log : list of tuple
        Name and arguments of every call.
    allocated : dict
        Address -> memory that is not freed yet.
    failing : str
        Name of the function that reports a failure.
    """

    CUresult = SimpleNamespace(CUDA_SUCCESS=SUCCESS)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="optin")
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic")

    def __init__(self, kernels: dict[str, tuple[str, Callable]]) -> None:
        self.kernels, self.failing = kernels, ""
        self.log: list[tuple] = []
        self.allocated: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Callable:
        if not name.startswith("cu"):
            raise AttributeError(name)
        action = getattr(type(self), f"_{name}", lambda self, *arguments: ())

        def function(*arguments: Any) -> tuple:
            self.log.append((name, *arguments))
            if name == self.failing:
                return (FAILURE,)
            return (SUCCESS, *action(self, *arguments))

        return function

    def calls(self, name: str) -> list[tuple]:
        """Arguments of the calls of one function."""
        return [arguments for called, *arguments in self.log if called == name]

    def cuGetErrorString(self, status: Any) -> tuple:
        return SUCCESS, b"out of memory"

    def _cuDeviceGet(self, ordinal: int) -> tuple:
        return (f"device {ordinal}",)

    def _cuDevicePrimaryCtxRetain(self, device: str) -> tuple:
        return (f"context of {device}",)

    def _cuDeviceGetAttribute(self, attribute: str, device: str) -> tuple:
        return ({"major": 9, "minor": 0, "optin": OPTIN}[attribute],)

    def _cuLibraryLoadData(self, code: bytes, *rest: Any) -> tuple:
        return (code,)

    def _cuLibraryGetKernel(self, library: bytes, entry: bytes) -> tuple:
        return (entry.decode(),)

    def _cuMemAllocAsync(self, size: int, stream: int) -> tuple:
        memory = np.full(size, 0xA5, np.uint8)
        self.allocated[memory.ctypes.data] = memory
        return (memory.ctypes.data,)

    def _cuMemFreeAsync(self, pointer: int, stream: int) -> tuple:
        del self.allocated[pointer]
        return ()

    def _cuMemcpyHtoDAsync(self, there: int, here: int, size: int, stream: int) -> tuple:
        ctypes.memmove(there, here, size)
        return ()

    def _cuMemcpyDtoHAsync(self, here: int, there: int, size: int, stream: int) -> tuple:
        ctypes.memmove(here, there, size)
        return ()

    def _cuMemsetD32Async(self, pointer: int, value: int, count: int, stream: int) -> tuple:
        view(pointer, np.uint32, count)[:] = value
        return ()

    def _cuLaunchKernel(self, kernel: str, *arguments: Any) -> tuple:
        codes, function = self.kernels[kernel]
        addresses = view(arguments[8], np.uint64, len(codes))
        function(*(struct.unpack("=" + code, ctypes.string_at(int(at), struct.calcsize(code)))[0]
                   for code, at in zip(codes, addresses)))
        return ()


def view(pointer: int, dtype: Any, count: int) -> np.ndarray:
    """Memory at an address."""
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype)
