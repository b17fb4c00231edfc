"""Merge attention over disjoint sets of keys: the algebra behind split-KV decoding, rings and cascades."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .arrays import FLOATING, HOST, Home, adopt, float32, float64, home_of
from .problem import LAYOUTS, _one_of, _out_dtype


def merge_states(
    outs: Sequence[Any] | Any, lses: Sequence[Any] | Any, *, sinks: Any = None, layout: str = "BHND",
    out_dtype: Any = None,
) -> tuple[Any, Any]:
    """Join results over disjoint key sets into the result over their union.

    With weights ``w_s = exp(lse_s - lse)`` and ``lse = log(sum_s exp(lse_s))``, the merged output is
    ``sum_s w_s * out_s``. A state that saw no key (lse -inf) is neutral, whatever its out holds; a row whose
    states are all empty stays empty: out 0, lse -inf. The sum runs in the order of the states.

    Parameters
    ----------
    outs : sequence of arrays, or one array with the states stacked on a new first axis
        Outputs as :func:`attention` returned them: (B, H, N, Dv), (H, N, Dv) or (N, Dv); "BNHD" swaps H and N.
    lses : likewise
        The matching lse: (B, H, N), (H, N) or (N,); float32 or float64.
    sinks : (H,) array, optional
        One more logit per head, added once here; the partial results must be computed without it.
    layout : {"BHND", "BNHD"}
        Layout of ``outs``; ``lses`` are head-major either way.
    out_dtype : dtype, optional
        Dtype of the merged output; the outs' own by default.

    Returns
    -------
    out, lse : ndarray
        One state, in the shapes of one element.

    Raises
    ------
    TypeError, ValueError
        No states, or states that do not fit together.

    Examples
    --------
    >>> import numpy as np, numbaflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 100, 64), dtype=np.float32)
    >>> parts = [numbaflash.attention(q, k[:, s], v[:, s], return_lse=True) for s in (np.s_[:40], np.s_[40:])]
    >>> out, lse = numbaflash.merge_states(*zip(*parts))
    >>> np.allclose(out, numbaflash.attention(q, k, v), atol=1e-6)
    True

    Notes
    -----
    The rescaling of online softmax (Milakov & Gimelshein, 2018), as FlashDecoding uses it between splits.
    """
    _one_of("layout", layout, LAYOUTS)
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    home = home_of("outs[0]", outs[0]) if outs else HOST
    if home.device is not None:
        raise NotImplementedError("outs lie on a GPU; merge_states works in host memory in this version")
    outs, lses = _states("outs", outs, home), _states("lses", lses, home)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} states and lses {len(lses)}; there must be at least one of each, equally many")
    ndim, shape, lse_shape = outs[0].ndim, outs[0].shape, lses[0].shape
    if ndim not in (2, 3, 4):
        raise ValueError(f"outs must have 2, 3 or 4 dimensions each, not {ndim}")
    swap = layout == "BNHD" and ndim > 2
    rows = shape[:-3] + (shape[-2], shape[-3]) if swap else shape[:-1]
    for name, arrays, wanted in (("outs", outs, shape), ("lses", lses, rows)):
        for number, array in enumerate(arrays):
            if array.shape != wanted:
                raise ValueError(f"{name}[{number}] has shape {array.shape}; it must be {wanted}")
            if array.dtype != arrays[0].dtype or array.dtype not in FLOATING:
                raise TypeError(f"{name}[{number}] is {array.dtype}; all states must share one floating dtype")
    if lses[0].dtype not in (float32, float64):
        raise TypeError(f"lses must be float32 or float64, not {lses[0].dtype}")
    dtype = _out_dtype(out_dtype, outs[0].dtype)
    logits = np.stack([lse.astype(np.float64) for lse in lses])
    if sinks is not None:
        logits = np.concatenate([logits, _sink_logits(sinks, lse_shape, home)[None]])
    m = logits.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp(logits - np.where(np.isneginf(m), 0.0, m))
        l = weights.sum(axis=0)  # noqa: E741
        weights /= np.where(l == 0.0, 1.0, l)
        lse = m + np.log(l)
    acc = np.zeros(shape, np.float64)
    for out, weight, logit in zip(outs, weights, logits[: len(outs)]):
        weight = (weight.swapaxes(-1, -2) if swap else weight)[..., None]
        empty = np.isneginf(logit.swapaxes(-1, -2) if swap else logit)[..., None]
        with np.errstate(invalid="ignore"):
            acc += np.where(empty, 0.0, weight * out.astype(np.float64))
    return _result(acc, dtype, home), _result(lse, lses[0].dtype, home)


def _result(values: np.ndarray, dtype: np.dtype, home: Home) -> Any:
    array, view = home.library.empty(values.shape, dtype, home.like)
    view[...] = values.astype(dtype)
    return home.library.finish(array, home.like)


def _listed(name: str, states: Any) -> list:
    """The states of a sequence, or of an array that stacks them on its first axis."""
    if not isinstance(states, Iterable) or isinstance(states, (str, bytes)):
        raise TypeError(f"{name} must be a sequence of arrays, not {type(states).__qualname__}")
    if hasattr(states, "ndim") and states.ndim < 2:
        raise ValueError(f"{name} must hold its states on a first axis, not be of shape {tuple(states.shape)}")
    return list(states)


def _states(name: str, states: list, home: Home) -> list[np.ndarray]:
    return [adopt(f"{name}[{number}]", state, home) for number, state in enumerate(states)]


def _sink_logits(sinks: Any, lse_shape: tuple[int, ...], home: Home) -> np.ndarray:
    sinks = adopt("sinks", sinks, home)
    if sinks.dtype not in FLOATING:
        raise TypeError(f"sinks must be floating, not {sinks.dtype}")
    heads = lse_shape[-2] if len(lse_shape) > 1 else 1
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape ({heads},), one logit per query head, not {sinks.shape}")
    logits = sinks.astype(np.float64)[:, None] if len(lse_shape) > 1 else sinks.astype(np.float64)
    return np.broadcast_to(logits, lse_shape)
