"""Forward attention on any GPU: FlashAttention-2's tiles and online softmax in plain multiply-adds.

A block owns `block_rows` queries of one head (and, past 256 value columns, one group of them).  Its queries
stay in shared memory; keys and values stream through one tile that both take in turn, so two blocks fit
where one tile each would not.  Scores, their running maxima and sums, and the result stay in registers;
weights cross shared memory between the lanes of one warp.  Tiles that no query of the block sees are never
loaded, and only those at the edges of what it sees are masked.

Per key tile: keys arrive | scores | values arrive, softmax | result; each bar is a barrier of the block.

Dao, "FlashAttention-2", 2023, algorithm 1.
"""
import math
from collections.abc import Callable
from functools import lru_cache

from numba import cuda, int32, int64, uint32

from numbaflash.cuda import ptx
from numbaflash.cuda.draw import load_draw
from numbaflash.cuda.inlining import device
from numbaflash.cuda.products import make_combine, make_combine_visible, make_dot
from numbaflash.cuda.simt_config import COLUMN_LANES, ROW_LANES, WARP, SimtConfig
from numbaflash.cuda.simt_scores import make_scores
from numbaflash.cuda.simt_softmax import LOG2_E, make_softmax
from numbaflash.cuda.simt_tiles import (
    LOAD_NUMBER, NATIVE_STORE, NUMBER, STORE_NUMBER, STORE_SHARED, make_load, make_store)
from numbaflash.cuda.tiles import Q_BATCH, Q_START, column, load_segment, locate, row_zero, tiles_seen
from numbaflash.cuda.unroll import unrolled


class Layout:
    """Byte offsets of a block's shared memory."""

    def __init__(self, config: SimtConfig) -> None:
        self.queries = 0
        self.stream = self.queries + config.block_rows * config.pitch(config.head_dim)
        self.weights = self.stream + config.block_columns * max(config.pitch(config.head_dim),
                                                                config.pitch(config.value_dim))
        self.flags = self.weights + config.block_rows * config.probability_pitch
        results = config.block_rows * config.pitch(config.value_dim)
        self.bytes = max(self.flags + 8 * config.warps, results)


def shared_bytes(config: SimtConfig) -> int:
    """Dynamic shared memory of a block."""
    return Layout(config).bytes


