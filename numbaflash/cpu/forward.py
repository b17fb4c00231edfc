"""The CPU forward pass: from a Problem to arrays, through :mod:`attend`."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..arrays import float64
from ..dropout import threshold
from ..problem import Problem
from ..segments import COLUMNS, K_LENGTH, Q_LENGTH, Q_OFFSET, uncovered
from ..visibility import Band
from . import attend
from .call import make_call
from .compile import Static
from .config import ForwardTiles, forward_tiles, vector_static
from .lanes import LANE_TABLES
from .simd import LOG2_E
from .softmax import STATE_PANELS
from .storage import CODES
from .threads import get_num_threads, run

_GIGAFLOPS = 60.0  # of one core, roughly: decides only whether threads are worth waking


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
    static = forward_static(problem)
    max_q, max_k = int(table[:, Q_LENGTH].max()), int(table[:, K_LENGTH].max())
    tiles = forward_tiles(
        static, head_dim, value_dim, max_q, max_k, len(table) * heads, problem.group, get_num_threads()
    )
    block_q = tiles.panels * static["panel"]
    jobs = _jobs(problem, tiles.packed_heads, block_q)
    head_units = heads // problem.group if tiles.packed_heads else heads
    call = _make_call(problem, static, tiles, jobs, head_units, out, lse)
    entry = attend.kernel.specialise(attend.ARGUMENTS, static)
    flops = 2.0 * (head_dim + value_dim + 8) * jobs.pairs * head_units
    run(entry, (call, None), jobs=len(jobs.table) * head_units, cost_ns=flops / _GIGAFLOPS,
        keep=(problem, jobs, out, lse))
    return out, lse


def empty_output(problem: Problem) -> np.ndarray:
    """A new output as a head-major view, contiguous in the caller's layout."""
    batch, heads, rows, dim = problem.out_shape
    if problem.varlen or problem.layout == "BNHD":
        return np.empty((batch, rows, heads, dim), problem.out_dtype).transpose(0, 2, 1, 3)
    return np.empty(problem.out_shape, problem.out_dtype)


def forward_static(problem: Problem) -> Static:
    """What the kernel is compiled for: dtype, vector width, and whether there is more than a band."""
    score = problem.score
    general = not score.is_empty or problem.mask is not None or problem.dropout is not None
    return _static(CODES[problem.q.dtype], general)


@lru_cache(maxsize=64)
def _static(storage: int, general: bool) -> Static:
    bits = 64 if storage == CODES[float64] else 32
    return Static(storage=storage, general=general, **vector_static(bits))


def _make_call(
    problem: Problem, static: Static, tiles: ForwardTiles, jobs: Jobs, head_units: int, out: np.ndarray,
    lse: np.ndarray,
) -> np.ndarray:
    q, k, v, score, dropout = problem.q, problem.k, problem.v, problem.score, problem.dropout
    head_dim, value_dim, size = q.shape[3], v.shape[3], static["size"]
    block_q = tiles.panels * static["panel"]
    in_place = {
        name: array.dtype == problem.compute_dtype and (array.strides[3] == size or array.shape[3] <= 1)
        for name, array in (("k", k), ("v", v))
    }
    width = static["panel"] * size
    # Stages work on scores in natural units; without any, only the sign of the scale has to reach Q.
    q_factor, unit = problem.scale, 1.0
    if not static["general"] and problem.scale:
        q_factor, unit = math.copysign(1.0, problem.scale), abs(problem.scale)
    layout = _layout(
        at_q=tiles.panels * head_dim * width,
        at_out=tiles.panels * value_dim * width,
        at_scores=max(2, tiles.block_k) * width,
        at_state=tiles.panels * STATE_PANELS * width,
        at_keys=0 if in_place["k"] else tiles.block_k * head_dim * size,
        at_values=0 if in_place["v"] else tiles.block_k * value_dim * size,
        at_clean=tiles.block_k * value_dim * size,
        at_lanes=LANE_TABLES * 8 * block_q,
    )
    return make_call(
        dict(q=q, k=k, v=v, out=out, lse=lse, bias=score.bias, mask=problem.mask, alibi=score.alibi,
             sinks=problem.sinks, segments=problem.segments, jobs=jobs.table),
        layout | dict(
            out_code=CODES[out.dtype], bias_code=0 if score.bias is None else CODES[score.bias.dtype],
            k_in_place=in_place["k"], v_in_place=in_place["v"], packed_heads=tiles.packed_heads,
            heads=q.shape[1], head_units=head_units, group=problem.group, head_dim=head_dim, value_dim=value_dim,
            head_origin=problem.head_origin, left=problem.band.left, right=problem.band.right, block_q=block_q,
            block_k=tiles.block_k, job_count=len(jobs.table) * head_units, segment_bytes=8 * COLUMNS,
            may_hide=problem.mask is not None or score.bias is not None,
            seed=0 if dropout is None else _signed(dropout.seed),
            threshold=-1 if dropout is None else threshold(dropout.p),
        ),
        dict(
            q_factor=q_factor, unit=unit * LOG2_E, softcap=score.softcap or 0.0,
            keep_factor=1.0 if dropout is None else 1.0 / (1.0 - dropout.p),
        ),
    )


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _layout(**parts: int) -> dict[str, int]:
    """Offsets of parts of scratch, each on a cache line of its own, and their total."""
    offsets, total = {}, 0
    for name, size in parts.items():
        offsets[name] = total
        total += size + 63 & ~63
    return offsets | {"scratch_bytes": total}


def _fill_uncovered(problem: Problem, out: np.ndarray, lse: np.ndarray) -> None:
    """Rows that belong to no segment: output 0, lse -inf (with a sink: the sink)."""
    batch, _, rows, _ = problem.q.shape
    table = problem.segments
    if int(table[:, Q_LENGTH].sum()) == batch * rows:
        return
    for at, low, high in uncovered(table, batch, rows):
        out[at, :, low:high] = 0
        lse[at, :, low:high] = -np.inf


def _jobs(problem: Problem, packed_heads: bool, block_q: int) -> Jobs:
    table = problem.segments
    scale = problem.group if packed_heads else 1
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
    if scale > 1:
        low, high = 0 * low, 0 * high + q_length
    first = np.maximum(0, low + offset - band.left)
    last = np.minimum(k_length, high + offset + band.right)
    return (high - low) * np.maximum(0, last - first)
