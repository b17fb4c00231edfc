"""The backward kernel: FlashAttention-2 (Dao, 2023, algorithm 2) with keys in vector lanes.

A job is one block of keys of one KV head. K and V are packed once per job, q and dout once per call; then the
tiles of queries that see the block pass by, those of all heads of the group one after the other:

    S = Q K^T,  dP = dO V^T,  P and dS from them,  dQ += dS K,  dV += P^T dO,  dK += dS^T Q

Every product has the numbers of its left factor broadcast and vectors of its right factor as they lie. dK and
dV stay with the job. dQ of a tile is summed over the blocks in falling order, whoever computes them: each
block waits for its turn at the tile, and since jobs begin in that order too, the wait is for a job that runs
already. So several cores can work on one head, no partial sums are kept, and the bits do not depend on the
number of threads. The blocks of a KV head are a *strand*: a thread keeps to its own, whose q, dout and dq then
stay in its cache, and helps with those of others when none is left.

Jobs below ``tile_jobs`` come first and prepare a tile of queries each: q and dout in rows of whole vectors, lse,
delta and what sinks need.
"""

import math

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import from_dtype

from ..jit import compile_plain
from ..segments import (
    K_BATCH, K_INDEX, K_LENGTH, K_START, Q_BATCH, Q_INDEX, Q_LENGTH, Q_OFFSET, Q_START, SEQUENCE,
)
from ..visibility import tile_range, visible_range
from .compile import HELPER_OPTIONS, Kernel, helper
from .gradient_call import GRADIENT_CALL
from .gradient_nonfinite import add_nonfinite_keys, add_nonfinite_queries, copy_finite
from .gradient_rows import (
    add_bias, find, load_float, load_inputs, load_keys, load_outputs, multiply, multiply_add, padded,
    row_width, statistics_of, store_float, whole_rows,
)
from .gradient_stages import alibi_rows, cap_scores, combine_rows, hide_outside_band, keep_factors
from .gradient_tile import (
    add_tile, dot, dropped_weights, edge_weights, multiply_tile, row_sum, scale_tile, staged_weights,
    store_rows, weights,
)
from .ordering import publish, publish_one_more, wait_for
from .simd import fetch_add, load_f64, load_i64, store_f64
from .storage import BOOLEAN
from .tiles import all_finite, fill

# Numba optimises a function anew in every function that calls it: what is called once is better part of its
# caller.
part = numba.njit(inline="always", **HELPER_OPTIONS)

FIELD = 8
SEGMENT = 80  # bytes of a row of the segment table
LSE, DELTA = range(2)
STATISTICS = 2  # numbers kept per row and head

visible = compile_plain(visible_range, numba.njit(**HELPER_OPTIONS))
tiles_seen = compile_plain(tile_range, numba.njit(**HELPER_OPTIONS))


# -------------------------------------------------------------------------------------- the jobs that prepare


@part
def prepare_tile(static, call, scratch, job):
    """q, dout, lse (+inf where nothing is seen), delta, what sinks need; dq of a tile that sees nothing is 0."""
    head = job % call.heads
    tile = job // call.heads
    number = find(call.tile_starts, call.segment_count, tile)
    segment = call.segments + SEGMENT * number
    first = (tile - load_i64(call.tile_starts + 8 * number)) * call.block_q
    q_length = load_i64(segment + FIELD * Q_LENGTH)
    rows = min(call.block_q, q_length - first)
    batch, start = load_i64(segment + FIELD * Q_BATCH), load_i64(segment + FIELD * Q_START)
    row, tile_row = start + first, load_i64(call.row_starts + 8 * number) + first

    q, dout = packed_q(static, call, head, tile_row), packed_dout(static, call, head, tile_row)
    out = scratch + call.at_dout
    load_inputs(static, q, call.q + batch * call.q_b + head * call.q_h + row * call.q_n, call.q_n, call.q_d,
                rows, call.head_dim, whole_rows(static, rows))
    # As the forward pass scales them, so that rounding gives the very scores that lse was made of.
    scale_tile(static, q, row_width(static, call.head_dim) * static.size, rows, padded(static, call.head_dim),
               call.q_factor)
    stride = row_width(static, call.value_dim) * static.size
    load_outputs(static, call.out_code, dout,
                 call.dout + batch * call.dout_b + head * call.dout_h + row * call.dout_n,
                 call.dout_n, call.dout_d, rows, call.value_dim, whole_rows(static, rows))
    load_outputs(static, call.out_code, out,
                 call.out + batch * call.out_b + head * call.out_h + row * call.out_n,
                 call.out_n, call.out_d, rows, call.value_dim, rows)
    lse_row = call.lse + batch * call.lse_b + head * call.lse_h + row * call.lse_n
    dlse_row = call.dlse + batch * call.dlse_b + head * call.dlse_h + row * call.dlse_n
    lse_at = statistics_of(static, call, LSE, head, tile_row)
    delta_at = statistics_of(static, call, DELTA, head, tile_row)
    sink_sum = 0.0
    for i in range(rows):
        lse = load_float(static, lse_row + i * call.lse_n)
        delta = dot(static, dout + i * stride, out + i * stride, padded(static, call.value_dim))
        if call.dlse:
            delta -= load_float(static, dlse_row + i * call.dlse_n)
        if call.sinks and lse != -np.inf:
            sink_sum -= math.exp(load_f64(call.sinks + 8 * head) - lse) * delta
        at = i * static.size
        store_float(static, delta_at + at, delta)
        if lse == -np.inf:  # the weights exp(s - lse) of a row that sees nothing shall be 0, not infinite
            lse = np.inf
        store_float(static, lse_at + at, lse)
    if call.sinks:
        store_f64(call.sink_sums + 8 * (tile * call.heads + head), sink_sum)

    low, _, _, high = visible(first, first + rows, load_i64(segment + FIELD * K_LENGTH),
                              load_i64(segment + FIELD * Q_OFFSET), call.left, call.right)
    if low >= high:
        zeros = scratch + call.at_q
        fill(static, zeros, rows * row_width(static, call.head_dim), 0.0)
        store_dq(static, call, batch, head, row, zeros, rows)


