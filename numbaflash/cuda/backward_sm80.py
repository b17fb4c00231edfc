"""Gradients on tensor cores with mma.sync: Ampere, Ada and later.

Two kernels; both recompute P = exp(S - lse) tile by tile (Dao, "FlashAttention-2", 2023, algorithm 2):

keys     a block owns keys and runs through the queries of every head of their group.  Scores are computed transposed,
         S^T = K Q^T: then P^T and dS^T are A operands straight from the accumulator, for dV += P^T dO and
         dK += dS^T Q, and nothing but tiles crosses shared memory.
queries  a block owns queries and runs through the keys; dS is the A operand of dQ += dS K.

Without atomics, so gradients are bit-equal from run to run.  That costs two products more than need be: where this is
not asked for, the first kernel also adds dS K to a float32 buffer by reductions, and `backward_reduced_sm80` rounds it.

The accumulator of dP starts at -delta, so that dS = P * dP costs one multiplication.  The kernels are in
`backward_keys_sm80` and `backward_queries_sm80`; here is their configuration and what they share.
"""
from typing import NamedTuple

from numbaflash.cuda import ptx
from numbaflash.cuda.panels import CHUNKS, COPIES, tile_bytes
from numbaflash.cuda.scores import DROPOUTS, INFINITY, ZERO, Lanes, Scoring, kept
from numbaflash.cuda.softmax import LOG2_E
from numbaflash.cuda.inlining import device
from numbaflash.cuda.unroll import unrolled

PARTS = ("both", "dk", "dv")
REDUCTIONS = ("", "scalar", "vector")


class BackwardConfig(NamedTuple):
    """The compile-time part of a backward kernel.

    Attributes
    ----------
    dtype : str
        "float16" or "bfloat16": of all arrays with a head dimension.
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
        Results leave through shared memory.
    scoring : Scoring
    """

    dtype: str = "bfloat16"
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
    scoring: Scoring = Scoring()

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
        return tile_bytes(self.block_rows, self.head_dim) + tile_bytes(self.block_rows, self.value_dim)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of the tiles that stream past, once, with two statistics per row."""
        tiles = tile_bytes(self.columns, self.head_dim) + tile_bytes(self.columns, self.value_dim)
        return tiles + -(-8 * self.columns // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory; dS^T crosses it where all warps need it for dq."""
        return self.own_bytes + 2 * self.stage_bytes + (2 * self.block_rows * self.columns if self.reduce else 0)

    def check(self) -> "BackwardConfig":
        """Raise ValueError if the parts do not fit together."""
        rounds = self.threads // CHUNKS
        wrong = {
            "dtype": self.dtype not in ("float16", "bfloat16"),
            "head_dim": self.head_dim % 16 != 0 or not 16 <= self.head_dim <= 256,
            "value_dim": self.value_dim % 16 != 0 or not 16 <= self.value_dim <= 256,
            "warps": self.warps not in (2, 4, 8),
            "row_tiles": self.row_tiles not in (1, 2),
            "columns": self.columns % rounds != 0 or self.columns > self.threads,
            "step": self.step % 16 != 0 or self.columns % self.step != 0,
            "parts": self.parts not in PARTS,
            "reduce": self.reduce not in REDUCTIONS or (self.reduce != "" and (self.columns != 64 or self.warps != 4)),
            "copy": self.copy not in COPIES,
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
