"""The CPU forward pass: from a Problem to arrays, through :mod:`attend`."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..arrays import Operand
from ..dropout import threshold
from ..problem import Problem
from ..segments import COLUMNS, K_LENGTH, Q_LENGTH, Q_OFFSET, uncovered
from ..visibility import Band
from . import attend
from .call import Integers, Numbers, Plan, make_call
from .compile import Static
from .config import forward_tiles, vector_static
from .lanes import LANE_TABLES
from .softmax import STATE_PANELS
from .storage import CODES, FLOAT64
from .threads import get_num_threads, run

_GIGAFLOPS = 60.0  # of one core, roughly: decides only whether threads are worth waking
_SMALLEST_UNIT = 2.0**-100  # -inf times a unit that rounds to 0 would be NaN


class Jobs(NamedTuple):
    """Blocks of queries, heavy ones first: (count, 2) of segment and block, and the work in rows times keys."""

    table: np.ndarray
    pairs: float


def forward(
    problem: Problem, out: np.ndarray | None = None, lse: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of a checked call.

    Parameters
    ----------
    problem : Problem
    out : ndarray, optional
        Head-major view (batch, H, Nq, Dv) of the array to write, of dtype ``problem.out_dtype``, any strides. By
        default a new array, contiguous in the caller's layout.
    lse : ndarray, optional
        (batch, H, Nq) of the dtype computed in, adjacent along the last axis.

    Returns
    -------
    out, lse : ndarray
        Head-major views.
    """
    out = empty_output(problem) if out is None else out
    lse = np.empty(problem.out_shape[:3], problem.compute_dtype) if lse is None else lse
    _fill_uncovered(problem, out, lse)
    batch, heads, _, head_dim = problem.q.shape
    value_dim = problem.v.shape[3]
    table = problem.segments
    if not (len(table) and heads and lse.size):
        return out, lse
    max_q, max_k = (int(longest) for longest in table[:, Q_LENGTH : K_LENGTH + 1 : K_LENGTH - Q_LENGTH].max(axis=0))
    general = is_general(problem)
    plan = _plan(
        CODES[problem.q.dtype], general, head_dim, value_dim, max_q, max_k, len(table), heads, problem.group,
        _in_place(problem, problem.k), _in_place(problem, problem.v), get_num_threads(),
    )
    jobs = _jobs(problem, plan)
    job_count = len(jobs.table) * plan.head_units
    call = _make_call(problem, plan, jobs, job_count, out, lse)
    flops = 2.0 * (head_dim + value_dim + 8) * jobs.pairs * plan.head_units
    run(_entry(CODES[problem.q.dtype], general), (call, None), jobs=job_count, cost_ns=flops / _GIGAFLOPS,
        keep=(problem, jobs, out, lse))
    return out, lse


def empty_output(problem: Problem) -> np.ndarray:
    """A new output as a head-major view, contiguous in the caller's layout."""
    batch, heads, rows, dim = problem.out_shape
    if problem.varlen or problem.layout == "BNHD":
        return np.empty((batch, rows, heads, dim), problem.out_dtype).transpose(0, 2, 1, 3)
    return np.empty(problem.out_shape, problem.out_dtype)


def is_general(problem: Problem) -> bool:
    """Whether there is more to do to a score than a band and lengths."""
    return not problem.score.is_empty or problem.mask is not None or problem.dropout is not None


@lru_cache(maxsize=64)
def forward_static(storage: int, general: bool) -> Static:
    """What the kernel is compiled for: stored dtype (a code), vector width, and whether stages are present."""
    return Static(storage=storage, general=general, **vector_static(64 if storage == FLOAT64 else 32))


@lru_cache(maxsize=64)
def _entry(storage: int, general: bool) -> Callable:
    return attend.kernel.specialise(attend.ARGUMENTS, forward_static(storage, general))


def _in_place(problem: Problem, array: Operand) -> bool:
    """Whether products can read the array where it lies."""
    return array.dtype == problem.compute_dtype and (
        array.strides[3] == array.dtype.itemsize or array.shape[3] <= 1
    )


@lru_cache(maxsize=256)
def _plan(
    storage: int, general: bool, head_dim: int, value_dim: int, max_q: int, max_k: int, segments: int, heads: int,
    group: int, k_in_place: bool, v_in_place: bool, threads: int,
) -> Plan:
    static = forward_static(storage, general)
    tiles = forward_tiles(static, head_dim, value_dim, max_q, max_k, segments * heads, group, threads)
    size, width = static["size"], static["panel"] * static["size"]
    block_q = tiles.panels * static["panel"]
    parts = dict(
        at_q=tiles.panels * head_dim * width,
        at_out=tiles.panels * value_dim * width,
        at_scores=max(2, tiles.block_k) * width,
        at_state=tiles.panels * STATE_PANELS * width,
        at_keys=0 if k_in_place else tiles.block_k * head_dim * size,
        at_values=0 if v_in_place else tiles.block_k * value_dim * size,
        at_clean=tiles.block_k * value_dim * size,
        at_lanes=LANE_TABLES * 8 * block_q,
    )
    offsets, total = {}, 0
    for name, length in parts.items():
        offsets[name] = total
        total += (length + 63) & ~63  # each on a cache line of its own
    return Plan(
        head_dim=head_dim, value_dim=value_dim, group=group, packed_heads=tiles.packed_heads,
        head_units=heads // group if tiles.packed_heads else heads, block_q=block_q, block_k=tiles.block_k,
        k_in_place=k_in_place, v_in_place=v_in_place, scratch_bytes=total, **offsets,
    )


