"""Compile plain scalar functions, and the plain functions of this package they call, for a backend."""

from collections.abc import Callable
from types import FunctionType


def compile_plain(function: Callable, jit: Callable) -> Callable:
    """Apply a backend's ``jit`` to a plain function and, inside out, to the package's functions it names.

    The integer and score functions that all backends share are written once as plain Python. Numba compiles a
    callee only when the global it is called by is itself compiled, so each backend compiles its own copy:
    ``compile_plain(tile_range, numba.njit)`` or with a ``cuda.jit(device=True, inline="always")``.
    """
    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        value = names.get(name)
        if isinstance(value, FunctionType) and value.__module__.startswith(__package__):
            names[name] = compile_plain(value, jit)
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__module__, copy.__qualname__, copy.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return jit(copy)
