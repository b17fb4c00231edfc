"""From tiles of q, k, v and dout to P and dS of one tile: what all SIMT backward kernels share.

    x = score - lse,   P = exp(x),   dP = dO V^T,   dS = Z P dP - P delta

with Z from dropout (Dao et al., 2022, appendix B.2).

A block owns rows and lets columns stream past: rows are keys where it computes dk and dv (`keys`), else
queries.  Either side has two operands: the first, k or q, makes the scores, the second, v or dout, makes
dP.
"""
import math
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda, int32, int64

from numbaflash.cuda import ptx
from numbaflash.cuda.inlining import device
from numbaflash.cuda.products import make_dot
from numbaflash.cuda.simt_config import COLUMN_LANES, ROW_LANES, WARP, SimtConfig
from numbaflash.cuda.simt_scores import make_scores
from numbaflash.cuda.simt_softmax import EXP2, LOG2_E
from numbaflash.cuda.simt_tiles import LOAD_NUMBER, NATIVE_NUMBER, NUMBER, STORE_NUMBER, make_load
from numbaflash.cuda.tiles import row_zero, tile_range
from numbaflash.cuda.unroll import unrolled


class Layout:
    """Byte offsets of a block's shared memory: tiles of its rows, tiles that stream past, weights,
    derivatives."""

    def __init__(self, config: SimtConfig) -> None:
        first, second = config.pitch(config.head_dim), config.pitch(config.value_dim)
        weights = config.block_rows * config.probability_pitch
        self.a_first = 0
        self.a_second = self.a_first + config.block_rows * first
        self.b_first = self.a_second + config.block_rows * second
        self.b_second = self.b_first + config.block_columns * first
        self.weights = self.b_second + config.block_columns * second
        self.slopes = self.weights + weights
        self.flags = self.slopes + (weights if config.general else 0)
        self.bytes = max(self.flags + 4 * config.warps, config.block_rows * max(first, second))


def shared_bytes(config: SimtConfig) -> int:
    """Dynamic shared memory of a block."""
    return Layout(config).bytes


class Rows(NamedTuple):
    """Rows of one head of an array, from the first of a tile on."""

    address: int
    row: int
    column: int
    count: int


class Lane(NamedTuple):
    """A thread's place in its block: its first row and column of a tile, and shared-memory addresses.

    Attributes
    ----------
    a_first, a_second, b_first, b_second : int
        The thread's first row of the four tiles.
    row_weights : int
        The thread's first row of weights; `weights` and `slopes` are its first number of weights and
        derivatives.
    """

    thread: int
    warp: int
    own: int
    column: int
    shared: int
    a_first: int
    a_second: int
    b_first: int
    b_second: int
    row_weights: int
    weights: int
    slopes: int


class Gradients(NamedTuple):
    """Device functions of one configuration: see `make_gradients`."""

    lane_of: Callable
    operands: Callable
    shifted: Callable
    load_stats: Callable
    seen_tiles: Callable
    weigh_tile: Callable
    differentiate_tile: Callable
    put_weights: Callable


class Loads(NamedTuple):
    """The loaders of the four tiles."""

    a_first: Callable
    a_second: Callable
    b_first: Callable
    b_second: Callable


def make_loads(config: SimtConfig, *, keys: bool) -> Loads:
    """The loaders of a block's tiles, see `simt_tiles.make_load`; dout has the dtype of out."""
    a_dtype, b_dtype = (config.dtype, config.out_dtype) if keys else (config.out_dtype, config.dtype)
    return Loads(
        make_load(config, config.block_rows, config.head_dim),
        make_load(config, config.block_rows, config.value_dim, a_dtype),
        make_load(config, config.block_columns, config.head_dim),
        make_load(config, config.block_columns, config.value_dim, b_dtype),
    )


