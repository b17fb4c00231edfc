"""NaN and infinity among queries, keys or gradients that a pair hides from each other: the slow path of such tiles.

Hidden pairs have weight 0, but 0 times NaN is NaN: here the products leave them out, pair by pair.
"""

import numpy as np

from ..segments import Q_OFFSET
from .compile import helper
from .nonfinite import bias_at, load_own, store_own
from .simd import load_i64, load_u8


@helper
def pair_visible(static, call, number, head, query, key, position):
    """Whether a query sees a key, by band, mask and bias."""
    if not position - call.left <= key <= position + call.right:
        return False
    if static.general:
        if call.mask:
            at = call.mask + number * call.mask_b + head * call.mask_h + query * call.mask_q + key * call.mask_k
            if load_u8(at) == 0:
                return False
        if call.bias:
            at = call.bias + number * call.bias_b + head * call.bias_h + query * call.bias_q + key * call.bias_k
            return bias_at(static, call.bias_code, at) != -np.inf
    return True


@helper
def add_multiple(static, target, factor, source, columns):
    """``target += factor * source``, rows of adjacent numbers."""
    for column in range(columns):
        at = column * static.size
        store_own(static, target + at, load_own(static, target + at) + factor * load_own(static, source + at))


@helper
def add_visible_products(static, call, scratch, segment, number, head, first, rows, key, keys, dq):
    """dq, dk and dv of one tile from its (Z *) P and dS, visible pairs only."""
    size = static.size
    width = (call.head_dim + static.lanes - 1) // static.lanes * static.lanes * size
    value_width = (call.value_dim + static.lanes - 1) // static.lanes * static.lanes * size
    stride = (call.block_k + static.lanes) * size
    position = first + load_i64(segment + 8 * Q_OFFSET)
    for i in range(rows):
        for j in range(keys):
            if pair_visible(static, call, number, head, first + i, key + j, position + i):
                at = i * stride + j * size
                p, ds = load_own(static, scratch + call.at_scores + at), load_own(static, scratch + call.at_products + at)
                add_multiple(static, dq + i * width, ds, scratch + call.at_keys + j * width, call.head_dim)
                add_multiple(static, scratch + call.at_dk + j * width, ds, scratch + call.at_q + i * width, call.head_dim)
                add_multiple(static, scratch + call.at_dv + j * value_width, p,
                             scratch + call.at_dout + i * value_width, call.value_dim)
