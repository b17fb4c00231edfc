"""From a product to a score: softcap, bias, ALiBi, mask and band, on the fragments that a warp holds; and dropout.

The stages are those of `numbaflash.score`.  A kernel has the code of all of them or of none (`Scoring.general`); in
the first case each is a branch at run time, alike for all threads, so that calls with options share one kernel.

Rows of a fragment are queries and columns keys (see `fragments`); a lane's rows are ``row + 16 i + 8 h``, its
columns ``key + 8 j + e``.
"""
from typing import NamedTuple

import numpy as np
from numba import float32, int32, int64, uint32, uint64

from numbaflash import dropout, segments
from numbaflash.cuda import ptx
from numbaflash.cuda.tiles import K_INDEX, Q_INDEX, SEQUENCE, column, device, pair_row
from numbaflash.cuda.unroll import unrolled
from numbaflash.jit import compile_plain

INFINITY = np.float32(np.inf)
ZERO = np.float32(0)
ONE = np.float32(1)
TWO = np.float32(2)
TWO_LOG2_E = np.float32(2 / np.log(2))
LOW, HALF, ONE_BIT, EIGHT = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(1), np.uint64(8)
DROPOUTS = ("", "block", "element")
"""No dropout; one Philox block for a lane's four numbers of a fragment (rows counted from a multiple of 16, keys from
an even number); one per number."""

philox = compile_plain(dropout.philox, device)
dropout_word = compile_plain(dropout.dropout_word, device)


class Scoring(NamedTuple):
    """The compile-time part of a call's score, mask and dropout.

    Attributes
    ----------
    general : bool
        The code of all stages is there.  Needed too by a scale that is not positive: its largest score is not its
        largest product.
    bias : str
        Dtype of the bias; any where there is none.
    dropout : str
        One of `DROPOUTS`.
    """

    general: bool = False
    bias: str = "float32"
    dropout: str = ""


def scoring_of(problem) -> Scoring:
    """The `Scoring` that a Problem needs."""
    score, table = problem.score, problem.segments
    drop = ""
    if problem.dropout is not None:
        aligned = not (table[:, segments.Q_INDEX] % 16).any() and not (table[:, segments.K_INDEX] % 2).any()
        drop = "block" if aligned else "element"
    general = not score.is_empty or problem.mask is not None or not problem.scale > 0
    return Scoring(general, "float32" if score.bias is None else score.bias.dtype.name, drop)


@device
def tanh(x):
    """tanh to about 1e-7 absolutely; exact at infinity."""
    return ONE - TWO * ptx.rcp_approx_ftz(ONE + ptx.ex2_approx_ftz(x * TWO_LOG2_E))


@device
def _load_float16(address):
    return ptx.f16_to_f32(ptx.ld_global_nc_b16(address))


@device
def _load_bfloat16(address):
    return ptx.bf16_low(uint32(ptx.ld_global_nc_b16(address)))


@device
def _load_float32(address):
    return ptx.ld_global_nc_f32(address)


@device
def _load_float64(address):
    return float32(ptx.ld_global_nc_f64(address))


LOAD_FLOAT = {"float16": _load_float16, "bfloat16": _load_bfloat16, "float32": _load_float32, "float64": _load_float64}
"""By dtype: one number of global memory as a float32."""