@helper
def packed_q(static, call, head, tile_row):
    """Where the rows of a tile of q lie, packed and scaled."""
    return call.packed_q + (head * call.row_count + tile_row) * row_width(static, call.head_dim) * static.size


@helper
def packed_dout(static, call, head, tile_row):
    """Where the rows of a tile of dout lie, packed."""
    return call.packed_dout + (head * call.row_count + tile_row) * row_width(static, call.value_dim) * static.size


@helper
def store_dq(static, call, batch, head, row, tile, rows):
    """Scale, round and write a tile of dq."""
    store_rows(static, static.storage, call.dq + batch * call.dq_b + head * call.dq_h + row * call.dq_n,
               call.dq_n, call.dq_d, tile, row_width(static, call.head_dim) * static.size, rows,
               call.head_dim, call.scale)


# ------------------------------------------------------------------------------- one tile of queries and keys


@part
def make_weights(static, call, scratch, segment, number, head, tile_row, first, rows, key, keys, edge):
    """Turn scores and products of a tile into (Z *) P and dS, through the stages of a non-empty Score."""
    scores, products = scratch + call.at_scores, scratch + call.at_products
    stride = row_width(static, call.block_k) * static.size
    columns = padded(static, keys)
    offset = load_i64(segment + FIELD * Q_OFFSET)
    low = first + offset - call.left - key
    high = first + offset + call.right + 1 - key
    lse = statistics_of(static, call, LSE, head, tile_row)
    delta = statistics_of(static, call, DELTA, head, tile_row)
    if not static.general:
        if edge:
            edge_weights(static, scores, products, stride, rows, columns, lse, delta, call.unit, low, high)
        else:
            weights(static, scores, products, stride, rows, columns, lse, delta, call.unit, 0, 0)
        return
    if call.softcap > 0:
        cap_scores(static, scores, scratch + call.at_derivatives, stride, rows, columns, call.softcap)
    if call.bias:
        add_bias(static, call.bias_code, scores, stride, rows, keys,
                 call.bias + number * call.bias_b + head * call.bias_h + first * call.bias_q
                 + key * call.bias_k,
                 call.bias_q, call.bias_k)
    if call.alibi:
        slope = load_f64(call.alibi + number * call.alibi_b + head * call.alibi_h)
        alibi_rows(static, scores, stride, rows, columns, first + offset - key, slope)
    if call.mask:
        combine_rows(static, BOOLEAN, scores, stride, rows, keys,
                     call.mask + number * call.mask_b + head * call.mask_h + first * call.mask_q
                     + key * call.mask_k,
                     call.mask_q, call.mask_k)
    if edge:
        hide_outside_band(static, scores, stride, rows, columns, low, high)
    if call.threshold >= 0:
        keep = scratch + call.at_keep
        keep_factors(static, keep, stride, rows, columns, load_i64(segment + FIELD * Q_INDEX) + first,
                     load_i64(segment + FIELD * K_INDEX) + key, call.head_origin + head,
                     load_i64(segment + FIELD * SEQUENCE), call.seed, call.threshold, call.keep_factor)
        dropped_weights(static, scores, products, keep, stride, rows, columns, lse, delta)
    else:
        staged_weights(static, scores, products, 0, stride, rows, columns, lse, delta)


