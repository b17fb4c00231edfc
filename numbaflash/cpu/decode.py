"""The forward kernel for few queries: Flash-Decoding (Dao et al., 2023), keys split into parts of a fixed size.

A job is one part of the keys of one KV head, for the queries of all heads that share it. It leaves maximum, sum and
unnormalised output; the job that finishes a head's last part combines them in the order of the parts. Parts follow
from the shape of a call alone, so results do not depend on the number of threads.
"""

import math

import numpy as np
from numba import types
from numba.np.numpy_support import from_dtype

from ..segments import K_BATCH, K_INDEX, K_LENGTH, K_START, Q_LENGTH, Q_OFFSET, SEQUENCE
from .attend import apply_stages, finish_panel
from .call import CALL
from .compile import Kernel, helper
from .dots import combine_rows, dot_keys, place_of, softmax_few, weigh_values
from .lanes import FIELD, HEAD, HIGH, LOW, Q_ROW, QUERY, lane_table, place_lanes, visible_keys
from .nonfinite import add_nonfinite_values, clean_values, load_own, number_at, store_own
from .ordering import count_up
from .scorepass import drop_weights
from .simd import fetch_add, load_i64
from .softmax import ALPHA, OLD_MAX, STATE_PANELS, SUM, hide_outside
from .storage import FLOAT32, FLOAT64
from .tiles import all_finite, fill, pack_rows

ARGUMENTS = (types.int64[::1], types.Array(from_dtype(CALL), 1, "C"))

JOB_COLUMNS = 4
"""Columns of the table of jobs: segment, part, parts of the segment, entry of the segment's first part."""


@helper
def place_query(static, call, target, row):
    """A query row, scaled, cut into vectors as :mod:`dots` has them."""
    whole = call.head_dim // static.wide * static.wide
    for column in range(whole):
        store_own(static, target + place_of(static, column, call.head_dim) * static.size,
                  load_own_number(static, call, row + column * call.q_stride_d) * call.q_factor)
    if whole < call.head_dim:
        begin = call.head_dim - static.wide
        for lane in range(static.wide):
            value = 0.0
            if begin + lane >= whole:
                value = load_own_number(static, call, row + (begin + lane) * call.q_stride_d) * call.q_factor
            store_own(static, target + (whole + lane) * static.size, value)


@helper
def load_own_number(static, call, address):
    """A number of Q, whose dtype need not be that of K and V."""
    return np.float64(number_at(static, call.q_code, address))


@helper
def last_shift(static, call):
    """Bytes by which the last vector of an output row lies behind its columns."""
    last = (call.value_dim + static.wide - 1) // static.wide - 1
    return (last * static.wide - (call.value_dim - static.wide)) * static.size


