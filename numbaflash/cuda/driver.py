"""Execute plans on a GPU: load machine code, hand out memory, launch on the right stream, at low host cost.

Talks to the driver alone, through cuda-bindings and in the device's primary context, which is the one that
Numba, CuPy, PyTorch and JAX use. Everything is ordered by one stream; only results that go back to host memory
make the host wait.
"""

import math
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from numbaflash.arrays import address
from numbaflash.cuda.plan import KernelSpec, Plan, Pointer, Workspace
from numbaflash.device import DeviceView

STATIC_SHARED_LIMIT = 48 * 1024
"""Shared memory per block that a launch may use without asking the driver first."""


class DriverError(RuntimeError):
    """The CUDA driver reports a failure; the message names the call."""


def call(name: str, *arguments: Any) -> Any:
    """One function of the driver; its error code becomes a :class:`DriverError`."""
    driver = _bindings()
    status, *values = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise DriverError(f"{name}: {(text or b'unknown error').decode()} ({status.name})")
    return values[0] if len(values) == 1 else tuple(values)


@cache
def _bindings() -> Any:
    from cuda.bindings import driver

    return driver


@cache
def available() -> bool:
    """True where a driver and at least one GPU are usable."""
    try:
        call("cuInit", 0)
        return call("cuDeviceGetCount") > 0
    except (ImportError, RuntimeError):
        return False


class Device:
    """One GPU: its primary context, its architecture, and the kernels loaded on it."""

    def __init__(self, ordinal: int) -> None:
        call("cuInit", 0)
        driver = _bindings()
        attribute = driver.CUdevice_attribute
        self.ordinal = ordinal
        self.handle = call("cuDeviceGet", ordinal)
        self.context = call("cuDevicePrimaryCtxRetain", self.handle)
        self.arch = architecture(
            call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self.handle),
            call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self.handle),
        )
        self.shared_limit = call(
            "cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, self.handle
        )
        self._kernels: dict[tuple, tuple[Any, int]] = {}
        self._lock = threading.Lock()

    def use(self) -> None:
        """Make the primary context current in this thread."""
        call("cuCtxSetCurrent", self.context)

    def kernel(self, spec: KernelSpec, shared_bytes: int) -> Any:
        """The loaded kernel, allowed to use this much dynamic shared memory."""
        key = (spec.function, spec.signature, spec.launch_bounds, spec.max_registers)
        function, allowed = self._kernels.get(key, (None, 0))
        if function is not None and shared_bytes <= allowed:
            return function
        if shared_bytes > self.shared_limit:
            raise ValueError(
                f"{spec.name} needs {shared_bytes} bytes of shared memory; this GPU gives {self.shared_limit}"
            )
        with self._lock:
            if function is None:
                function, allowed = self._load(spec), STATIC_SHARED_LIMIT
            if shared_bytes > allowed:
                wanted = _bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call("cuKernelSetAttribute", wanted, shared_bytes, function, self.handle)
                allowed = shared_bytes
            self._kernels[key] = function, allowed
        return function

    def _load(self, spec: KernelSpec) -> Any:
        cubin = spec.cubin(self.arch)
        library = call("cuLibraryLoadData", cubin.code, [], [], 0, [], [], 0)
        return call("cuLibraryGetKernel", library, cubin.entry.encode())


def device_of(pointer: int) -> int:
    """Number of the GPU whose memory an address lies in."""
    ordinal = _bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call("cuPointerGetAttribute", ordinal, pointer)) if pointer else 0


def synchronize(ordinal: int) -> None:
    """Wait for everything on a GPU."""
    device(ordinal).use()
    call("cuCtxSynchronize")


