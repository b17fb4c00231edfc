"""The CPU forward pass: from a Problem to arrays, through :mod:`attend`, or :mod:`decode` where queries are few."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..arrays import Operand
from ..dropout import threshold
from ..problem import Problem
from ..segments import COLUMNS, K_LENGTH, Q_LENGTH, Q_OFFSET, uncovered
from ..tuning import DEFAULT, CPUConfig, config_of
from . import attend, decode
from .call import Integers, Numbers, Plan, make_call, plan_bytes
from .compile import Static
from .config import MAX_FEW_ROWS, few_queries_static, forward_tiles, key_parts, vector_static
from .jobs import block_jobs, part_jobs
from .lanes import LANE_TABLES
from .softmax import STATE_PANELS
from .storage import CODES, FLOAT64, ITEM_SIZES
from .threads import get_num_threads, run

_GIGAFLOPS = 60.0  # of one core, roughly: decides only whether threads are worth waking
_GIGABYTES = 10.0  # read by one core in a second, likewise
_SMALLEST_UNIT = 2.0**-100  # -inf times a unit that rounds to 0 would be NaN


class Shape(NamedTuple):
    """What a plan depends on: nothing of a call's numbers.

    Attributes
    ----------
    storage : int
        Code of K's and V's dtype.
    general : bool
        Whether there is more to do to a score than a band and lengths.
    head_dim, value_dim : int
    max_q, max_k : int
        Longest sequence of queries and of keys.
    segments, heads, group : int
    k_in_place, v_in_place : bool
        Whether products can read K (V) where it lies.
    adjacent : bool
        Whether the columns of K and V are adjacent.
    """

    storage: int
    general: bool
    head_dim: int
    value_dim: int
    max_q: int
    max_k: int
    segments: int
    heads: int
    group: int
    k_in_place: bool
    v_in_place: bool
    adjacent: bool


class Prepared(NamedTuple):
    """What calls of one shape share: plan, jobs, kernel, and the estimated time on one thread."""

    plan: Plan
    planned: bytes
    tables: tuple[np.ndarray, np.ndarray]
    job_count: int
    counters: int
    entry: Callable
    cost_ns: float


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
    if problem.padded:
        _fill_uncovered(problem, out, lse)
    if not (len(problem.segments) and lse.size):
        return out, lse
    prepared = prepare(problem)
    if not prepared.job_count:
        return out, lse
    plan = prepared.plan
    partials = counters = None
    if prepared.counters:
        partials = np.empty(prepared.job_count * plan.partial_bytes, np.uint8)
        counters = np.zeros(prepared.counters, np.int64)
    call = record(problem, prepared, out, lse, partials, counters)
    run(prepared.entry, (call, None), jobs=prepared.job_count, cost_ns=prepared.cost_ns,
        keep=(problem, prepared, out, lse, partials, counters))
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
def decode_static(storage: int, general: bool) -> Static:
    """The same for few queries; storage is that of K and V."""
    return Static(storage=storage, general=general, **few_queries_static(64 if storage == FLOAT64 else 32))


def specialise(storage: int, general: bool, few: bool) -> Callable:
    """The kernel's entry point, compiled or loaded on first use."""
    if few:
        return decode.kernel.specialise(decode.ARGUMENTS, decode_static(storage, general))
    return attend.kernel.specialise(attend.ARGUMENTS, forward_static(storage, general))


def _adjacent(array: Operand) -> bool:
    return array.strides[3] == array.dtype.itemsize or array.shape[3] <= 1


def prepare(problem: Problem) -> Prepared:
    """Plan, jobs and kernel of a call; made once for calls of one shape."""
    table, k, v = problem.segments, problem.k, problem.v
    if table.flags.writeable:
        return _prepare_shape(_shape(problem), problem)
    key = (k.dtype, problem.q.shape, k.shape, v.shape, int(table[0, Q_OFFSET]), is_general(problem), _adjacent(k),
           _adjacent(v), problem.band, get_num_threads(), problem.config)
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _MOST_PREPARED:
            _prepared.clear()
        prepared = _prepared[key] = _prepare_shape(_shape(problem), problem)
    return prepared


