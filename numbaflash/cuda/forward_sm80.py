"""Forward attention on tensor cores with mma.sync: Ampere, Ada and later; a variant for Turing.

FlashAttention-2 (Dao, 2023).  A block computes `block_q` rows of one head; tiles of `block_k` keys and values stream
through a ring of swizzled shared memory.  Every warp owns 16 or 32 rows outright: with 32 each fragment of K and V
that it reads from shared memory serves two row tiles, and shared memory is what holds 16 rows back.  Weights stay in
registers: the accumulator of S is the A operand of P V.

One kernel serves every option.  What a call does not use is compiled out; what tile geometry decides (nothing seen,
all seen, some seen) is a branch that all threads of a warp take alike.
"""
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from numbaflash.cuda import ptx
from numbaflash.cuda.arguments import CALL, make_call
from numbaflash.cuda.draw import load_draw
from numbaflash.cuda.fragments import (
    HALVES, lane_words, make_clear, make_load_rows, make_multiply_nn, make_multiply_nn_words, make_multiply_nt,
    make_pack, make_pack_words, matrix_instructions,
)
from numbaflash.cuda.packing import (
    make_find_members, make_row_place, make_split, parts_of, slot_shift,
)
from numbaflash.cuda.panels import (
    CHUNKS, COPIES, PANEL_ROW, lane_across, lane_down, make_load, make_load_packed, tile_bytes,
)
from numbaflash.cuda.plan import KernelSpec, Launch, Plan
from numbaflash.cuda.results import make_write
from numbaflash.cuda.scores import (
    DROPOUTS, INFINITY, ONE, Scoring, make_apply_score, make_drop, make_hide, make_keep,
    make_lanes,
)
from numbaflash.cuda.softmax import LOG2_E, finish_row, make_softmax_step
from numbaflash.cuda.inlining import device
from numbaflash.cuda.tiles import Q_LENGTH, column, fill_grid, load_segment, locate, query_rows, tiles_seen
from numbaflash.cuda.unroll import unrolled
from numbaflash.problem import Problem

