"""From product to score, one pair at a time: softcap, bias, ALiBi, mask, band; and the dropout pattern.

A general SIMT kernel has the code of every stage and a run-time switch for each, so that all calls with
options share one compiled kernel.  The scores of a tile go through shared memory one by one in a loop that
is not unrolled: a thread's own scores, so nothing is exchanged and the code is there once.
"""
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import cuda, int32, int64, uint64

from numbaflash import score as plain
from numbaflash.cuda import ptx
from numbaflash.cuda.draw import dropout_word
from numbaflash.cuda.inlining import device
from numbaflash.cuda.simt_config import COLUMN_LANES, ROW_LANES, SimtConfig
from numbaflash.cuda.simt_tiles import NUMBER, READ_NUMBER
from numbaflash.cuda.unroll import unrolled
from numbaflash.jit import compile_plain

LOAD_NUMBER = {"float32": ptx.ld_shared_f32, "float64": ptx.ld_shared_f64}
STORE_NUMBER = {"float32": ptx.st_shared_f32, "float64": ptx.st_shared_f64}

softcap_value = compile_plain(plain.softcap_value, device)
softcap_derivative = compile_plain(plain.softcap_derivative, device)
alibi_value = compile_plain(plain.alibi_value, device)


class Stages(NamedTuple):
    """What a block needs for its stages; an address is 0 where its stage is off."""

    softcap: float
    slope: float
    bias: int
    mask: int


class Scores(NamedTuple):
    """Device functions of one configuration: see `make_scores`."""

    load_stages: Callable
    apply: Callable
    drop: Callable


def make_scores(config: SimtConfig, *, transposed: bool = False, derivatives: bool = False,
                floored: bool = False) -> Scores:
    """The stages of a general kernel, on a thread's own numbers in shared memory.

    ``load_stages(call, place)`` gives the `Stages` of a head.
    ``apply(call, stages, segment, address, slopes, first, end, start)`` turns products into scores in
    natural units, -inf where hidden.  `address` is that of the thread's first number; its rows are `first`,
    ``first + 4``, ... below `end`, its columns `start`, ``start + 8``, ...: queries and keys, or keys and
    queries if `transposed`. With `derivatives` and a softcap, those of the cap go to `slopes` likewise.
    If `floored`, a score of -inf that is seen becomes the lowest number, so that -inf says hidden.
    ``drop(draw, address, first, end, start, keep_scale)`` applies the dropout pattern to probabilities and
    leaves hidden ones (-0.0) alone.
    """
    columns, number, size = config.columns, NUMBER[config.compute], config.size
    load, store = LOAD_NUMBER[config.compute], STORE_NUMBER[config.compute]
    read_bias = READ_NUMBER[config.bias_dtype]
    row_step, column_step = ROW_LANES * config.probability_pitch, COLUMN_LANES * size
    infinity, zero, lowest = number(math.inf), number(0), number(-np.finfo(config.compute).max)

    @device
    def pair(row, column):
        return (column, row) if transposed else (row, column)

    @device
    def load_stages(call, place):
        bias, mask, slope = int64(0), int64(0), zero
        segment, head = int64(place.segment), int64(place.head)
        if call.bias.pointer != 0:
            bias = call.bias.pointer + segment * call.bias.batch + head * call.bias.head
        if call.mask.pointer != 0:
            mask = call.mask.pointer + segment * call.mask.batch + head * call.mask.head
        if (call.slopes.pointer != 0) & (place.segment < call.sequences):
            slope = number(ptx.ld_global_nc_f64(
                call.slopes.pointer + segment * call.slopes.batch + head * call.slopes.head))
        return Stages(number(call.softcap), slope, bias, mask)

    @device
    def seen(segment, query, key):
        """Is the pair inside the band, and is there such a key (and, for the clamped ones, such a query)?"""
        return ((key >= query + segment.first) & (key <= query + segment.last)
                & (key < segment.k_length) & (query < segment.q_length))

    @device
    def place_of(tensor, origin, segment, row, column):
        """Address of a pair's element; that of the nearest existing pair where there is no such pair."""
        query, key = pair(row, column)
        query, key = min(query, segment.q_length - 1), min(key, segment.k_length - 1)
        return origin + int64(query) * tensor.row + int64(key) * tensor.column

    def get_one(j, x, address, scale):
        x[j] = load(int32(address + j * column_step)) * scale

    def floor_one(j, x):
        x[j] = lowest if x[j] == -infinity else x[j]

    def cap_one(j, x, cap, slopes):
        x[j] = softcap_value(x[j], cap, math.tanh)
        if derivatives:
            store(int32(slopes + j * column_step), softcap_derivative(x[j], cap))

    def read_bias_one(j, y, call, stages, segment, row, start):
        y[j] = number(read_bias(place_of(call.bias, stages.bias, segment, row, start + j * COLUMN_LANES)))

    def add_bias_one(j, x, y):
        x[j] = -infinity if y[j] == -infinity else x[j] + y[j]

    def alibi_one(j, x, slope, segment, row, start):
        query, key = pair(row, start + j * COLUMN_LANES)
        x[j] = alibi_value(x[j], slope, number(int32(query + segment.offset)), number(key))

    def read_mask_one(j, y, call, stages, segment, row, start):
        y[j] = number(ptx.ld_global_nc_u8(
            place_of(call.mask, stages.mask, segment, row, start + j * COLUMN_LANES)))

    def mask_one(j, x, y):
        x[j] = -infinity if y[j] == zero else x[j]

    def put_one(j, x, address, segment, row, start):
        query, key = pair(row, start + j * COLUMN_LANES)
        store(int32(address + j * column_step), x[j] if seen(segment, query, key) else -infinity)

    get_all, floor_all, cap_all, put_all = (
        unrolled(columns, one) for one in (get_one, floor_one, cap_one, put_one))
    read_biases, add_biases = unrolled(columns, read_bias_one), unrolled(columns, add_bias_one)
    read_masks, mask_all = unrolled(columns, read_mask_one), unrolled(columns, mask_one)
    alibi_all = unrolled(columns, alibi_one)

    @device
    def apply(call, stages, segment, address, slopes, first, end, start):
        x = cuda.local.array(columns, number)
        y = cuda.local.array(columns, number)
        scale = number(call.scale)
        for row in range(first, end, ROW_LANES):
            row = int32(row)
            get_all(x, address, scale)
            if floored:
                floor_all(x)
            if stages.softcap != zero:
                cap_all(x, stages.softcap, slopes)
            if stages.bias != 0:
                read_biases(y, call, stages, segment, row, start)       # all under way before one is used
                add_biases(x, y)
            if stages.slope != zero:
                alibi_all(x, stages.slope, segment, row, start)
            if stages.mask != 0:
                read_masks(y, call, stages, segment, row, start)
                mask_all(x, y)
            put_all(x, address, segment, row, start)
            address = int32(address + row_step)
            slopes = int32(slopes + row_step)

    @device
    def drop(draw, address, first, end, start, keep_scale):
        for row in range(first, end, ROW_LANES):
            for j in range(columns):
                query, key = pair(int32(row), start + j * COLUMN_LANES)
                word = dropout_word(draw.seed, draw.sequence, draw.head, uint64(draw.row + query),
                                    uint64(draw.key + key))
                factor = keep_scale if word >= draw.threshold else zero         # -0.0 and NaN stay what they are
                store(int32(address + j * column_step), load(int32(address + j * column_step)) * factor)
            address = int32(address + row_step)

    return Scores(load_stages, apply, drop)
