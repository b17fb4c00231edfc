"""What the backward kernel is made of besides vector code: products by panels, rows into tiles, look-ups."""

import numpy as np

from .compile import helper
from .gemm import gemm_add, gemm_set
from .gradient_stages import combine_rows
from .simd import load_f32, load_f64, load_i64, store_f32, store_f64, store_i64
from .storage import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from .tiles import fill, pack_panel, pack_rows


@helper
def load_float(static, address):
    """A number of the dtype computed in, as float64."""
    if static.bits == 32:
        return np.float64(load_f32(address))
    return load_f64(address)


@helper
def store_float(static, address, value):
    """Round a float64 to the dtype computed in."""
    if static.bits == 32:
        store_f32(address, np.float32(value))
    else:
        store_f64(address, value)


@helper
def find(starts, count, value):
    """The last i of ``count`` with ``starts[i] <= value``, in a table of rising int64."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if load_i64(starts + 8 * middle) <= value:
            low = middle
        else:
            high = middle
    return low


@helper
def whole_rows(static, rows):
    """Rounded up to what the microkernel takes at once."""
    return (rows + static.rows - 1) // static.rows * static.rows


@helper
def padded(static, columns):
    """Rounded up to whole vectors."""
    return (columns + static.lanes - 1) // static.lanes * static.lanes


@helper
def row_width(static, columns):
    """Numbers from row to row of a tile: a spare vector spreads a column over the sets of the cache."""
    return padded(static, columns) + static.lanes


# --------------------------------------------------------------------------------------------------- products


@helper
def multiply(wide, narrow, a, a_row, b, b_row, c, c_row, rows, inner, columns, ahead, share):
    """C = A B for one panel of B; A has adjacent columns. Each row asks for ``share`` bytes of what is ``ahead``."""
    if columns > narrow.lanes:
        gemm_set(wide, a, a_row, wide.size, b, b_row, c, c_row, rows, inner, 0, ahead, share, share)
    else:
        gemm_set(narrow, a, a_row, narrow.size, b, b_row, c, c_row, rows, inner, 0, ahead, share, share)


@helper
def multiply_add(wide, narrow, a, a_row, a_column, b, c, stride, rows, inner, columns, ahead, ahead_row):
    """C += A B for B and C with adjacent columns and one row stride; the panels share what is asked for."""
    share = ahead_row * wide.panel // columns
    done = 0
    while columns - done > narrow.lanes:
        at = done * wide.size
        gemm_add(wide, a, a_row, a_column, b + at, stride, c + at, stride, rows, inner, 0, ahead, share, share)
        ahead += rows * share
        done += wide.panel
    if done < columns:
        at = done * narrow.size
        gemm_add(narrow, a, a_row, a_column, b + at, stride, c + at, stride, rows, inner, 0, ahead, share, share)


# -------------------------------------------------------------------------------------------- rows and tables


@helper
def clear_padding(static, tile, rows, columns, all_rows):
    """Zeros where a tile of ``rows`` x ``columns`` is padded to whole vectors and to ``all_rows``."""
    width = row_width(static, columns)
    if padded(static, columns) > columns:
        fill(static, tile, rows * width, 0.0)
    fill(static, tile + rows * width * static.size, (all_rows - rows) * width, 0.0)
    return width * static.size


@helper
def load_inputs(static, tile, source, row_stride, column_stride, rows, columns, all_rows):
    """Convert rows of an array of q's dtype into a tile of whole vectors, zeros in the padding."""
    stride = clear_padding(static, tile, rows, columns, all_rows)
    pack_rows(static, static.storage, tile, stride, source, row_stride, column_stride, rows, columns)


@helper
def load_outputs(static, code, tile, source, row_stride, column_stride, rows, columns, all_rows):
    """The same for out and dout, which may have another dtype."""
    stride = clear_padding(static, tile, rows, columns, all_rows)
    if code == FLOAT32:
        pack_rows(static, FLOAT32, tile, stride, source, row_stride, column_stride, rows, columns)
    elif code == FLOAT64:
        pack_rows(static, FLOAT64, tile, stride, source, row_stride, column_stride, rows, columns)
    elif code == FLOAT16:
        pack_rows(static, FLOAT16, tile, stride, source, row_stride, column_stride, rows, columns)
    else:
        pack_rows(static, BFLOAT16, tile, stride, source, row_stride, column_stride, rows, columns)


@helper
def load_keys(static, call, scratch, panels, rows, row_stride, columns, column_stride, count):
    """Transpose ``count`` rows into panels with the rows in their lanes."""
    table = scratch + call.at_rows
    lanes = (count + static.panel - 1) // static.panel * static.panel
    for lane in range(lanes):
        store_i64(table + 8 * lane, rows + min(lane, count - 1) * row_stride)
    for first in range(0, lanes, static.panel):
        pack_panel(static, static.storage, panels + first * columns * static.size, table + 8 * first, columns,
                   column_stride, 1.0)


@helper
def add_bias(static, code, scores, stride, rows, columns, bias, bias_row, bias_column):
    """Add a tile of bias of any dtype."""
    if code == FLOAT32:
        combine_rows(static, FLOAT32, scores, stride, rows, columns, bias, bias_row, bias_column)
    elif code == FLOAT64:
        combine_rows(static, FLOAT64, scores, stride, rows, columns, bias, bias_row, bias_column)
    elif code == FLOAT16:
        combine_rows(static, FLOAT16, scores, stride, rows, columns, bias, bias_row, bias_column)
    else:
        combine_rows(static, BFLOAT16, scores, stride, rows, columns, bias, bias_row, bias_column)


@helper
def statistics_of(static, call, which, head, tile_row):
    """Address of one of the numbers that are kept per row and head."""
    return call.statistics + ((which * call.heads + head) * call.row_count + tile_row) * static.size