def architecture(major: int, minor: int) -> str:
    """Name of the target that serves a GPU: the architecture-specific one from Hopper on."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@cache
def device(ordinal: int = 0) -> Device:
    """The GPU of this number; made once."""
    return Device(ordinal)


def execute(plan: Plan, ordinal: int = 0, stream: int = 0, results: Sequence[np.ndarray] = ()) -> None:
    """Run a plan on a GPU.

    Parameters
    ----------
    plan : Plan
        Its arrays are :class:`~numbaflash.device.DeviceView` (used in place) or NumPy arrays in host memory, which
        are copied to the device first.
    ordinal : int
        Number of the GPU.
    stream : int
        Handle of the stream that orders everything; 0 is the default stream.
    results : sequence of ndarray
        Host arrays of the plan that the kernels write: copied back before the call returns.

    Raises
    ------
    DriverError
        What the driver reports.
    ValueError
        If a launch needs more shared memory than the GPU has.
    """
    replay(record(plan, ordinal), stream=stream, results=results)


class Step(NamedTuple):
    """A launch, ready but for the addresses.

    Attributes
    ----------
    kernel : kernel of the driver
    grid, block : tuple of int
    shared_bytes : int
    kinds : tuple of str
        Struct codes of the parameters.
    values : list
        The parameters; what stands where an address goes is of no account.
    addresses : list of (int, target, int)
        Which parameter, address of what (a Workspace, an array, or the number of an argument), and bytes from it.
    """

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    kinds: tuple[str, ...]
    values: list
    addresses: list


class Recording(NamedTuple):
    """A plan with its kernels loaded on a GPU, and with the arrays that may change left open.

    Attributes
    ----------
    ordinal : int
    steps : list of Step
    workspaces : sequence of Workspace
    is_open : bool
        Every array of numbers is left open: what it keeps are tables of integers.
    """

    ordinal: int
    steps: list[Step]
    workspaces: Sequence[Workspace]
    is_open: bool


def record(plan: Plan, ordinal: int = 0, arrays: Sequence[Any] = ()) -> Recording:
    """Load the kernels of a plan; `arrays` are those that `replay` will be given anew."""
    gpu = device(ordinal)
    gpu.use()
    slots = {id(array): number for number, array in reversed(list(enumerate(arrays))) if array is not None}
    steps, is_open = [], True
    for launch in plan.launches:
        values, addresses = [], []
        for leaf in launch.leaves:
            if not isinstance(leaf, (int, float, np.generic)):
                target, offset = (leaf.target, leaf.byte_offset) if isinstance(leaf, Pointer) else (leaf, 0)
                target = slots.get(id(target), target)
                is_open &= isinstance(target, (int, Workspace)) or target.dtype.kind == "i"
                addresses.append((len(values), target, offset))
                leaf = 0
            values.append(leaf)
        spec = launch.kernel
        steps.append(Step(gpu.kernel(spec, launch.shared_bytes), launch.grid, launch.block, launch.shared_bytes,
                          _scalar_types(spec.signature), values, addresses))
    return Recording(ordinal, steps, plan.workspaces, is_open)


def replay(
    recording: Recording, arrays: Sequence[Any] = (), stream: int = 0, results: Sequence[np.ndarray] = ()
) -> None:
    """Run a recording on arrays like those it was made of; `stream` and `results` as for `execute`."""
    device(recording.ordinal).use()
    memory = _Memory(stream)
    try:
        for workspace in recording.workspaces:
            memory.place_workspace(workspace)
        for kernel, grid, block, shared_bytes, kinds, values, addresses in recording.steps:
            values = values.copy()
            for position, target, offset in addresses:
                values[position] = memory.address(arrays[target] if type(target) is int else target) + offset
            parameters = pack_parameters(kinds, values)
            call("cuLaunchKernel", kernel, *grid, *block, shared_bytes, stream, parameters.table, 0)
        memory.fetch(results)
    finally:
        memory.release()


class Parameters:
    """Kernel parameters in memory, and the table of their addresses that a launch takes."""

    def __init__(self, data: bytes, offsets: np.ndarray) -> None:
        self.data = np.frombuffer(data, np.uint8)
        self.addresses = offsets + np.uint64(address(self.data))
        self.table = address(self.addresses)


def pack_parameters(kinds: str | tuple[str, ...], values: Sequence[Any]) -> Parameters:
    """Lay out scalars as the kernel ABI does: each at its natural alignment.

    Parameters
    ----------
    kinds : str or tuple of str
        One struct code per value: "b" "B" "h" "H" "i" "I" "q" "Q" "f" "d".
    values : sequence of numbers
    """
    layout, offsets = _layout(kinds)
    return Parameters(layout.pack(*values), offsets)


@cache
def _layout(kinds: str | tuple[str, ...]) -> tuple[struct.Struct, np.ndarray]:
    """All scalars as one format, with the gaps that alignment leaves, and where each begins."""
    text, offsets, position = "=", [], 0
    for kind in kinds:
        size = struct.calcsize("=" + kind)
        gap = -position % size
        text += f"{gap}x{kind}" if gap else kind
        offsets.append(position + gap)
        position += gap + size
    return struct.Struct(text), np.array(offsets, np.uint64)


_STRUCT_CODES = {
    "int8": "b", "uint8": "B", "bool": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I",
    "int64": "q", "uint64": "Q", "float32": "f", "float64": "d",
}


@cache
def _scalar_types(signature: tuple) -> tuple[str, ...]:
    """Struct codes of a signature's scalars, NamedTuples taken apart."""
    codes = []
    for kind in signature:
        inner = getattr(kind, "types", None)
        codes += _scalar_types(tuple(inner)) if inner is not None else [_STRUCT_CODES[str(kind)]]
    return tuple(codes)


