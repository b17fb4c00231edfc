"""The forward kernel: FlashAttention (Dao et al., 2022) with queries in vector lanes.

A panel of scores is S^T = K Q^T, one row per key; K and V enter the products as broadcast numbers and are read where
they lie unless they must be converted. A job is one block of queries of one head or, where queries are few, of all
heads that share K and V. The panels of a block take each tile of keys in turn, while it is in the cache.
"""

import numpy as np
from numba import types
from numba.np.numpy_support import from_dtype

from ..segments import K_BATCH, K_INDEX, K_LENGTH, K_START, Q_LENGTH, Q_OFFSET, SEQUENCE
from .call import CALL
from .compile import Kernel, helper
from .gemm import gemm_max, gemm_rescale, gemm_set
from .lanes import (
    BIAS_ROW, FIELD, HEAD, HIGH, LOW, LSE_ROW, MASK_ROW, OUT_ROW, POSITION, Q_ROW, QUERY, SINK, SLOPE,
    lane_table, place_lanes, visible_keys,
)
from .nonfinite import add_nonfinite_values, clean_values
from .scorepass import alibi_scores, combine_columns, drop_weights, softcap_scores
from .simd import fetch_add, load_f32, load_f64, load_i64, store_f32, store_f64
from .softmax import ALPHA, NEW_MAX, STATE_PANELS, SUM, add_sink, finish_lse, hide_outside, softmax, take_maximum
from .storage import BFLOAT16, BOOLEAN, FLOAT16, FLOAT32, FLOAT64
from .tiles import all_finite, fill, pack_panel, pack_rows, unpack_panel

ARGUMENTS = (types.int64[::1], types.Array(from_dtype(CALL), 1, "C"))


@helper
def apply_stages(static, call, scratch, panel, scores, count, key):
    """The stages of a non-empty Score, and the mask, on the scores of ``count`` keys from number ``key``."""
    if call.softcap > 0:
        softcap_scores(static, scores, count, call.softcap)
    if call.bias:
        rows = lane_table(static, call, scratch, BIAS_ROW, panel)
        # The lanes' addresses are those of key 0: the tile begins ``key`` keys further on.
        shift = key * call.bias_stride_k
        if call.bias_code == FLOAT32:
            combine_columns(static, FLOAT32, scores, rows, shift, count, call.bias_stride_k)
        elif call.bias_code == FLOAT64:
            combine_columns(static, FLOAT64, scores, rows, shift, count, call.bias_stride_k)
        elif call.bias_code == FLOAT16:
            combine_columns(static, FLOAT16, scores, rows, shift, count, call.bias_stride_k)
        else:
            combine_columns(static, BFLOAT16, scores, rows, shift, count, call.bias_stride_k)
    if call.alibi:
        alibi_scores(static, scores, count, key, lane_table(static, call, scratch, POSITION, panel),
                     lane_table(static, call, scratch, SLOPE, panel))
    if call.mask:
        rows = lane_table(static, call, scratch, MASK_ROW, panel)
        combine_columns(static, BOOLEAN, scores, rows, key * call.mask_stride_k, count, call.mask_stride_k)


@helper
def store_output(static, call, panel, rows, factors):
    """Round a panel of output to its dtype and lay its lanes down as rows."""
    if call.out_code == FLOAT32:
        unpack_panel(static, FLOAT32, panel, rows, call.value_dim, call.out_stride_d, factors)
    elif call.out_code == FLOAT64:
        unpack_panel(static, FLOAT64, panel, rows, call.value_dim, call.out_stride_d, factors)
    elif call.out_code == FLOAT16:
        unpack_panel(static, FLOAT16, panel, rows, call.value_dim, call.out_stride_d, factors)
    else:
        unpack_panel(static, BFLOAT16, panel, rows, call.value_dim, call.out_stride_d, factors)


