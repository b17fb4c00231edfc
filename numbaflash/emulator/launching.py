"""`launch`: one kernel on NumPy arrays."""
from __future__ import annotations

import dataclasses
import functools
import time

import numpy as np

from ..problem import _integer
from .arguments import Memory, flatten_numba, flatten_ptx, gather, with_memory
from .calls import flatten
from .checks import Checks
from .compiling import compile_kernel
from .counters import Counters
from .decode import Decoder
from .errors import KernelError, RaceError
from .journal import Journal
from .limits import check_shared, check_threads, dimensions
from .machine import MAX_STEPS, Machine
from .memory import GLOBAL_BASE, Arena
from .parser import parse
from .report import Report


@functools.lru_cache(maxsize=256)
def prepared(text: str, entry: str | None):
    """Module and flat kernel of a PTX text, parsed once per process."""
    module = parse(text)
    return module, flatten(module, module.entry(entry))


def launch(kernel, grid, block, *arguments, shared_bytes: int = 0, arch: str = "sm_80", checks=True,
           copies: str = "late", seed: int | None = None, counters: bool = True, names=None,
           entry: str | None = None, max_steps: int = MAX_STEPS,
           resident_blocks: int | None = None) -> Report:
    """Run a CUDA kernel on the CPU by interpreting its PTX, and check everything it does.

    Neither a GPU nor a driver is needed, and NUMBA_ENABLE_CUDASIM must not be set: this runs what Numba would
    hand to a GPU.

    Parameters
    ----------
    kernel : function or str
        A ``@numba.cuda.jit`` kernel, a plain Python function to compile as one, or PTX text.
    grid, block : int or tuple of int
        Blocks of the grid and threads of a block, in up to three dimensions.
    *arguments
        As for a launch on a GPU. NumPy arrays take the place of device arrays and are read and written in
        place; they may overlap, and have any strides. Where a kernel takes a ``uint64`` pointer, pass
        `address` of an array; PTX text takes an array for every ``.u64`` parameter that is a pointer.
    shared_bytes : int
        Dynamic shared memory of each block.
    arch : str
        What to compile for, like "sm_80" or "sm_90a".
    checks : bool or Checks
        What is checked; everything by default.
    copies : {"late", "early"}
        When asynchronous copies deliver: at the wait, or at once.
    seed : int, optional
        Run warps and blocks in a random order instead of in step.
    counters : bool
        Count memory traffic.
    names : sequence of str, optional
        Names of the arguments for messages; those of the function by default.
    entry : str, optional
        Which kernel of a PTX text with several.
    max_steps : int
        After so many instructions, each counted once however many threads execute it together, the launch
        ends with a `StepLimitError`. The default takes some ten minutes.
    resident_blocks : int, optional
        Blocks that run at the same time; by default as many as make 8192 threads. Blocks of one batch may
        wait for each other, but not for a later batch.

    Returns
    -------
    Report

    Raises
    ------
    EmulatorError
        One of its subclasses, if the program does what the PTX ISA does not allow. The arrays are then left
        as they were. The message names the thread, the array, the Python and the PTX line, and for a race
        both accesses.
    TypeError, ValueError
        An argument or option that no launch takes, before any work.

    Notes
    -----
    Also run: C++ that a kernel is linked with (``link=``, Numba's bfloat16 functions), and ``grid.sync()``, for
    which all blocks are resident. Not known: recursion, ``wgmma`` and TMA. A kernel with a signature,
    ``@cuda.jit("void(float32[:])")``, asks for a GPU where it is decorated; without it, the types are those of
    the arguments.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> from numbaflash import emulator
    >>> @cuda.jit
    ... def double(x, y):
    ...     i = cuda.grid(1)
    ...     if i < x.size:
    ...         y[i] = 2 * x[i]
    >>> x = np.arange(100.0)
    >>> y = np.zeros_like(x)
    >>> report = emulator.launch(double, 4, 32, x, y)
    >>> bool((y == 2 * x).all()), report.global_load.bytes
    (True, 800)

    A kernel that forgets the barrier between writing shared memory and reading what other warps wrote gives
    the right values on a lucky schedule. Here it is an error that names both accesses, with their lines in
    Python and in PTX:

    >>> @cuda.jit
    ... def reverse(x):
    ...     tile = cuda.shared.array(64, np.float64)
    ...     i = cuda.threadIdx.x
    ...     tile[i] = x[i]
    ...     x[i] = tile[63 - i]                                # cuda.syncthreads() is missing before
    >>> emulator.launch(reverse, 1, 64, x[:64])                # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ...
    numbaflash.emulator.errors.RaceError: race on shared memory: read of 8 bytes, shared array tile (...) at
    byte 504 of 512, written by thread (63, 0, 0) of the same block [..., PTX line ...: st.shared.f64 ...]; no
    barrier orders the two accesses
      by block (0, 0, 0) thread (0, 0, 0) and 63 more
      at ..., PTX line ...: ld.shared.f64 ...
    """
    if isinstance(kernel, str):
        text, kinds, default_names = kernel, None, [f"argument {n}" for n in range(len(arguments))]
    elif entry is not None:
        raise ValueError(f"entry chooses from PTX text, and must be None for a Python kernel, not {entry!r}")
    else:
        text, kinds, default_names = compile_kernel(kernel, arguments, arch)
    names = default_names if names is None else checked_names(names)
    report = launch_text(text, kinds, names, grid, block, arguments, shared_bytes=shared_bytes, checks=checks,
                         copies=copies, seed=seed, counters=counters, entry=entry, max_steps=max_steps,
                         resident_blocks=resident_blocks)
    if kinds is None:
        return report
    return dataclasses.replace(report, kernel=getattr(kernel, "py_func", kernel).__name__)