class _Memory:
    """What one execution puts on the device: workspaces and copies of host arrays."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.placed: dict[int, int] = {}
        self.copies: dict[tuple[int, int], int] = {}
        self.allocations: list[int] = []

    def allocate(self, size: int) -> int:
        pointer = int(call("cuMemAllocAsync", max(size, 1), self.stream))
        self.allocations.append(pointer)
        return pointer

    def place_workspace(self, workspace: Workspace) -> None:
        pointer = self.placed[id(workspace)] = self.allocate(workspace.nbytes)
        if workspace.fill is None or not workspace.nbytes:
            return
        pattern = np.full(1, workspace.fill, workspace.dtype)
        if pattern.itemsize == 8:
            self._upload(np.full(workspace.shape, workspace.fill, workspace.dtype), pointer)
            return
        name, unit = {1: ("cuMemsetD8Async", np.uint8), 2: ("cuMemsetD16Async", np.uint16),
                      4: ("cuMemsetD32Async", np.uint32)}[pattern.itemsize]
        call(name, pointer, int(pattern.view(unit)[0]), math.prod(workspace.shape), self.stream)

    def address(self, target: Any) -> int:
        if isinstance(target, Workspace):
            return self.placed[id(target)]
        pointer = address(target)
        if not isinstance(target, DeviceView) and target.size:
            lo, hi = np.lib.array_utils.byte_bounds(target)
            pointer += self._copy_of(lo, hi) - lo
        return pointer

    def fetch(self, results: Sequence[np.ndarray]) -> None:
        for array in results:
            lo, hi = np.lib.array_utils.byte_bounds(array)
            if array.size and (lo, hi) in self.copies:
                call("cuMemcpyDtoHAsync", lo, self.copies[lo, hi], hi - lo, self.stream)
        if results:
            call("cuStreamSynchronize", self.stream)

    def release(self) -> None:
        for pointer in self.allocations:
            call("cuMemFreeAsync", pointer, self.stream)

    def _copy_of(self, lo: int, hi: int) -> int:
        if (lo, hi) not in self.copies:
            self.copies[lo, hi] = pointer = self.allocate(hi - lo)
            # Of pageable memory the driver has taken its own copy when this returns, so nobody waits for tables
            # beside device arrays; callers with arrays in (perhaps pinned) host memory wait for their results.
            call("cuMemcpyHtoDAsync", pointer, lo, hi - lo, self.stream)
        return self.copies[lo, hi]

    def _upload(self, array: np.ndarray, pointer: int) -> None:
        call("cuMemcpyHtoDAsync", pointer, array.ctypes.data, array.nbytes, self.stream)
