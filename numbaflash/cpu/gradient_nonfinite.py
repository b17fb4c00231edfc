"""NaN and infinity among queries, keys or gradients that may be hidden: the slow path of their tiles.

Hidden pairs have weight 0, but 0 times NaN is NaN. So the products are taken with 0 in place of such numbers,
which leaves all others as they would be, and each of them is then added where its pair is visible.
"""

import numpy as np

from .compile import helper
from .nonfinite import load_own, number_at, store_own
from .simd import load_u8


@helper
def pair_visible(static, call, number, head, query, key, position):
    """Whether a query sees a key, by band, mask and bias."""
    if not position - call.left <= key <= position + call.right:
        return False
    if static.general:
        if call.mask:
            at = call.mask + number * call.mask_b + head * call.mask_h + query * call.mask_q
            at += key * call.mask_k
            if load_u8(at) == 0:
                return False
        if call.bias:
            at = call.bias + number * call.bias_b + head * call.bias_h + query * call.bias_q
            at += key * call.bias_k
            return number_at(static, call.bias_code, at) != -np.inf
    return True


@helper
def copy_finite(static, target, source, count):
    """Copy ``count`` adjacent numbers, with 0 in place of those that are not finite."""
    for i in range(0, count * static.size, static.size):
        value = load_own(static, source + i)
        store_own(static, target + i, value if np.isfinite(value) else 0.0)


@helper
def add_nonfinite_keys(static, call, scratch, number, head, first, rows, key, keys, position, width, dq):
    """Add ``dS * k`` for each number k of the keys that is not finite, to the queries that see its key."""
    stride = (call.block_k + static.lanes) * static.size
    for j in range(keys):
        for column in range(0, call.head_dim * static.size, static.size):
            value = load_own(static, scratch + call.at_kept_keys + j * width + column)
            if np.isfinite(value):
                continue
            for i in range(rows):
                if pair_visible(static, call, number, head, first + i, key + j, position + i):
                    ds = load_own(static, scratch + call.at_products + i * stride + j * static.size)
                    at = dq + i * width + column
                    store_own(static, at, load_own(static, at) + ds * value)


@helper
def add_nonfinite_queries(
    static, call, scratch, number, head, first, rows, key, keys, position, kept, width, columns, weights,
    target,
):
    """Add weight times value for each value of the queries that is not finite, to the keys its query sees.

    Values are q with weights dS for dk, and dout with weights P for dv.
    """
    stride = (call.block_k + static.lanes) * static.size
    for i in range(rows):
        for column in range(0, columns * static.size, static.size):
            value = load_own(static, kept + i * width + column)
            if np.isfinite(value):
                continue
            for j in range(keys):
                if pair_visible(static, call, number, head, first + i, key + j, position + i):
                    weight = load_own(static, weights + i * stride + j * static.size)
                    at = target + j * width + column
                    store_own(static, at, load_own(static, at) + weight * value)
