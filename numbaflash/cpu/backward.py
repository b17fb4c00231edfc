"""The CPU backward pass: from a Problem to gradients, through :mod:`differentiate`."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..arrays import float64
from ..dropout import threshold
from ..problem import Problem
from ..segments import K_LENGTH, Q_LENGTH, Q_OFFSET
from ..tuning import DEFAULT, CPUConfig, config_of
from . import differentiate
from .compile import Static
from .config import machine
from .forward import score_factors
from .gradient_call import make_gradient_call
from .storage import CODES
from .threads import get_num_threads, run
from .workspace import borrow

MAX_BLOCK = 96
_GIGAFLOPS = 60.0  # of one core, roughly: decides only whether threads are worth waking


class Statics(NamedTuple):
    """What a kernel is compiled for: products of a whole panel, of one vector, and the rest."""

    wide: Static
    narrow: Static
    kernel: Static


class BiasSums(NamedTuple):
    """How the gradient of a bias is summed; at most one array is not None.

    Attributes
    ----------
    dbias : ndarray or None
        In the bias' own shape, for one that depends on query and key.
    row_sums, column_sums : ndarray or None
        Sums of dS over keys and over queries, float64 per head, for one that does not.
    """

    dbias: np.ndarray | None = None
    row_sums: np.ndarray | None = None
    column_sums: np.ndarray | None = None


class Tables(NamedTuple):
    """Where each sequence's rows, tiles of queries and blocks of keys begin; the last entry is the total."""

    rows: np.ndarray
    tiles: np.ndarray
    blocks: np.ndarray


class Prepared(NamedTuple):
    """What calls of one shape share.

    Attributes
    ----------
    tables : Tables
    row_count, key_extent : int
        Rows of all sequences, in whole blocks of the microkernel; keys of the longest.
    shapes : dict
        Of the arrays that a call works with.
    counters : (int, int)
        Lengths of two tables of zeros: turns and taken.
    integers : dict
        Fields of the record.
    job_count : int
    entry : callable or None
        None where there are no jobs.
    cost_ns : float
        Estimated time on one thread.
    """

    tables: Tables
    row_count: int
    key_extent: int
    shapes: dict[str, tuple[int, ...]]
    counters: tuple[int, int]
    integers: dict[str, int]
    job_count: int
    entry: Callable | None
    cost_ns: float

    def new_counters(self) -> tuple[np.ndarray, np.ndarray]:
        """Zeros for one call."""
        return np.zeros(self.counters[0], np.int64), np.zeros(self.counters[1], np.int64)


