"""Run CUDA kernels without a GPU: an interpreter for PTX that checks and counts.

It executes the very PTX that numba.cuda emits, in NumPy, vectorised over threads and blocks, and raises an
`EmulatorError` where a program does what the PTX ISA does not allow: accesses out of bounds or misaligned,
reads of memory nobody wrote, races, barriers in divergent code, deadlocks, endless loops.

>>> import numpy as np
>>> from numba import cuda
>>> from numbaflash import emulator
>>> @cuda.jit
... def scale(x, factor):
...     i = cuda.grid(1)
...     x[i] *= factor                                         # "if i < x.size" is missing before
>>> emulator.launch(scale, 4, 32, np.ones(100), 3.0)           # doctest: +IGNORE_EXCEPTION_DETAIL
Traceback (most recent call last):
...
numbaflash.emulator.errors.MemoryFault: out-of-bounds read of 8 bytes: global address 0x7f1000001320, just
past the end of x (800 bytes) (element 100)
  by block (3, 0, 0) thread (4, 0, 0) and 27 more
  at ..., PTX line ...: ld.global.f64 ...

The `Report` that `launch` returns counts traffic, bank conflicts and floating point operations, per source
line on request:

>>> x = np.ones(128)
>>> report = emulator.launch(scale, 4, 32, x, 3.0)
>>> float(x.sum()), report.global_load.sectors, report.flops["f64"]
(384.0, 32, 128)
>>> print(report)                                              # doctest: +ELLIPSIS
kernel             scale
grid x block       (4, 1, 1) x (32, 1, 1)
...
global store       1,024 bytes in 4 requests, 32 sectors (1.00 x ideal), 32 distinct

`launch` describes all options, `Checks` what is checked, `address` and `uninitialized` arguments of special
kinds; `execute` runs the plans that numbaflash makes for a call.

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


def __dir__():
    return sorted({*globals(), *__all__})


def __getattr__(name):
    if name in _LAZY:
        import importlib
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