def make_gradients(config: SimtConfig, loads: Loads, *, keys: bool, capped: bool = True) -> Gradients:
    """The steps of a backward kernel whose rows are keys, or queries.

    ``lane_of(thread)`` gives the `Lane`.
    ``operands(call, back, segment, dout)`` gives the four operands from row 0 on.
    ``shifted(rows, first, length, block)`` gives the `Rows` of the tile that starts at row `first`.
    ``load_stats(negative_lse, delta, call, back, segment, place, first)`` fetches what belongs to the
    thread's queries; -inf stands for the lse of a row that sees nothing.
    ``seen_tiles(segment, row_lo)`` is `tile_range` for either side.
    ``weigh_tile(...)`` leaves P in `s`, and Z P in the thread's own weights.
    ``differentiate_tile(...)`` then leaves dS in `s`, which a kernel without options need not keep till then.
    Hidden pairs are -0.0 in all three, and no other is.  dS is that of the product, or if not `capped` that of
    the score behind the softcap, as the bias needs it.
    """
    number, size = NUMBER[config.compute], config.size
    rows, columns, lanes, general, sliced = (
        config.rows, config.columns, config.lanes, config.general, config.sliced)
    block_rows, block_columns = config.block_rows, config.block_columns
    first_width, second_width = config.head_dim, config.value_dim
    first_pitch, second_pitch, weight_pitch = (
        config.pitch(first_width), config.pitch(second_width), config.probability_pitch)
    row_step, column_step = ROW_LANES * weight_pitch, COLUMN_LANES * size
    layout = Layout(config)
    a_first_at, a_second_at, b_first_at, b_second_at = (
        layout.a_first, layout.a_second, layout.b_first, layout.b_second)
    weights_at, slopes_at = layout.weights, layout.slopes
    count, rows_per_warp = rows * columns, ROW_LANES * rows
    stats_count, stats_step = (columns, COLUMN_LANES) if keys else (rows, ROW_LANES)
    load_number, store_number, exp2 = (
        LOAD_NUMBER[config.compute], STORE_NUMBER[config.compute], EXP2[config.compute])
    read_number = NATIVE_NUMBER[config.compute]
    infinity, zero, hidden, one = number(math.inf), number(0), number(-0.0), number(1)
    log2_e = number(LOG2_E)
    scores = make_scores(config, transposed=keys, derivatives=capped, floored=True)
    apply, drop = scores.apply, scores.drop

    @device
    def lane_of(thread):
        warp, lane = thread // WARP, thread % WARP
        own = int32(warp * rows_per_warp + lane // COLUMN_LANES)
        column = int32(lane % COLUMN_LANES)
        shared = ptx.dynamic_shared_address()
        row_weights = int32(shared + weights_at + own * weight_pitch)
        return Lane(
            thread, int32(warp), own, column, shared,
            int32(shared + a_first_at + own * first_pitch), int32(shared + a_second_at + own * second_pitch),
            int32(shared + b_first_at + column * first_pitch),
            int32(shared + b_second_at + column * second_pitch),
            row_weights, int32(row_weights + column * size),
            int32(row_weights + slopes_at - weights_at + column * size),
        )

    @device
    def operands(call, back, segment, dout):
        q = Rows(segment.q, call.q.row, call.q.column, segment.q_length)
        k = Rows(segment.k, call.k.row, call.k.column, segment.k_length)
        v = Rows(segment.v, call.v.row, call.v.column, segment.k_length)
        do = Rows(dout, back.dout.row, back.dout.column, segment.q_length)
        if keys:
            return k, v, q, do
        return q, do, k, v

    @device
    def shifted(operand, first, block):
        return Rows(operand.address + int64(first) * operand.row, operand.row, operand.column,
                    int32(min(operand.count - first, block)))

    def load_stat(n, negative_lse, delta, first, last, lse_zero, lse_row, delta_zero, delta_row):
        row = int64(min(first + n * stats_step, last))
        lse = read_number(lse_zero + row * lse_row)
        negative_lse[n] = -infinity if lse == -infinity else -lse
        delta[n] = read_number(delta_zero + row * delta_row)

    load_all_stats = unrolled(stats_count, load_stat)

    @device
    def load_stats(negative_lse, delta, call, back, segment, batch, head, start, first):
        load_all_stats(negative_lse, delta, first, segment.q_length - 1,
                       row_zero(call.lse, batch, head, start), call.lse.row,
                       row_zero(back.delta, batch, head, start), back.delta.row)

    @device
    def seen_tiles(segment, row_lo):
        if keys:
            return tile_range(row_lo, min(row_lo + block_rows, segment.k_length), block_columns,
                              segment.q_length, 0, segment.last, -segment.first)
        return tile_range(row_lo, min(row_lo + block_rows, segment.q_length), block_columns,
                          segment.k_length, 0, -segment.first, segment.last)

    @device
    def stat(i, j):
        return j if keys else i

    def hide_one(j, i, x, lo, hi, column):
        at = column + j * COLUMN_LANES
        x[i * columns + j] = x[i * columns + j] if (at >= lo) & (at <= hi) else hidden

    hide_columns = unrolled(columns, hide_one)

    def hide_row(i, x, first, last, length, row, column):
        lo = row + i * ROW_LANES + first
        hi = min(row + i * ROW_LANES + last, length - 1)
        hide_columns(i, x, lo, hi, column)

    hide_rows = unrolled(rows, hide_row)

    @device
    def hide(x, segment, row, column):
        if keys:
            hide_rows(x, -segment.last, -segment.first, segment.q_length, row, column)
        else:
            hide_rows(x, segment.first, segment.last, segment.k_length, row, column)

    def clear_one(i, s):
        s[i] = zero

    def put_weight(at, s, address):
        i, j = at // columns, at % columns
        store_number(int32(address + i * row_step + j * column_step), s[at])

    def get_score(at, s, address, negative_lse):
        i, j = at // columns, at % columns
        score = load_number(int32(address + i * row_step + j * column_step))
        s[at] = -infinity if score == -infinity else score + negative_lse[stat(i, j)]     # lse may be NaN

    def scale_one(at, s, scale, negative_lse):
        s[at] = cuda.fma(s[at], scale, negative_lse[stat(at // columns, at % columns)])

    def weigh_one(at, s):
        s[at] = exp2(s[at] * log2_e)

    def weigh_seen_one(at, s):
        s[at] = hidden if s[at] == -infinity else exp2(s[at] * log2_e)

    @device
    def is_hidden(weight):
        return (weight == zero) & (math.copysign(one, weight) < zero)

    def differentiate(at, s, dp, delta, address):
        i, j = at // columns, at % columns
        kept = load_number(int32(address + i * row_step + j * column_step))
        if general:
            weight = s[at]
            gradient = cuda.fma(kept, dp[at], -weight * delta[stat(i, j)]) + zero
        else:
            weight = kept       # from shared memory: its register was free during the second product
            gradient = cuda.fma(weight, dp[at] - delta[stat(i, j)], zero)
        s[at] = hidden if is_hidden(weight) else gradient       # + zero: a gradient is never -0.0

    def cap_one(at, s, address, row, row_end):
        i, j = at // columns, at % columns
        if row + i * ROW_LANES < row_end:
            slope = load_number(int32(address + i * row_step + j * column_step))
            s[at] = hidden if is_hidden(s[at]) else cuda.fma(s[at], slope, zero)

    clear, put_weights, get_scores = (
        unrolled(count, clear_one), unrolled(count, put_weight), unrolled(count, get_score))
    scale_scores, to_gradient = unrolled(count, scale_one), unrolled(count, differentiate)
    weigh, weigh_seen = unrolled(count, weigh_one), unrolled(count, weigh_seen_one)
    cap_all = unrolled(count, cap_one)

    def make_product(width, load_a, load_b, a_at, b_at):
        dot = make_dot(config, width)

        @device
        def product(s, a, b, dim, a_own, b_own, lane):
            clear(s)
            if sliced:
                for first in range(0, dim, width):
                    here = int32(min(dim - first, width))
                    cuda.syncthreads()
                    load_a(int32(lane.shared + a_at), a.address + first * a.column, a.row, a.column, a.count,
                           here,
                           lane.thread)
                    load_b(int32(lane.shared + b_at), b.address + first * b.column, b.row, b.column, b.count,
                           here,
                           lane.thread)
                    cuda.syncthreads()
                    dot(s, a_own, b_own, int32((here + lanes - 1) // lanes))
            else:
                dot(s, a_own, b_own, int32((dim + lanes - 1) // lanes))
        return product

    product_first = make_product(first_width, loads.a_first, loads.b_first, a_first_at, b_first_at)
    product_second = make_product(second_width, loads.a_second, loads.b_second, a_second_at, b_second_at)

    @device
    def weigh_tile(s, negative_lse, call, segment, stages, draw, a_first, b_first, row, row_end, column, edge,
                   lane):
        product_first(s, a_first, b_first, call.head_dim, lane.a_first, lane.b_first, lane)
        if general:
            put_weights(s, lane.weights)
            apply(call, stages, segment, lane.weights, lane.slopes, row, row_end, column)
            get_scores(s, lane.weights, negative_lse)
            weigh_seen(s)
        else:
            scale_scores(s, number(call.scale), negative_lse)
            weigh(s)
            if edge:
                hide(s, segment, row, column)
        put_weights(s, lane.weights)
        if general:
            if call.threshold != 0:
                drop(draw, lane.weights, row, row_end, column, number(call.keep_scale))

    @device
    def differentiate_tile(s, dp, delta, call, stages, a_second, b_second, row, row_end, lane):
        product_second(dp, a_second, b_second, call.value_dim, lane.a_second, lane.b_second, lane)
        to_gradient(s, dp, delta, lane.weights)
        if general and capped:
            if stages.softcap != zero:
                cap_all(s, lane.slopes, row, row_end)

    return Gradients(lane_of, operands, shifted, load_stats, seen_tiles, weigh_tile, differentiate_tile,
                     put_weights)