_prepared: dict[tuple, Prepared] = {}
_MOST_PREPARED = 512


_generation = object()


def generation() -> object:
    """The same object as long as plans stay as they are."""
    return _generation


def forget() -> None:
    """Plans are made anew: other tile sizes have been measured."""
    global _generation
    _generation = object()
    _prepared.clear()


def tile_sizes(problem: Problem) -> dict[str, int]:
    """The sizes that a configuration can change, as they are for a call."""
    plan = _plan(_shape(problem), problem)
    return {name: getattr(plan, name) for name in ("block_q", "block_k", "part_keys")}


def _plan(shape: Shape, problem: Problem) -> Plan:
    threads = get_num_threads()
    config = config_of("forward", problem, threads)
    return decode_plan(shape, config) if few_queries(shape) else block_plan(shape, threads, config)


def _shape(problem: Problem) -> Shape:
    table, k, v = problem.segments, problem.k, problem.v
    converted = k.dtype != problem.compute_dtype
    return Shape(
        storage=CODES[k.dtype], general=is_general(problem), head_dim=k.shape[3], value_dim=v.shape[3],
        max_q=int(table[:, Q_LENGTH].max()), max_k=int(table[:, K_LENGTH].max()), segments=len(table),
        heads=problem.q.shape[1], group=problem.group, k_in_place=_adjacent(k) and not converted,
        v_in_place=_adjacent(v) and not converted, adjacent=_adjacent(k) and _adjacent(v),
    )


def _prepare_shape(shape: Shape, problem: Problem) -> Prepared:
    few = few_queries(shape)
    plan = _plan(shape, problem)
    jobs = (part_jobs if few else block_jobs)(problem, plan)
    job_count = len(jobs.table) * plan.head_units
    columns = shape.head_dim + shape.value_dim
    cost_ns = 2.0 * (columns + 8) * jobs.pairs * plan.head_units / _GIGAFLOPS
    counters = 0
    if few:
        bytes_read = jobs.pairs / max(1, shape.max_q * shape.group) * plan.head_units * columns
        cost_ns = max(cost_ns, bytes_read * ITEM_SIZES[shape.storage] / _GIGABYTES)
        if len(jobs.table) and jobs.table[:, 2].max() > 1:
            counters = shape.segments * plan.head_units
    entry = specialise(shape.storage, shape.general, few)
    return Prepared(
        plan, plan_bytes(plan, problem.segments, jobs.table), (problem.segments, jobs.table), job_count, counters,
        entry, cost_ns,
    )


def few_queries(shape: Shape) -> bool:
    """Whether :mod:`decode` takes the call: bound by reading K and V, which it does once for a whole group."""
    wide = decode_static(shape.storage, shape.general)["wide"]
    return (
        shape.max_q * shape.group <= MAX_FEW_ROWS
        and shape.adjacent
        and min(shape.head_dim, shape.value_dim) >= wide
    )


def _offsets(parts: dict[str, int]) -> dict[str, int]:
    """Offsets of the parts of a thread's scratch, each on a cache line of its own, and their total."""
    offsets, total = {}, 0
    for name, length in parts.items():
        offsets[name] = total
        total += (length + 63) & ~63
    return offsets | {"scratch_bytes": total}


@lru_cache(maxsize=256)
def block_plan(shape: Shape, threads: int, config: CPUConfig = DEFAULT) -> Plan:
    """How :mod:`attend` runs a call of some shape."""
    static = forward_static(shape.storage, shape.general)
    head_dim, value_dim = shape.head_dim, shape.value_dim
    tiles = forward_tiles(static, head_dim, value_dim, shape.max_q, shape.max_k, shape.segments * shape.heads,
                          shape.group, threads).changed(static, config)
    size, width = static["size"], static["panel"] * static["size"]
    block_q = tiles.panels * static["panel"]
    parts = dict(
        at_q=tiles.panels * head_dim * width,
        at_out=tiles.panels * value_dim * width,
        at_scores=max(2, tiles.block_k) * width,
        at_state=tiles.panels * STATE_PANELS * width,
        at_keys=0 if shape.k_in_place else tiles.block_k * head_dim * size,
        at_values=0 if shape.v_in_place else tiles.block_k * value_dim * size,
        at_clean=tiles.block_k * value_dim * size,
        at_lanes=LANE_TABLES * 8 * block_q,
    )
    return Plan(
        head_dim=head_dim, value_dim=value_dim, group=shape.group, packed_heads=tiles.packed_heads,
        head_units=shape.heads // shape.group if tiles.packed_heads else shape.heads, block_q=block_q,
        block_k=tiles.block_k, k_in_place=shape.k_in_place, v_in_place=shape.v_in_place, **_offsets(parts),
    )


