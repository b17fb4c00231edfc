"""From a product to a score: softcap, bias, ALiBi, mask and band, on the fragments that a warp holds; and dropout.

The stages are those of `numbaflash.score`.  A kernel has the code of all of them or of none (`Scoring.general`); in
the first case each is a branch at run time, alike for all threads, so that calls with options share one kernel.

Rows of a result are queries and columns keys, or (transposed) the other way round; a lane's rows are ``8 n`` and
its columns ``8 (n // 2) + n % 2`` behind its first one (see `fragments`).
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import float32, int32, int64, uint32, uint64

from numbaflash import segments
from numbaflash.cuda import ptx
from numbaflash.cuda.draw import dropout_word, philox
from numbaflash.cuda.inlining import device
from numbaflash.cuda.packing import make_split
from numbaflash.cuda.tiles import Place, pair_row
from numbaflash.cuda.unroll import unrolled

INFINITY = np.float32(np.inf)
ZERO = np.float32(0)
ONE = np.float32(1)
TWO = np.float32(2)
TWO_LOG2_E = np.float32(2 / np.log(2))
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
ZERO_BITS, ONE_BIT = np.uint64(0), np.uint64(1)
DROPOUTS = ("", "block", "element")
"""No dropout; one Philox block for a lane's four numbers of a fragment (rows counted from a multiple of 16, keys from
an even number); one per number."""



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


class Lanes(NamedTuple):
    """Where a lane's numbers of a result stand, in offsets from its first query and its first key.

    `query(n)` and `key(n)` are device functions of numbers ``n < queries`` and ``n < keys``, `at(q, k)` is where
    the pair stands in the local array.  Where heads are packed, "queries" are rows of the block, and `split` tells
    which query of which member a row is (`packing.make_split`).
    """

    queries: int
    keys: int
    query: Callable
    key: Callable
    at: Callable
    packed: bool
    split: Callable


def make_lanes(m_tiles: int, n_tiles: int, transposed: bool = False, packed: bool = False) -> Lanes:
    """`Lanes` of a result whose rows are queries and columns keys, or (transposed) the other way round."""
    split = make_split(packed)

    @device
    def row(n):
        return 8 * n

    @device
    def column(n):
        return 8 * (n // 2) + n % 2

    @device
    def at(r, c):
        return 4 * ((r // 2) * n_tiles + c // 2) + 2 * (r % 2) + c % 2

    @device
    def at_transposed(c, r):
        return 4 * ((r // 2) * n_tiles + c // 2) + 2 * (r % 2) + c % 2

    if transposed:
        return Lanes(2 * n_tiles, 2 * m_tiles, column, row, at_transposed, packed, split)
    return Lanes(2 * m_tiles, 2 * n_tiles, row, column, at, packed, split)


def make_apply_score(lanes: Lanes, scoring: Scoring, derivative: bool = False):
    """``apply_score(s, slope, call, place, segment, packing, query, key)``: products become scores in natural units.

    Masked scores become -inf.  Pairs that do not exist get the score of the last one, for others to hide.  Where
    asked for, `slope` receives the derivative of each score by the scaled product.
    """
    load_bias = LOAD_FLOAT[scoring.bias]
    queries, keys, query_of, key_of, at, PACKED, split = lanes

    def scale_one(x, s, slope, scale):
        s[x] = s[x] * scale
        if derivative:
            slope[x] = ONE

    def cap_one(x, s, slope, cap, inverse):
        t = tanh(s[x] * inverse)
        s[x] = cap * t
        if derivative:
            slope[x] = (ONE - t) * (ONE + t)

    def bias_one(k, s, q, address, stride, key, last):
        x = at(q, k)
        s[x] = s[x] + load_bias(address + int64(min(key + key_of(k), last)) * stride)

    def bias_query(q, s, call, place, segment, packing, query, key):
        row, member = split(query + query_of(q), packing)
        here = Place(place.segment, int32(place.head + member), place.tile)
        address = pair_row(call.bias, here, min(row, segment.q_length - 1))
        bias_keys(s, q, address, call.bias.column, key, segment.k_length - 1)

    def alibi_one(k, s, q, penalty, distance):
        x = at(q, k)
        s[x] = s[x] - penalty * abs(float32(int32(distance + query_of(q) - key_of(k))))

    def alibi_query(q, s, penalty, distance):
        alibi_keys(s, q, penalty, distance)

    def alibi_key(k, s, q, penalty, distance):
        x = at(q, k)
        s[x] = s[x] - penalty * abs(float32(int32(distance - key_of(k))))

    def alibi_row(q, s, call, place, segment, packing, query, key):
        row, member = split(query + query_of(q), packing)
        here = Place(place.segment, int32(place.head + member), place.tile)
        penalty = float32(ptx.ld_global_nc_f64(pair_row(call.slopes, here, 0)))
        alibi_all_keys(s, q, penalty, row + segment.offset - key)

    def mask_one(k, s, q, address, stride, key, last):
        x = at(q, k)
        seen = ptx.ld_global_nc_u8(address + int64(min(key + key_of(k), last)) * stride)
        s[x] = s[x] if seen != 0 else -INFINITY

    def mask_query(q, s, call, place, segment, packing, query, key):
        row, member = split(query + query_of(q), packing)
        here = Place(place.segment, int32(place.head + member), place.tile)
        address = pair_row(call.mask, here, min(row, segment.q_length - 1))
        mask_keys(s, q, address, call.mask.column, key, segment.k_length - 1)

    scale_all, cap_all = unrolled(queries * keys, scale_one), unrolled(queries * keys, cap_one)
    bias_keys, alibi_keys, mask_keys = unrolled(keys, bias_one), unrolled(keys, alibi_one), unrolled(keys, mask_one)
    bias_all, alibi_all = unrolled(queries, bias_query), unrolled(queries, alibi_query)
    alibi_all_keys, alibi_rows = unrolled(keys, alibi_key), unrolled(queries, alibi_row)
    mask_all = unrolled(queries, mask_query)

    @device
    def apply_score(s, slope, call, place, segment, packing, query, key):
        scale_all(s, slope, float32(call.scale))
        if call.softcap > 0.0:
            cap_all(s, slope, float32(call.softcap), float32(1.0 / call.softcap))
        if call.bias.pointer != 0:
            bias_all(s, call, place, segment, packing, query, key)
        if call.slopes.pointer != 0:
            if PACKED:
                alibi_rows(s, call, place, segment, packing, query, key)
            else:
                penalty = float32(ptx.ld_global_nc_f64(pair_row(call.slopes, place, 0)))
                alibi_all(s, penalty, query + segment.offset - key)
        if call.mask.pointer != 0:
            mask_all(s, call, place, segment, packing, query, key)
    return apply_score


def make_hide(lanes: Lanes):
    """``hide(s, segment, packing, query, key)``: -inf for what the band hides, and for pairs that do not exist."""
    queries, keys, query_of, key_of, at, _, split = lanes

    def hide_one(k, s, q, first, last):
        x = at(q, k)
        ahead = int32(key_of(k))
        s[x] = s[x] if first <= ahead and ahead <= last else -INFINITY

    def hide_query(q, s, segment, packing, query, key):
        row, _ = split(query + query_of(q), packing)
        first = int32(row + segment.first - key)
        last = int32(min(row + segment.last, segment.k_length - 1) - key)
        hide_keys(s, q, first, last if row < segment.q_length else int32(-1))

    hide_keys = unrolled(keys, hide_one)
    return unrolled(queries, hide_query)


# --- dropout ----------------------------------------------------------------------------------------------


def make_keep(m_tiles: int, n_tiles: int, mode: str, transposed: bool = False, packed: bool = False):
    """``keep(bits, draw, packing, query, key)``: which pairs the pattern keeps; bit ``x % 32`` of word ``x // 32`` for number x.

    `query` and `key` are those of the lane's first number.  Packed heads need the mode "element".
    """
    queries, keys, query_of, key_of, at, _, split = make_lanes(m_tiles, n_tiles, transposed, packed)
    PAIRS, HALVES = n_tiles // 2, 2 * m_tiles

    @device
    def put(bits, x, word, threshold):
        if word >= threshold:
            bits[x // 32] |= uint32(1) << uint32(x % 32)

    def clear_word(w, bits):
        bits[w] = uint32(0)

    def keep_fragment(n, bits, draw, packing, query, key):
        i, j = n // n_tiles, n % n_tiles
        first = uint64(int64(query) + 16 * i + draw.row)
        w0, w1, w2, w3 = philox(first & LOW, uint64(int64(key) + 8 * j + draw.key) >> ONE_BIT, draw.head, draw.sequence,
                                draw.seed & LOW, draw.seed >> HALF)
        put(bits, 4 * n, w0, draw.threshold)
        put(bits, 4 * n + 1, w1, draw.threshold)
        put(bits, 4 * n + 2, w2, draw.threshold)
        put(bits, 4 * n + 3, w3, draw.threshold)

    def keep_columns(n, bits, draw, packing, query, key):
        """Of a key and of 16 queries, those that this lane holds: two column tiles, in each the one that is e-th."""
        e, pair, r = n % 2, n // 2 % PAIRS, n // (2 * PAIRS)
        j = uint64(int64(key) + 8 * r + draw.key)
        w0, w1, w2, w3 = philox(uint64(int64(query) + 16 * pair + e + draw.row) & LOW, j >> ONE_BIT, draw.head,
                                draw.sequence, draw.seed & LOW, draw.seed >> HALF)
        odd = j & ONE_BIT != ZERO_BITS
        x = at(4 * pair + e, r)
        put(bits, x, w1 if odd else w0, draw.threshold)
        put(bits, x + 4, w3 if odd else w2, draw.threshold)

    def keep_one(n, bits, draw, packing, query, key):
        q, k = n // keys, n % keys
        row, member = split(query + query_of(q), packing)
        i = uint64(int64(row) + draw.row)
        j = uint64(int64(key) + key_of(k) + draw.key)
        head = uint64(int64(draw.head) + member)
        put(bits, at(q, k), dropout_word(draw.seed, draw.sequence, head, i, j), draw.threshold)

    clear = unrolled(-(-queries * keys // 32), clear_word)
    if mode != "block":
        draw_all = unrolled(queries * keys, keep_one)
    elif transposed:
        draw_all = unrolled(2 * PAIRS * HALVES, keep_columns)
    else:
        draw_all = unrolled(m_tiles * n_tiles, keep_fragment)

    @device
    def keep(bits, draw, packing, query, key):
        clear(bits)
        draw_all(bits, draw, packing, query, key)
    return keep


@device
def kept(bits, x):
    """True where number x is kept."""
    return (bits[x // 32] >> uint32(x % 32)) & uint32(1) != uint32(0)


def make_drop(size: int):
    """``drop(p, bits, factor)``: what is not kept becomes 0, what is kept is multiplied."""

    def drop_one(x, p, bits, factor):
        p[x] = p[x] * factor if kept(bits, x) else ZERO

    return unrolled(size, drop_one)