@part
def add_bias_gradient(static, call, scratch, number, head, first, rows, key, keys):
    """dS of a tile joins the gradient of the bias, or the sums over queries that its shape asks for."""
    products = scratch + call.at_products
    stride = row_width(static, call.block_k) * static.size
    if call.dbias:
        target = call.dbias + number * call.dbias_b + head * call.dbias_h + first * call.dbias_q
        target += key * static.size
        add_tile(static, target, call.dbias_q, products, stride, rows, keys)
    elif call.column_sums:
        partial = scratch + call.at_column_sum
        fill(static, partial, call.block_k, 0.0)
        add_tile(static, partial, 0, products, stride, rows, keys)
        target = call.column_sums + ((number * call.heads + head) * call.key_extent + key) * 8
        for k in range(keys):
            total = load_f64(target + 8 * k) + load_float(static, partial + k * static.size)
            store_f64(target + 8 * k, total)


@part
def add_row_sums(static, call, scratch, number, head, tile_row, rows, keys):
    """Sums of dS over keys, for a bias that is the same for all keys; at the tile's turn."""
    stride = row_width(static, call.block_k) * static.size
    target = call.row_sums + 8 * (head * call.row_count + tile_row)
    for i in range(rows):
        total = row_sum(static, scratch + call.at_products + i * stride, keys)
        store_f64(target + 8 * i, load_f64(target + 8 * i) + total)


