"""Gradients on any GPU: FlashAttention-2's recomputing backward pass in plain multiply-adds, without atomics.

Three kernels: delta = rowsum(dout * out) - dlse; dk and dv by blocks that own keys and run through the
query tiles of every head of their group; dq by blocks that own queries.  Each number of a gradient is
summed by one thread in a fixed order, so results are equal to the bit from run to run.
`backward_bias_simt` has the gradients of bias and sinks.

The two large kernels are one function: both own rows and let columns stream past (see `simt_gradients`).
Per tile: columns arrive | P and dS | products, where a bar is a barrier of the block, and weights cross
shared memory within one warp.  Head dimensions past the last class run slice by slice, and the columns of
the results are then split over the y axis of the grid, each with a recomputation of its own.

Dao, "FlashAttention-2", 2023, algorithm 2.
"""
from collections.abc import Callable
from functools import lru_cache

from numba import cuda, int32, int64, uint32

from numbaflash.cuda import ptx
from numbaflash.cuda.draw import load_draw
from numbaflash.cuda.inlining import device
from numbaflash.cuda.products import make_combine, make_combine_visible
from numbaflash.cuda.simt_config import COLUMN_LANES, ROW_LANES, VECTOR_BYTES, WARP, SimtConfig
from numbaflash.cuda.simt_gradients import Layout, make_gradients, make_loads
from numbaflash.cuda.simt_scores import make_scores
from numbaflash.cuda.simt_softmax import ALL
from numbaflash.cuda.simt_tiles import (
    NATIVE, NATIVE_NUMBER, NATIVE_STORE, NUMBER, READ_NUMBER, READ_VECTOR, SIZE, STORE_SHARED, make_store)
from numbaflash.cuda.tiles import (
    K_BATCH, K_START, Q_BATCH, Q_START, Place, column, divide, load_segment, locate, row_zero)
from numbaflash.cuda.unroll import unrolled


@device
def sync_warp():
    ptx.bar_warp_sync(uint32(ALL))


