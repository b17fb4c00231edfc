"""dk and dv on tensor cores: blocks own keys, queries stream past (see `backward_sm80`)."""
from functools import lru_cache

from numba import cuda, float32, int32, int64, uint32

from numbaflash.cuda import ptx
from numbaflash.cuda.backward_sm80 import BackwardConfig, exponent_base, make_recomputation
from numbaflash.cuda.draw import load_draw
from numbaflash.cuda.fragments import HALVES, make_clear, make_multiply_tn, matrix_instructions
from numbaflash.cuda.inlining import device
from numbaflash.cuda.packing import ONE_HEAD
from numbaflash.cuda.panels import PANEL_ROW, lane_across, lane_down, tile_bytes
from numbaflash.cuda.results import make_write
from numbaflash.cuda.scores import ONE, make_drop
from numbaflash.cuda.softmax import LOG2_E
from numbaflash.cuda.tiles import (
    K_BATCH, K_START, Q_BATCH, Q_START, Place, column, load_segment, locate, row_zero, tile_range,
)
from numbaflash.cuda.unroll import unrolled


@lru_cache(maxsize=None)
def make_backward_keys(config: BackwardConfig):
    """The kernel of a configuration: ``backward_keys(back, sums, tiles)``, with a `BackwardCall` whose grid is of keys.

    `sums` is the address of the float32 buffer of dq and `tiles` its query tiles per head, where the kernel reduces.
    """
    config.check()
    ROWS, COLUMNS, STEP, THREADS = config.block_rows, config.columns, config.step, config.threads
    HALF, WIDTH, VALUE_WIDTH = HALVES[config.kind], config.head_dim, config.value_dim
    M_TILES, N_TILES, WARP_ROWS = config.row_tiles, config.step // 8, 16 * config.row_tiles
    K_BYTES, Q_BYTES = tile_bytes(ROWS, HALF * WIDTH), tile_bytes(COLUMNS, HALF * WIDTH)
    RING, STAGE_BYTES = config.own_bytes, config.stage_bytes
    DOUT_AT, STATS_AT = Q_BYTES, Q_BYTES + tile_bytes(COLUMNS, HALF * VALUE_WIDTH)
    RESIDENT, ASYNC, STEPS = config.resident, config.copy == "async", COLUMNS // STEP
    WANT_DK, WANT_DV = config.parts != "dv", config.parts != "dk"
    GENERAL, DROPOUT = config.scoring.general, config.scoring.dropout != ""
    S_SIZE, SLOPE_SIZE, P_SIZE, BITS_SIZE, K_SIZE, V_SIZE = config.lane_sizes
    DK_SIZE = M_TILES * WIDTH // 2 if WANT_DK else 1
    DV_SIZE = M_TILES * VALUE_WIDTH // 2 if WANT_DV else 1
    REDUCE, VECTOR, DS_AT = config.reduce != "", config.reduce == "vector", RING + 2 * STAGE_BYTES
    SUMS = WIDTH // 2 if REDUCE else 4          # of dq, of a warp: two strips of 16 queries, half of the columns
    HALF_SUMS, HALF_FRAGMENTS, STRIP_BYTES = SUMS // 2, SUMS // 8, 64 * WIDTH
    STATS, LANE_ROWS, STAGED = 2 * N_TILES, 2 * M_TILES, config.through_shared

    parts = make_recomputation(config, transposed=True)
    load_k, load_v, load_q, load_dout = parts.load_own, parts.load_own_value, parts.load_next, parts.load_next_value
    hold_k, hold_v, warp_rows, lane_values = parts.hold_own, parts.hold_own_value, parts.warp_rows, parts.lane_values
    scores, weights, score_gradient, keep = parts.scores, parts.weights, parts.score_gradient, parts.keep
    pack, multiply_dk, multiply_dv = parts.pack, parts.add_product, parts.add_value_product
    drop = make_drop(S_SIZE)
    write_dk = make_write(M_TILES, WIDTH, ROWS, THREADS, config.dtype, config.staged, config.turing)
    write_dv = make_write(M_TILES, VALUE_WIDTH, ROWS, THREADS, config.dtype, config.staged, config.turing)
    clear_dk, clear_dv = make_clear(DK_SIZE), make_clear(DV_SIZE)

    def copy_pair(j, p, s):
        p[j] = s[j]

    def read_base(j, base, stats):
        ptx.ld_shared_v2_f32(base, j, stats + 32 * j)
        base[2 * j] = exponent_base(base[2 * j])
        base[2 * j + 1] = exponent_base(base[2 * j + 1])

    def read_delta(j, delta, stats):
        ptx.ld_shared_v2_f32(delta, j, stats + 4 * COLUMNS + 32 * j)

    def store_ds(n, p, address):
        fragment, e = n // 4, n % 4
        step, i = fragment // M_TILES, fragment % M_TILES
        ptx.st_shared_b32((address ^ (32 * step + 16 * (e // 2))) + (16 * i + 8 * (e % 2)) * PANEL_ROW, p[n])

    def clear_word(n, p):
        p[n] = uint32(0)

    def add_number(n, sums, address):
        ptx.red_global_add_f32(address + n // HALF_SUMS * STRIP_BYTES + n % HALF_SUMS * 128, sums[n])

    def add_fragment(n, sums, address):
        at = n // HALF_FRAGMENTS * STRIP_BYTES + n % HALF_FRAGMENTS * 512
        ptx.red_global_add_v4_f32(address + at, sums, n)

    def fill_factor(r, factors, value):
        factors[r] = value

    copy_scores = unrolled(S_SIZE, copy_pair)
    read_bases, read_deltas = unrolled(N_TILES, read_base), unrolled(N_TILES, read_delta)
    fill_factors = unrolled(LANE_ROWS, fill_factor)
    multiply_dq = make_multiply_tn(2, ROWS, WIDTH // 2, ROWS, matrix_instructions(config.kind)[0])
    store_all_ds, clear_words, clear_sums = unrolled(P_SIZE, store_ds), unrolled(P_SIZE, clear_word), make_clear(SUMS)
    add_all, LANE_BYTES = (unrolled(SUMS // 4, add_fragment), 16) if VECTOR else (unrolled(SUMS, add_number), 4)

    @device
    def load_stats(target, lse, delta, call, back, count):
        """lse and delta of a tile of queries; zeros for those that do not exist."""
        thread = ptx.thread_index()
        if thread < COLUMNS:
            exists = thread < count
            if ASYNC:
                size = int32(4) if exists else int32(0)
                ptx.cp_async_4_zfill(target + 4 * thread, lse + int64(thread) * call.lse.row, size)
                ptx.cp_async_4_zfill(target + 4 * (COLUMNS + thread), delta + int64(thread) * back.delta.row, size)
            else:
                a, b = float32(0), float32(0)
                if exists:
                    a = ptx.ld_global_f32(lse + int64(thread) * call.lse.row)
                    b = ptx.ld_global_f32(delta + int64(thread) * back.delta.row)
                ptx.st_shared_f32(target + 4 * thread, a)
                ptx.st_shared_f32(target + 4 * (COLUMNS + thread), b)

    @device
    def load_tile(target, call, back, segment, batch, start, head, tile):
        """A tile of q, dout and their statistics, of one query head."""
        batch, head = int64(ptx.anew_s32(batch)), int64(ptx.anew_s32(head))
        first = int64(tile) * COLUMNS
        count = int32(segment.q_length - first)
        row = start + first
        load_q(target, row_zero(call.q, batch, head, row), call.q.row, call.q.column,
               HALF * call.head_dim, 0, count)
        load_dout(target + DOUT_AT, row_zero(back.dout, batch, head, row), back.dout.row, back.dout.column,
                  HALF * call.value_dim, 0, count)
        load_stats(target + STATS_AT, row_zero(call.lse, batch, head, row), row_zero(back.delta, batch, head, row),
                   call, back, count)

    @device
    def ds_place(base, step):
        """A lane's address in dS^T for the first number of a step."""
        thread = ptx.thread_index()
        g = (thread & 31) >> 2
        return (base + DS_AT + ((thread >> 5) * WARP_ROWS + g) * PANEL_ROW + (((step * (STEP // 8)) ^ g) << 4)
                + 4 * (thread & 3))

    @device
    def key_tile(call, place):
        """Under a causal mask the first keys are heavy: they come first."""
        return place.tile if call.work != 0 else int32(call.tiles - 1 - place.tile)

    @device
    def half_place(address, half):
        """A lane's address in one half of the columns of a tile."""
        return address + half * (WIDTH // 128 * ROWS * PANEL_ROW) if WIDTH >= 128 else address ^ (half * WIDTH)

    @device
    def reduce_dq(base, address):
        """Add this block's part of dq of a tile, in the order of fragments: contiguously.

        A warp takes 32 queries and half of the columns.
        """
        sums = cuda.local.array(SUMS, float32)
        clear_sums(sums)
        thread = ptx.thread_index()
        pair, half = (thread >> 5) & 1, thread >> 6
        multiply_dq(sums, base + DS_AT + (lane_across(thread) ^ (pair << 6)),
                    base + half_place(lane_down(thread), half))
        thread = ptx.thread_index()
        place = ((thread >> 5) & 1) * (2 * STRIP_BYTES) + (thread >> 6) * (128 * HALF_SUMS)
        add_all(sums, address + int64(place + (thread & 31) * LANE_BYTES))

    def backward_keys(back, sums, tiles):
        call = back.call
        base = ptx.dynamic_shared_address()
        place = locate(call, ptx.block_index())
        first_key = int32(key_tile(call, place) * ROWS)
        first_head = int32(place.head * call.group)
        segment = load_segment(call, Place(place.segment, first_head, place.tile))
        if first_key >= segment.k_length:
            return
        batch, start = int32(column(call, place, Q_BATCH)), column(call, place, Q_START)
        lo, _, _, hi = tile_range(first_key, min(first_key + ROWS, segment.k_length), COLUMNS, segment.q_length, 0,
                                  segment.last, -segment.first)
        # keys that some query sees: only these are ever read
        seen_lo = int32(max(0, segment.first) - first_key)
        seen_hi = int32(min(segment.k_length, segment.q_length + segment.last) - first_key)
        if lo < hi:
            load_k(base, segment.k + int64(first_key) * call.k.row, call.k.row, call.k.column,
                   HALF * call.head_dim, seen_lo, seen_hi)
            load_v(base + K_BYTES, segment.v + int64(first_key) * call.v.row, call.v.row, call.v.column,
                   HALF * call.value_dim, seen_lo, seen_hi)
            load_tile(base + RING, call, back, segment, batch, start, first_head, lo)

        dk = cuda.local.array(DK_SIZE, float32)
        dv = cuda.local.array(DV_SIZE, float32)
        clear_dk(dk)
        clear_dv(dv)
        s = cuda.local.array(S_SIZE, float32)
        dp = cuda.local.array(S_SIZE, float32)
        slope = cuda.local.array(SLOPE_SIZE, float32)
        p = cuda.local.array(P_SIZE, uint32)
        bits = cuda.local.array(BITS_SIZE, uint32)
        stats = cuda.local.array(STATS, float32)
        k = cuda.local.array(K_SIZE, uint32)
        v = cuda.local.array(V_SIZE, uint32)
        if RESIDENT and lo < hi:
            if ASYNC:
                ptx.cp_async_wait_all()
            cuda.syncthreads()
            hold_k(k, warp_rows(base))
            hold_v(v, warp_rows(base + K_BYTES))
        factor = LOG2_E if GENERAL else float32(call.scale) * LOG2_E
        keep_scale = float32(call.keep_scale)

        member, tile, stage = int32(0), int32(lo), int32(0)
        while member < call.group and tile < hi:
            if ASYNC:
                ptx.cp_async_wait_all()
            cuda.syncthreads()                      # this tile has arrived, and every warp is done with the last one
            next_tile, next_member = int32(tile + 1), member
            if next_tile >= hi:
                next_tile, next_member = int32(lo), int32(member + 1)
            if next_member < call.group:
                load_tile(base + RING + (STAGE_BYTES - stage), call, back, segment, batch, start,
                          first_head + next_member, next_tile)
            for step in range(STEPS):
                thread = ptx.thread_index()         # volatile, and what derives from it: no register between steps
                query = int32(tile * COLUMNS + step * STEP)
                warp_key = int32(first_key + (thread >> 5) * WARP_ROWS)
                if (query + segment.first < warp_key + WARP_ROWS and warp_key <= query + STEP - 1 + segment.last
                        and query < segment.q_length):
                    lane_key = int32(warp_key + ((thread & 31) >> 2))
                    lane_query = int32(query + 2 * (thread & 3))
                    rows = base + RING + stage + step * (STEP * PANEL_ROW)
                    here = Place(place.segment, int32(first_head + member), place.tile)
                    edge = not (query + STEP - 1 + segment.first <= warp_key and query + STEP <= segment.q_length
                                and warp_key + WARP_ROWS - 1 <= query + segment.last)
                    scores(s, slope, k, base, rows, call, here, segment, lane_query, lane_key, edge)
                    quad_stats = base + RING + stage + STATS_AT + step * (4 * STEP) + 8 * (thread & 3)
                    read_bases(stats, quad_stats)
                    weights(s, stats, factor)
                    if DROPOUT:
                        keep(bits, load_draw(call, here), ONE_HEAD, lane_query, lane_key)
                    if WANT_DV:
                        if DROPOUT:
                            copy_scores(dp, s)
                            drop(dp, bits, ONE)
                            pack(dp, p)
                        else:
                            pack(s, p)
                        multiply_dv(dv, p, rows + DOUT_AT + lane_values(ptx.thread_index()))
                    if WANT_DK:
                        read_deltas(stats, quad_stats)
                        score_gradient(dp, s, slope, stats, bits, v, base + K_BYTES, rows + DOUT_AT, keep_scale)
                        pack(dp, p)
                        if REDUCE:
                            store_all_ds(p, ds_place(base, step))
                        multiply_dk(dk, p, rows + lane_values(ptx.thread_index()))
                elif REDUCE:
                    clear_words(p)
                    store_all_ds(p, ds_place(base, step))
            if REDUCE:
                cuda.syncthreads()
                unit = int64(place.segment) * call.heads * call.group + first_head + member
                reduce_dq(base, sums + (unit * tiles + tile) * (4 * COLUMNS * WIDTH))
            stage = int32(STAGE_BYTES - stage)
            tile, member = next_tile, next_member

        # results; where they go is worked out again here, rather than kept in registers through the loop
        thread = ptx.thread_index()
        place = locate(call, ptx.block_index())
        first_key = key_tile(call, place) * ROWS
        count = int32(load_segment(call, Place(place.segment, int32(place.head * call.group), place.tile)).k_length
                      - first_key)
        own = int32((thread >> 5) * WARP_ROWS + ((thread & 31) >> 2))
        batch, row = column(call, place, K_BATCH), column(call, place, K_START) + int64(first_key)
        factors = cuda.local.array(LANE_ROWS, float32)
        if STAGED:
            cuda.syncthreads()                      # nobody reads the tiles of keys any more
        if WANT_DK:
            fill_factors(factors, float32(call.scale))
            write_dk(dk, factors, base, own, row_zero(back.dk, batch, int64(place.head), row), back.dk.row,
                     back.dk.column, count, call.head_dim)
        if WANT_DV:
            fill_factors(factors, keep_scale if DROPOUT else ONE)
            write_dv(dv, factors, base + K_BYTES, own, row_zero(back.dv, batch, int64(place.head), row), back.dv.row,
                     back.dv.column, count, call.value_dim)

    return backward_keys