@helper
def differentiate_tile(
    static, wide, narrow, call, scratch, segment, number, head, tile, key, keys, block, keys_finite, last
):
    """All that one tile of queries of one head and one block of keys have to do with each other."""
    size = static.size
    q_length, k_length = load_i64(segment + FIELD * Q_LENGTH), load_i64(segment + FIELD * K_LENGTH)
    offset = load_i64(segment + FIELD * Q_OFFSET)
    batch, start = load_i64(segment + FIELD * Q_BATCH), load_i64(segment + FIELD * Q_START)
    first = tile * call.block_q
    rows = min(call.block_q, q_length - first)
    all_rows = whole_rows(static, rows)
    _, all_low, all_high, _ = visible(key, key + keys, q_length, -offset, call.right, call.left)
    edge = first < all_low or first + rows > all_high

    q_stride, v_stride = row_width(static, call.head_dim) * size, row_width(static, call.value_dim) * size
    stride = row_width(static, call.block_k) * size
    tile_row = load_i64(call.row_starts + 8 * number) + first
    q, dout = packed_q(static, call, head, tile_row), packed_dout(static, call, head, tile_row)
    scores, products = scratch + call.at_scores, scratch + call.at_products

    # The next tile's rows of q, dout and dq are asked for during the products: of a long sequence they are in no
    # cache of the core.
    following = 0 if last else call.block_q
    panels = (keys + static.panel - 1) // static.panel
    q_ahead, dout_ahead = q + following * q_stride, dout + following * v_stride
    q_share, dout_share = min(following, 1) * q_stride // panels, min(following, 1) * v_stride // panels

    # At an edge the products leave out what no query of a group of rows, or no key of a panel, has to do
    # with.
    for panel in range(0, keys, static.panel):
        columns = min(static.panel, keys - panel)
        low, high = 0, all_rows
        if edge:
            low, high = rows_seen(static, call, first, rows, key + panel, columns, q_length, offset)
        at = panel * call.head_dim * size
        multiply(wide, narrow, q + low * q_stride, q_stride, scratch + call.at_k_lanes + at,
                 static.panel * size, scores + low * stride + panel * size, stride, high - low,
                 call.head_dim, columns, q_ahead, q_share)
        q_ahead += all_rows * q_share
        at = panel * call.value_dim * size
        multiply(wide, narrow, dout + low * v_stride, v_stride, scratch + call.at_v_lanes + at,
                 static.panel * size, products + low * stride + panel * size, stride, high - low,
                 call.value_dim, columns, dout_ahead, dout_share)
        dout_ahead += all_rows * dout_share

    make_weights(static, call, scratch, segment, number, head, tile_row, first, rows, key, keys, edge)
    if static.general:
        add_bias_gradient(static, call, scratch, number, head, first, rows, key, keys)

    # Hidden pairs have weight 0, yet 0 * NaN is NaN: tiles that hold such numbers take a path of their own.
    finite = True
    if edge or call.may_hide:
        finite = (all_finite(static, q, q_stride, rows, call.head_dim)
                  and all_finite(static, dout, v_stride, rows, call.value_dim))
    finite_q, finite_dout = q, dout
    if not finite:
        finite_q, finite_dout = scratch + call.at_q, scratch + call.at_dout
        copy_finite(static, finite_q, q, rows * row_width(static, call.head_dim))
        copy_finite(static, finite_dout, dout, rows * row_width(static, call.value_dim))

    block_low, _, _, block_high = tiles_seen(first, first + rows, call.block_k, k_length, offset,
                                             call.left, call.right)
    begins, ends = block == block_high - 1, block == block_low
    turn = call.turns + 8 * (1 + (load_i64(call.tile_starts + 8 * number) + tile) * call.heads + head)
    dq = call.sums + (head * call.row_count + tile_row) * q_stride
    if begins and ends:
        dq = scratch + call.at_dq
    else:
        wait_for(turn, block_high - 1 - block)
    if begins:
        fill(static, dq, all_rows * row_width(static, call.head_dim), 0.0)
    if static.general and call.row_sums:
        add_row_sums(static, call, scratch, number, head, tile_row, rows, keys)
    if static.general and call.softcap > 0:
        multiply_tile(static, products, scratch + call.at_derivatives, stride, rows, padded(static, keys))
    step = static.rows if edge else call.block_q
    for i in range(0, rows, step):
        count = min(step, all_rows - i)
        low, high = 0, keys
        if edge:
            low, _, _, high = visible(first + i, first + min(i + count, rows), k_length, offset,
                                      call.left, call.right)
            low, high = max(low - key, 0), min(high - key, keys)
        if low < high:
            multiply_add(wide, narrow, products + i * stride + low * size, stride, size,
                         scratch + call.at_keys + low * q_stride, dq + i * q_stride, q_stride,
                         count, high - low, padded(static, call.head_dim),
                         dq + (following + i) * q_stride, min(following, 1) * q_stride)
    if not keys_finite:
        add_nonfinite_keys(static, call, scratch, number, head, first, rows, key, keys, first + offset,
                           q_stride, dq)
    if ends:
        store_dq(static, call, batch, head, start + first, dq, rows)
    publish(turn, block_high - block)

    dk, dv = scratch + call.at_dk, scratch + call.at_dv
    step = static.rows if edge else call.block_k
    all_keys = whole_rows(static, keys)
    for i in range(0, keys, step):
        count = min(step, all_keys - i)
        low, high = 0, rows
        if edge:
            low, _, _, high = visible(key + i, key + min(i + count, keys), q_length, -offset,
                                      call.right, call.left)
            low, high = max(low - first, 0), min(high - first, rows)
        if low < high:
            at = low * stride + i * size
            multiply_add(wide, narrow, scores + at, size, stride, finite_dout + low * v_stride, dv + i * v_stride,
                         v_stride, count, high - low, padded(static, call.value_dim), 0, 0)
            multiply_add(wide, narrow, products + at, size, stride, finite_q + low * q_stride, dk + i * q_stride,
                         q_stride, count, high - low, padded(static, call.head_dim), 0, 0)
    if not finite:
        add_nonfinite_queries(static, call, scratch, number, head, first, rows, key, keys, first + offset,
                              dout, v_stride, call.value_dim, scores, dv)
        add_nonfinite_queries(static, call, scratch, number, head, first, rows, key, keys, first + offset,
                              q, q_stride, call.head_dim, products, dk)


@helper
def rows_seen(static, call, first, rows, key, keys, q_length, offset):
    """Rows of a tile that see some of the keys, as whole blocks of the microkernel."""
    low, _, _, high = visible(key, key + keys, q_length, -offset, call.right, call.left)
    low, high = max(low - first, 0), min(high - first, rows)
    if low >= high:
        return 0, 0
    return low // static.rows * static.rows, whole_rows(static, high)


# ------------------------------------------------------------------------------------------ one block of keys


