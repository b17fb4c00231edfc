"""What each lane of a block stands for: which query of which head, where its rows lie, which keys it sees."""

import numba

from ..jit import compile_plain
from ..segments import K_LENGTH, Q_BATCH, Q_INDEX, Q_LENGTH, Q_OFFSET, Q_START
from ..visibility import visible_range
from .compile import HELPER_OPTIONS, helper
from .simd import load_f64, load_i64, store_f32, store_f64, store_i32, store_i64

# Tables of one entry per lane: eight bytes each ...
Q_ROW, OUT_ROW, LSE_ROW, BIAS_ROW, MASK_ROW, QUERY, HEAD = range(7)
# ... or as wide as the scores, which makes a panel of them.
LOW, HIGH, POSITION, SLOPE, SINK = range(7, 12)
LANE_TABLES = 12

FIELD = 8
"""Bytes of an entry of a segment table."""

visible_keys = compile_plain(visible_range, numba.njit(**HELPER_OPTIONS))


@helper
def store_integer(static, address, value):
    """Store an integer as wide as the scores, saturated."""
    if static.bits == 32:
        store_i32(address, min(max(value, -(1 << 31)), (1 << 31) - 1))
    else:
        store_i64(address, value)


@helper
def store_number(static, address, value):
    """Store a floating number of the dtype computed in."""
    if static.bits == 32:
        store_f32(address, value)
    else:
        store_f64(address, value)


@helper
def lane_table(static, call, scratch, table, panel):
    """Address of one panel's part of a lane table."""
    width = 8 if table < LOW else static.size
    return scratch + call.at_lanes + 8 * table * call.block_q + panel * static.panel * width


@helper
def place_lanes(static, call, scratch, segment, segment_number, first_head, first_row, rows, lanes):
    """Fill the lane tables of a block of ``rows`` rows; lanes past the last row repeat it.

    A row is a query of ``first_head`` or, where heads are packed, of the heads after it, query by query.
    """
    q_length = load_i64(segment + FIELD * Q_LENGTH)
    k_length = load_i64(segment + FIELD * K_LENGTH)
    offset = load_i64(segment + FIELD * Q_OFFSET)
    batch = load_i64(segment + FIELD * Q_BATCH)
    start = load_i64(segment + FIELD * Q_START)
    q_number = load_i64(segment + FIELD * Q_INDEX)
    tables = scratch + call.at_lanes
    width = 8 * call.block_q
    for lane in range(lanes):
        row = first_row + min(lane, rows - 1)
        head = first_head
        query = row
        if call.packed_heads:
            head += row // q_length
            query = row % q_length
        wide, narrow = tables + 8 * lane, tables + static.size * lane
        store_i64(wide + Q_ROW * width,
                  call.q + batch * call.q_stride_b + head * call.q_stride_h + (start + query) * call.q_stride_n)
        store_i64(wide + OUT_ROW * width,
                  call.out + batch * call.out_stride_b + head * call.out_stride_h + (start + query) * call.out_stride_n)
        store_i64(wide + LSE_ROW * width,
                  call.lse + batch * call.lse_stride_b + head * call.lse_stride_h + (start + query) * static.size)
        low, _, _, high = visible_keys(query, query + 1, k_length, offset, call.left, call.right)
        store_integer(static, narrow + LOW * width, low)
        store_integer(static, narrow + HIGH * width, high)
        if call.sinks:
            store_number(static, narrow + SINK * width, load_f64(call.sinks + 8 * head))
        if static.general:
            store_i64(wide + BIAS_ROW * width, call.bias + segment_number * call.bias_stride_b
                      + head * call.bias_stride_h + query * call.bias_stride_q)
            store_i64(wide + MASK_ROW * width, call.mask + segment_number * call.mask_stride_b
                      + head * call.mask_stride_h + query * call.mask_stride_q)
            store_i64(wide + QUERY * width, q_number + query)
            store_i64(wide + HEAD * width, call.head_origin + head)
            store_integer(static, narrow + POSITION * width, query + offset)
            if call.alibi:
                slope = load_f64(call.alibi + segment_number * call.alibi_stride_b + head * call.alibi_stride_h)
                store_number(static, narrow + SLOPE * width, slope)
