"""The numbers of one call as a record: what kernels read besides the arrays themselves."""

from typing import Any, NamedTuple

import numpy as np

from ..arrays import Operand
from .storage import CODES

_ADDRESSES = ("q", "k", "v", "out", "lse", "bias", "mask", "alibi", "sinks", "segments", "jobs")
_STRIDES = {
    "q": "bhnd", "k": "bhnd", "v": "bhnd", "out": "bhnd", "lse": "bh",
    "bias": "bhqk", "mask": "bhqk", "alibi": "bh",
}
_INTEGERS = (
    "out_code", "bias_code", "k_in_place", "v_in_place", "packed_heads",
    "heads", "head_units", "group", "head_dim", "value_dim", "head_origin",
    "left", "right", "block_q", "block_k", "job_count", "may_hide", "segment_bytes", "seed", "threshold",
    "scratch_bytes", "at_q", "at_out", "at_scores", "at_state", "at_keys", "at_values", "at_clean", "at_lanes",
)
_NUMBERS = ("q_factor", "unit", "softcap", "keep_factor")

INTEGER_FIELDS = (
    _ADDRESSES
    + tuple(f"{name}_stride_{axis}" for name, axes in _STRIDES.items() for axis in axes)
    + _INTEGERS
)
CALL = np.dtype([(name, np.int64) for name in INTEGER_FIELDS] + [(name, np.float64) for name in _NUMBERS])


class Address(NamedTuple):
    """Where an array lies: what :func:`make_call` needs of it."""

    pointer: int
    strides: tuple[int, ...]


def address_of(array: np.ndarray | Operand | None) -> Address:
    """Pointer and byte strides of an array; zeros for None, which kernels read as absent."""
    if array is None:
        return Address(0, (0, 0, 0, 0))
    if isinstance(array, Operand):
        return Address(array.pointer, array.strides)
    return Address(array.__array_interface__["data"][0], array.strides)


def make_call(arrays: dict[str, Any], integers: dict[str, int], numbers: dict[str, float]) -> np.ndarray:
    """A record array of one call.

    Parameters
    ----------
    arrays : dict
        ndarray, Operand or None by name; all names of ``CALL`` that have an address.
    integers, numbers : dict
        The other fields; ones left out are 0.
    """
    values: dict[str, int] = {}
    for name in _ADDRESSES:
        pointer, strides = address_of(arrays.get(name))
        values[name] = pointer
        for axis, stride in zip(_STRIDES.get(name, ""), strides):
            values[f"{name}_stride_{axis}"] = stride
    values.update(integers)
    record = np.empty(1, CALL)
    count = len(INTEGER_FIELDS)
    record.view(np.int64)[:count] = [values.get(name, 0) for name in INTEGER_FIELDS]
    record.view(np.float64)[count:] = [numbers.get(name, 0.0) for name in _NUMBERS]
    return record


def storage_code(dtype: np.dtype) -> int:
    """The kernels' number of a dtype."""
    return CODES[dtype]