@lru_cache(maxsize=None)
def make_forward(config: SimtConfig) -> Callable:
    """The kernel of a configuration: ``forward_simt(call)``, with a `Call` (signature ``(CALL,)``).

    Its grid is `tiles.fill_grid`'s along x and the groups of `value_dim` value columns along y.
    """
    number, zero = NUMBER[config.compute], NUMBER[config.compute](0)
    infinity, log2_e = number(math.inf), number(LOG2_E)
    rows, columns, lanes = config.rows, config.columns, config.lanes
    head_dim, value_dim, warps = config.head_dim, config.value_dim, config.warps
    block_rows, block_columns = config.block_rows, config.block_columns
    per_row = value_dim // COLUMN_LANES
    pieces = per_row // lanes
    scores_count, result_count = rows * columns, rows * per_row
    layout = Layout(config)
    queries_at, stream_at, weights_at, flags_at = layout.queries, layout.stream, layout.weights, layout.flags
    query_pitch, value_pitch = config.pitch(head_dim), config.pitch(value_dim)
    weight_pitch, size = config.probability_pitch, config.size
    column_step, row_step = COLUMN_LANES * size, ROW_LANES * config.probability_pitch
    sliced, general = config.sliced, config.general

    load_queries = make_load(config, block_rows, head_dim)
    load_keys = make_load(config, block_columns, head_dim)
    load_values = make_load(config, block_columns, value_dim)
    store_result = make_store(config, block_rows, value_dim, config.out_dtype)
    dot = make_dot(config, head_dim)
    combine, combine_visible = make_combine(config, value_dim), make_combine_visible(config, value_dim)
    softmax = make_softmax(config, per_row)
    step, finish = softmax.step, softmax.finish
    load_stages, apply, drop = make_scores(config)
    store_number, store_vector, load_number = (
        STORE_NUMBER[config.compute], STORE_SHARED[config.compute], LOAD_NUMBER[config.compute])
    store_lse = NATIVE_STORE[config.compute]

    def make_hide(hidden):
        """Replace the pairs of an edge tile that are outside the band or past the last key."""
        def hide_one(j, i, s, lo, hi, key):
            at = key + j * COLUMN_LANES
            s[i * columns + j] = s[i * columns + j] if (at >= lo) & (at <= hi) else hidden

        hide_columns = unrolled(columns, hide_one)

        def hide_row(i, s, segment, row, key):
            lo = row + i * ROW_LANES + segment.first
            hi = min(row + i * ROW_LANES + segment.last, segment.k_length - 1)
            hide_columns(i, s, lo, hi, key)

        return unrolled(rows, hide_row)

    hide_scores, hide_weights = make_hide(-infinity), make_hide(number(-0.0))

    def clear_one(i, s):
        s[i] = zero

    def scale_one(i, s, factor):
        s[i] *= factor

    def put_weight(at, s, address):
        store_number(int32(address + at // columns * row_step + at % columns * column_step), s[at])

    def get_score(at, s, address):
        s[at] = load_number(int32(address + at // columns * row_step + at % columns * column_step))

    def put_result(at, acc, address):
        i, n = at // pieces, at % pieces
        store_vector(int32(address + i * (ROW_LANES * value_pitch) + n * (COLUMN_LANES * lanes * size)), acc,
                     at)

    def share_one(j, i, acc, share):
        acc[i * per_row + j] *= share

    share_all = unrolled(per_row, share_one)

    def finish_row(i, acc, top, total, lse, sink, column_lane):
        row_lse, share = finish(top[i], total[i], sink)
        lse[0] = row_lse if column_lane == i else lse[0]
        share_all(i, acc, share)

    def start_row(i, top, total):
        top[i] = -infinity
        total[i] = zero

    finish_rows, put_results = unrolled(rows, finish_row), unrolled(rows * pieces, put_result)
    clear_result, start_rows = unrolled(result_count, clear_one), unrolled(rows, start_row)
    clear_scores, scale_scores = unrolled(scores_count, clear_one), unrolled(scores_count, scale_one)
    put_weights, get_scores = unrolled(scores_count, put_weight), unrolled(scores_count, get_score)

    @device
    def product(s, segment, call, shared, row_lo, here, key_lo, keys, a, b, thread):
        """Scores of a tile: along the whole head dimension, or slice by slice."""
        clear_scores(s)
        key_address = segment.k + int64(key_lo) * call.k.row
        if sliced:
            for first in range(0, call.head_dim, head_dim):
                width = int32(min(call.head_dim - first, head_dim))
                cuda.syncthreads()
                load_queries(int32(shared + queries_at),
                             segment.q + int64(row_lo) * call.q.row + first * call.q.column,
                             call.q.row, call.q.column, here, width, thread)
                load_keys(int32(shared + stream_at), key_address + first * call.k.column,
                          call.k.row, call.k.column, keys, width, thread)
                cuda.syncthreads()
                dot(s, a, b, int32((width + lanes - 1) // lanes))
        elif call.head_dim > 0:
            cuda.syncthreads()
            load_keys(int32(shared + stream_at), key_address, call.k.row, call.k.column, keys, call.head_dim,
                      thread)
            cuda.syncthreads()
            dot(s, a, b, int32((call.head_dim + lanes - 1) // lanes))

    def forward_simt(call):
        thread = ptx.thread_index()
        warp, lane = thread // WARP, thread % WARP
        row_lane, column_lane = lane // COLUMN_LANES, lane % COLUMN_LANES
        shared = ptx.dynamic_shared_address()
        place = locate(call, cuda.blockIdx.x)
        segment = load_segment(call, place)
        row_lo = int32(place.tile * block_rows)
        here = int32(min(segment.q_length - row_lo, block_rows))
        own = int32(warp * (ROW_LANES * rows) + row_lane)           # this thread's first row of the tile
        row = int32(row_lo + own)
        row_end = int32(min(row_lo + (warp + 1) * (ROW_LANES * rows), segment.q_length))
        value_lo = int32(cuda.blockIdx.y * value_dim)
        width = int32(min(call.value_dim - value_lo, value_dim))

        a = int32(shared + queries_at + own * query_pitch)
        b = int32(shared + stream_at + column_lane * query_pitch)
        p = int32(shared + weights_at + own * weight_pitch)
        own_weights = int32(p + column_lane * size)
        v = int32(shared + stream_at + column_lane * (lanes * size))

        s = cuda.local.array(scores_count, number)
        acc = cuda.local.array(result_count, number)
        top = cuda.local.array(rows, number)
        total = cuda.local.array(rows, number)
        clear_result(acc)
        start_rows(top, total)

        if not sliced:
            if call.head_dim > 0:
                load_queries(int32(shared + queries_at), segment.q + int64(row_lo) * call.q.row,
                             call.q.row, call.q.column, here, call.head_dim, thread)
        if general:
            stages = load_stages(call, place)
            draw = load_draw(call, place)
            keep_scale = number(call.keep_scale)
        factor = number(call.scale * LOG2_E)

        lo, full_lo, full_hi, hi = tiles_seen(segment, row_lo, row_lo + block_rows, block_columns)
        for tile in range(lo, hi):
            key_lo = int32(tile * block_columns)
            keys = int32(min(segment.k_length - key_lo, block_columns))
            key = int32(key_lo + column_lane)
            edge = (tile < full_lo) | (tile >= full_hi)
            product(s, segment, call, shared, row_lo, here, key_lo, keys, a, b, thread)

            cuda.syncthreads()
            if width > 0:
                bad = load_values(
                    int32(shared + stream_at),
                    segment.v + int64(key_lo) * call.v.row + int64(value_lo) * call.v.column,
                    call.v.row, call.v.column, keys, width, thread)
                found = ptx.vote_any(bad != bad)
                if lane == 0:
                    ptx.st_shared_b32(int32(shared + flags_at + 4 * warp), uint32(found))
            if general:
                put_weights(s, own_weights)
                apply(call, stages, segment, own_weights, own_weights, row, row_end, key)
                get_scores(s, own_weights)
            else:
                scale_scores(s, factor)
                if edge:
                    hide_scores(s, segment, row, key)
            step(s, acc, top, total)
            if not general:
                if edge:
                    hide_weights(s, segment, row, key)
            put_weights(s, own_weights)
            if general:
                if call.threshold != 0:
                    drop(draw, own_weights, row, row_end, key, keep_scale)
            cuda.syncthreads()
            if width > 0:
                found = uint32(0)
                for i in range(warps):
                    found |= ptx.ld_shared_b32(int32(shared + flags_at + 4 * i))
                if found != 0:
                    combine_visible(acc, p, v, keys)
                else:
                    combine(acc, p, v, int32((keys + lanes - 1) // lanes))

        sink = -infinity
        if (call.sinks != 0) & (place.segment < call.sequences):
            sink = number(ptx.ld_global_nc_f64(call.sinks + 8 * int64(place.head)))
        lse = cuda.local.array(1, number)       # of the row whose number is the lane's
        lse[0] = zero
        finish_rows(acc, top, total, lse, sink, column_lane)
        batch, start = column(call, place, Q_BATCH), column(call, place, Q_START) + row_lo
        if (cuda.blockIdx.y == 0) & (column_lane < rows) & (own + column_lane * ROW_LANES < here):
            at = row_zero(call.lse, batch, int64(place.head), start + own + column_lane * ROW_LANES)
            store_lse(at, lse[0])

        cuda.syncthreads()
        result = int32(shared + own * value_pitch + column_lane * (lanes * size))
        put_results(acc, result)
        cuda.syncthreads()
        out = row_zero(call.out, batch, int64(place.head), start)
        store_result(shared, out + int64(value_lo) * call.out.column,
                     call.out.row, call.out.column, here, width, thread)

    return forward_simt
