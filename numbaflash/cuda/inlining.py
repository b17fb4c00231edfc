"""Device functions that LLVM inlines, compiled without a GPU.

``cuda.jit(device=True, inline="always")`` needs no GPU either, but inlines before types are known: every
call copies and re-analyses the whole function, and the time grows with the square of a kernel's size.  With
``forceinline`` each function is compiled once and the machine code is the same (measured on the SIMT
kernels: 2 to 4 times faster, equal registers).  Its price: Numba asks the current device for its
architecture, which `compiling_for` answers.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numba.cuda.dispatcher
from numba import cuda

device = cuda.jit(device=True, forceinline=True)
"""Decorates a device function; kernels that call it are compiled within `compiling_for`."""


class _Target(NamedTuple):
    compute_capability: tuple


@contextmanager
def naming_what_is_missing() -> Iterator[None]:
    """Raise ImportError where the compiler's libraries are missing; it says which extra brings them."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "DynamicLibNotFoundError":
            raise
        raise ImportError(
            "compiling CUDA kernels needs NVIDIA's compiler libraries, which pip brings: "
            "pip install 'numbaflash[emulator]' to run them in the emulator, "
            "numbaflash[cuda13] or numbaflash[cuda12] for a GPU; or take compiled ones from a bundle (NUMBAFLASH_BUNDLE)"
        ) from error


@contextmanager
def compiling_for(capability: tuple) -> Iterator[None]:
    """Let Numba compile device functions for an architecture, whatever device there is, or none.

    Raises
    ------
    ImportError
        As `naming_what_is_missing`.
    """
    module = numba.cuda.dispatcher
    current = module.get_current_device
    module.get_current_device = lambda: _Target(capability)
    try:
        with naming_what_is_missing():
            yield
    finally:
        module.get_current_device = current
