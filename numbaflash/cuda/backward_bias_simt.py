"""Gradients of bias and sinks on any GPU, without atomics.

A block owns a tile of the bias and sums dS over all that shared it: sequences and heads where those axes
were broadcast, and then the rows or columns of the tile itself.  One fixed order, so equal to the bit from
run to run.

    dbias = dS,    dsink = -sum_i exp(sink - lse_i) delta_i

where the last holds because the sink is a key whose value, and so its dP, is 0.
"""
import math
from collections.abc import Callable
from functools import lru_cache

from numba import cuda, float64, int32, int64

from numbaflash.cuda import ptx
from numbaflash.cuda.draw import load_draw
from numbaflash.cuda.inlining import device
from numbaflash.cuda.simt_config import ROW_LANES, WARP, SimtConfig
from numbaflash.cuda.simt_gradients import Layout, make_gradients, make_loads
from numbaflash.cuda.simt_scores import make_scores
from numbaflash.cuda.simt_softmax import ALL, EXP2, LOG2_E
from numbaflash.cuda.simt_tiles import LOAD_NUMBER, NATIVE_NUMBER, NATIVE_STORE, NUMBER, STORE_NUMBER
from numbaflash.cuda.tiles import Q_BATCH, Q_START, Place, column, load_segment, row_zero
from numbaflash.cuda.unroll import unrolled

