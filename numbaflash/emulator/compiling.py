"""Kernels to PTX without a GPU. Numba is imported only when they are called, here and where arguments are
typed and files linked."""
from __future__ import annotations

import inspect
import threading

from .arguments import check_argument, kind_of
from .linking import whole_program, with_linked

_CACHE: dict = {}
_LOCK = threading.RLock()
OPTIONS = ("fastmath", "opt", "debug", "launch_bounds")


def python_function(kernel):
    """The function of a ``@cuda.jit`` kernel; TypeError for what is no kernel."""
    if hasattr(kernel, "dispatcher"):
        raise TypeError("kernel must be the kernel itself, not kernel[grid, block]: launch takes grid and block")
    function = getattr(kernel, "py_func", kernel)
    if not inspect.isfunction(function):
        raise TypeError(f"kernel must be a @cuda.jit kernel, a Python function or PTX text, not {kernel!r}")
    if getattr(kernel, "targetoptions", {}).get("device"):
        raise TypeError(f"kernel must not be a device function, which {function.__name__} is: launch a kernel "
                        "that calls it")
    return function


def compile_kernel(kernel, values, arch: str):
    """``(PTX text, argument types, parameter names)`` of a ``@cuda.jit`` kernel or a plain function."""
    from numba import cuda
    from numbaflash.cuda.compile import parse_arch, require_numba_cuda
    require_numba_cuda()
    from numbaflash.cuda.inlining import compiling_for
    function = python_function(kernel)
    capability = parse_arch(arch).capability
    given = getattr(kernel, "targetoptions", {})
    options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    names = function.__code__.co_varnames[:function.__code__.co_argcount]
    if len(names) != len(values):
        raise TypeError(
            f"{function.__name__} takes {len(names)} arguments ({', '.join(names)}), not {len(values)}")
    dispatcher = kernel if hasattr(kernel, "typeof_pyval") else cuda.jit(kernel)
    kinds = tuple(kind_of(name, value, dispatcher.typeof_pyval) for name, value in zip(names, values))
    for name, value, kind in zip(names, values, kinds):
        check_argument(name, value, kind)
    key = function, kinds, capability, repr(sorted(options.items()))
    with _LOCK:
        if key not in _CACHE:
            with compiling_for(capability), whole_program() as files:
                text, _ = cuda.compile_ptx(function, kinds, cc=capability,
                                           lineinfo=not options.get("debug"), **options)
                _CACHE[key] = with_linked(text, [*given.get("link", ()), *files], capability)
        return _CACHE[key], kinds, names