def make_apply_score(m_tiles: int, n_tiles: int, scoring: Scoring):
    """``apply_score(s, call, place, segment, row, key)``: products become scores in natural units; masked ones -inf.

    Rows and keys that do not exist get the score of the last one, for others to hide.
    """
    load_bias = LOAD_FLOAT[scoring.bias]

    def scale_one(x, s, scale):
        s[x] = s[x] * scale

    def cap_one(x, s, cap, inverse):
        s[x] = cap * tanh(s[x] * inverse)

    def bias_one(c, s, at, address, stride, key, last):
        x = at + 4 * (c // 2) + c % 2
        s[x] = s[x] + load_bias(address + int64(min(key + 8 * (c // 2) + c % 2, last)) * stride)

    def bias_row(r, s, call, place, segment, row, key):
        address = pair_row(call.bias, place, min(row + 8 * r, segment.q_length - 1))
        bias_columns(s, 4 * (r // 2) * n_tiles + 2 * (r % 2), address, call.bias.column, key, segment.k_length - 1)

    def alibi_one(n, s, slope, distance):
        r, c = n // (2 * n_tiles), n % (2 * n_tiles)
        x = 4 * ((r // 2) * n_tiles + c // 2) + 2 * (r % 2) + c % 2
        s[x] = s[x] - slope * abs(float32(int32(distance + 8 * r - (8 * (c // 2) + c % 2))))

    def mask_one(c, s, at, address, stride, key, last):
        x = at + 4 * (c // 2) + c % 2
        seen = ptx.ld_global_nc_u8(address + int64(min(key + 8 * (c // 2) + c % 2, last)) * stride)
        s[x] = s[x] if seen != 0 else -INFINITY

    def mask_row(r, s, call, place, segment, row, key):
        address = pair_row(call.mask, place, min(row + 8 * r, segment.q_length - 1))
        mask_columns(s, 4 * (r // 2) * n_tiles + 2 * (r % 2), address, call.mask.column, key, segment.k_length - 1)

    size = 4 * m_tiles * n_tiles
    scale_all, cap_all, alibi_all = unrolled(size, scale_one), unrolled(size, cap_one), unrolled(size, alibi_one)
    bias_columns, mask_columns = unrolled(2 * n_tiles, bias_one), unrolled(2 * n_tiles, mask_one)
    bias_rows, mask_rows = unrolled(2 * m_tiles, bias_row), unrolled(2 * m_tiles, mask_row)

    @device
    def apply_score(s, call, place, segment, row, key):
        scale_all(s, float32(call.scale))
        if call.softcap > 0.0:
            cap_all(s, float32(call.softcap), float32(1.0 / call.softcap))
        if call.bias.pointer != 0:
            bias_rows(s, call, place, segment, row, key)
        if call.slopes.pointer != 0:
            slope = float32(ptx.ld_global_nc_f64(pair_row(call.slopes, place, 0)))
            alibi_all(s, slope, row + segment.offset - key)
        if call.mask.pointer != 0:
            mask_rows(s, call, place, segment, row, key)
    return apply_score


def make_hide(m_tiles: int, n_tiles: int):
    """``hide(s, segment, row, key)``: -inf for what the band hides and for keys that do not exist."""

    def hide_one(c, s, at, first, last):
        x = at + 4 * (c // 2) + c % 2
        ahead = int32(8 * (c // 2) + c % 2)
        s[x] = s[x] if first <= ahead and ahead <= last else -INFINITY

    def hide_row(r, s, segment, row, key):
        at = row + 8 * r
        first = int32(at + segment.first - key)
        last = int32(min(at + segment.last, segment.k_length - 1) - key)
        hide_columns(s, 4 * (r // 2) * n_tiles + 2 * (r % 2), first, last)

    hide_columns = unrolled(2 * n_tiles, hide_one)
    return unrolled(2 * m_tiles, hide_row)


# --- dropout ----------------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """What the dropout pattern of a block counts from."""

    seed: np.uint64
    threshold: np.uint64
    head: np.uint64
    sequence: np.uint64
    row: np.int64
    key: np.int64


@device
def load_draw(call, place):
    """The `Draw` of a place."""
    return Draw(
        uint64(call.seed), uint64(call.threshold), uint64(int64(place.head) + call.head_origin),
        uint64(column(call, place, SEQUENCE)), column(call, place, Q_INDEX), column(call, place, K_INDEX),
    )


def make_drop(m_tiles: int, n_tiles: int, mode: str):
    """``drop(p, draw, row, key)``: zeros where the pattern drops a pair."""
    block = mode == "block"

    def drop_fragment(n, p, draw, row, key):
        x = 4 * n
        query = uint64(int64(row) + 16 * (n // n_tiles) + draw.row)
        first = uint64(int64(key) + 8 * (n % n_tiles) + draw.key)
        if block:
            w0, w1, w2, w3 = philox(query & LOW, first >> ONE_BIT, draw.head, draw.sequence, draw.seed & LOW,
                                    draw.seed >> HALF)
        else:
            below, after = query + EIGHT, first + ONE_BIT
            w0 = dropout_word(draw.seed, draw.sequence, draw.head, query, first)
            w1 = dropout_word(draw.seed, draw.sequence, draw.head, query, after)
            w2 = dropout_word(draw.seed, draw.sequence, draw.head, below, first)
            w3 = dropout_word(draw.seed, draw.sequence, draw.head, below, after)
        p[x] = p[x] if w0 >= draw.threshold else ZERO
        p[x + 1] = p[x + 1] if w1 >= draw.threshold else ZERO
        p[x + 2] = p[x + 2] if w2 >= draw.threshold else ZERO
        p[x + 3] = p[x + 3] if w3 >= draw.threshold else ZERO

    return unrolled(m_tiles * n_tiles, drop_fragment)