@part
def differentiate_block(static, wide, narrow, call, scratch, number, kv_head, block):
    """dk and dv of one block of keys, and its part of dq."""
    segment = call.segments + SEGMENT * number
    k_length = load_i64(segment + FIELD * K_LENGTH)
    key = block * call.block_k
    keys = min(call.block_k, k_length - key)
    batch, start = load_i64(segment + FIELD * K_BATCH), load_i64(segment + FIELD * K_START) + key
    k_stride = row_width(static, call.head_dim) * static.size
    v_stride = row_width(static, call.value_dim) * static.size
    dk, dv = scratch + call.at_dk, scratch + call.at_dv
    all_keys = whole_rows(static, keys)
    fill(static, dk, all_keys * row_width(static, call.head_dim), 0.0)
    fill(static, dv, all_keys * row_width(static, call.value_dim), 0.0)
    low, _, _, high = tiles_seen(
        key, key + keys, call.block_q, load_i64(segment + FIELD * Q_LENGTH),
        -load_i64(segment + FIELD * Q_OFFSET), call.right, call.left)
    if low < high:
        k_rows = call.k + batch * call.k_b + kv_head * call.k_h + start * call.k_n
        v_rows = call.v + batch * call.v_b + kv_head * call.v_h + start * call.v_n
        load_keys(static, call, scratch, scratch + call.at_k_lanes, k_rows, call.k_n, call.head_dim, call.k_d,
                  keys)
        load_keys(static, call, scratch, scratch + call.at_v_lanes, v_rows, call.v_n, call.value_dim,
                  call.v_d, keys)
        load_inputs(static, scratch + call.at_keys, k_rows, call.k_n, call.k_d, keys, call.head_dim, keys)
        finite = all_finite(static, scratch + call.at_keys, k_stride, keys, call.head_dim)
        if not finite:
            kept_keys = scratch + call.at_kept_keys
            load_inputs(static, kept_keys, k_rows, call.k_n, call.k_d, keys, call.head_dim, keys)
            copy_finite(static, scratch + call.at_keys, kept_keys, keys * row_width(static, call.head_dim))
        for head in range(kv_head * call.group, (kv_head + 1) * call.group):
            for tile in range(low, high):
                differentiate_tile(static, wide, narrow, call, scratch, segment, number, head, tile, key,
                                   keys, block, finite, tile == high - 1)
    store_rows(static, static.storage, call.dk + batch * call.dk_b + kv_head * call.dk_h + start * call.dk_n,
               call.dk_n, call.dk_d, dk, k_stride, keys, call.head_dim, call.dk_factor)
    store_rows(static, static.storage, call.dv + batch * call.dv_b + kv_head * call.dv_h + start * call.dv_n,
               call.dv_n, call.dv_d, dv, v_stride, keys, call.value_dim, 1.0)


@helper
def take_block(call, strand):
    """A block that nobody has taken, and its strand: the thread's own, else a new one, else one of the last.

    Whoever asks has a job, and there are as many blocks as jobs.
    """
    while True:
        if strand >= 0:
            unit = strand // (call.kv_heads // call.heads_per_unit)
            blocks = load_i64(call.block_starts + 8 * (unit + 1)) - load_i64(call.block_starts + 8 * unit)
            taken = fetch_add(call.taken + 8 * (1 + strand), 1)
            if taken < blocks:
                return strand, blocks - 1 - taken
        begun = fetch_add(call.taken, 1)
        strand = begun if begun < call.strands else call.strands - 1 - begun % call.strands


def differentiate(counter, calls, wide, narrow, static):
    """Take jobs until none is left."""
    call = calls[0]
    queue = counter.ctypes.data
    memory = np.empty(call.scratch_bytes + 64, np.uint8)
    scratch = (memory.ctypes.data + 63) & ~63
    job = fetch_add(queue, 1)
    while job < call.tile_jobs:
        prepare_tile(static, call, scratch, job)
        publish_one_more(call.turns)
        job = fetch_add(queue, 1)
    if job < call.job_count:
        wait_for(call.turns, call.tile_jobs)
    strand = -1
    while job < call.job_count:
        strand, block = take_block(call, strand)
        # Sequences and heads that share a bias are one strand, which sums its gradient in order; else there is
        # one each.
        units = call.kv_heads // call.heads_per_unit
        first_segment, first_head = strand // units * call.segments_per_unit, strand % units * call.heads_per_unit
        for number in range(first_segment, first_segment + call.segments_per_unit):
            k_length = load_i64(call.segments + SEGMENT * number + FIELD * K_LENGTH)
            if block * call.block_k < k_length:
                for kv_head in range(first_head, first_head + call.heads_per_unit):
                    differentiate_block(static, wide, narrow, call, scratch, number, kv_head, block)
        job = fetch_add(queue, 1)
    memory[0] = 0  # the kernel knows its scratch by address: keep it alive until here


kernel = Kernel(differentiate)
ARGUMENTS = (types.int64[::1], types.Array(from_dtype(GRADIENT_CALL), 1, "C"))