@lru_cache(maxsize=None)
def make_delta(config: SimtConfig) -> Callable:
    """The kernel of delta: ``delta_simt(back)``, with a `BackwardCall`; a block has `block_rows` rows of a
    head."""
    number, zero = NUMBER[config.compute], NUMBER[config.compute](0)
    block_rows, per_pass = config.block_rows, ROW_LANES * config.warps
    size = SIZE[config.out_dtype]
    items = VECTOR_BYTES // size if config.vector else 1
    native = NATIVE[config.out_dtype]
    read_vector, read_number = READ_VECTOR[config.out_dtype], READ_NUMBER[config.out_dtype]
    read_native, store_native = NATIVE_NUMBER[config.compute], NATIVE_STORE[config.compute]

    @device
    def read_vectors(x, address, at, column_stride):
        read_vector(x, 0, address + at * VECTOR_BYTES)

    @device
    def read_single(x, address, at, column_stride):
        x[0] = read_number(address + int64(at) * column_stride)

    def add_one(i, total, x, y):
        total[0] = cuda.fma(number(x[i]), number(y[i]), total[0])

    add_all = unrolled(items, add_one)
    read = read_vectors if config.vector else read_single

    def delta_simt(back):
        call = back.call
        thread = ptx.thread_index()
        place = locate(call, cuda.blockIdx.x)
        segment = load_segment(call, place)
        head, batch = int64(place.head), column(call, place, Q_BATCH)
        row_lo = int64(place.tile) * block_rows
        start = column(call, place, Q_START) + row_lo
        here = int32(min(segment.q_length - row_lo, block_rows))
        x = cuda.local.array(items, native)
        y = cuda.local.array(items, native)
        for first in range(0, here, per_pass):
            row = int32(first + thread // COLUMN_LANES)
            at = start + min(row, here - 1)
            dout, out = row_zero(back.dout, batch, head, at), row_zero(call.out, batch, head, at)
            total = cuda.local.array(1, number)
            total[0] = zero
            for piece in range(thread % COLUMN_LANES, divide(call.value_dim, items), COLUMN_LANES):
                read(x, dout, piece, back.dout.column)
                read(y, out, piece, call.out.column)
                add_all(total, x, y)
            delta = total[0]
            delta += cuda.shfl_xor_sync(ALL, delta, 1)
            delta += cuda.shfl_xor_sync(ALL, delta, 2)
            delta += cuda.shfl_xor_sync(ALL, delta, 4)
            if (row < here) & (thread % COLUMN_LANES == 0):
                if back.dlse.pointer != 0:
                    delta -= read_native(row_zero(back.dlse, batch, head, at))
                store_native(row_zero(back.delta, batch, head, at), delta)

    return delta_simt


@lru_cache(maxsize=None)
def make_backward(config: SimtConfig, *, keys: bool) -> Callable:
    """The kernel of dk and dv (`keys`) or of dq: ``backward_simt(back)``, with a `BackwardCall`.

    For dk and dv the heads of ``back.call`` count the heads of k, and its tiles are tiles of keys.
    """
    number, zero = NUMBER[config.compute], NUMBER[config.compute](0)
    rows, columns, lanes, warps = config.rows, config.columns, config.lanes, config.warps
    block_rows, block_columns, general, sliced = (
        config.block_rows, config.block_columns, config.general, config.sliced)
    first_width, second_width = config.head_dim, config.value_dim
    first_pitch, second_pitch = config.pitch(first_width), config.pitch(second_width)
    count, rows_per_warp = rows * columns, ROW_LANES * rows
    first_per_row, second_per_row = first_width // COLUMN_LANES, second_width // COLUMN_LANES
    first_count, second_count = rows * first_per_row, rows * second_per_row if keys else 1
    stats_count = columns if keys else rows
    layout = Layout(config)
    a_first_at, a_second_at, b_first_at, b_second_at = (
        layout.a_first, layout.a_second, layout.b_first, layout.b_second)
    flags_at = layout.flags
    loads = make_loads(config, keys=keys)
    load_a_first, load_a_second, load_b_first, load_b_second = loads
    lane_of, operands, shifted, load_stats, seen_tiles, weigh_tile, differentiate_tile, put_weights = (
        make_gradients(config, loads, keys=keys))
    load_stages = make_scores(config, transposed=keys).load_stages
    store_first = make_store(config, block_rows, first_width, config.dtype)
    store_second = make_store(config, block_rows, second_width, config.dtype)
    store_vector = STORE_SHARED[config.compute]

    def make_join(width):
        combine, combine_visible = make_combine(config, width), make_combine_visible(config, width)

        @device
        def join(acc, weights, tile, length, found):
            if found != 0:
                combine_visible(acc, weights, tile, length)
            else:
                combine(acc, weights, tile, int32((length + lanes - 1) // lanes))
        return join

    def clear_one(i, acc):
        acc[i] = zero

    clear_first, clear_second = unrolled(first_count, clear_one), unrolled(second_count, clear_one)
    join_first, join_second = make_join(first_width), make_join(second_width)

    def make_finish(width, pitch, store):
        pieces = width // (COLUMN_LANES * lanes)

        def scale_one(at, acc, factor):
            acc[at] *= factor

        def put_piece(at, acc, address):
            i, n = at // pieces, at % pieces
            store_vector(int32(address + i * (ROW_LANES * pitch) + n * (COLUMN_LANES * VECTOR_BYTES)), acc,
                         at)

        scale_all, put_pieces = unrolled(rows * pieces * lanes, scale_one), unrolled(rows * pieces, put_piece)

        @device
        def finish(acc, factor, lane, address, row_stride, column_stride, length, here):
            """Results through shared memory to global memory, so that stores are whole rows."""
            cuda.syncthreads()
            scale_all(acc, factor)
            put_pieces(acc, int32(lane.shared + lane.own * pitch + lane.column * VECTOR_BYTES))
            cuda.syncthreads()
            store(lane.shared, address, row_stride, column_stride, length, here, lane.thread)
        return finish

    finish_first = make_finish(first_width, first_pitch, store_first)
    finish_second = make_finish(second_width, second_pitch, store_second)

    @device
    def load_columns(b_first, b_second, first_lo, second_lo, first_here, second_here, lane):
        """The two streaming tiles, and whether anything in them is not finite, for all warps to see."""
        bad = zero
        if first_here > 0:
            bad += load_b_first(int32(lane.shared + b_first_at),
                                b_first.address + int64(first_lo) * b_first.column,
                                b_first.row, b_first.column, b_first.count, first_here, lane.thread)
        if second_here > 0:
            bad += load_b_second(int32(lane.shared + b_second_at),
                                 b_second.address + int64(second_lo) * b_second.column,
                                 b_second.row, b_second.column, b_second.count, second_here, lane.thread)
        found = ptx.vote_any(bad != bad)
        if lane.thread % WARP == 0:
            ptx.st_shared_b32(int32(lane.shared + flags_at + 4 * lane.warp), uint32(found))

    @device
    def any_found(lane):
        found = uint32(0)
        for i in range(warps):
            found |= ptx.ld_shared_b32(int32(lane.shared + flags_at + 4 * i))
        return found

    @device
    def join_weights(acc_second, lane, length):
        """dv takes the weights of a tile, which are then free for the derivatives."""
        sync_warp()
        join_second(acc_second, lane.row_weights,
                    int32(lane.shared + b_second_at + lane.column * VECTOR_BYTES), length, any_found(lane))
        sync_warp()

    def backward_simt(back):
        call = back.call
        lane = lane_of(ptx.thread_index())
        place = locate(call, cuda.blockIdx.x)
        tile_index = place.tile
        if keys:
            if call.work == 0:
                tile_index = int32(call.tiles - 1 - place.tile)     # causal: the first keys are heavy
        row_lo = int32(tile_index * block_rows)
        row = int32(row_lo + lane.own)
        first_lo, second_lo = int32(cuda.blockIdx.y * first_width), int32(cuda.blockIdx.y * second_width)
        first_here = int32(min(call.head_dim - first_lo, first_width))
        second_here = int32(min(call.value_dim - second_lo, second_width))

        s = cuda.local.array(count, number)
        dp = cuda.local.array(count, number)
        acc_first = cuda.local.array(first_count, number)
        acc_second = cuda.local.array(second_count, number)
        negative_lse = cuda.local.array(stats_count, number)
        delta = cuda.local.array(stats_count, number)
        clear_first(acc_first)
        clear_second(acc_second)

        members = call.group if keys else 1
        for member in range(members):
            head = int32(place.head * members + member)
            here = Place(place.segment, head, tile_index)
            segment = load_segment(call, here)
            batch, start = column(call, here, Q_BATCH), column(call, here, Q_START)
            dout = row_zero(back.dout, batch, int64(head), start)
            a_first, a_second, b_first, b_second = operands(call, back, segment, dout)
            row_end = int32(min(row_lo + (lane.warp + 1) * rows_per_warp, a_first.count))
            a_first, a_second = shifted(a_first, row_lo, block_rows), shifted(a_second, row_lo, block_rows)
            stages, draw = load_stages(call, here), load_draw(call, here)
            if not sliced:
                if member == 0:
                    if call.head_dim > 0:
                        load_a_first(int32(lane.shared + a_first_at), a_first.address, a_first.row,
                                     a_first.column,
                                     a_first.count, call.head_dim, lane.thread)
                    if call.value_dim > 0:
                        load_a_second(int32(lane.shared + a_second_at), a_second.address, a_second.row,
                                      a_second.column, a_second.count, call.value_dim, lane.thread)
            if not keys:
                load_stats(negative_lse, delta, call, back, segment, batch, int64(head), start, row)
            lo, full_lo, full_hi, hi = seen_tiles(segment, row_lo)
            lo, full_lo, full_hi, hi = int32(lo), int32(full_lo), int32(full_hi), int32(hi)
            for tile in range(lo, hi):
                column_lo = int32(tile * block_columns)
                first_column = int32(column_lo + lane.column)
                b_first_tile = shifted(b_first, column_lo, block_columns)
                b_second_tile = shifted(b_second, column_lo, block_columns)
                length = b_first_tile.count
                if not sliced:
                    cuda.syncthreads()
                    load_columns(b_first_tile, b_second_tile, 0, 0, call.head_dim, call.value_dim, lane)
                    cuda.syncthreads()
                if keys:
                    load_stats(negative_lse, delta, call, back, segment, batch, int64(head), start,
                               first_column)
                edge = (tile < full_lo) | (tile >= full_hi)
                weigh_tile(s, negative_lse, call, segment, stages, draw, a_first, b_first_tile, row, row_end,
                           first_column, edge, lane)
                if keys and not sliced:
                    if second_here > 0:
                        join_weights(acc_second, lane, length)
                differentiate_tile(s, dp, delta, call, stages, a_second, b_second_tile, row, row_end, lane)
                if sliced:
                    cuda.syncthreads()
                    load_columns(b_first_tile, b_second_tile, first_lo, second_lo, first_here, second_here,
                                 lane)
                    cuda.syncthreads()
                    if keys:
                        if second_here > 0:
                            join_weights(acc_second, lane, length)
                put_weights(s, lane.weights)
                sync_warp()
                if first_here > 0:
                    join_first(acc_first, lane.row_weights,
                               int32(lane.shared + b_first_at + lane.column * VECTOR_BYTES), length,
                               any_found(lane))

        scale = number(call.scale)
        length = a_first.count
        if keys:
            batch, start = column(call, place, K_BATCH), column(call, place, K_START) + row_lo
            finish_first(acc_first, scale, lane, row_zero(back.dk, batch, int64(place.head), start)
                         + int64(first_lo) * back.dk.column, back.dk.row, back.dk.column, length, first_here)
            finish_second(acc_second, number(1), lane, row_zero(back.dv, batch, int64(place.head), start)
                          + int64(second_lo) * back.dv.column, back.dv.row, back.dv.column, length,
                          second_here)
        else:
            batch, start = column(call, place, Q_BATCH), column(call, place, Q_START) + row_lo
            finish_first(acc_first, scale, lane, row_zero(back.dq, batch, int64(place.head), start)
                         + int64(first_lo) * back.dq.column, back.dq.row, back.dq.column, length, first_here)

    return backward_simt
