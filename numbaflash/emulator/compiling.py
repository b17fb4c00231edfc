"""Kernels to PTX without a GPU. This is the only file of the emulator that imports numba, and only when it
is called."""
from __future__ import annotations

import re
import threading

from .arguments import Address

_CACHE: dict = {}
_LOCK = threading.RLock()
OPTIONS = ("fastmath", "opt", "debug", "forceinline", "launch_bounds")


def capability(arch: str) -> tuple:
    """``"sm_90a"`` -> ``(9, 0, "a")``."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if match is None:
        raise ValueError(f'arch must look like "sm_80" or "sm_90a", not {arch!r}')
    number = int(match[1]), int(match[2])
    return (*number, match[3]) if match[3] else number


def argument_types(kernel, values):
    """The Numba types a launch would give the arguments."""
    from numba import cuda, types
    dispatcher = kernel if hasattr(kernel, "typeof_pyval") else cuda.jit(kernel)
    return tuple(types.uint64 if isinstance(value, Address) else dispatcher.typeof_pyval(value)
                 for value in values)


def compile_kernel(kernel, values, arch: str):
    """``(PTX text, argument types, parameter names)`` of a ``@cuda.jit`` kernel or a plain function."""
    from numba import cuda
    from numbaflash.cuda.compile import require_numba_cuda
    require_numba_cuda()
    from numbaflash.cuda.inlining import compiling_for
    function = getattr(kernel, "py_func", kernel)
    given = getattr(kernel, "targetoptions", {})
    options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    names = function.__code__.co_varnames[:function.__code__.co_argcount]
    if len(names) != len(values):
        raise TypeError(
            f"{function.__name__} takes {len(names)} arguments ({', '.join(names)}), not {len(values)}")
    for name, value in zip(names, values):
        if isinstance(value, (list, dict, set, str)):
            raise TypeError(f"{name} must be a NumPy array or a number, not a {type(value).__name__}")
    kinds = argument_types(kernel, values)
    key = function, kinds, arch, repr(sorted(options.items()))
    with _LOCK:
        if key not in _CACHE:
            with compiling_for(capability(arch)):
                text, _ = cuda.compile_ptx(function, kinds, cc=capability(arch),
                                           lineinfo=not options.get("debug"), **options)
            _CACHE[key] = text
        return _CACHE[key], kinds, names
