"""The numbers of one call as a record: what kernels read besides the arrays themselves."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Operand

ARRAYS = {
    "q": "bhnd", "k": "bhnd", "v": "bhnd", "out": "bhnd", "lse": "bh", "bias": "bhqk", "mask": "bhqk",
    "alibi": "bh", "sinks": "", "segments": "", "jobs": "",
}
"""Arrays that a kernel reads or writes, and the letters of their strides."""


class Plan(NamedTuple):
    """How a call of some shape runs: tile sizes and offsets into scratch. The same for many calls.

    Attributes
    ----------
    head_dim, value_dim, group : int
    packed_heads : bool
        The rows of a block are the queries of all heads of a KV group, head by head.
    head_units : int
        Units of work in one sequence: heads, or KV heads where heads are packed.
    block_q, block_k : int
        Rows of a block, keys of a tile.
    k_in_place, v_in_place : bool
        Products read K (V) where it lies; otherwise tiles of it are converted into scratch.
    scratch_bytes, at_q, ... : int
        Scratch of one thread.
    """

    head_dim: int
    value_dim: int
    group: int
    packed_heads: bool
    head_units: int
    block_q: int
    block_k: int
    k_in_place: bool
    v_in_place: bool
    at_q: int
    at_out: int
    at_scores: int
    at_state: int
    at_keys: int
    at_values: int
    at_clean: int
    at_lanes: int
    scratch_bytes: int


class Integers(NamedTuple):
    """The other integers of a call."""

    job_count: int
    segment_bytes: int
    out_code: int
    bias_code: int
    may_hide: bool
    left: int
    right: int
    head_origin: int
    seed: int
    threshold: int


class Numbers(NamedTuple):
    """The floating numbers of a call: ``q_factor`` scales Q, ``unit`` scales scores."""

    q_factor: float
    unit: float
    softcap: float
    keep_factor: float


_INTEGER_FIELDS = (
    tuple(field for name, axes in ARRAYS.items() for field in (name, *(f"{name}_stride_{a}" for a in axes)))
    + Plan._fields + Integers._fields
)
CALL = np.dtype([(name, np.int64) for name in _INTEGER_FIELDS] + [(name, np.float64) for name in Numbers._fields])
_RECORD = struct.Struct(f"={len(_INTEGER_FIELDS)}q{len(Numbers._fields)}d")


class Address(NamedTuple):
    """Where an array lies."""

    pointer: int
    strides: tuple[int, ...]


def address_of(array: np.ndarray | Operand | None) -> Address:
    """Pointer and byte strides of an array; zeros for None, which kernels read as absent."""
    if array is None:
        return Address(0, (0, 0, 0, 0))
    if isinstance(array, Operand):
        return Address(array.pointer, array.strides)
    return Address(array.ctypes.data, array.strides)


def make_call(
    arrays: Sequence[np.ndarray | Operand | None], plan: Plan, integers: Integers, numbers: Numbers
) -> np.ndarray:
    """The record of one call, as an array of one element.

    Parameters
    ----------
    arrays : sequence
        In the order of ``ARRAYS``; None leaves address and strides 0, which kernels read as absent.
    plan, integers, numbers
        The other fields.
    """
    values: list = []
    for array, axes in zip(arrays, ARRAYS.values(), strict=True):
        pointer, strides = address_of(array)
        values.append(pointer)
        values += strides[: len(axes)]
    memory = bytearray(_RECORD.size)
    _RECORD.pack_into(memory, 0, *values, *plan, *integers, *numbers)
    return np.frombuffer(memory, CALL)
