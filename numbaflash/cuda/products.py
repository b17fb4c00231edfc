"""Register-blocked products of tiles in shared memory, in plain fused multiply-adds.

Where the operands lie is told in `simt_config`: each thread holds ``rows`` x ``columns`` numbers of a
product in a local array, row by row.  Per 16 bytes along the summed axis a thread loads ``rows + columns``
vectors for ``4 * rows * columns`` float32 multiply-adds.  The loops over a thread's own numbers are
unrolled by construction; the loop along the summed axis has a run-time length, which also ends it early
where a tile is not full.
"""
import math
from collections.abc import Callable

from numba import cuda, int32

from numbaflash.cuda.inlining import device
from numbaflash.cuda.simt_config import COLUMN_LANES, ROW_LANES, VECTOR_BYTES, SimtConfig
from numbaflash.cuda.simt_tiles import LOAD_NUMBER, LOAD_SHARED, NUMBER
from numbaflash.cuda.unroll import unrolled


def make_dot(config: SimtConfig, width: int) -> Callable:
    """``dot(acc, a, b, steps)``: acc += A B^T, both operands with `width` columns in rows of shared memory.

    `a` and `b` are the addresses of the thread's first row of either; `steps` counts pieces of 16 bytes.
    """
    rows, columns, lanes = config.rows, config.columns, config.lanes
    number, load = NUMBER[config.compute], LOAD_SHARED[config.compute]
    a_step, b_step = ROW_LANES * config.pitch(width), COLUMN_LANES * config.pitch(width)
    count = rows * lanes

    def load_row(i, x, a):
        load(x, i, int32(a + i * a_step))

    def add_one(at, j, acc, x, y):
        e, i = at // rows, at % rows
        acc[i * columns + j] = cuda.fma(x[i * lanes + e], y[e], acc[i * columns + j])

    add_all = unrolled(lanes * rows, add_one)

    def add_column(j, acc, x, y, b):
        load(y, 0, int32(b + j * b_step))
        add_all(j, acc, x, y)

    load_rows, add_columns = unrolled(rows, load_row), unrolled(columns, add_column)

    @device
    def dot(acc, a, b, steps):
        x = cuda.local.array(count, number)
        y = cuda.local.array(lanes, number)
        for _ in range(steps):
            load_rows(x, a)
            add_columns(acc, x, y, b)
            a = int32(a + VECTOR_BYTES)
            b = int32(b + VECTOR_BYTES)

    return dot


def make_combine(config: SimtConfig, width: int) -> Callable:
    """``combine(acc, p, v, steps)``: acc += P V, with P `rows` per thread and V rows of `width` columns.

    `p` is the address of the thread's first row of P, `v` of its first piece of row 0 of V; `steps` counts
    pieces of 16 bytes along the rows of P.
    """
    rows, lanes = config.rows, config.lanes
    pieces = width // (COLUMN_LANES * lanes)
    number, load = NUMBER[config.compute], LOAD_SHARED[config.compute]
    p_step, v_pitch = ROW_LANES * config.probability_pitch, config.pitch(width)
    piece_step, v_step = COLUMN_LANES * VECTOR_BYTES, config.lanes * config.pitch(width)
    count, per_row = rows * lanes, pieces * lanes

    def load_row(i, x, p):
        load(x, i, int32(p + i * p_step))

    def add_one(at, key, n, acc, x, y):
        e, i = at // rows, at % rows
        to = i * per_row + n * lanes + e
        acc[to] = cuda.fma(x[i * lanes + key], y[e], acc[to])

    add_all = unrolled(lanes * rows, add_one)

    def add_piece(at, acc, x, y, v):
        key, n = at // pieces, at % pieces
        load(y, 0, int32(v + key * v_pitch + n * piece_step))
        add_all(key, n, acc, x, y)

    load_rows, add_pieces = unrolled(rows, load_row), unrolled(lanes * pieces, add_piece)

    @device
    def combine(acc, p, v, steps):
        x = cuda.local.array(count, number)
        y = cuda.local.array(lanes, number)
        for _ in range(steps):
            load_rows(x, p)
            add_pieces(acc, x, y, v)
            p = int32(p + VECTOR_BYTES)
            v = int32(v + v_step)

    return combine


def make_combine_visible(config: SimtConfig, width: int) -> Callable:
    """As `make_combine`, but a pair whose P is -0.0 is left out, and `steps` counts numbers.

    Hidden pairs are marked so: 0 * NaN would carry a NaN in V to rows that do not see it.  Rarely run, so one
    number at a time, in little code.
    """
    rows, lanes = config.rows, config.lanes
    pieces = width // (COLUMN_LANES * lanes)
    number, load, load_number = (
        NUMBER[config.compute], LOAD_SHARED[config.compute], LOAD_NUMBER[config.compute])
    p_step, v_pitch = ROW_LANES * config.probability_pitch, config.pitch(width)
    piece_step, size = COLUMN_LANES * VECTOR_BYTES, config.size
    per_row = pieces * lanes
    zero, one = number(0), number(1)

    def load_row(i, x, p):
        x[i] = load_number(int32(p + i * p_step))

    def add_one(at, n, acc, x, y):
        e, i = at // rows, at % rows
        hidden = (x[i] == zero) & (math.copysign(one, x[i]) < zero)
        to = i * per_row + n * lanes + e
        acc[to] = acc[to] if hidden else cuda.fma(x[i], y[e], acc[to])

    add_all = unrolled(lanes * rows, add_one)

    def add_piece(n, acc, x, y, v):
        load(y, 0, int32(v + n * piece_step))
        add_all(n, acc, x, y)

    load_rows, add_pieces = unrolled(rows, load_row), unrolled(pieces, add_piece)

    @device
    def combine_visible(acc, p, v, steps):
        x = cuda.local.array(rows, number)
        y = cuda.local.array(lanes, number)
        for _ in range(steps):
            load_rows(x, p)
            add_pieces(acc, x, y, v)
            p = int32(p + size)
            v = int32(v + v_pitch)

    return combine_visible
