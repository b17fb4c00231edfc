"""dq on tensor cores: blocks own queries, keys stream past (see `backward_sm80`)."""
from functools import lru_cache

from numba import cuda, float32, int32, int64, uint32

from numbaflash.cuda import ptx
from numbaflash.cuda.backward_sm80 import BackwardConfig, exponent_base, make_recomputation
from numbaflash.cuda.draw import load_draw
from numbaflash.cuda.fragments import HALVES, make_clear
from numbaflash.cuda.inlining import device
from numbaflash.cuda.packing import ONE_HEAD
from numbaflash.cuda.panels import PANEL_ROW, tile_bytes
from numbaflash.cuda.results import make_write
from numbaflash.cuda.scores import ZERO
from numbaflash.cuda.softmax import LOG2_E
from numbaflash.cuda.tiles import Q_LENGTH, column, load_segment, locate, query_rows, tiles_seen
from numbaflash.cuda.unroll import unrolled


@lru_cache(maxsize=None)
def make_backward_queries(config: BackwardConfig):
    """The kernel of a configuration: ``backward_queries(back, sums, tiles)``, with a grid of queries.

    `sums` and `tiles` are for kernels that reduce; this one does not.
    """
    config.check()
    ROWS, COLUMNS, STEP, THREADS = config.block_rows, config.columns, config.step, config.threads
    M_TILES, WARP_ROWS, HALF, WIDTH = config.row_tiles, 16 * config.row_tiles, HALVES[config.kind], config.head_dim
    Q_BYTES, K_BYTES = tile_bytes(ROWS, HALF * WIDTH), tile_bytes(COLUMNS, HALF * WIDTH)
    RING, STAGE_BYTES, STEPS = config.own_bytes, config.stage_bytes, COLUMNS // STEP
    RESIDENT, ASYNC = config.resident, config.copy == "async"
    GENERAL, DROPOUT = config.scoring.general, config.scoring.dropout != ""
    S_SIZE, SLOPE_SIZE, P_SIZE, BITS_SIZE, Q_SIZE, DOUT_SIZE = config.lane_sizes
    ACC_SIZE, LANE_ROWS, STAGED = M_TILES * WIDTH // 2, 2 * M_TILES, config.through_shared

    parts = make_recomputation(config, transposed=False)
    load_q, load_dout, load_k, load_v = parts.load_own, parts.load_own_value, parts.load_next, parts.load_next_value
    hold_q, hold_dout, warp_rows, lane_values = parts.hold_own, parts.hold_own_value, parts.warp_rows, parts.lane_values
    scores, weights, score_gradient, keep = parts.scores, parts.weights, parts.score_gradient, parts.keep
    pack, multiply_dq = parts.pack, parts.add_product
    write_dq = make_write(M_TILES, WIDTH, ROWS, THREADS, config.dtype, config.staged, config.turing)
    clear_acc = make_clear(ACC_SIZE)

    def read_stats(r, bases, deltas, lse, delta, lse_stride, delta_stride, row, count):
        bases[r], deltas[r] = ZERO, ZERO
        if row + 8 * r < count:
            bases[r] = exponent_base(ptx.ld_global_f32(lse + int64(row + 8 * r) * lse_stride))
            deltas[r] = ptx.ld_global_f32(delta + int64(row + 8 * r) * delta_stride)

    def fill_factor(r, factors, value):
        factors[r] = value

    read_all_stats, fill_factors = unrolled(LANE_ROWS, read_stats), unrolled(LANE_ROWS, fill_factor)

    @device
    def load_tile(target, call, segment, seen_lo, seen_hi, tile):
        """A tile of k and v."""
        key = int64(tile) * COLUMNS
        load_k(target, segment.k + key * call.k.row, call.k.row, call.k.column, HALF * call.head_dim,
               seen_lo - key, seen_hi - key)
        load_v(target + K_BYTES, segment.v + key * call.v.row, call.v.row, call.v.column, HALF * call.value_dim,
               seen_lo - key, seen_hi - key)

    def backward_queries(back, sums, tiles):
        call = back.call
        base = ptx.dynamic_shared_address()
        place = locate(call, ptx.block_index())
        segment = load_segment(call, place)
        block_row = int32(place.tile * ROWS)
        count = int32(segment.q_length - block_row)
        if count <= 0:
            return
        # keys that some row of the sequence sees: only these are ever read
        seen_lo = max(0, segment.first)
        seen_hi = min(segment.k_length, segment.q_length + segment.last)
        lo, _, _, hi = tiles_seen(segment, block_row, block_row + ROWS, COLUMNS)
        if lo < hi:
            load_q(base, segment.q + int64(block_row) * call.q.row, call.q.row, call.q.column,
                   HALF * call.head_dim, 0, count)
            load_dout(base + Q_BYTES, query_rows(call, back.dout, place) + int64(block_row) * back.dout.row,
                      back.dout.row, back.dout.column, HALF * call.value_dim, 0, count)
            load_tile(base + RING, call, segment, seen_lo, seen_hi, lo)

        acc = cuda.local.array(ACC_SIZE, float32)
        clear_acc(acc)
        bases = cuda.local.array(LANE_ROWS, float32)
        deltas = cuda.local.array(LANE_ROWS, float32)
        s = cuda.local.array(S_SIZE, float32)
        dp = cuda.local.array(S_SIZE, float32)
        slope = cuda.local.array(SLOPE_SIZE, float32)
        p = cuda.local.array(P_SIZE, uint32)
        bits = cuda.local.array(BITS_SIZE, uint32)
        q = cuda.local.array(Q_SIZE, uint32)
        dout = cuda.local.array(DOUT_SIZE, uint32)
        thread = ptx.thread_index()
        row = int32(block_row + (thread >> 5) * WARP_ROWS + ((thread & 31) >> 2))
        read_all_stats(bases, deltas, query_rows(call, call.lse, place), query_rows(call, back.delta, place),
                       call.lse.row, back.delta.row, row, segment.q_length)
        if RESIDENT and lo < hi:
            if ASYNC:
                ptx.cp_async_wait_all()
            cuda.syncthreads()
            hold_q(q, warp_rows(base))
            hold_dout(dout, warp_rows(base + Q_BYTES))
        factor = LOG2_E if GENERAL else float32(call.scale) * LOG2_E
        keep_scale = float32(call.keep_scale)
        if DROPOUT:
            draw = load_draw(call, place)

        tile, stage = int32(lo), int32(0)
        while tile < hi:
            if ASYNC:
                ptx.cp_async_wait_all()
            cuda.syncthreads()                      # this tile has arrived, and every warp is done with the last one
            if tile + 1 < hi:
                load_tile(base + RING + (STAGE_BYTES - stage), call, segment, seen_lo, seen_hi, tile + 1)
            for step in range(STEPS):
                thread = ptx.thread_index()         # volatile, and what derives from it: no register between steps
                key = int32(tile * COLUMNS + step * STEP)
                warp_row = int32(block_row + (thread >> 5) * WARP_ROWS)
                if (warp_row + segment.first < key + STEP and key <= warp_row + WARP_ROWS - 1 + segment.last
                        and key < segment.k_length):
                    lane_row = int32(warp_row + ((thread & 31) >> 2))
                    lane_key = int32(key + 2 * (thread & 3))
                    rows = base + RING + stage + step * (STEP * PANEL_ROW)
                    edge = not (warp_row + WARP_ROWS - 1 + segment.first <= key and key + STEP <= segment.k_length
                                and key + STEP - 1 <= warp_row + segment.last)
                    scores(s, slope, q, base, rows, call, place, segment, lane_row, lane_key, edge)
                    weights(s, bases, factor)
                    if DROPOUT:
                        keep(bits, draw, ONE_HEAD, lane_row, lane_key)
                    score_gradient(dp, s, slope, deltas, bits, dout, base + Q_BYTES, rows + K_BYTES, keep_scale)
                    pack(dp, p)
                    multiply_dq(acc, p, rows + lane_values(ptx.thread_index()))
            stage = int32(STAGE_BYTES - stage)
            tile = int32(tile + 1)

        # results; where they go is worked out again here, rather than kept in registers through the loop
        thread = ptx.thread_index()
        place = locate(call, ptx.block_index())
        block_row = int32(place.tile * ROWS)
        own = int32((thread >> 5) * WARP_ROWS + ((thread & 31) >> 2))
        target = query_rows(call, back.dq, place) + int64(block_row) * back.dq.row
        factors = cuda.local.array(LANE_ROWS, float32)
        fill_factors(factors, float32(call.scale))
        if STAGED and not RESIDENT:                 # else the tiles of queries were read before the first barrier
            cuda.syncthreads()
        write_dq(acc, factors, base, own, target, back.dq.row, back.dq.column,
                 int32(column(call, place, Q_LENGTH) - block_row), call.head_dim)

    return backward_queries
