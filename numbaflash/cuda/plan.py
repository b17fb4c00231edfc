"""What a call launches, as plain values: made without a device, executed by the driver or by the emulator.

A `Plan` is a list of launches in stream order and the scratch memory they share.  Planning code never asks a
device anything, so the same plan runs on a GPU and, launch by launch, in the emulator.

>>> from numba import types
>>> def scale(x, partial, n, factor): ...
>>> kernel = KernelSpec("scale", scale, (types.int64, types.int64, types.int32, types.float32), 128)
>>> x, partial = np.ones(1000, np.float32), Workspace("partial", (8,), np.dtype(np.float32), fill=0)
>>> launch = Launch(kernel, grid=8, block=128, arguments=(Pointer(x), Pointer(partial), 1000, 0.5))
>>> Plan([launch], [partial]).workspace_bytes
32
"""
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numbaflash.cuda.compile import Cubin, compile_cubin, compile_ptx

MAX_BLOCK = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True)
class KernelSpec:
    """A kernel before it is compiled for an architecture.

    Attributes
    ----------
    name : str
        Of its factory, with the variant where that helps a reader of a profile.
    function : function or dispatcher
    signature : tuple of numba types
        Of the arguments; pointers are ``int64`` or ``uint64``.
    launch_bounds : int or tuple of int, optional
        Most threads per block, fewest blocks per multiprocessor, most blocks per cluster.
    max_registers : int, optional
        Per thread.
    """

    name: str
    function: Callable
    signature: tuple
    launch_bounds: "int | tuple | None" = None
    max_registers: "int | None" = None

    def cubin(self, arch: str) -> Cubin:
        """Its machine code for an architecture, from the cache where it is there."""
        return compile_cubin(self.function, tuple(self.signature), arch, launch_bounds=self.launch_bounds,
                             max_registers=self.max_registers)

    def ptx(self, arch: str, lineinfo: bool = False) -> str:
        """Its PTX for an architecture, from the cache where it is there."""
        return compile_ptx(self.function, tuple(self.signature), arch, launch_bounds=self.launch_bounds,
                           lineinfo=lineinfo)


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch memory that lives as long as one execution of the plan.

    Attributes
    ----------
    name : str
        For messages.
    shape : tuple of int
    dtype : numpy.dtype
    fill : int or float, optional
        What every element holds before the first launch; None leaves it uninitialised, and the emulator
        reports a read of what no launch has written.
    """

    name: str
    shape: tuple
    dtype: np.dtype
    fill: "int | float | None" = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class Pointer:
    """The address of an element: of its first one, or `byte_offset` bytes from it.

    Attributes
    ----------
    target : array or Workspace
        Of the kind that the executor works on: NumPy arrays in the emulator, device arrays on a GPU.
    byte_offset : int
    """

    target: object
    byte_offset: int = 0


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch.

    Attributes
    ----------
    kernel : KernelSpec
    grid, block : int or tuple of up to three int
        Kept as (x, y, z).
    shared_bytes : int
        Dynamic shared memory; the driver asks for more than 48 KB where needed.
    arguments : tuple
        One per type in the signature: int, float, `Pointer`, an array, a Workspace (its address), or a
        (NamedTuple) tuple of these, which a kernel receives leaf by leaf.
    leaves : list
        Those leaves.

    Raises
    ------
    ValueError
        If a grid or block has a size that no GPU takes, or the arguments do not match the signature.
    """

    kernel: KernelSpec
    grid: "int | tuple"
    block: "int | tuple"
    shared_bytes: int = 0
    arguments: tuple = ()
    leaves: list = field(init=False, repr=False)

    def __post_init__(self) -> None:
        grid, block = _triple("grid", self.grid), _triple("block", self.block)
        if any(size > most for size, most in zip(grid, MAX_GRID)):
            raise ValueError(f"grid must be at most {MAX_GRID}, got {grid}")
        if math.prod(block) > MAX_BLOCK:
            raise ValueError(f"block must have at most {MAX_BLOCK} threads, got {block}")
        arguments = tuple(self.arguments)
        if len(arguments) != len(self.kernel.signature):
            raise ValueError(f"arguments: {self.kernel.name} takes {len(self.kernel.signature)}, "
                             f"got {len(arguments)}")
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "leaves", leaves(arguments))

    @property
    def workspaces(self) -> "list[Workspace]":
        """The workspaces that the arguments refer to."""
        targets = [item.target if isinstance(item, Pointer) else item for item in self.leaves]
        return [target for target in targets if isinstance(target, Workspace)]


@dataclass(frozen=True, eq=False)
class Plan:
    """Launches, in the order in which one stream runs them, and the scratch memory they share.

    Raises
    ------
    ValueError
        If a launch refers to a workspace that is not in the plan.
    """

    launches: Sequence[Launch]
    workspaces: Sequence[Workspace] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "launches", tuple(self.launches))
        object.__setattr__(self, "workspaces", tuple(self.workspaces))
        for launch in self.launches:
            for workspace in launch.workspaces:
                if not any(workspace is known for known in self.workspaces):
                    raise ValueError(f"workspaces: {launch.kernel.name} refers to {workspace.name!r}, "
                                     "which the plan does not have")

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory in all."""
        return sum(workspace.nbytes for workspace in self.workspaces)


def leaves(arguments: tuple) -> list[Any]:
    """What (nested) tuples of arguments hold, in the order of a kernel's parameters."""
    found = []
    for item in arguments:
        if isinstance(item, tuple):
            found += leaves(item)
        else:
            found.append(item)
    return found


def _triple(name: str, size: "int | tuple") -> "tuple[int, int, int]":
    sizes = tuple(size) if isinstance(size, Sequence) else (size,)
    if not 1 <= len(sizes) <= 3 or any(extent < 1 for extent in sizes):
        raise ValueError(f"{name} must be one to three positive sizes, got {size!r}")
    x, y, z = (int(extent) for extent in sizes + (1,) * (3 - len(sizes)))
    return x, y, z