@helper
def finish_panel(static, call, scratch, panel):
    """Divide by the sum, write output and lse of one panel."""
    width = static.panel * static.size
    state = scratch + call.at_state + panel * STATE_PANELS * width
    factors = scratch + call.at_scores
    lse = factors + width
    fill(static, state + ALPHA * width, static.panel, 1.0)
    if call.sinks:
        add_sink(static, state, lane_table(static, call, scratch, SINK, panel), call.unit)
    finish_lse(static, state, factors, lse, call.unit)
    output = scratch + call.at_out + panel * call.value_dim * width
    store_output(static, call, output, lane_table(static, call, scratch, OUT_ROW, panel), factors)
    rows = lane_table(static, call, scratch, LSE_ROW, panel)
    for lane in range(static.panel):
        row = load_i64(rows + 8 * lane)
        if static.bits == 32:
            store_f32(row, load_f32(lse + 4 * lane))
        else:
            store_f64(row, load_f64(lse + 8 * lane))


@helper
def attend_block(static, call, scratch, job):
    """One job: a block of queries against all keys that any of them sees."""
    entry = call.jobs + 16 * (job // call.head_units)
    unit = job % call.head_units
    segment_number = load_i64(entry)
    first_row = load_i64(entry + 8) * call.block_q
    segment = call.segments + call.segment_bytes * segment_number
    q_length = load_i64(segment + FIELD * Q_LENGTH)
    k_length = load_i64(segment + FIELD * K_LENGTH)
    offset = load_i64(segment + FIELD * Q_OFFSET)
    all_rows = q_length
    first_head = unit
    kv_head = unit // call.group
    if call.packed_heads:
        all_rows = q_length * call.group
        first_head = unit * call.group
        kv_head = unit
    rows = min(call.block_q, all_rows - first_row)
    size, width = static.size, static.panel * static.size
    panels = (rows + static.panel - 1) // static.panel
    place_lanes(static, call, scratch, segment, segment_number, first_head, first_row, rows, panels * static.panel)

    scores = scratch + call.at_scores
    for panel in range(panels):
        pack_panel(static, static.storage, scratch + call.at_q + panel * call.head_dim * width,
                   lane_table(static, call, scratch, Q_ROW, panel), call.head_dim, call.q_stride_d, call.q_factor)
        state = scratch + call.at_state + panel * STATE_PANELS * width
        fill(static, state, 2 * static.panel, -np.inf)
        fill(static, state + SUM * width, 2 * static.panel, 0.0)
    fill(static, scratch + call.at_out, panels * call.value_dim * static.panel, 0.0)

    batch, start = load_i64(segment + FIELD * K_BATCH), load_i64(segment + FIELD * K_START)
    k_rows = call.k + batch * call.k_stride_b + kv_head * call.k_stride_h + start * call.k_stride_n
    v_rows = call.v + batch * call.v_stride_b + kv_head * call.v_stride_h + start * call.v_stride_n
    low, _, _, high = panel_range(static, call, first_row, first_row + rows, q_length, k_length, offset)
    k_stride, v_stride = call.k_stride_n, call.v_stride_n
    if not call.k_in_place:
        k_stride = call.head_dim * size
    if not call.v_in_place:
        v_stride = call.value_dim * size

    # Tiles lie on a grid from key 0, and the last one may be rounded up, so that the bits of a row do not depend on
    # the rows that share its block.
    readable = min(high + static.rows, k_length)
    for grid in range(low // call.block_k * call.block_k, high, call.block_k):
        tile = max(grid, low)
        tile_end = min(grid + call.block_k, readable)
        keys = k_rows + tile * call.k_stride_n
        if not call.k_in_place:
            pack_rows(static, static.storage, scratch + call.at_keys, k_stride, keys, call.k_stride_n,
                      call.k_stride_d, tile_end - tile, call.head_dim)
            keys = scratch + call.at_keys
        values = v_rows + tile * call.v_stride_n
        if not call.v_in_place:
            pack_rows(static, static.storage, scratch + call.at_values, v_stride, values, call.v_stride_n,
                      call.v_stride_d, tile_end - tile, call.value_dim)
            values = scratch + call.at_values
        known_finite = False
        for panel in range(panels):
            panel_row = first_row + panel * static.panel
            seen_low, all_low, all_high, seen_high = panel_range(
                static, call, panel_row, min(panel_row + static.panel, first_row + rows), q_length, k_length, offset)
            begin = max(tile, seen_low)
            end = min(tile_end, seen_high)
            if begin >= end:
                continue
            # Whole blocks of rows are faster than single ones; the keys added are hidden below.
            end = min(tile_end, begin + (end - begin + static.rows - 1) // static.rows * static.rows)
            count = end - begin
            edge = begin < all_low or end > all_high
            state = scratch + call.at_state + panel * STATE_PANELS * width
            queries = scratch + call.at_q + panel * call.head_dim * width
            tile_keys = keys + (begin - tile) * k_stride
            tile_values = values + (begin - tile) * v_stride
            # V is read down its columns, which no prefetcher of a core foresees; the first panel asks for it.
            asked = 0 if panel > 0 else call.value_dim * size

            if static.general:
                gemm_set(static, tile_keys, k_stride, size, queries, width, scores, width, count, call.head_dim,
                         0, tile_values, v_stride, asked)
                apply_stages(static, call, scratch, panel, scores, count, begin)
            else:
                gemm_max(static, tile_keys, k_stride, size, queries, width, scores, width, count, call.head_dim,
                         state + NEW_MAX * width, tile_values, v_stride, asked)
            if edge:
                hide_outside(static, scores, count, begin, lane_table(static, call, scratch, LOW, panel),
                             lane_table(static, call, scratch, HIGH, panel), state)
            elif static.general:
                take_maximum(static, scores, count, state)
            softmax(static, scores, count, state, call.unit)
            if static.general and call.threshold >= 0:
                drop_weights(
                    static, scores, count, load_i64(segment + FIELD * K_INDEX) + begin,
                    lane_table(static, call, scratch, QUERY, panel), lane_table(static, call, scratch, HEAD, panel),
                    load_i64(segment + FIELD * SEQUENCE), call.seed, call.threshold, call.keep_factor)

            # A hidden key has weight 0, yet 0 * NaN is NaN: values that are not finite take a path of their own.
            multiply, multiply_stride = tile_values, v_stride
            partly_hidden = edge or (static.general and call.may_hide != 0)
            if partly_hidden and not known_finite:
                known_finite = all_finite(static, values, v_stride, tile_end - tile, call.value_dim)
            dirty = partly_hidden and not known_finite
            if dirty:
                multiply, multiply_stride = scratch + call.at_clean, call.value_dim * size
                clean_values(static, multiply, tile_values, v_stride, count, call.value_dim)
            output = scratch + call.at_out + panel * call.value_dim * width
            gemm_rescale(static, multiply, size, multiply_stride, scores, width, output, width, call.value_dim, count,
                         state + ALPHA * width, 0, 0, 0)
            if dirty:
                add_nonfinite_values(static, call, scratch, panel, scores, output, width, size, tile_values, v_stride,
                                     begin, count, 0, call.value_dim)

    for panel in range(panels):
        finish_panel(static, call, scratch, panel)


@helper
def panel_range(static, call, row_low, row_high, q_length, k_length, offset):
    """Keys that some and that all of the rows see; rows of packed heads are taken for all queries they span."""
    if call.packed_heads:
        if row_low // q_length != (row_high - 1) // q_length:
            return visible_keys(0, q_length, k_length, offset, call.left, call.right)
        head = row_low // q_length * q_length
        row_low -= head
        row_high -= head
    return visible_keys(row_low, row_high, k_length, offset, call.left, call.right)


def attend(counter, calls, static):
    """Take jobs until none is left."""
    call = calls[0]
    memory = np.empty(call.scratch_bytes + 64, np.uint8)
    scratch = (memory.ctypes.data + 63) & ~63
    while True:
        job = fetch_add(counter.ctypes.data, 1)
        if job >= call.job_count:
            break
        attend_block(static, call, scratch, job)
    memory[0] = 0  # the kernel knows its scratch by address: keep it alive until here


kernel = Kernel(attend)
