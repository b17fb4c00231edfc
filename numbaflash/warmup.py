"""Compile ahead of the first call."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

PASSES = ("forward", "decode", "backward")


class Compiled(NamedTuple):
    """A kernel that is ready: pass, dtype, whether it serves calls with options, and how long it took."""

    which: str
    dtype: str
    options: bool
    seconds: float


def warmup(
    dtypes: str | Any | Sequence[Any] = "float32", *, passes: str | Sequence[str] = PASSES, options: bool = False
) -> list[Compiled]:
    """Compile the CPU kernels that calls will need, or load them from the disk, so that no call waits for them.

    Kernels are few, whatever the shapes: per dtype and pass one for calls without and one for calls with options that
    change scores. They are kept on the disk, so a second process takes a fraction of a second.

    Parameters
    ----------
    dtypes : dtype or sequence of dtypes
        Of float16, bfloat16, float32 and float64.
    passes : {"forward", "decode", "backward"} or a sequence of them
        "decode" is the forward pass of few queries; default: all.
    options : bool
        Also compile for calls with bias, mask, softcap, ALiBi or dropout.

    Returns
    -------
    list of (which, dtype, options, seconds)
        One entry per kernel.

    Raises
    ------
    TypeError, ValueError
        For an unknown dtype or pass.

    Examples
    --------
    >>> import numbaflash
    >>> ready = numbaflash.warmup("float32", passes="forward")
    >>> [(kernel.which, kernel.dtype) for kernel in ready]
    [('forward', 'float32')]
    """
    from .problem import _boolean, _one_of

    dtypes = dtypes if isinstance(dtypes, (list, tuple)) else [dtypes]
    passes = passes if isinstance(passes, (list, tuple)) else [passes]
    names = [_dtype(dtype) for dtype in dtypes]
    for which in passes:
        _one_of("passes", which, PASSES)
    done = []
    for dtype in names:
        for general in (False, True) if _boolean("options", options) else (False,):
            for which, prepare in _kernels(dtype, general, passes):
                start = time.perf_counter()
                prepare()
                done.append(Compiled(which, dtype.name, general, time.perf_counter() - start))
    return done


def _kernels(dtype: Any, general: bool, passes: Sequence[str]) -> Iterator[tuple[str, Callable]]:
    from .cpu import backward, forward
    from .cpu.storage import CODES

    code = CODES[dtype]
    for which in passes:
        if which == "backward":
            yield which, lambda: backward.specialise(backward.statics_of(code, general))
        else:
            yield which, lambda few=which == "decode": forward.specialise(code, general, few)


def _dtype(dtype: Any) -> Any:
    from .arrays import FLOATING, bfloat16

    try:
        found = bfloat16 if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
    except TypeError:
        found = None
    if dtype is None or found not in FLOATING:
        raise TypeError(f"dtypes must be of float16, bfloat16, float32 and float64, not {dtype!r}")
    return found
