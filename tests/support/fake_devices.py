"""GPU libraries that are not there: their arrays in host memory, and their kernels run by the emulator.

Each fake class answers what the adapter of its library in `numbaflash.arrays` asks of a real one, and nothing
else; its memory is an ordinary NumPy array. `install` puts the libraries, a driver and two GPUs in place.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import cuda

import numbaflash.backend
from numbaflash import emulator
from numbaflash.cuda import backend, driver
from numbaflash.cuda.plan import Plan, Pointer
from numbaflash.device import DeviceView, host_view

STREAMS = {0: 1000, 1: 1001}
"""What every library says its current stream on a GPU is."""


class Array:
    """What the arrays of all libraries have in common."""

    def __init__(self, host: np.ndarray, ordinal: int) -> None:
        self.host, self.ordinal = host, ordinal

    @property
    def shape(self) -> tuple[int, ...]:
        return self.host.shape

    @property
    def ndim(self) -> int:
        return self.host.ndim

    @property
    def dtype(self) -> Any:
        return self.host.dtype

    def like(self, host: np.ndarray) -> "Array":
        return type(self)(np.ascontiguousarray(host), self.ordinal)


class Contiguous(Array):
    """Those of CuPy, JAX and Numba, whose methods are NumPy's."""

    def astype(self, dtype: np.dtype) -> Array:
        return self.like(self.host.astype(dtype))

    def reshape(self, shape: tuple[int, ...]) -> Array:
        return self.like(self.host.reshape(shape))


class CuPyArray(Contiguous):
    __module__ = "cupy"

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=_address(self.host))

    @property
    def strides(self) -> tuple[int, ...]:
        return self.host.strides

    @property
    def device(self) -> "Gpu":
        return Gpu(self.ordinal)


class Gpu:
    """Current within a with statement."""

    current = 0

    def __init__(self, ordinal: int) -> None:
        self.id = ordinal

    def __enter__(self) -> None:
        self.before, Gpu.current = Gpu.current, self.id

    def __exit__(self, *error: Any) -> None:
        Gpu.current = self.before


class JaxArray(Contiguous):
    """Immutable, contiguous, and ready only once somebody has waited for it."""

    __module__ = "jaxlib._jax"
    waited = False

    def devices(self) -> set:
        return {JaxDevice(self.ordinal)}

    def block_until_ready(self) -> "JaxArray":
        self.waited = True
        return self

    def unsafe_buffer_pointer(self) -> int:
        assert self.waited, "the memory of an array that may not be written yet"
        return _address(self.host)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.host, dtype)


class JaxDevice(SimpleNamespace):
    platform = "gpu"

    def __init__(self, ordinal: int) -> None:
        super().__init__(local_hardware_id=ordinal)

    def __hash__(self) -> int:
        return self.local_hardware_id


class NumbaArray(Contiguous):
    __module__ = "numba.cuda.cudadrv.devicearray"

    @property
    def strides(self) -> tuple[int, ...]:
        return self.host.strides

    @property
    def __cuda_array_interface__(self) -> dict:
        return self.host.__array_interface__

    def copy_to_host(self) -> np.ndarray:
        return self.host.copy()


class TorchArray(Array):
    __module__ = "torch"
    requires_grad, layout = False, "strided"

    @property
    def device(self) -> SimpleNamespace:
        return SimpleNamespace(type="cuda", index=self.ordinal)

    @property
    def dtype(self) -> str:
        return f"torch.{self.host.dtype}"

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.host.itemsize for step in self.host.strides)

    def data_ptr(self) -> int:
        return _address(self.host)

    def resolve_neg(self) -> "TorchArray":
        return self

    detach = contiguous = resolve_neg

    def double(self) -> Array:
        return self.like(self.host.astype(np.float64))

    def to(self, dtype: np.dtype) -> Array:
        return self.like(self.host.astype(dtype))

    def reshape(self, shape: tuple[int, ...]) -> Array:
        return self.like(self.host.reshape(shape))


