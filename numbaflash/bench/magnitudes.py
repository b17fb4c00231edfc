"""How large the terms of a result are: what every order of summation may lose of it.

Part of the project's numeric rule: an error may be ``factor * err_plain + 4 * eps * max|exact| + u * magnitude``,
u the eps of the accumulator and ``magnitude`` the same result with all its terms taken as absolute values.  The
last term matters only where terms cancel, or where there are so few that plain code is exact by luck.
"""

import ml_dtypes
import numpy as np

from numbaflash import reference
from numbaflash.problem import Problem


def eps(dtype) -> float:
    """Distance from 1 to the next number."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps)


def product_eps(problem: Problem) -> float:
    """What rounding the factors of products adds to the eps of a dtype."""
    return 2.0**-11 if problem.precision == "tf32" and problem.q.dtype == np.float32 else 0.0


def coarser(a, b):
    """Whichever dtype rounds more."""
    return a if eps(a) >= eps(b) else b


def forward_magnitudes(problem: Problem) -> tuple[float, float]:
    """Largest magnitude in out and in lse."""
    out = lse = 0.0
    with np.errstate(all="ignore"):
        for head in reference.heads(problem, np.dtype(np.float64)):
            p, _, row_lse, score = _probabilities(head)
            growth = 1 + score.max(axis=1, initial=0.0)
            sums = _visible_sum(head.dropout * p, head.visible, np.abs(head.v)) * growth[:, None]
            out = max(out, _largest(sums))
            lse = max(lse, _largest(np.abs(row_lse) + growth))
    return out, lse


def backward_magnitudes(problem: Problem, dout, dlse) -> tuple[float, ...]:
    """Largest magnitude in dq, dk, dv, dbias and dsinks."""
    shapes = [problem.q.shape, problem.k.shape, problem.v.shape]
    totals = [np.zeros(shape) for shape in shapes]
    totals.append(np.zeros(problem.score.bias_shape or (1, 1, 1, 1)))
    totals.append(np.zeros(problem.q.shape[1]))
    dq, dk, dv, dbias, dsinks = totals
    with np.errstate(all="ignore"):
        for head in reference.heads(problem, np.dtype(np.float64)):
            do = np.abs(dout[head.rows].astype(np.float64))
            p, p_sink, row_lse, score = _probabilities(head)
            # P is recomputed from an lse that was rounded when it was stored: half an eps, whatever the code
            stored = 0.5 * np.where(np.isfinite(row_lse), np.abs(row_lse), 0.0)
            growth = (1 + score.max(axis=1, initial=0.0) + stored)[:, None]
            out = _visible_sum(head.dropout * p, head.visible, np.abs(head.v))
            delta = (do * out).sum(axis=1)
            if dlse is not None:
                delta = delta + np.abs(dlse[head.rows].astype(np.float64))
            dp = (do @ np.abs(head.v).T) * head.dropout
            ds = np.where(head.visible, p * (dp + delta[:, None]) * growth, 0)
            dq[head.rows] = abs(head.scale) * _visible_sum(ds, head.visible, np.abs(head.k))
            dk[head.keys] += abs(head.scale) * _visible_sum(ds.T, head.visible.T, np.abs(head.q))
            dv[head.keys] += _visible_sum((head.dropout * p * growth).T, head.visible.T, do)
            if problem.score.bias is not None:
                reference.add_broadcast(dbias, head.pairs, ds)
            dsinks[head.pairs[1]] += (p_sink * delta * growth[:, 0]).sum()
    return tuple(_largest(total) for total in totals)


def _visible_sum(weights, visible, values):
    return reference.visible_sum(weights, visible, values, reference.EXACT)


def _probabilities(head):
    """P, the sink's P, lse, and the sum of absolute terms of each visible score."""
    s, _ = reference.scores(head, reference.EXACT)
    score = np.abs(head.q) @ np.abs(head.k).T * abs(head.scale)
    for term in (head.bias, head.penalty):
        if term is not None:
            score = score + np.abs(term)
    return *reference.softmax(s, head.visible, head.sink), np.where(head.visible, score, 0)


def _largest(array) -> float:
    return float(np.max(array, where=np.isfinite(array), initial=0.0))
