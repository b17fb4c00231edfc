"""Calls that are alike are checked and planned once: a small call would spend most of its time on that.

What checks and plans find depends on nothing but the shapes, strides and dtypes of q, k and v and on the options.
Where those are plain values they make a key, and a later call with the same key goes straight to the kernel.
Arrays among the options, and arrays of other libraries, make none.
"""

from typing import Any

import numpy as np

from .problem import Problem

_PLAIN = frozenset({type(None), bool, int, float, str, tuple})
_known: dict[tuple, Any] = {}
_MOST_KNOWN = 512


def likeness(q: object, k: object, v: object, values: tuple) -> tuple | None:
    """A key that is equal for two calls only if they differ in nothing but the memory of q, k and v.

    Parameters
    ----------
    q, k, v : object
        As the caller gave them.
    values : tuple
        The values of all options.

    Returns
    -------
    tuple or None
        None where the arrays are not plain NumPy ones. The key may be unhashable; then it is of no use.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.zeros((2, 1, 1, 5, 8))
    >>> likeness(x, x, x, (True, 0.5)) == likeness(y, y, y, (True, 0.5))
    True
    >>> likeness(x, x, x, (1, 0.5)) == likeness(y, y, y, (True, 0.5))
    False
    """
    if not type(q) is type(k) is type(v) is np.ndarray:
        return None
    kinds = tuple(map(type, values))  # 1 == True == 1.0, and not all of them may pass
    return values, kinds, q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, q.dtype, k.dtype, v.dtype


def gradient_likeness(arrays: tuple, options: dict[str, Any]) -> tuple | None:
    """A key as that of :func:`likeness` for a backward call.

    Parameters
    ----------
    arrays : tuple
        q, k, v, dout, out, lse, and dlse or None.
    options : dict
        The options that were given.
    """
    places: list = []
    for array in arrays:
        if type(array) is np.ndarray:
            places += (array.shape, array.strides, array.dtype)
        elif array is not None:
            return None
        places.append(None)
    values = tuple(options.values())
    return values, tuple(map(type, values)), "backward", tuple(options), *places


def find(key: tuple | None) -> Any:
    """The ``Replay`` of a call alike, a function of its arrays; None where there was no such call."""
    try:
        again = _known.get(key)
    except TypeError:  # an array among the options
        return None
    return again if again is None or again.is_current() else None


def keep(key: tuple | None, problem: Problem, kind: type | None, *parts: Any) -> None:
    """Let calls alike go straight to the kernel, where key and backend allow it.

    Parameters
    ----------
    key : tuple or None
        Of :func:`likeness` or :func:`gradient_likeness`.
    problem : Problem
        The checked call.
    kind : type or None
        The ``Replay`` or ``GradientReplay`` of the backend that ran it; None if it has none.
    *parts
        What that is made of, besides the problem.
    """
    if key is None or kind is None or not _PLAIN.issuperset(key[1]):
        return
    # What a tuple holds would need a look at its kinds as well; the empty one, mod_args, is always there.
    if any(type(value) is tuple and value for value in key[0]):
        return
    if problem.padded or problem.dropout is not None or 0 in problem.out_shape[:3]:  # a seed is not met twice
        return
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = kind(problem, *parts)