def backward(
    problem: Problem,
    dout: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Gradients of a checked call, by recomputation; equal to the last bit for any number of threads.

    Parameters
    ----------
    problem : Problem
    dout, out : ndarray
        Head-major views (batch, H, Nq, Dv) of dtype ``problem.out_dtype``, any strides.
    lse, dlse : ndarray
        (batch, H, Nq) of the dtype computed in; dlse may be None.
    dq, dk, dv : ndarray
        Head-major views of the arrays to write, of q's dtype; rows that belong to no sequence are left alone.

    Returns
    -------
    dbias : ndarray or None
        In ``score.bias_shape``, of the dtype computed in or float64.
    dsinks : ndarray or None
        (H,), float64.
    """
    prepared = prepare(problem)
    tables, compute = prepared.tables, problem.compute_dtype
    bias = bias_sums(problem, prepared.row_count, prepared.key_extent)
    sink_sums = None if problem.sinks is None else np.zeros((int(tables.tiles[-1]), problem.q.shape[1]))
    if prepared.job_count:
        dbias = bias.dbias
        if dbias is not None:
            dbias = np.broadcast_to(dbias, (len(problem.segments), problem.q.shape[1], *dbias.shape[2:]))
        given = dict(out=out, dout=dout, lse=lse, dlse=dlse, dq=dq, dk=dk, dv=dv, dbias=dbias, row_sums=bias.row_sums,
                     column_sums=bias.column_sums, sink_sums=sink_sums)
        turns, taken = prepared.new_counters()
        with borrow(prepared.shapes, compute) as work:
            call = record(problem, prepared, given | work | dict(turns=turns, taken=taken))
            run(prepared.entry, (call, None, None, None), jobs=prepared.job_count, cost_ns=prepared.cost_ns,
                keep=(problem, prepared, given, turns, taken, work))
    return bias_gradient(problem, bias, tables), None if sink_sums is None else sink_sums.sum(axis=0)


def prepare(problem: Problem) -> Prepared:
    """What calls of one shape share."""
    segments = problem.segments
    heads, head_dim, value_dim = problem.q.shape[1], problem.q.shape[3], problem.v.shape[3]
    kv_heads, count = problem.k.shape[1], len(segments)
    statics = kernel_statics(problem)
    static = statics.kernel
    max_q, max_k = (int(segments[:, column].max(initial=0)) for column in (Q_LENGTH, K_LENGTH))
    config = config_of("backward", problem, get_num_threads())
    block_q, block_k = block_sizes(static, head_dim, value_dim, max_q, max_k, config)
    tables = make_tables(segments, static["rows"], block_q, block_k)
    share_batch, share_heads = shares(problem)
    if share_batch:
        tables = tables._replace(blocks=np.array([0, np.diff(tables.blocks).max(initial=0)], np.int64))
    row_count, tile_jobs = int(tables.rows[-1]), int(tables.tiles[-1]) * heads
    heads_per_unit = kv_heads if share_heads else 1
    units = kv_heads // max(1, heads_per_unit)
    strands, job_count = (len(tables.blocks) - 1) * units, tile_jobs + int(tables.blocks[-1]) * units
    width, value_width = (row_width(static, dim) for dim in (head_dim, value_dim))
    shapes = dict(
        packed_q=(heads, row_count, width), packed_dout=(heads, row_count, value_width),
        sums=(heads, row_count, width) if max_k > block_k else (0,),
        statistics=(differentiate.STATISTICS, heads, row_count),
    )
    integers = scratch_layout(static, block_q, block_k, head_dim, value_dim) | dict(
        heads=heads, kv_heads=kv_heads, group=problem.group, head_dim=head_dim, value_dim=value_dim,
        block_q=block_q, block_k=block_k, segment_count=count, row_count=row_count, key_extent=max_k,
        heads_per_unit=heads_per_unit, strands=strands, segments_per_unit=count if share_batch else 1,
        tile_jobs=tile_jobs, job_count=job_count,
    )
    flops = 2.0 * (3 * head_dim + 2 * value_dim + 16) * visible_pairs(problem) * heads
    return Prepared(
        tables, row_count, max_k, shapes, (1 + tile_jobs, 1 + strands), integers, job_count,
        specialise(statics) if job_count else None, flops / _GIGAFLOPS,
    )


def record(problem: Problem, prepared: Prepared, arrays: dict[str, Any]) -> np.ndarray:
    """The record of one call; `arrays` are those that belong to no problem and are not shared, by name."""
    score, dropout, (rows, tiles, blocks) = problem.score, problem.dropout, prepared.tables
    q_factor, unit = score_factors(problem)
    return make_gradient_call(
        dict(
            q=problem.q, k=problem.k, v=problem.v, bias=score.bias, mask=problem.mask, alibi=score.alibi,
            sinks=problem.sinks, segments=problem.segments, row_starts=rows, tile_starts=tiles, block_starts=blocks,
            **arrays,
        ),
        prepared.integers | dict(
            head_origin=problem.head_origin, left=problem.band.left, right=problem.band.right,
            out_code=CODES[problem.out_dtype], bias_code=0 if score.bias is None else CODES[score.bias.dtype],
            may_hide=problem.mask is not None or score.bias is not None,
            seed=0 if dropout is None else dropout.seed - (dropout.seed >> 63 << 64),
            threshold=-1 if dropout is None else threshold(dropout.p),
        ),
        dict(
            scale=problem.scale, q_factor=q_factor, unit=unit,
            dk_factor=problem.scale / q_factor if q_factor else problem.scale, softcap=score.softcap or 0.0,
            keep_factor=1.0 if dropout is None else 1.0 / (1.0 - dropout.p),
        ),
    )


def specialise(statics: Statics) -> Callable:
    """The kernel's entry point, compiled or loaded on first use."""
    return differentiate.kernel.specialise(
        (*differentiate.ARGUMENTS, statics.wide, statics.narrow), statics.kernel
    )


def kernel_statics(problem: Problem) -> Statics:
    """The constants of the kernel that a call needs."""
    score = problem.score
    general = not score.is_empty or problem.mask is not None or problem.dropout is not None
    return statics_of(CODES[problem.q.dtype], general)


@lru_cache(maxsize=64)
def statics_of(storage: int, general: bool) -> Statics:
    """The constants of the kernel for a stored dtype (a code)."""
    # Twice as many rows as vectors of a panel: the accumulators fill the registers, and a row of vectors is
    # as short as the lanes of common head dimensions want it.
    m = machine()
    bits = 64 if storage == CODES[float64] else 32
    lanes = m.vector_bits // bits
    common = dict(bits=bits, size=bits // 8, lanes=lanes, rows=12 if m.registers >= 32 else 6)
    wide = Static(vectors=2, panel=2 * lanes, **common)
    return Statics(
        wide, Static(vectors=1, panel=lanes, **common), wide.replace(storage=storage, general=general)
    )


def tile_sizes(problem: Problem) -> dict[str, int]:
    """The sizes that a configuration can change, as they are for a call."""
    segments = problem.segments
    longest = (int(segments[:, column].max(initial=0)) for column in (Q_LENGTH, K_LENGTH))
    static = kernel_statics(problem).kernel
    config = config_of("backward", problem, get_num_threads())
    sizes = block_sizes(static, problem.q.shape[3], problem.v.shape[3], *longest, config)
    return dict(zip(("backward_block_q", "backward_block_k"), sizes))


def block_sizes(
    static: Static, head_dim: int, value_dim: int, max_q: int, max_k: int, config: CPUConfig = DEFAULT
) -> tuple[int, int]:
    """Queries to a tile and keys to a block: what is kept per key and per query fits the L2 cache."""
    room = machine().l2 // 2 // max(1, (3 * head_dim + 2 * value_dim) * static["size"])
    largest = max(static["panel"], min(MAX_BLOCK, room))
    block_q = config.backward_block_q or min(largest, max(1, max_q))
    block_k = config.backward_block_k or min(largest, max(1, max_k))
    return block_q + -block_q % static["rows"], block_k + -block_k % static["panel"]


def make_tables(segments: np.ndarray, rows: int, block_q: int, block_k: int) -> Tables:
    """Running totals over the sequences; rows are counted in whole blocks of the microkernel."""

    def totals(counts: np.ndarray) -> np.ndarray:
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))

    q_length, k_length = segments[:, Q_LENGTH], segments[:, K_LENGTH]
    tiles, blocks = -(-q_length // block_q), -(-k_length // block_k)
    return Tables(totals(-(-q_length // rows) * rows), totals(tiles), totals(blocks))


def shares(problem: Problem) -> tuple[bool, bool]:
    """Whether sequences, and heads, add to the same dbias: then one job takes them all, in order."""
    shape = problem.score.bias_shape
    if problem.score.bias is None or not _is_summed_in_place(shape):
        return False, False
    return shape[0] < len(problem.segments), shape[1] < problem.q.shape[1]


def _is_summed_in_place(shape: tuple[int, ...]) -> bool:
    return 0 in shape or (shape[2] > 1 and shape[3] > 1)


def bias_sums(problem: Problem, row_count: int, max_k: int) -> BiasSums:
    """The arrays in which the gradient of the bias is summed."""
    shape = problem.score.bias_shape
    if problem.score.bias is None:
        return BiasSums()
    sequences, heads = len(problem.segments), problem.q.shape[1]
    if _is_summed_in_place(shape):
        return BiasSums(dbias=np.zeros(shape, problem.compute_dtype))
    if shape[2] > 1:
        return BiasSums(row_sums=np.zeros((heads, row_count)))
    return BiasSums(column_sums=np.zeros((sequences, heads, max_k)))


def bias_gradient(problem: Problem, sums: BiasSums, tables: Tables) -> np.ndarray | None:
    """The gradient in the bias' shape from what the kernel has summed."""
    if sums.row_sums is None and sums.column_sums is None:
        return sums.dbias
    shape = problem.score.bias_shape
    if sums.column_sums is not None:
        dbias = np.zeros((*sums.column_sums.shape[:2], 1, problem.score.bias.shape[3]))
        dbias[:, :, 0, : sums.column_sums.shape[2]] = sums.column_sums
    else:
        dbias = np.zeros((*problem.score.bias.shape[:3], 1))
        for number, length in enumerate(problem.segments[:, Q_LENGTH].tolist()):
            first = tables.rows[number]
            dbias[number, :, :length, 0] = sums.row_sums[:, first : first + length]
    axes = tuple(axis for axis in range(4) if shape[axis] == 1)
    return dbias.sum(axis=axes, keepdims=True)


def row_width(static: Static, columns: int) -> int:
    """Numbers from row to row of a tile, as :func:`differentiate.row_width` has them."""
    return columns + -columns % static["lanes"] + static["lanes"]


def scratch_layout(
    static: Static, block_q: int, block_k: int, head_dim: int, value_dim: int
) -> dict[str, int]:
    """Offsets of the parts of a thread's scratch, each on a cache line of its own, and their total."""
    lanes, size = static["lanes"], static["size"]
    width, value_width = row_width(static, head_dim), row_width(static, value_dim)
    keys = block_k + -block_k % static["rows"]
    # Two vectors behind the last row of a tile of scores are read or written in passing.
    tile = (block_q * row_width(static, block_k) + 2 * max(lanes, static["rows"])) * size
    general = static["general"]
    parts = dict(
        at_q=block_q * width * size,
        at_dout=block_q * value_width * size,
        at_scores=tile,
        at_products=tile,
        at_derivatives=tile if general else 0,
        at_keep=tile + 64 if general else 0,
        at_k_lanes=block_k * head_dim * size,
        at_v_lanes=block_k * value_dim * size,
        at_keys=keys * width * size,
        at_dk=keys * width * size,
        at_dv=keys * value_width * size,
        at_dq=block_q * width * size,
        at_column_sum=(block_k + lanes) * size,
        at_rows=8 * (block_k + static["panel"]),
        at_kept_keys=keys * width * size,
    )
    offsets, total = {}, 64
    for name, length in parts.items():
        offsets[name] = total
        total += length + 63 & ~63
    offsets["at_keep"] += 64  # dropout's first pair of keys may begin before the tile
    return offsets | {"scratch_bytes": total}


def visible_pairs(problem: Problem) -> float:
    """About how many pairs of query and key the band shows, over all sequences."""
    segments = problem.segments
    q_length, k_length = segments[:, Q_LENGTH].astype(float), segments[:, K_LENGTH].astype(float)
    middle = q_length / 2 + segments[:, Q_OFFSET]
    seen = np.minimum(k_length, middle + problem.band.right + 1) - np.maximum(0, middle - problem.band.left)
    return float((q_length * np.maximum(seen, 0)).sum())
