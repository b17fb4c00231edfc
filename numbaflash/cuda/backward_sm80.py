"""Gradients on tensor cores with mma.sync: Ampere, Ada and later; float16 on Turing too.

Two kernels; both recompute P = exp(S - lse) tile by tile (Dao, "FlashAttention-2", 2023, algorithm 2):

keys     a block owns keys and runs through the queries of every head of their group.  Scores are computed transposed,
         S^T = K Q^T: then P^T and dS^T are A operands straight from the accumulator, for dV += P^T dO and
         dK += dS^T Q, and nothing but tiles crosses shared memory.
queries  a block owns queries and runs through the keys; dS is the A operand of dQ += dS K.

Without atomics, so gradients are bit-equal from run to run.  That costs two products more than need be: where this is
not asked for, the first kernel also adds dS K to a float32 buffer by reductions, and `backward_reduced_sm80` rounds it.

The accumulator of dP starts at -delta, so that dS = P * dP costs one multiplication.  The kernels are in
`backward_keys_sm80` and `backward_queries_sm80`; here is their configuration and what they share: of the tiles that a
block owns ("own": k and v, or q and dout) and of those that stream past ("next": q and dout, or k and v).
"""
from collections.abc import Callable
from typing import NamedTuple

from numbaflash.cuda import ptx
from numbaflash.cuda.fragments import (
    HALVES, lane_words, make_clear, make_load_rows, make_multiply_nn, make_multiply_nn_words, make_multiply_nt,
    make_pack, make_pack_words, matrix_instructions,
)
from numbaflash.cuda.inlining import device
from numbaflash.cuda.packing import ONE_HEAD
from numbaflash.cuda.panels import CHUNKS, COPIES, PANEL_ROW, lane_across, lane_down, make_load, tile_bytes
from numbaflash.cuda.scores import (
    DROPOUTS, INFINITY, ZERO, Lanes, Scoring, kept, make_apply_score, make_hide, make_keep, make_lanes,
)
from numbaflash.cuda.softmax import LOG2_E
from numbaflash.cuda.unroll import unrolled

PARTS = ("both", "dk", "dv")
REDUCTIONS = ("", "scalar", "vector")