SINK_THREADS = 128
SINK_BYTES = 8 * (SINK_THREADS // WARP)


@lru_cache(maxsize=None)
def make_dbias(config: SimtConfig) -> Callable:
    """The kernel of dbias: ``dbias_simt(back)``, one block per `block_rows` x `block_columns` of
    ``bias_shape``."""
    number, zero = NUMBER[config.compute], NUMBER[config.compute](0)
    rows, columns, sliced = config.rows, config.columns, config.sliced
    block_rows, block_columns, threads = config.block_rows, config.block_columns, config.threads
    count, rows_per_warp, size, pitch = (
        rows * columns, ROW_LANES * rows, config.size, config.probability_pitch)
    layout = Layout(config)
    a_first_at, a_second_at, b_first_at, b_second_at = (
        layout.a_first, layout.a_second, layout.b_first, layout.b_second)
    weights_at = layout.weights
    loads = make_loads(config, keys=False)
    load_a_first, load_a_second, load_b_first, load_b_second = loads
    lane_of, operands, shifted, load_stats, seen_tiles, weigh_tile, differentiate_tile, put_weights = (
        make_gradients(config, loads, keys=False, capped=False))
    load_stages = make_scores(config).load_stages
    load_number, store_number = LOAD_NUMBER[config.compute], STORE_NUMBER[config.compute]
    store_native = NATIVE_STORE[config.compute]

    @device
    def covered(index, size, total):
        """The range of `total` that entry `index` of an axis of `size` entries stands for."""
        return (0, total) if size == 1 else (index, min(index + 1, total))

    @device
    def load_tile(load, at, operand, width, lane):
        if width > 0:
            load(int32(lane.shared + at), operand.address, operand.row, operand.column, operand.count, width,
                 lane.thread)

    def clear_one(i, total):
        total[i] = zero

    def add_one(at, total, s, row, row_end):
        total[at] += s[at] if row + at // columns * ROW_LANES < row_end else zero

    clear, add_all = unrolled(count, clear_one), unrolled(count, add_one)

    def dbias_simt(back):
        call, shape = back.call, back.bias_shape
        lane = lane_of(ptx.thread_index())
        column_tiles = int32((shape.columns + block_columns - 1) // block_columns)
        row_tiles = int32((shape.rows + block_rows - 1) // block_rows)
        rest = int32(cuda.blockIdx.x // column_tiles)
        column_tile = int32(cuda.blockIdx.x - rest * column_tiles)
        unit = int32(rest // row_tiles)
        row_tile = int32(rest - unit * row_tiles)
        bias_sequence = int32(unit // shape.heads)
        bias_head = int32(unit - bias_sequence * shape.heads)

        s = cuda.local.array(count, number)
        dp = cuda.local.array(count, number)
        total = cuda.local.array(count, number)
        negative_lse = cuda.local.array(rows, number)
        delta = cuda.local.array(rows, number)
        clear(total)
        first_sequence, end_sequence = covered(bias_sequence, shape.sequences, call.sequences)
        first_head, end_head = covered(bias_head, shape.heads, call.heads)
        for sequence in range(first_sequence, end_sequence):
            for head in range(first_head, end_head):
                place = Place(int32(sequence), int32(head), row_tile)
                segment = load_segment(call, place)
                batch, start = column(call, place, Q_BATCH), column(call, place, Q_START)
                dout = row_zero(back.dout, batch, int64(head), start)
                stages, draw = load_stages(call, place), load_draw(call, place)
                a_first_rows, a_second_rows, b_first_rows, b_second_rows = operands(call, back, segment, dout)
                first_tile, end_tile = covered(row_tile, shape.rows,
                                               (segment.q_length + block_rows - 1) // block_rows)
                for tile in range(first_tile, end_tile):
                    row_lo = int32(tile * block_rows)
                    row = int32(row_lo + lane.own)
                    row_end = int32(min(row_lo + (lane.warp + 1) * rows_per_warp, segment.q_length))
                    a_first = shifted(a_first_rows, row_lo, block_rows)
                    a_second = shifted(a_second_rows, row_lo, block_rows)
                    load_stats(negative_lse, delta, call, back, segment, batch, int64(head), start, row)
                    lo, _, _, hi = seen_tiles(segment, row_lo)
                    if shape.columns > 1:
                        lo, hi = max(lo, column_tile), min(hi, column_tile + 1)
                    for at in range(lo, hi):
                        column_lo = int32(at * block_columns)
                        b_first = shifted(b_first_rows, column_lo, block_columns)
                        b_second = shifted(b_second_rows, column_lo, block_columns)
                        if not sliced:
                            cuda.syncthreads()
                            load_tile(load_a_first, a_first_at, a_first, call.head_dim, lane)
                            load_tile(load_a_second, a_second_at, a_second, call.value_dim, lane)
                            load_tile(load_b_first, b_first_at, b_first, call.head_dim, lane)
                            load_tile(load_b_second, b_second_at, b_second, call.value_dim, lane)
                            cuda.syncthreads()
                        weigh_tile(s, negative_lse, call, segment, stages, draw, a_first, b_first, row, row_end,
                                   int32(column_lo + lane.column), True, lane)
                        differentiate_tile(s, dp, delta, call, stages, a_second, b_second, row, row_end, lane)
                        add_all(total, s, row, row_end)

        put_weights(total, lane.weights)
        cuda.syncthreads()
        tile_at = int32(lane.shared + weights_at)
        width, height = block_columns, block_rows
        if shape.columns == 1:
            for r in range(lane.thread, block_rows, threads):
                joined = zero
                for c in range(block_columns):
                    joined += load_number(int32(tile_at + r * pitch + c * size))
                store_number(int32(tile_at + r * pitch), joined)
            width = 1
            cuda.syncthreads()
        if shape.rows == 1:
            for c in range(lane.thread, width, threads):
                joined = zero
                for r in range(block_rows):
                    joined += load_number(int32(tile_at + r * pitch + c * size))
                store_number(int32(tile_at + c * size), joined)
            height = 1
            cuda.syncthreads()
        origin = row_zero(back.dbias, int64(bias_sequence), int64(bias_head), int64(row_tile) * block_rows)
        for r in range(height):
            for c in range(lane.thread, width, threads):
                key = column_tile * block_columns + c
                if (row_tile * block_rows + r < shape.rows) & (key < shape.columns):
                    store_native(origin + r * back.dbias.row + int64(key) * back.dbias.column,
                                 load_number(int32(tile_at + r * pitch + c * size)))

    return dbias_simt


@lru_cache(maxsize=None)
def make_dsinks(compute: str) -> Callable:
    """The kernel of dsinks: ``dsinks_simt(back)``, a block of `SINK_THREADS` threads per head, sums in
    float64."""
    number, exp2 = NUMBER[compute], EXP2[compute]
    log2_e, infinity = number(LOG2_E), number(math.inf)
    read_native = NATIVE_NUMBER[compute]

    def dsinks_simt(back):
        call = back.call
        thread = ptx.thread_index()
        shared = ptx.dynamic_shared_address()
        head = int32(cuda.blockIdx.x)
        sink = number(ptx.ld_global_nc_f64(call.sinks + 8 * int64(head)))
        total = float64(0)
        for sequence in range(call.sequences):
            place = Place(int32(sequence), head, int32(0))
            segment = load_segment(call, place)
            batch, start = column(call, place, Q_BATCH), column(call, place, Q_START)
            for row in range(thread, segment.q_length, SINK_THREADS):
                at = start + int64(row)
                lse = read_native(row_zero(call.lse, batch, int64(head), at))
                if lse != -infinity:
                    share = exp2((sink - lse) * log2_e)
                    total -= float64(share * read_native(row_zero(back.delta, batch, int64(head), at)))
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_xor_sync(ALL, total, step)
        if thread % WARP == 0:
            ptx.st_shared_f64(int32(shared + 8 * (thread // WARP)), total)
        cuda.syncthreads()
        if thread == 0:
            total = float64(0)
            for warp in range(SINK_THREADS // WARP):
                total += ptx.ld_shared_f64(int32(shared + 8 * warp))
            ptx.st_global_f64(back.dsinks + 8 * int64(head), total)

    return dsinks_simt
