"""Run CUDA kernels without a GPU: an interpreter for PTX that checks and counts.

>>> from numbaflash import emulator
>>> report = emulator.launch(kernel, grid, block, *arguments)   # doctest: +SKIP

It executes the very PTX that numba.cuda emits, in NumPy, vectorised over threads and blocks, and raises an
`EmulatorError` where a program does what the PTX ISA does not allow: accesses out of bounds or misaligned,
reads of memory nobody wrote, races, barriers in divergent code, deadlocks, endless loops. The `Report` counts
traffic, bank conflicts and floating point operations, per source line on request.

Where to read on: ``parser`` turns text into instructions, ``machine`` runs them, ``opcodes/`` has one small
function per instruction that says what it does, ``memory``, ``races``, ``global_races`` and
``fences`` check accesses, ``counters`` counts.
"""
from .checks import Checks
from .errors import (BarrierError, DeadlockError, EmulatorError, KernelError, MemoryFault, RaceError,
                     StepLimitError, TrapError, UninitializedRead, UnknownInstruction)

__all__ = [
    "launch", "execute", "address", "uninitialized", "Checks", "Report", "EmulatorError", "MemoryFault",
    "UninitializedRead", "RaceError", "BarrierError", "DeadlockError", "StepLimitError", "KernelError",
    "TrapError", "UnknownInstruction"
]

_LAZY = {"launch": "launching", "address": "arguments", "uninitialized": "arguments", "execute": "executor",
         "Report": "report"}


def __getattr__(name):
    if name in _LAZY:
        import importlib
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
