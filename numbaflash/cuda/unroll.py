"""Loops over registers that are certain to be unrolled.

A `cuda.local.array` becomes registers only where every index is a constant.  LLVM unrolls a loop only up to a size
that depends on its version and on what is inside: one loop that it leaves puts the whole array into local memory
(measured: most kernels here, with the compiler that targets Blackwell).  `unrolled` leaves no choice: it emits the
calls one after the other, each with its number as a constant.
"""
import inspect
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core.typing import signature
from numba.cuda.core.targetconfig import ConfigStack
from numba.cuda.extending import intrinsic


def unrolled(count: int, body: Callable) -> Callable:
    """A device function ``f(*arguments)`` that is ``for i in range(count): body(i, *arguments)``.

    Parameters
    ----------
    count : int
    body : function
        Plain Python that Numba compiles, with the number (an int64) first; it returns nothing.  What it captures
        must be hashable.

    Returns
    -------
    intrinsic

    Examples
    --------
    >>> def clear_one(i, x):
    ...     x[i] = 0
    >>> clear = unrolled(64, clear_one)         # in a kernel: clear(x)
    """
    parameters = list(inspect.signature(body).parameters.values())[1:]

    def typing_function(context, *arguments):
        def codegen(context, builder, sig, values):
            inner = signature(types.void, types.int64, *sig.args)
            flags = ConfigStack.top_or_none().copy()
            flags.forceinline = True
            compiled = context.compile_subroutine(builder, body, inner, flags=flags)
            for i in range(count):
                number = ir.Constant(ir.IntType(64), i)
                context.call_internal(builder, compiled.fndesc, inner, [number, *values])
            return context.get_dummy_value()

        return signature(types.void, *arguments), codegen

    typing_function.__signature__ = inspect.Signature(
        [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters])
    typing_function.__name__ = typing_function.__qualname__ = f"unrolled_{body.__name__}"
    return intrinsic(typing_function)
