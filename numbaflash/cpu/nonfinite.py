"""NaN and infinity among values that some query may not see: the slow path of tiles that hold them.

Hidden keys have weight 0, but 0 times NaN is NaN. So the product is taken with such values replaced by 0, and each
of them is then added to the queries that do see its key.
"""

import numpy as np
from numba import types
from numba.extending import intrinsic

from .compile import helper
from .lanes import BIAS_ROW, HIGH, LOW, MASK_ROW, lane_table
from .simd import Lanes, load_f32, load_f64, load_i32, load_i64, load_u8, store_f32, store_f64, typed
from .storage import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, load_as_computed


@intrinsic(prefer_literal=True)
def load_number(typing_context, static, code, address):
    """One number stored as ``code`` (a literal), in the dtype computed in."""
    literal, code = code, code.literal_value

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        return load_as_computed(x, x.pointer(arguments[2]), code, 1)

    number = types.float32 if static["bits"] == 32 else types.float64
    return typed(number, static, literal, address), generate


@helper
def number_at(static, code, address):
    """One number of a dtype that is known at run time."""
    if code == FLOAT32:
        return load_number(static, FLOAT32, address)
    if code == FLOAT64:
        return load_number(static, FLOAT64, address)
    if code == FLOAT16:
        return load_number(static, FLOAT16, address)
    return load_number(static, BFLOAT16, address)


@helper
def lane_sees(static, call, scratch, panel, lane, key):
    """Whether one query sees one key, by band, length, mask and bias."""
    at = static.size * lane
    low = lane_table(static, call, scratch, LOW, panel) + at
    high = lane_table(static, call, scratch, HIGH, panel) + at
    if static.bits == 32:
        inside = load_i32(low) <= key < load_i32(high)
    else:
        inside = load_i64(low) <= key < load_i64(high)
    if inside and static.general:
        if call.mask:
            row = load_i64(lane_table(static, call, scratch, MASK_ROW, panel) + 8 * lane)
            inside = load_u8(row + key * call.mask_stride_k) != 0
        if inside and call.bias:
            row = load_i64(lane_table(static, call, scratch, BIAS_ROW, panel) + 8 * lane)
            inside = number_at(static, call.bias_code, row + key * call.bias_stride_k) != -np.inf
    return inside


@helper
def load_own(static, address):
    """A number of the dtype computed in."""
    if static.bits == 32:
        return np.float64(load_f32(address))
    return load_f64(address)


@helper
def store_own(static, address, value):
    """Store a number of the dtype computed in."""
    if static.bits == 32:
        store_f32(address, value)
    else:
        store_f64(address, value)


@helper
def clean_values(static, clean, values, row_stride, rows, columns):
    """Copy a tile of values with 0 in place of NaN and infinity."""
    for row in range(rows):
        for column in range(columns):
            value = load_own(static, values + row * row_stride + column * static.size)
            store_own(static, clean + (row * columns + column) * static.size, value if np.isfinite(value) else 0.0)


@helper
def add_nonfinite_values(
    static, call, scratch, panel, weights, output, column_step, lane_step, values, row_stride, key, count, low, high
):
    """Add weight times value for each value that is not finite, to the lanes that see its key.

    For the columns from ``low`` to ``high``; output of (column, lane) lies ``column_step`` and ``lane_step`` bytes apart.
    """
    width = static.panel * static.size
    for row in range(count):
        for column in range(low, high):
            value = load_own(static, values + row * row_stride + column * static.size)
            if np.isfinite(value):
                continue
            for lane in range(static.panel):
                if lane_sees(static, call, scratch, panel, lane, key + row):
                    weight = load_own(static, weights + row * width + lane * static.size)
                    at = output + column * column_step + lane * lane_step
                    store_own(static, at, load_own(static, at) + weight * value)