class BackwardConfig(NamedTuple):
    """The compile-time part of a backward kernel.

    Attributes
    ----------
    kind : str
        Of the products: "float16", "bfloat16", or for float32 arrays "tf32" or "tf32x3".
    head_dim, value_dim : int
        Multiples of 16: columns that are computed; arrays may have fewer.
    warps, row_tiles : int
        A block owns ``16 * row_tiles`` rows per warp: keys, or queries for dq.
    columns, step : int
        Rows of the tiles that stream past, and how many of them make scores at a time.
    resident : bool
        Keep the two operands that the block owns in registers.
    parts : str
        "both" dk and dv, or one of them where registers do not hold two accumulators.
    reduce : str
        "" where dq has a kernel of its own; "scalar" or (from sm_90) "vector": blocks of keys add their part of dq by
        float32 reductions, in any order.
    blocks : int
        Blocks per multiprocessor that the registers must allow.
    copy : str
        One of `panels.COPIES`.
    staged : bool
        16-bit results leave through shared memory, 16 bytes at a time, and float32 in pairs; otherwise one by one.
    turing : bool
        m16n8k8, no cp.async.
    scoring : Scoring
    """

    kind: str = "bfloat16"
    head_dim: int = 64
    value_dim: int = 64
    warps: int = 4
    row_tiles: int = 2
    columns: int = 64
    step: int = 32
    resident: bool = False
    parts: str = "both"
    reduce: str = ""
    blocks: int = 1
    copy: str = "async"
    staged: bool = True
    turing: bool = False
    scoring: Scoring = Scoring()

    @property
    def dtype(self) -> str:
        """Of all arrays with a head dimension."""
        return "float32" if HALVES[self.kind] == 2 else self.kind

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def block_rows(self) -> int:
        """Rows that a block owns."""
        return 16 * self.row_tiles * self.warps

    @property
    def own_bytes(self) -> int:
        """Shared memory of the two tiles that a block owns."""
        return self._tile(self.block_rows, self.head_dim) + self._tile(self.block_rows, self.value_dim)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of the tiles that stream past, once, with two statistics per row."""
        tiles = self._tile(self.columns, self.head_dim) + self._tile(self.columns, self.value_dim)
        return tiles + -(-8 * self.columns // 1024) * 1024

    def _tile(self, height: int, width: int) -> int:
        return tile_bytes(height, HALVES[self.kind] * width)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory; dS^T crosses it where all warps need it for dq."""
        return self.own_bytes + 2 * self.stage_bytes + (2 * self.block_rows * self.columns if self.reduce else 0)

    @property
    def through_shared(self) -> bool:
        """Do results take the place of the tiles that the block owns?"""
        return self.staged and HALVES[self.kind] == 1

    @property
    def lane_sizes(self) -> tuple[int, ...]:
        """Lengths of a lane's local arrays.

        Of scores, their derivatives, packed weights, bits of dropout, and the two operands that the block owns.
        """
        scores, halves = self.row_tiles * self.step // 2, HALVES[self.kind]
        widths = self.head_dim, self.value_dim
        own = [self.row_tiles * (halves * width // 4 if self.resident else 4) for width in widths]
        return scores, scores if self.scoring.general else 1, halves * scores // 2, -(-scores // 32), *own

    def check(self) -> "BackwardConfig":
        """Raise ValueError if the parts do not fit together."""
        rounds = self.threads // CHUNKS
        wrong = {
            "kind": self.kind not in HALVES or (self.turing and self.kind != "float16"),
            "head_dim": self.head_dim % 16 != 0 or not 16 <= self.head_dim <= 256,
            "value_dim": self.value_dim % 16 != 0 or not 16 <= self.value_dim <= 256,
            "warps": self.warps not in (2, 4, 8),
            "row_tiles": self.row_tiles not in (1, 2),
            "columns": self.columns % rounds != 0 or self.columns > self.threads,
            "step": self.step % 16 != 0 or self.columns % self.step != 0,
            "parts": self.parts not in PARTS,
            "reduce": self.reduce not in REDUCTIONS or (self.reduce != "" and (
                self.columns != 64 or self.warps != 4 or HALVES[self.kind] != 1 or self.turing)),
            "copy": self.copy not in COPIES or (self.turing and self.copy == "async"),
            "scoring": self.scoring.dropout not in DROPOUTS,
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"{name}={getattr(self, name)!r} does not fit the rest of {self}")
        return self


@device
def exponent_base(lse):
    """What to subtract from scores in exp2 units; for a row that sees nothing so much that its weights are 0."""
    return lse * LOG2_E if lse > -INFINITY else INFINITY


def make_weights(lanes: Lanes):
    """``weights(s, base, factor)``: scores become P = exp2(s * factor - base of the query)."""

    def one(n, s, base, factor):
        q, k = n // lanes_keys, n % lanes_keys
        x = at(q, k)
        s[x] = ptx.ex2_approx_ftz(s[x] * factor - base[q])

    lanes_keys, at = lanes.keys, lanes.at
    return unrolled(lanes.queries * lanes.keys, one)


def make_start(lanes: Lanes, dropout: bool):
    """``start(dp, delta)``: what the accumulator of dP begins with."""

    def one(n, dp, delta):
        q, k = n // lanes_keys, n % lanes_keys
        dp[at(q, k)] = ZERO if dropout else -delta[q]

    lanes_keys, at = lanes.keys, lanes.at
    return unrolled(lanes.queries * lanes.keys, one)


def make_derivative(lanes: Lanes, general: bool, dropout: bool):
    """``derivative(dp, p, slope, delta, bits, keep_scale)``: dP becomes the gradient of the scaled product."""

    def one(n, dp, p, slope, delta, bits, keep_scale):
        q, k = n // lanes_keys, n % lanes_keys
        x = at(q, k)
        if dropout:
            dp[x] = (dp[x] * keep_scale if kept(bits, x) else ZERO) - delta[q]
        dp[x] = p[x] * dp[x]
        if general:
            dp[x] = dp[x] * slope[x]

    lanes_keys, at = lanes.keys, lanes.at
    return unrolled(lanes.queries * lanes.keys, one)


class Recomputation(NamedTuple):
    """Device functions of both kernels: tiles to shared memory, scores to weights, and gradients of scores.

    Attributes
    ----------
    load_own, load_own_value, load_next, load_next_value : function
        As `panels.make_load`: of k and v or q and dout, own and next.
    hold_own, hold_own_value : function
        As `fragments.make_load_rows`, where they are resident.
    warp_rows : function
        ``warp_rows(tile)``, a lane's address of this warp's own rows.
    lane_values : function
        A lane's address in a tile that is the B operand of a product over its rows.
    scores : function
        ``scores(s, slope, own, own_tile, next_rows, call, place, segment, query, key, edge)``: S, of this warp's own
        rows and `step` next ones; at an edge, what is hidden becomes -inf.
    weights : function
        As `make_weights`.
    score_gradient : function
        ``score_gradient(dp, p, slope, delta, bits, own, own_tile, next_rows, keep_scale)``: dS, in `dp`.
    keep, pack : function
        As `scores.make_keep` and `fragments.make_pack`.
    add_product, add_value_product : function
        As `fragments.make_multiply_nn`, of `step` rows: for dq or dk, and for dv.
    """

    load_own: Callable
    load_own_value: Callable
    load_next: Callable
    load_next_value: Callable
    hold_own: Callable
    hold_own_value: Callable
    warp_rows: Callable
    lane_values: Callable
    scores: Callable
    weights: Callable
    score_gradient: Callable
    keep: Callable
    pack: Callable
    add_product: Callable
    add_value_product: Callable


def make_recomputation(config: BackwardConfig, transposed: bool) -> Recomputation:
    """The `Recomputation` of a configuration; transposed where a block owns keys."""
    ROWS, COLUMNS, STEP, THREADS = config.block_rows, config.columns, config.step, config.threads
    M_TILES, N_TILES, WARP_ROWS = config.row_tiles, config.step // 8, 16 * config.row_tiles
    HALF, WIDTH, VALUE_WIDTH = HALVES[config.kind], config.head_dim, config.value_dim
    GENERAL, DROPOUT = config.scoring.general, config.scoring.dropout != ""

    def load(height: int, width: int) -> Callable:
        return make_load(height, HALF * width, THREADS, config.copy)

    def multiply(width: int) -> Callable:
        return make_multiply_nt(M_TILES, N_TILES, HALF * width, ROWS, COLUMNS, mma, config.resident)

    def add(width: int) -> Callable:
        make = make_multiply_nn_words if HALF == 2 else make_multiply_nn
        return make(M_TILES, STEP, width, COLUMNS, mma)

    mma, pack = matrix_instructions(config.kind, config.turing)
    multiply_scores, multiply_dp = multiply(WIDTH), multiply(VALUE_WIDTH)
    lanes = make_lanes(M_TILES, N_TILES, transposed)
    apply_score, hide = make_apply_score(lanes, config.scoring, derivative=True), make_hide(lanes)
    clear, begin_dp = make_clear(config.lane_sizes[0]), make_start(lanes, DROPOUT)
    derivative = make_derivative(lanes, GENERAL, DROPOUT)

    @device
    def warp_rows(tile):
        thread = ptx.thread_index()
        return tile + (thread >> 5) * (WARP_ROWS * PANEL_ROW) + lane_down(thread)

    @device
    def scores(s, slope, own, own_tile, next_rows, call, place, segment, query, key, edge):
        clear(s)
        multiply_scores(s, own, warp_rows(own_tile), next_rows + lane_across(ptx.thread_index()))
        if GENERAL:
            apply_score(s, slope, call, place, segment, ONE_HEAD, query, key)
        if edge:
            hide(s, segment, ONE_HEAD, query, key)

    @device
    def score_gradient(dp, p, slope, delta, bits, own, own_tile, next_rows, keep_scale):
        begin_dp(dp, delta)
        multiply_dp(dp, own, warp_rows(own_tile), next_rows + lane_across(ptx.thread_index()))
        derivative(dp, p, slope, delta, bits, keep_scale)

    return Recomputation(
        load(ROWS, WIDTH), load(ROWS, VALUE_WIDTH), load(COLUMNS, WIDTH), load(COLUMNS, VALUE_WIDTH),
        make_load_rows(M_TILES, HALF * WIDTH, ROWS), make_load_rows(M_TILES, HALF * VALUE_WIDTH, ROWS),
        warp_rows, lane_words if HALF == 2 else lane_down,
        scores, make_weights(lanes), score_gradient, make_keep(M_TILES, N_TILES, config.scoring.dropout, transposed),
        make_pack_words(M_TILES, N_TILES) if HALF == 2 else make_pack(M_TILES, N_TILES, pack),
        add(WIDTH), add(VALUE_WIDTH),
    )
