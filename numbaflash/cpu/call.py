"""The numbers of one call as a record: what kernels read besides the arrays themselves."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Operand
from .layout import Layout

ARRAYS = {
    "q": "bhnd", "k": "bhnd", "v": "bhnd", "out": "bhnd", "lse": "bh", "bias": "bhqk", "mask": "bhqk",
    "alibi": "bh", "sinks": "", "segments": "", "jobs": "", "partials": "", "counters": "",
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
    part_keys : int
        Keys of a part, where keys are split between jobs (few queries); else 0, as the following.
    q_width, row_width, partial_bytes : int
        Bytes of a query row, of an output row, and of what a part leaves.
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
    at_rows: int = 0
    part_keys: int = 0
    q_width: int = 0
    row_width: int = 0
    partial_bytes: int = 0


class Integers(NamedTuple):
    """The other integers of a call."""

    job_count: int
    segment_bytes: int
    q_code: int
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


LAYOUT = Layout(ARRAYS, Plan._fields + Integers._fields, Numbers._fields, stride="{}_stride_{}")
CALL = LAYOUT.dtype
_PLAN = struct.Struct(f"={len(Plan._fields)}q")
_NUMBERS = struct.Struct(f"={len(Integers._fields)}q{len(Numbers._fields)}d")


def plan_bytes(plan: Plan, segments: np.ndarray, jobs: np.ndarray) -> bytes:
    """A record with a plan and its tables and nothing else: what :func:`make_call` begins with."""
    record = bytearray(CALL.itemsize)
    LAYOUT.place(record, "segments", segments)
    LAYOUT.place(record, "jobs", jobs)
    _PLAN.pack_into(record, LAYOUT.at_integers, *plan)
    return bytes(record)


def make_call(
    planned: bytes,
    arrays: Sequence[tuple[str, np.ndarray | Operand | None]],
    integers: Integers,
    numbers: Numbers,
) -> np.ndarray:
    """The record of one call, as an array of one element.

    Parameters
    ----------
    planned : bytes
        Of :func:`plan_bytes`: most of a record is the same for many calls.
    arrays : sequence
        Names of ``ARRAYS`` and the arrays; for None, and where left out, address and strides are 0, which kernels read
        as absent.
    integers, numbers
        The other fields.
    """
    record = bytearray(planned)
    for name, array in arrays:
        LAYOUT.place(record, name, array)
    _NUMBERS.pack_into(record, LAYOUT.at_integers + _PLAN.size, *integers, *numbers)
    return np.frombuffer(record, CALL)