KINDS = {"cupy": CuPyArray, "jax": JaxArray, "numba": NumbaArray, "torch": TorchArray}


def _address(host: np.ndarray) -> int:
    return host.__array_interface__["data"][0]


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


class Machine:
    """Two GPUs of one kind; remembers every execution."""

    def __init__(self) -> None:
        self.executed: list[tuple[int, int]] = []
        self.synchronized: list[int] = []
        self.memory: dict[int, int] = {}

    def place(self, library: str, host: np.ndarray, ordinal: int) -> Array:
        """An array of a library on a GPU."""
        self.memory[_address(host)] = ordinal
        return KINDS[library](host, ordinal)

    def record(self, plan: Plan, ordinal: int, arrays: Any) -> driver.Recording:
        """As `driver.record`, of a plan that serves once."""
        return driver.Recording(ordinal, plan, (), False)

    def replay(self, recording: driver.Recording, arrays: Any, stream: int, results: Any) -> None:
        """As `driver.replay`, in the emulator."""
        plan = recording.steps
        self.executed.append((recording.ordinal, stream))
        if plan.launches:
            launches = [launch.__class__(launch.kernel, launch.grid, launch.block, launch.shared_bytes,
                                         _on_host(launch.arguments)) for launch in plan.launches]
            emulator.execute(Plan(launches, plan.workspaces), counters=False)


def _on_host(item: Any) -> Any:
    """Arguments of a launch with views of device memory as arrays of host memory, which the fake memory is."""
    if isinstance(item, tuple):
        parts = [_on_host(one) for one in item]
        return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)
    if isinstance(item, Pointer):
        return Pointer(_on_host(item.target), item.byte_offset)
    if isinstance(item, DeviceView):
        return host_view(item.__array_interface__["data"][0], item.shape, item.strides, item.dtype, item)
    return item


def install(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Put libraries, driver and GPUs in place for one test."""
    machine = Machine()

    def cupy_empty(shape, dtype):
        return machine.place("cupy", np.full(shape, 77, dtype), Gpu.current)

    def jax_device_put(array, device):
        return machine.place("jax", np.array(array), device.local_hardware_id)

    def torch_empty(shape, dtype, device):
        return machine.place("torch", np.full(shape, 77, dtype), device.index)

    cupy = _module("cupy", empty=cupy_empty, ascontiguousarray=lambda array, dtype: array.astype(dtype))
    cupy.cuda = SimpleNamespace(
        Device=Gpu, get_current_stream=lambda: SimpleNamespace(ptr=STREAMS[Gpu.current]))
    jax = _module("jax", device_put=jax_device_put, core=SimpleNamespace(Tracer=type("Tracer", (), {})),
                  numpy=SimpleNamespace(zeros=np.zeros))
    torch = _module("torch", strided="strided", empty=torch_empty, is_grad_enabled=lambda: False,
                    cuda=SimpleNamespace(
                        current_stream=lambda device: SimpleNamespace(cuda_stream=STREAMS[device])),
                    **{name: np.dtype(name) for name in ("float16", "float32", "float64")})
    for name, module in (("cupy", cupy), ("jax", jax), ("torch", torch)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cuda, "gpus", [Gpu(ordinal) for ordinal in STREAMS])
    monkeypatch.setattr(cuda, "device_array", lambda shape, dtype: machine.place(
        "numba", np.full(shape, 77, dtype), Gpu.current))
    monkeypatch.setattr(cuda, "to_device", lambda array: machine.place("numba", array, Gpu.current))
    monkeypatch.setattr(numbaflash.backend, "gpu_is_usable", lambda: True)
    monkeypatch.setattr(backend, "device", lambda ordinal: SimpleNamespace(arch="sm_80"))
    monkeypatch.setattr(backend, "record", machine.record)
    monkeypatch.setattr(backend, "replay", machine.replay)
    monkeypatch.setattr(driver, "device_of", machine.memory.__getitem__)
    monkeypatch.setattr(driver, "synchronize", machine.synchronized.append)
    return machine