@helper
def attend_keys(static, call, scratch, segment, panel, begin, count, keys, next_keys, values, edge, converted):
    """One tile of keys for one panel of queries; ``converted`` values are in the dtype computed in.

    V is asked for while K is read, and the K that comes next (``next_keys``) while V is.
    """
    width = static.panel * static.size
    state = scratch + call.at_state + panel * STATE_PANELS * width
    queries = scratch + call.at_q + panel * static.panel * call.q_width
    output = scratch + call.at_rows + panel * static.panel * call.row_width
    scores = scratch + call.at_scores
    dot_keys(static, static.storage, queries, call.q_width, keys, call.k_stride_n, count, call.head_dim, scores,
             values, call.v_stride_n)
    if static.general:
        apply_stages(static, call, scratch, panel, scores, count, begin)
    hidden = static.general or edge
    if hidden:
        hide_outside(static, scores, count, begin, lane_table(static, call, scratch, LOW, panel),
                     lane_table(static, call, scratch, HIGH, panel), state)
    softmax_few(static, scores, count, hidden, state, call.unit)
    if static.general and call.threshold >= 0:
        drop_weights(
            static, scores, count, load_i64(segment + FIELD * K_INDEX) + begin,
            lane_table(static, call, scratch, QUERY, panel), lane_table(static, call, scratch, HEAD, panel),
            load_i64(segment + FIELD * SEQUENCE), call.seed, call.threshold, call.keep_factor)
    factors = state + ALPHA * width
    if not (edge or (static.general and call.may_hide != 0)):
        weigh_values(static, static.storage, scores, values, call.v_stride_n, count, call.value_dim, output,
                     call.row_width, factors, next_keys, call.k_stride_n, call.head_dim)
        return
    # Values that a query may not see: those that are not finite take a path of their own, see nonfinite.
    row = call.value_dim * static.size
    tile = scratch + call.at_values
    if not converted:
        pack_rows(static, static.storage, tile, row, values, call.v_stride_n, call.v_stride_d, count,
                  call.value_dim)
    multiply = tile
    dirty = not all_finite(static, tile, row, count, call.value_dim)
    if dirty:
        multiply = scratch + call.at_clean
        clean_values(static, multiply, tile, row, count, call.value_dim)
    if static.bits == 32:
        weigh_values(static, FLOAT32, scores, multiply, row, count, call.value_dim, output, call.row_width,
                     factors, multiply, row, call.value_dim)
    else:
        weigh_values(static, FLOAT64, scores, multiply, row, count, call.value_dim, output, call.row_width,
                     factors, multiply, row, call.value_dim)
    if dirty:
        last = call.value_dim - static.wide
        add_nonfinite_values(static, call, scratch, panel, scores, output, static.size, call.row_width, tile, row,
                             begin, count, 0, last)
        add_nonfinite_values(static, call, scratch, panel, scores, output + last_shift(static, call), static.size,
                             call.row_width, tile, row, begin, count, last, call.value_dim)


@helper
def combine_parts(static, call, scratch, panels, unit, parts, first):
    """Combine all parts of one KV head, in order, into state and output rows."""
    width = static.panel * static.size
    numbers = call.row_width // static.size
    for panel in range(panels):
        state = scratch + call.at_state + panel * STATE_PANELS * width
        for lane in range(static.panel):
            row = panel * static.panel + lane
            largest, total = -np.inf, 0.0
            output = scratch + call.at_rows + row * call.row_width
            fill(static, output, numbers, 0.0)
            for part in range(parts):
                slot = call.partials + ((first + part) * call.head_units + unit) * call.partial_bytes
                states = slot + panels * static.panel * call.row_width + 2 * row * static.size
                maximum, part_sum = load_own(static, states), load_own(static, states + static.size)
                new = max(largest, maximum)
                # Equal also where both are infinite, whose difference is NaN.
                old_factor = 1.0 if largest == new else math.exp((largest - new) * call.unit)
                new_factor = 1.0 if maximum == new else math.exp((maximum - new) * call.unit)
                total = total * old_factor + part_sum * new_factor
                largest = new
                combine_rows(static, output, slot + row * call.row_width, old_factor, new_factor, numbers)
            store_own(static, state + OLD_MAX * width + lane * static.size, largest)
            store_own(static, state + SUM * width + lane * static.size, total)


@helper
def leave_part(static, call, scratch, panels, job):
    """Keep the state and the output rows of one part until the others are there."""
    width = static.panel * static.size
    slot = call.partials + job * call.partial_bytes
    rows = panels * static.panel
    numbers = call.row_width // static.size
    for row in range(rows):
        target, state = slot + row * call.row_width, scratch + call.at_state
        fill(static, target, numbers, 0.0)
        combine_rows(static, target, scratch + call.at_rows + row * call.row_width, 0.0, 1.0, numbers)
        at = state + row // static.panel * STATE_PANELS * width + row % static.panel * static.size
        states = slot + rows * call.row_width + 2 * row * static.size
        store_own(static, states, load_own(static, at + OLD_MAX * width))
        store_own(static, states + static.size, load_own(static, at + SUM * width))