def _make_call(
    problem: Problem, plan: Plan, jobs: Jobs, job_count: int, out: np.ndarray, lse: np.ndarray
) -> np.ndarray:
    score, dropout, mask = problem.score, problem.dropout, problem.mask
    # Stages work on scores in natural units; without any, only the sign of a scale has to reach Q.
    q_factor, unit = problem.scale, 1.0
    if _SMALLEST_UNIT < abs(q_factor) < 1 / _SMALLEST_UNIT and not is_general(problem):
        q_factor, unit = math.copysign(1.0, q_factor), abs(q_factor)
    return make_call(
        (problem.q, problem.k, problem.v, out, lse, score.bias, mask, score.alibi, problem.sinks, problem.segments,
         jobs.table),
        plan,
        Integers(
            job_count=job_count, segment_bytes=8 * COLUMNS, out_code=CODES[out.dtype],
            bias_code=0 if score.bias is None else CODES[score.bias.dtype],
            may_hide=mask is not None or score.bias is not None,
            left=problem.band.left, right=problem.band.right, head_origin=problem.head_origin,
            seed=0 if dropout is None else _signed(dropout.seed),
            threshold=-1 if dropout is None else threshold(dropout.p),
        ),
        Numbers(
            q_factor=q_factor, unit=unit, softcap=score.softcap or 0.0,
            keep_factor=1.0 if dropout is None else 1.0 / (1.0 - dropout.p),
        ),
    )


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _fill_uncovered(problem: Problem, out: np.ndarray, lse: np.ndarray) -> None:
    """Rows that belong to no segment: output 0, lse -inf (with a sink: the sink)."""
    batch, _, rows, _ = problem.q.shape
    table = problem.segments
    if int(table[:, Q_LENGTH].sum()) == batch * rows:
        return
    for at, low, high in uncovered(table, batch, rows):
        out[at, :, low:high] = 0
        lse[at, :, low:high] = -np.inf


def _jobs(problem: Problem, plan: Plan) -> Jobs:
    table, block_q = problem.segments, plan.block_q
    scale = plan.group if plan.packed_heads else 1
    first = table[0]
    if not table.flags.writeable:  # a dense batch: all segments are alike
        return _uniform_jobs(len(table), int(first[Q_LENGTH]), int(first[K_LENGTH]), int(first[Q_OFFSET]), scale,
                             block_q, problem.band)
    rows = table[:, Q_LENGTH] * scale
    blocks = -(-rows // block_q)
    segment = np.repeat(np.arange(len(table)), blocks)
    block = np.arange(len(segment)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    pairs = _pairs(problem.band, block * block_q, np.minimum((block + 1) * block_q, rows[segment]),
                   table[segment, Q_LENGTH], table[segment, K_LENGTH], table[segment, Q_OFFSET], scale)
    order = np.argsort(-pairs, kind="stable")
    return Jobs(np.ascontiguousarray(np.stack([segment[order], block[order]], axis=1)), float(pairs.sum()))


@lru_cache(maxsize=256)
def _uniform_jobs(
    segments: int, q_length: int, k_length: int, offset: int, scale: int, block_q: int, band: Band
) -> Jobs:
    block = np.arange(-(-q_length * scale // block_q))
    pairs = _pairs(band, block * block_q, np.minimum((block + 1) * block_q, q_length * scale), q_length, k_length,
                   offset, scale)
    order = np.argsort(-pairs, kind="stable")
    table = np.empty((len(block), segments, 2), np.int64)
    table[..., 0] = np.arange(segments)
    table[..., 1] = block[order, None]
    return Jobs(table.reshape(-1, 2), float(pairs.sum()) * segments)


def _pairs(band: Band, low, high, q_length, k_length, offset, scale) -> np.ndarray:
    """Rows times keys of blocks of rows: the measure of a job's work."""
    rows = high - low
    if scale > 1:  # rows of several heads: taken for all queries
        low, high = 0 * low, 0 * high + q_length
    first = np.maximum(0, low + offset - band.left)
    last = np.minimum(k_length, high + offset + band.right)
    return rows * np.maximum(0, last - first)
