"""Which tile of which head of which sequence a block computes, and which keys its rows see.

Plain functions of integers, compiled for the device.
"""
from typing import NamedTuple

import numpy as np
from numba import int32, int64, uint32

from numbaflash import segments as seg
from numbaflash import visibility
from numbaflash.cuda import ptx
from numbaflash.cuda.arguments import LARGEST
from numbaflash.cuda.inlining import device
from numbaflash.cuda.plan import Pointer
from numbaflash.jit import compile_plain

tile_range = compile_plain(visibility.tile_range, device)

SEGMENT_BYTES = 8 * seg.COLUMNS
Q_BATCH, Q_START, Q_LENGTH, K_BATCH, K_START, K_LENGTH, Q_OFFSET, Q_INDEX, K_INDEX, SEQUENCE = (
    8 * column for column in range(seg.COLUMNS))
L2_BYTES = 16 << 20
"""How much of k and v the blocks that run at one time may be spread over: well inside any L2 cache."""


class Place(NamedTuple):
    """What a block works on."""

    segment: np.int32
    head: np.int32
    tile: np.int32


class Segment(NamedTuple):
    """One sequence, seen by one head.

    Attributes
    ----------
    q, k, v : int
        Addresses of row 0, column 0 of the head.
    q_length, k_length : int
    first, last, offset : int
        Row i stands at key position ``i + offset``, and
        sees the keys j with ``i + first <= j <= i + last`` (and 0 <= j < k_length).
    """

    q: np.int64
    k: np.int64
    v: np.int64
    q_length: np.int32
    k_length: np.int32
    first: np.int32
    last: np.int32
    offset: np.int32


# --- the grid ---------------------------------------------------------------------------------------------


@device
def divide(a, b):
    """a // b of numbers that are not negative, in 32 bits: 64-bit division is a function call on a GPU."""
    return int32(uint32(a) // uint32(b))


@device
def locate(call, block):
    """The `Place` of a block.

    Without a work list the blocks run through groups of `chunk` units; within a group the last tile of every unit
    comes first, then the one before: under a causal mask the heavy tiles start early and the light ones fill the
    end, while the k and v of one group stay in the L2 cache.
    """
    if call.work != 0:
        item = divide(block, call.heads)
        pair = call.work + 8 * int64(item)
        segment, head, tile = ptx.ld_global_nc_s32(pair), block - item * call.heads, ptx.ld_global_nc_s32(pair + 4)
        return Place(int32(segment), int32(head), int32(tile))
    group = divide(block, call.tiles * call.chunk)
    within = block - group * call.tiles * call.chunk
    size = min(call.chunk, call.units - group * call.chunk)
    step = divide(within, size)
    unit = group * call.chunk + within - step * size
    segment = divide(unit, call.heads)
    return Place(int32(segment), int32(unit - segment * call.heads), int32(call.tiles - 1 - step))


def fill_grid(call, table: np.ndarray, block_rows: int, kv_bytes: int):
    """Complete a `Call` with its grid of query tiles.

    Parameters
    ----------
    call : Call
    table : ndarray
        The segments.
    block_rows : int
        Rows of a tile.
    kv_bytes : int
        Bytes of k and v that one unit reads.

    Returns
    -------
    call : Call
    blocks : int
    """
    rows = table[:, seg.Q_LENGTH]
    counts = -(-rows // block_rows)
    tiles = int(counts.max(initial=0))
    units = len(table) * call.heads
    if (counts == tiles).all():
        open_band = call.left >= visibility.UNBOUNDED and call.right >= visibility.UNBOUNDED
        chunk = 1 if open_band else max(1, min(units, L2_BYTES // max(kv_bytes, 1)))
        return call._replace(tiles=tiles, units=units, chunk=chunk), tiles * units
    segment = np.repeat(np.arange(len(table)), counts)
    tile = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    work = np.stack([segment, tile], 1)[np.argsort(-_weights(call, table, segment, tile, block_rows), kind="stable")]
    return call._replace(work=Pointer(work.astype(np.int32))), len(work) * call.heads


def _weights(call, table, segment, tile, block_rows):
    """Keys that some row of each tile sees: how long its block takes."""
    row_lo = tile * block_rows
    row_hi = np.minimum(row_lo + block_rows, table[segment, seg.Q_LENGTH])
    offset, length = table[segment, seg.Q_OFFSET], table[segment, seg.K_LENGTH]
    return np.minimum(length, row_hi + offset + call.right) - np.maximum(0, row_lo + offset - call.left)


# --- sequences --------------------------------------------------------------------------------------------


@device
def column(call, place, at):
    """A number of the segment table."""
    return ptx.ld_global_nc_s64(call.segments + SEGMENT_BYTES * int64(place.segment) + at)


@device
def row_zero(tensor, batch, head, row):
    """Address of column 0 of a row."""
    return tensor.pointer + batch * tensor.batch + head * tensor.head + row * tensor.row


@device
def query_rows(call, tensor, place):
    """Address of row 0 of a place in an array that lies like q."""
    return row_zero(tensor, column(call, place, Q_BATCH), int64(place.head), column(call, place, Q_START))


@device
def pair_row(tensor, place, row):
    """Address of a row of a place in an array that is indexed by segment (bias, mask)."""
    return row_zero(tensor, int64(place.segment), int64(place.head), int64(row))


@device
def clamp(value, lo, hi):
    return min(max(value, lo), hi)


@device
def load_segment(call, place):
    """The `Segment` of a place."""
    offset = column(call, place, Q_OFFSET)
    k_batch, k_start = column(call, place, K_BATCH), column(call, place, K_START)
    head = int64(place.head)
    kv_head = int64(divide(head, call.group))
    return Segment(
        query_rows(call, call.q, place),
        row_zero(call.k, k_batch, kv_head, k_start),
        row_zero(call.v, k_batch, kv_head, k_start),
        int32(column(call, place, Q_LENGTH)),
        int32(column(call, place, K_LENGTH)),
        int32(clamp(offset - call.left, -LARGEST, LARGEST)),
        int32(clamp(offset + call.right, -LARGEST, LARGEST)),
        int32(offset),
    )


@device
def tiles_seen(segment, row_lo, row_hi, block):
    """`visibility.tile_range` of rows of a segment."""
    return tile_range(row_lo, min(row_hi, segment.q_length), block, segment.k_length, 0,
                      -segment.first, segment.last)
