"""Dense attention in float64, forward and backward: what every kernel is measured against.

Written to be read beside the papers, one function per formula, and clear before fast: it forms the N x N
arrays that the kernels avoid, one sequence and one query head at a time. It reads the same :class:`Problem`
as the kernels but shares no formula with them: no tiles, no score stages, no online softmax. float64 inputs
are computed in long double where that is wider.

    S = cap(scale Q K^T) + bias - slope |pos - j|    Vaswani et al., 2017; ALiBi: Press et al., 2022
    lse = log(sum_j exp S_j + exp sink)              over the visible j
    P = exp(S - lse)                                 0 where hidden
    O = (Z * P) V                                    Z: dropout, 0 or 1 / (1 - p)
    dV = (Z * P)^T dO,    dP = Z * (dO V^T)          Dao et al., 2022, appendix B.2
    dS = P * (dP - delta),    delta = rowsum(dO * O) - dlse
    dQ = scale (dS * cap') K,    dK = scale (dS * cap')^T Q
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import segments as seg
from .dropout import keep_pattern
from .options import Gradients, Options
from .problem import Problem, head_major, make_problem
from .visibility import UNBOUNDED


def attention(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Dense attention on NumPy arrays, with the keywords of :func:`numbaflash.attention`.

    Parameters
    ----------
    q, k, v : ndarray
        As for :func:`numbaflash.attention`; with ``cu_seqlens_q`` and ``cu_seqlens_k`` as for
        :func:`numbaflash.attention_varlen`.
    **options
        The fields of :class:`numbaflash.Options`.

    Returns
    -------
    out, lse : ndarray
        In the caller's shapes; float64, or long double for float64 inputs. Never rounded to ``out_dtype``.

    Raises
    ------
    TypeError, ValueError
        What :func:`numbaflash.attention` raises for the same call.

    Examples
    --------
    >>> import numpy as np
    >>> from numbaflash import reference
    >>> q = np.zeros((2, 1)); k = np.zeros((2, 1)); v = np.array([[2.0], [4.0]])
    >>> out, lse = reference.attention(q, k, v, causal=True)
    >>> out.ravel().tolist(), np.exp(lse).tolist()
    ([2.0, 3.0], [1.0, 2.0])
    """
    problem = make_problem(q, k, v, Options(**options), cu_seqlens_q, cu_seqlens_k)
    out, lse = forward(problem)
    return caller_major(problem, out), caller_lse(problem, lse)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dlse: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    **options: Any,
) -> Gradients:
    """Gradients of :func:`attention` in float64 (long double for float64 inputs), in the caller's shapes.

    Parameters
    ----------
    dout : ndarray
        Gradient of the output, in its shape.
    q, k, v : ndarray
        As in the forward call.
    dlse : ndarray, optional
        Gradient of lse, in its shape.
    **options
        As in the forward call.

    Returns
    -------
    Gradients
        ``dbias`` in the shape of bias, ``dsinks`` of shape (H,).
    """
    problem = make_problem(q, k, v, Options(**options), cu_seqlens_q, cu_seqlens_k)
    rows = problem.q.shape[:3]
    gradients = backward(
        problem, problem_major(problem, dout), None if dlse is None else np.reshape(dlse, rows)
    )
    return caller_gradients(problem, gradients, options.get("bias"))


def caller_major(problem: Problem, array: np.ndarray) -> np.ndarray:
    """A (batch, heads, rows, dim) array in the caller's layout."""
    if problem.varlen:
        return array[0].transpose(1, 0, 2)
    if problem.ndim == 2:
        return array[0, 0]
    array = array if problem.layout == "BHND" else array.transpose(0, 2, 1, 3)
    return array if problem.ndim == 4 else array[0]


def caller_lse(problem: Problem, lse: np.ndarray) -> np.ndarray:
    """A (batch, heads, rows) array in the caller's dimensions."""
    if problem.varlen:
        return lse[0]
    return lse[(0,) * (4 - problem.ndim)]