@lru_cache(maxsize=256)
def decode_plan(shape: Shape, config: CPUConfig = DEFAULT) -> Plan:
    """How :mod:`decode` runs a call of some shape."""
    static = decode_static(shape.storage, shape.general)
    head_dim, value_dim = shape.head_dim, shape.value_dim
    size, width, wide = static["size"], static["panel"] * static["size"], static["wide"]
    units = shape.heads // shape.group
    panels = -(-shape.max_q * shape.group // static["panel"])
    rows = panels * static["panel"]
    block_k, part_keys = key_parts(
        head_dim, value_dim, ITEM_SIZES[shape.storage], shape.max_k, shape.segments * units
    ).changed(config)
    q_width, row_width = (-(-dim // wide) * wide * size for dim in (head_dim, value_dim))
    parts = dict(
        at_q=rows * q_width,
        at_out=panels * value_dim * width,
        at_scores=(block_k + wide) * width,
        at_state=panels * STATE_PANELS * width,
        at_keys=0,
        at_values=block_k * value_dim * size,
        at_clean=block_k * value_dim * size,
        at_lanes=LANE_TABLES * 8 * rows,
        at_rows=rows * row_width,
    )
    return Plan(
        head_dim=head_dim, value_dim=value_dim, group=shape.group, packed_heads=True, head_units=units, block_q=rows,
        block_k=block_k, k_in_place=shape.k_in_place, v_in_place=shape.v_in_place, part_keys=part_keys,
        q_width=q_width, row_width=row_width, partial_bytes=(rows * (row_width + 2 * size) + 63) & ~63,
        **_offsets(parts),
    )


def score_factors(problem: Problem) -> tuple[float, float]:
    """What Q is multiplied by before the product, and the scores after it; both passes round alike.

    Stages work on scores in natural units; without any, only the sign of a scale has to reach Q.
    """
    scale = problem.scale
    if not is_general(problem) and _SMALLEST_UNIT < abs(scale) < 1 / _SMALLEST_UNIT:
        return math.copysign(1.0, scale), abs(scale)
    return scale, 1.0


def record(
    problem: Problem, prepared: Prepared, out: np.ndarray, lse: np.ndarray, partials: np.ndarray | None,
    counters: np.ndarray | None,
) -> np.ndarray:
    score, dropout, mask = problem.score, problem.dropout, problem.mask
    q_factor, unit = score_factors(problem)
    arrays = [
        ("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", out), ("lse", lse),
        ("sinks", problem.sinks),
    ]
    softcap, keep_factor, seed, limit, bias_code, may_hide = 0.0, 1.0, 0, -1, 0, False
    if is_general(problem):
        arrays += [("bias", score.bias), ("mask", mask), ("alibi", score.alibi)]
        softcap = score.softcap or 0.0
        may_hide = mask is not None or score.bias is not None
        bias_code = 0 if score.bias is None else CODES[score.bias.dtype]
        if dropout is not None:
            seed, limit, keep_factor = _signed(dropout.seed), threshold(dropout.p), 1.0 / (1.0 - dropout.p)
    if partials is not None:
        arrays += [("partials", partials), ("counters", counters)]
    return make_call(
        prepared.planned, arrays,
        Integers(  # in order, which takes half the time of naming them
            prepared.job_count, 8 * COLUMNS, CODES[problem.q.dtype], CODES[problem.out_dtype], bias_code, may_hide,
            *problem.band, problem.head_origin, seed, limit,
        ),
        Numbers(q_factor, unit, softcap, keep_factor),
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