@helper
def finish_rows(static, call, scratch, panels):
    """Output rows to panels, and those to the arrays of the call."""
    width = static.panel * static.size
    shift = last_shift(static, call)
    for panel in range(panels):
        target = scratch + call.at_out + panel * call.value_dim * width
        for lane in range(static.panel):
            source = scratch + call.at_rows + (panel * static.panel + lane) * call.row_width
            for column in range(call.value_dim):
                at = source + column * static.size
                if column >= call.value_dim - static.wide:
                    at += shift
                store_own(static, target + column * width + lane * static.size, load_own(static, at))
        finish_panel(static, call, scratch, panel)


@helper
def decode_part(static, call, scratch, job):
    """One job: a part of the keys of one KV head."""
    entry = call.jobs + FIELD * JOB_COLUMNS * (job // call.head_units)
    unit = job % call.head_units
    segment_number, part = load_i64(entry), load_i64(entry + FIELD)
    parts, first = load_i64(entry + 2 * FIELD), load_i64(entry + 3 * FIELD)
    segment = call.segments + call.segment_bytes * segment_number
    q_length = load_i64(segment + FIELD * Q_LENGTH)
    k_length = load_i64(segment + FIELD * K_LENGTH)
    rows = q_length * call.group
    panels = (rows + static.panel - 1) // static.panel
    width = static.panel * static.size
    place_lanes(static, call, scratch, segment, segment_number, unit * call.group, 0, rows, panels * static.panel)
    for panel in range(panels):
        state = scratch + call.at_state + panel * STATE_PANELS * width
        fill(static, state, 2 * static.panel, -np.inf)
        fill(static, state + SUM * width, 2 * static.panel, 0.0)
        table = lane_table(static, call, scratch, Q_ROW, panel)
        for lane in range(static.panel):
            place_query(static, call, scratch + call.at_q + (panel * static.panel + lane) * call.q_width,
                        load_i64(table + FIELD * lane))
    fill(static, scratch + call.at_rows, panels * static.panel * (call.row_width // static.size), 0.0)

    low, all_low, all_high, high = visible_keys(0, q_length, k_length, load_i64(segment + FIELD * Q_OFFSET),
                                                call.left, call.right)
    batch, start = load_i64(segment + FIELD * K_BATCH), load_i64(segment + FIELD * K_START)
    k_rows = call.k + batch * call.k_stride_b + unit * call.k_stride_h + start * call.k_stride_n
    v_rows = call.v + batch * call.v_stride_b + unit * call.v_stride_h + start * call.v_stride_n
    tile = max(low, part * call.part_keys)
    stop = min(high, (part + 1) * call.part_keys)
    while tile < stop:
        tile_end = min(stop, tile + call.block_k)
        edge = tile < all_low or tile_end > all_high
        keys = k_rows + tile * call.k_stride_n
        next_keys = keys
        if tile_end < stop:
            next_keys += (tile_end - tile) * call.k_stride_n
        for panel in range(panels):
            attend_keys(static, call, scratch, segment, panel, tile, tile_end - tile, keys, next_keys,
                        v_rows + tile * call.v_stride_n, edge, panel > 0)
        tile = tile_end

    if parts > 1:
        leave_part(static, call, scratch, panels, job)
        if count_up(call.counters + FIELD * (segment_number * call.head_units + unit)) < parts:
            return
        combine_parts(static, call, scratch, panels, unit, parts, first)
    finish_rows(static, call, scratch, panels)


def decode(counter, calls, static):
    """Take jobs until none is left."""
    call = calls[0]
    memory = np.empty(call.scratch_bytes + 64, np.uint8)
    scratch = (memory.ctypes.data + 63) & ~63
    while True:
        job = fetch_add(counter.ctypes.data, 1)
        if job >= call.job_count:
            break
        decode_part(static, call, scratch, job)
    memory[0] = 0  # the kernel knows its scratch by address: keep it alive until here


kernel = Kernel(decode)