def problem_major(problem: Problem, array: np.ndarray) -> np.ndarray:
    """Undo :func:`caller_major`."""
    if problem.varlen:
        return array.transpose(1, 0, 2)[None]
    return head_major("dout", array, problem.layout, problem.ndim)


def caller_gradients(problem: Problem, gradients: tuple, bias: np.ndarray | None) -> Gradients:
    """The results of :func:`backward` or :func:`dense_backward` in the caller's shapes."""
    *inputs, dbias, dsinks = gradients
    dq, dk, dv = (caller_major(problem, array) for array in inputs)
    return Gradients(dq, dk, dv, dbias if dbias is None else dbias.reshape(np.shape(bias)), dsinks)


# ---------------------------------------------------------------------------------------- on checked problems


def forward(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of every row, head-major; rows outside the segments hold 0 and -inf."""
    return _forward(problem, _exact(problem))


def backward(
    problem: Problem, dout: np.ndarray, dlse: np.ndarray | None = None
) -> tuple[np.ndarray | None, ...]:
    """Gradients ``dq, dk, dv, dbias, dsinks``, head-major; dbias has ``score.bias_shape``."""
    return _backward(problem, dout, dlse, _exact(problem))


def dense(problem: Problem, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse as plain code in ``dtype`` computes them: the yardstick of a kernel's rounding errors.

    S and P are rounded to ``dtype``; products add one term after the other in float32 (float64 for float64), of
    factors that ``precision="tf32"`` rounds; the output is rounded to ``problem.out_dtype``.
    """
    return _forward(problem, _plain(dtype, problem.precision))


def dense_backward(
    problem: Problem, dtype: np.dtype, dout: np.ndarray, dlse: np.ndarray | None = None
) -> tuple[np.ndarray | None, ...]:
    """Gradients as plain code in ``dtype`` computes them, in the form of :func:`backward`."""
    return _backward(problem, dout, dlse, _plain(dtype, problem.precision))


class Arithmetic(NamedTuple):
    """How numbers are computed.

    Attributes
    ----------
    work : numpy.dtype
        Of sums and functions.
    rounded : callable
        What happens to S, P and their gradients when they are stored.
    stored : callable
        What happens to a result when it is stored in a dtype.
    product : callable
        Matrix product.
    """

    work: np.dtype
    rounded: Callable[[np.ndarray], np.ndarray]
    stored: Callable[[np.ndarray, np.dtype], np.ndarray]
    product: Callable[[np.ndarray, np.ndarray], np.ndarray]


EXACT = Arithmetic(np.dtype(np.float64), lambda x: x, lambda x, dtype: x, np.matmul)


def _exact(problem: Problem) -> Arithmetic:
    return EXACT._replace(work=np.dtype(np.longdouble)) if problem.q.dtype == np.float64 else EXACT


def _plain(dtype: np.dtype, precision: str) -> Arithmetic:
    work = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    product = _tf32_product if precision == "tf32" and dtype == np.float32 else _term_by_term

    def rounded(x: np.ndarray) -> np.ndarray:
        return stored(x, dtype)

    def stored(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return x.astype(dtype).astype(work)

    return Arithmetic(work, rounded, stored, product)


def _term_by_term(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros((len(a), b.shape[1]), a.dtype)
    for column, row in zip(a.T, b, strict=True):
        total += column[:, None] * row
    return total


def _tf32_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _term_by_term(round_tf32(a), round_tf32(b))


def round_tf32(x: np.ndarray) -> np.ndarray:
    """float32 numbers rounded to the ten bits of mantissa of tf32, ties away from zero; NaN and infinities stay."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def _forward(problem: Problem, how: Arithmetic) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros(problem.out_shape, how.work)
    lse = np.full(problem.q.shape[:3], -np.inf, how.work)
    with np.errstate(all="ignore"):
        for head in heads(problem, how.work):
            s, _ = scores(head, how)
            p, _, lse[head.rows] = softmax(s, head.visible, head.sink)
            out[head.rows] = output(how.rounded(p), head, how)
        return how.stored(out, problem.out_dtype), lse


def _backward(
    problem: Problem, dout: np.ndarray, dlse: np.ndarray | None, how: Arithmetic
) -> tuple[np.ndarray | None, ...]:
    dq, dk, dv = (np.zeros(operand.shape, how.work) for operand in (problem.q, problem.k, problem.v))
    dbias = None if problem.score.bias is None else np.zeros(problem.score.bias_shape, how.work)
    dsinks = None if problem.sinks is None else np.zeros(problem.sinks.shape, how.work)
    with np.errstate(all="ignore"):
        for head in heads(problem, how.work):
            do = dout[head.rows].astype(how.work)
            s, ds_dproduct = scores(head, how)
            p, p_sink, _ = softmax(s, head.visible, head.sink)
            p = how.rounded(p)
            o = how.stored(output(p, head, how), problem.out_dtype)
            delta = (do * o).sum(axis=1)
            if dlse is not None:
                delta = delta - dlse[head.rows].astype(how.work)
            dp = how.rounded(how.product(do, head.v.T) * head.dropout)
            ds = how.rounded(p * (dp - delta[:, None]))
            dproduct = how.rounded(ds * ds_dproduct) * head.scale
            dq[head.rows] = visible_sum(dproduct, head.visible, head.k, how)
            dk[head.keys] += visible_sum(dproduct.T, head.visible.T, head.q, how)
            dv[head.keys] += visible_sum((head.dropout * p).T, head.visible.T, do, how)
            if dbias is not None:
                add_broadcast(dbias, head.pairs, np.where(head.visible, ds, 0))
            if dsinks is not None:
                dsinks[head.pairs[1]] -= (p_sink * delta).sum()
        return tuple(how.stored(g, problem.q.dtype) for g in (dq, dk, dv)) + (dbias, dsinks)


# ----------------------------------------------------------------------------------------------- the formulas


class Head(NamedTuple):
    """One query head of one sequence: n rows, m keys.

    Attributes
    ----------
    q, k, v : ndarray
        (n, D), (m, D) and (m, Dv).
    scale : float
    softcap : float or None
    bias : ndarray or None
        (n, m).
    penalty : ndarray or None
        (n, m) ALiBi term, to be subtracted.
    visible : ndarray of bool
        (n, m).
    sink : float
        One more logit; -inf where there is none.
    dropout : ndarray
        (n, m), or of shape () where nothing is dropped: what Z holds.
    rows, keys : tuple
        Index of these rows in q, out and lse, and of these keys in k and v.
    pairs : tuple of int
        Index of the pairs in mask and bias: (sequence, head).
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    softcap: float | None
    bias: np.ndarray | None
    penalty: np.ndarray | None
    visible: np.ndarray
    sink: float
    dropout: np.ndarray
    rows: tuple
    keys: tuple
    pairs: tuple[int, int]


def heads(problem: Problem, work: np.dtype) -> Iterator[Head]:
    """Every query head of every sequence, its operands converted to ``work``."""
    score = problem.score
    for sequence, segment in enumerate(problem.segments.tolist()):
        n, m = segment[seg.Q_LENGTH], segment[seg.K_LENGTH]
        row_slice = slice(segment[seg.Q_START], segment[seg.Q_START] + n)
        key_slice = slice(segment[seg.K_START], segment[seg.K_START] + m)
        i, j = np.arange(n)[:, None], np.arange(m)
        position = i + segment[seg.Q_OFFSET]
        for h in range(problem.q.shape[1]):
            rows = segment[seg.Q_BATCH], h, row_slice
            keys = segment[seg.K_BATCH], h // problem.group, key_slice
            bias = None if score.bias is None else score.bias.array[sequence, h, :n, :m]
            slope = 0.0 if score.alibi is None else score.alibi.array[sequence, h]
            mask = None if problem.mask is None else problem.mask.array[sequence, h, :n, :m]
            yield Head(
                q=problem.q.array[rows].astype(work),
                k=problem.k.array[keys].astype(work),
                v=problem.v.array[keys].astype(work),
                scale=problem.scale,
                softcap=score.softcap,
                bias=None if bias is None else bias.astype(np.float64).astype(work),
                penalty=None if score.alibi is None else work.type(slope) * np.abs(position - j).astype(work),
                visible=visibility(problem.band, position, j, mask, bias),
                sink=work.type(-np.inf if problem.sinks is None else problem.sinks[h]),
                dropout=dropout_factor(problem, segment, h, i, j).astype(work),
                rows=rows,
                keys=keys,
                pairs=(sequence, h),
            )


def visibility(
    band: tuple[int, int],
    position: np.ndarray,
    j: np.ndarray,
    mask: np.ndarray | None,
    bias: np.ndarray | None,
) -> np.ndarray:
    """(n, m): may the query at ``position`` see key j? Band, mask and a bias of -inf say."""
    left, right = band
    visible = np.ones(np.broadcast_shapes(position.shape, j.shape), bool)
    if left < UNBOUNDED:
        visible &= j >= position - left
    if right < UNBOUNDED:
        visible &= j <= position + right
    if mask is not None:
        visible &= mask
    if bias is not None:
        visible &= bias != -np.inf
    return visible


def scores(head: Head, how: Arithmetic) -> tuple[np.ndarray, np.ndarray | float]:
    """``S = c tanh(scale q k^T / c) + bias - slope |pos - j|``, and its derivative by the scaled product."""
    s, derivative = how.rounded(how.product(head.q, head.k.T) * head.scale), 1.0
    if head.softcap is not None:
        t = np.tanh(s / head.softcap)
        s, derivative = how.rounded(head.softcap * t), (1 - t) * (1 + t)
    if head.bias is not None:
        s = how.rounded(s + head.bias)
    if head.penalty is not None:
        s = how.rounded(s - head.penalty)
    return s, derivative


def softmax(s: np.ndarray, visible: np.ndarray, sink: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P, the probability of the sink, and lse; rows that see nothing have P = 0."""
    s = np.where(visible, s, -np.inf)
    m = np.maximum(s.max(axis=1, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0, m)
    weight, sink_weight = np.exp(s - m[:, None]), np.exp(sink - m)
    l = weight.sum(axis=1) + sink_weight  # noqa: E741
    divisor = np.where(l == 0, 1, l)
    return weight / divisor[:, None], sink_weight / divisor, m + np.log(l)


def output(p: np.ndarray, head: Head, how: Arithmetic) -> np.ndarray:
    """O = (Z * P) V."""
    return visible_sum(head.dropout * p, head.visible, head.v, how)


def dropout_factor(problem: Problem, segment: list[int], h: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Z: 0 where a pair is dropped, 1 / (1 - p) where it is kept."""
    if problem.dropout is None:
        return np.ones(())
    p, seed = problem.dropout
    row, key = i + segment[seg.Q_INDEX], j + segment[seg.K_INDEX]
    keep = keep_pattern(p, seed, segment[seg.SEQUENCE], h + problem.head_origin, row, key)
    return keep / (1 - p)


def visible_sum(weights: np.ndarray, visible: np.ndarray, values: np.ndarray, how: Arithmetic) -> np.ndarray:
    """Row i of the result: the sum of ``weights[i, j] * values[j]`` over the j that i sees, and no other.

    A matrix product, except that a hidden NaN is no summand, not even one times zero.
    """
    finite = np.isfinite(values)
    total = how.product(np.where(visible, weights, 0), np.where(finite, values, 0))
    for j in np.flatnonzero(~finite.all(axis=1)):
        seen = visible[:, j]
        total[seen] += np.where(finite[j], 0, weights[seen, j, None] * values[j])
    return total


def add_broadcast(total: np.ndarray, pairs: tuple[int, int], ds: np.ndarray) -> None:
    """Add one head's (n, m) to a gradient of bias, summed over the axes where the bias was broadcast."""
    sequence, h = (at if size > 1 else 0 for at, size in zip(pairs, total.shape))
    target = total[sequence, h]
    if target.shape[0] == 1:
        ds = ds.sum(axis=0, keepdims=True)
    if target.shape[1] == 1:
        ds = ds.sum(axis=1, keepdims=True)
    target[: ds.shape[0], : ds.shape[1]] += ds