class ForwardConfig(NamedTuple):
    """The compile-time part of a forward kernel.

    Attributes
    ----------
    kind : str
        Of the products: "float16", "bfloat16", or for float32 inputs "tf32" or "tf32x3".
    head_dim, value_dim : int
        Multiples of 16: columns that are computed; arrays may have fewer.
    warps, row_tiles, block_k, stages : int
        A block has ``16 * row_tiles`` rows per warp; tiles of `block_k` keys in a ring of `stages`.
    resident : bool
        Keep Q in registers.
    blocks : int
        Blocks per multiprocessor that the registers must allow.
    copy : str
        One of `panels.COPIES`.
    out_dtype : str
    staged : bool
        16-bit results leave through shared memory, 16 bytes at a time, and float32 in pairs; otherwise one by one.
    turing : bool
        m16n8k8, no cp.async.
    scoring : Scoring
    packed : bool
        Tiles hold several heads of a group: see `packing`.
    """

    kind: str = "bfloat16"
    head_dim: int = 64
    value_dim: int = 64
    warps: int = 4
    row_tiles: int = 2
    block_k: int = 64
    stages: int = 2
    resident: bool = True
    blocks: int = 2
    copy: str = "async"
    out_dtype: str = "bfloat16"
    staged: bool = True
    turing: bool = False
    scoring: Scoring = Scoring()
    packed: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def block_q(self) -> int:
        """Rows of a block."""
        return 16 * self.row_tiles * self.warps

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the K and V tiles."""
        halves = HALVES[self.kind]
        tiles = tile_bytes(self.block_k, halves * self.head_dim) + tile_bytes(self.block_k, halves * self.value_dim)
        return self.stages * tiles

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory; results are staged where the tiles were."""
        tiles = self.ring_bytes + tile_bytes(self.block_q, HALVES[self.kind] * self.head_dim)
        return max(tiles, tile_bytes(self.block_q, self.value_dim) if self.staged else 0)

    def check(self) -> "ForwardConfig":
        """Raise ValueError if the parts do not fit together."""
        wrong = {
            "kind": self.kind not in HALVES or (self.turing and self.kind != "float16"),
            "head_dim": self.head_dim % 16 != 0 or not 16 <= self.head_dim <= 256,
            "value_dim": self.value_dim % 16 != 0 or not 16 <= self.value_dim <= 256,
            "warps": self.warps not in (2, 4, 8),
            "row_tiles": self.row_tiles not in (1, 2),
            "block_k": self.block_k % 16 != 0 or self.block_k % (self.threads // CHUNKS) != 0,
            "stages": self.stages != 2,
            "copy": self.copy not in COPIES or (self.turing and self.copy == "async"),
            "staged": self.staged and self.out_dtype == "float64",
            "out_dtype": self.turing and self.out_dtype == "bfloat16",
            "scoring": self.scoring.dropout not in DROPOUTS or (self.packed and self.scoring.dropout == "block"),
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"{name}={getattr(self, name)!r} does not fit the rest of {self}")
        return self


@lru_cache(maxsize=None)
def make_forward(config: ForwardConfig):
    """The kernel of a configuration: ``forward(call)``, one block of `config.threads` threads per query tile."""
    config.check()
    BQ, BK, WIDTH, VALUE_WIDTH = config.block_q, config.block_k, config.head_dim, config.value_dim
    M_TILES, N_TILES, VALUE_TILES = config.row_tiles, BK // 8, VALUE_WIDTH // 8
    ROWS, WARP_ROWS, THREADS = 2 * M_TILES, 16 * M_TILES, config.threads
    HALF = HALVES[config.kind]
    WORDS = HALF == 2
    K_BYTES, V_BYTES = tile_bytes(BK, HALF * WIDTH), tile_bytes(BK, HALF * VALUE_WIDTH)
    STAGE_BYTES = K_BYTES + V_BYTES
    Q_AT = config.ring_bytes
    RESIDENT, ASYNC, PACKED = config.resident, config.copy == "async", config.packed
    GENERAL, DROPOUT = config.scoring.general, config.scoring.dropout != ""
    S_SIZE, ACC_SIZE, P_SIZE = M_TILES * N_TILES * 4, M_TILES * VALUE_TILES * 4, M_TILES * N_TILES * 2 * HALF
    Q_SIZE = M_TILES * 4 * (HALF * WIDTH // 16 if RESIDENT else 1)

    BITS_SIZE = -(-S_SIZE // 32)

    mma, pack = matrix_instructions(config.kind, config.turing)
    load_q = (make_load_packed if PACKED else make_load)(BQ, HALF * WIDTH, THREADS, config.copy)
    load_k = make_load(BK, HALF * WIDTH, THREADS, config.copy)
    load_v = make_load(BK, HALF * VALUE_WIDTH, THREADS, config.copy)
    load_rows = make_load_rows(M_TILES, HALF * WIDTH, BQ)
    multiply_scores = make_multiply_nt(M_TILES, N_TILES, HALF * WIDTH, BQ, BK, mma, RESIDENT)
    if WORDS:
        multiply_values = make_multiply_nn_words(M_TILES, BK, VALUE_WIDTH, BK, mma)
        pack_weights, lane_values = make_pack_words(M_TILES, N_TILES), lane_words
    else:
        multiply_values = make_multiply_nn(M_TILES, BK, VALUE_WIDTH, BK, mma)
        pack_weights, lane_values = make_pack(M_TILES, N_TILES, pack), lane_down
    softmax_step = make_softmax_step(M_TILES, N_TILES, VALUE_TILES)
    lanes = make_lanes(M_TILES, N_TILES, packed=PACKED)
    apply_score, hide = make_apply_score(lanes, config.scoring), make_hide(lanes)
    keep, drop = make_keep(M_TILES, N_TILES, config.scoring.dropout, packed=PACKED), make_drop(S_SIZE)

    def start_row(r, top):
        top[r] = -INFINITY

    find_members, split, row_place = make_find_members(PACKED, BQ), make_split(PACKED), make_row_place(PACKED)

    @device
    def load_sink(call, place, head):
        sink = -INFINITY
        if call.sinks != 0 and place.segment < call.sequences:
            sink = float32(ptx.ld_global_nc_f64(call.sinks + 8 * int64(head))) * LOG2_E
        return sink

    def finish_one(r, top, total, factors, call, place, packing, count, own, sink, lse):
        if PACKED:
            _, member = split(own + 8 * r, packing)
            sink = load_sink(call, place, place.head + member)
        log_sum, factor = finish_row(top[r], total[r], sink)
        factors[r] = factor * float32(call.keep_scale) if DROPOUT else factor
        address, exists = row_place(lse, own + 8 * r, call.lse.row, call.lse.head, count, packing)
        if exists and ptx.thread_index() & 3 == 0:
            ptx.st_global_f32(address, log_sum)

    start_rows, clear_rows = unrolled(ROWS, start_row), make_clear(ROWS)
    clear_scores, clear_acc = make_clear(S_SIZE), make_clear(ACC_SIZE)
    finish_rows = unrolled(ROWS, finish_one)
    write = make_write(M_TILES, VALUE_WIDTH, BQ, THREADS, config.out_dtype, config.staged, config.turing,
                       PACKED)

    @device
    def warp_rows(tile):
        thread = ptx.thread_index()
        return tile + (thread >> 5) * (WARP_ROWS * PANEL_ROW) + lane_down(thread)

    def forward(call):
        base = ptx.dynamic_shared_address()
        place, packing = find_members(call, locate(call, ptx.block_index()))
        segment = load_segment(call, place)
        block_row = int32(place.tile * BQ)
        if block_row >= segment.q_length:
            return

        # keys that some row of the sequence sees: only these are ever read
        seen_lo = max(0, segment.first)
        seen_hi = min(segment.k_length, segment.q_length + segment.last)
        lo, _, _, hi = tiles_seen(segment, block_row, block_row + BQ, BK)
        if PACKED:
            load_q(base + Q_AT, segment.q, call.q.row, call.q.column, HALF * call.head_dim, call.q.head,
                   segment.q_length, packing)
        else:
            load_q(base + Q_AT, segment.q + int64(block_row) * call.q.row, call.q.row, call.q.column,
                   HALF * call.head_dim, 0, segment.q_length - block_row)
        if lo < hi:
            key = int64(lo) * BK
            load_k(base, segment.k + key * call.k.row, call.k.row, call.k.column, HALF * call.head_dim,
                   seen_lo - key, seen_hi - key)
            load_v(base + K_BYTES, segment.v + key * call.v.row, call.v.row, call.v.column, HALF * call.value_dim,
                   seen_lo - key, seen_hi - key)

        acc = cuda.local.array(ACC_SIZE, float32)
        clear_acc(acc)
        top = cuda.local.array(ROWS, float32)
        total = cuda.local.array(ROWS, float32)
        clear_rows(total)
        start_rows(top)
        s = cuda.local.array(S_SIZE, float32)
        p = cuda.local.array(P_SIZE, uint32)
        q = cuda.local.array(Q_SIZE, uint32)
        if RESIDENT:
            if ASYNC:
                ptx.cp_async_wait_all()
            cuda.syncthreads()
            load_rows(q, warp_rows(base + Q_AT))

        factor = LOG2_E if GENERAL else float32(call.scale) * LOG2_E
        if DROPOUT:
            draw = load_draw(call, place)
            bits = cuda.local.array(BITS_SIZE, uint32)

        tile = int32(lo)
        stage = int32(0)
        while tile < hi:
            if ASYNC:
                ptx.cp_async_wait_all()
            cuda.syncthreads()                      # this tile has arrived, and every warp is done with the last one
            if tile + 1 < hi:
                ring = base + (STAGE_BYTES - stage)
                key = int64(tile + 1) * BK
                load_k(ring, segment.k + key * call.k.row, call.k.row, call.k.column, HALF * call.head_dim,
                       seen_lo - key, seen_hi - key)
                load_v(ring + K_BYTES, segment.v + key * call.v.row, call.v.row, call.v.column, HALF * call.value_dim,
                       seen_lo - key, seen_hi - key)
            thread = ptx.thread_index()             # volatile, and what derives from it: no register between tiles
            warp_row = int32(block_row + (thread >> 5) * WARP_ROWS)
            tile_key = int32(tile * BK)
            first_query, last_query = warp_row, int32(warp_row + WARP_ROWS - 1)
            busy = True
            if PACKED:                              # a warp has all queries of some heads, or some of one head
                first_query, last_query = int32(0), int32(segment.q_length - 1)
                busy = warp_row >> packing.shift < packing.members
            if busy and first_query + segment.first < tile_key + BK and tile_key <= last_query + segment.last:
                clear_scores(s)
                multiply_scores(s, q, warp_rows(base + Q_AT), base + stage + lane_across(thread))
                row = int32(warp_row + ((thread & 31) >> 2))
                first_key = int32(tile_key + 2 * (thread & 3))
                if GENERAL:
                    apply_score(s, s, call, place, segment, packing, row, first_key)
                if not (last_query + segment.first <= tile_key and tile_key + BK <= segment.k_length
                        and tile_key + BK - 1 <= first_query + segment.last):
                    hide(s, segment, packing, row, first_key)
                softmax_step(s, acc, top, total, factor)
                if DROPOUT:
                    keep(bits, draw, packing, row, first_key)
                    drop(s, bits, ONE)
                pack_weights(s, p)
                multiply_values(acc, p, base + stage + K_BYTES + lane_values(ptx.thread_index()))
            stage = int32(STAGE_BYTES - stage)
            tile = int32(tile + 1)

        # results; where they go is worked out again here, rather than kept in registers through the loop
        thread = ptx.thread_index()
        place, packing = find_members(call, locate(call, ptx.block_index()))
        block_row = int32(place.tile * BQ)
        count = int32(int32(column(call, place, Q_LENGTH)) - block_row)
        own = int32((thread >> 5) * WARP_ROWS + ((thread & 31) >> 2))
        sink = load_sink(call, place, place.head)
        out = query_rows(call, call.out, place) + int64(block_row) * call.out.row
        lse = query_rows(call, call.lse, place) + int64(block_row) * call.lse.row
        if ASYNC and not RESIDENT:                  # where nothing was seen, nobody has waited yet
            ptx.cp_async_wait_all()
        cuda.syncthreads()                          # nobody reads tiles any more
        factors = cuda.local.array(ROWS, float32)
        finish_rows(top, total, factors, call, place, packing, count, own, sink, lse)
        if PACKED:
            write(acc, factors, base, own, out, call.out.row, call.out.column, count, call.value_dim, call.out.head,
                  packing)
        else:
            write(acc, factors, base, own, out, call.out.row, call.out.column, count, call.value_dim)

    return forward


def plan_forward(problem: Problem, out: np.ndarray, lse: np.ndarray, config: ForwardConfig) -> Plan:
    """What computes `out` and `lse` of a problem.

    Parameters
    ----------
    problem : Problem
    out, lse : array
        Head-major, as a backend receives them.
    config : ForwardConfig
        From `configs_sm80.choose_forward`.

    Raises
    ------
    NotImplementedError
        Where sizes exceed int32 arithmetic.
    """
    kv_bytes = 2 * (problem.q.shape[3] + problem.v.shape[3]) * problem.k.shape[2]
    call = make_call(problem, out, lse)
    if config.packed:
        shift = slot_shift(problem, config.block_q)
        parts = parts_of(problem.group, config.block_q, shift)
        call = call._replace(shift=shift, heads=problem.k.shape[1] * parts)
    call, blocks = fill_grid(call, problem.segments, config.block_q, kv_bytes)
    if blocks == 0:
        return Plan([])
    kernel = KernelSpec(f"forward_sm80_d{config.head_dim}_{config.kind}{'_packed' if config.packed else ''}", make_forward(config), (CALL,),
                        (config.threads, config.blocks))
    return Plan([Launch(kernel, blocks, config.threads, config.shared_bytes, (call,))])