def checked_names(names):
    """A tuple of str."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names must be a sequence of str, not {names!r}")
    return tuple(names)


def launch_text(text, kinds, names, grid, block, arguments, *, shared_bytes=0, checks=True, copies="late",
                seed=None, counters=True, entry=None, max_steps=MAX_STEPS, resident_blocks=None):
    """`launch` of PTX text; ``kinds`` are the Numba types of the arguments, or None to go by the
    parameters."""
    grid, block = dimensions(grid, "grid"), dimensions(block, "block")
    checks = Checks.of(checks)
    if copies not in ("late", "early"):
        raise ValueError(f'copies must be "late" or "early", not {copies!r}')
    if _integer("shared_bytes", shared_bytes) < 0:
        raise ValueError(f"shared_bytes must not be negative, not {shared_bytes}")
    if not isinstance(counters, bool):
        raise TypeError(f"counters must be a bool, not {counters!r}")
    if seed is not None and _integer("seed", seed) < 0:
        raise ValueError(f"seed must not be negative, not {seed}")
    if len(names) != len(arguments):
        raise ValueError(f"names must have one name per argument: {len(arguments)}, not {len(names)}")
    for name, value in ("max_steps", max_steps), ("resident_blocks", resident_blocks):
        if value is not None and _integer(name, value) < 1:
            raise ValueError(f"{name} must be positive, not {value}")
    module, function = prepared(text, entry)
    check_threads(function, block)
    check_shared(module, function, shared_bytes)
    settings = (module, function, kinds, grid, block, arguments, names, shared_bytes, checks, copies, seed,
                counters, max_steps, resident_blocks)
    journal = Journal()
    try:
        return execute(*settings, journal)
    except RaceError:
        if journal.suspect is None:
            raise
        # The same once more, to tell more of the other access.
        execute(*settings, Journal(watch=journal.suspect))
        raise


def execute(module, function, kinds, grid, block, arguments, names, shared_bytes, checks, copies, seed,
            counters, max_steps, resident_blocks, journal):
    started = time.perf_counter()
    arena = Arena()
    memory = Memory(arena)
    arguments = [with_memory(argument) for argument in arguments]
    gather(arguments, names, memory)
    memory.place()
    addresses = {}
    for name, variable in module.variables.items():
        if variable.space in ("global", "const"):
            addresses[name] = arena.reserve(f"{variable.space} {name}", variable.nbytes,
                                            variable.data or bytes(variable.nbytes),
                                            writable=variable.space != "const")
    parameters = pack(function, kinds, arguments, names, memory)
    tally = Counters(counters)
    machine = Machine(function, grid, block, checks, copies, seed, tally, journal, max_steps,
                      resident_blocks)
    tally.attach(machine, arena.size + 512)
    machine.decoder = Decoder(machine, module.variables, parameters, arena, addresses, shared_bytes)
    machine.run()
    check_exception(function, arena, addresses)
    memory.write_back()
    return tally.report(function.name, time.perf_counter() - started)


def check_exception(function, arena, addresses):
    """An error if the kernel has stored the number of an exception where Numba's runtime looks for it."""
    def stored(name):
        start = addresses[f"{function.name}__{name}__"] - GLOBAL_BASE
        return int(arena.bytes[start:start + 4].view(np.int32)[0])

    if f"{function.name}__errcode__" in addresses and stored("errcode"):
        block, thread = (tuple(stored(name + axis) for axis in "xyz") for name in ("ctaid", "tid"))
        raise KernelError(f"the kernel raised an exception, the first in block {block} thread {thread}")


def pack(function, kinds, arguments, names, memory):
    """Parameter name -> bytes."""
    expected = function.parameters
    if kinds is None:
        if len(arguments) != len(expected):
            listed = ", ".join(f".{p.type} {p.name}" for p in expected)
            raise TypeError(
                f"{function.name} takes {len(expected)} arguments ({listed}), not {len(arguments)}")
        return {p.name: flatten_ptx(a, p, n, memory) for a, p, n in zip(arguments, expected, names)}
    pieces = [piece for a, kind in zip(arguments, kinds) for piece in flatten_numba(a, kind, memory)]
    if [len(piece) for piece in pieces] != [p.nbytes for p in expected]:
        raise TypeError(f"the arguments make parameters of {[len(piece) for piece in pieces]} bytes, but "
                        f"{function.name} takes {[p.nbytes for p in expected]}")
    return {p.name: piece for p, piece in zip(expected, pieces)}
