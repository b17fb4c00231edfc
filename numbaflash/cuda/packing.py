"""Query heads of one group in one tile: where queries are few, k and v are then read once for all of them.

A packed block has slots of ``1 << shift`` rows, one to each head: row r is query ``r % slot`` of head ``r // slot`` of
the block.  Slots are powers of two of at least eight rows, so that the rows of one lane (eight apart) are told apart by
shifts.  The kernels ask the functions made here; without packing these are the identity, and cost nothing.
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import int32, int64

from numbaflash.cuda.inlining import device
from numbaflash.cuda.tiles import Place, divide
from numbaflash.problem import Problem
from numbaflash.segments import Q_LENGTH

SMALLEST = 8
"""Rows of the smallest slot."""


class Packing(NamedTuple):
    """How rows of a block are shared out.

    Attributes
    ----------
    shift : int
        A slot has ``1 << shift`` rows.
    members : int
        Heads of the block.
    """

    shift: np.int32
    members: np.int32


ONE_HEAD = Packing(np.int32(0), np.int32(1))
"""Without packing."""


def slot_shift(problem: Problem, block_q: int) -> int:
    """Shift of the slots where two or more heads of a group fit into `block_q` rows, else 0."""
    rows = int(problem.segments[:, Q_LENGTH].max(initial=0))
    shift = (max(rows, SMALLEST) - 1).bit_length()
    return shift if problem.group > 1 and 0 < rows and 2 << shift <= block_q else 0


def parts_of(group: int, block_q: int, shift: int) -> int:
    """Blocks that a group's heads fill."""
    return -(-group // (block_q >> shift))


def make_find_members(packed: bool, block_q: int) -> Callable:
    """``find_members(call, place) -> (place, packing)``: a block's first head, and how its rows are shared out."""

    @device
    def find_members(call, place):
        capacity = int32(block_q >> call.shift)
        parts = divide(call.group + capacity - 1, capacity)
        head = divide(place.head, parts)
        first = int32((place.head - head * parts) * capacity)
        return (Place(place.segment, int32(head * call.group + first), place.tile),
                Packing(call.shift, int32(min(capacity, call.group - first))))

    @device
    def one_head(call, place):
        return place, ONE_HEAD

    return find_members if packed else one_head


def make_split(packed: bool) -> Callable:
    """``split(row, packing) -> (query, member)``; rows behind the last member count as its own."""

    @device
    def split(row, packing):
        member = min(row >> packing.shift, packing.members - 1)
        return int32(row & ((1 << packing.shift) - 1)), int32(member)

    @device
    def whole(row, packing):
        return row, int32(0)

    return split if packed else whole


def make_row_place(packed: bool) -> Callable:
    """``row_place(target, row, row_stride, head_stride, count, packing) -> (address, exists)`` of a row of a block.

    `target` is the address of row 0 of the first head, of which `count` rows exist, as of all others.
    """

    @device
    def row_place(target, row, row_stride, head_stride, count, packing):
        query, member = int32(row & ((1 << packing.shift) - 1)), int32(row >> packing.shift)
        address = target + int64(query) * row_stride + int64(member) * head_stride
        return address, query < count and member < packing.members

    @device
    def plain(target, row, row_stride, head_stride, count, packing):
        return target + int64(row) * row_stride, row < count

    return row_place if packed else plain
