"""The numbers of one backward call as a record, in the manner of :mod:`numbaflash.cpu.call`."""

import struct
from typing import Any

import numpy as np

from .layout import Layout

STRIDES = {
    "q": "bhnd", "k": "bhnd", "v": "bhnd", "out": "bhnd", "dout": "bhnd", "lse": "bhn", "dlse": "bhn",
    "dq": "bhnd", "dk": "bhnd", "dv": "bhnd", "bias": "bhqk", "mask": "bhqk", "alibi": "bh", "dbias": "bhqk",
}
TABLES = (
    "sinks", "segments", "row_starts", "tile_starts", "block_starts", "turns", "taken", "statistics", "packed_q",
    "packed_dout", "sums", "row_sums", "column_sums", "sink_sums",
)
INTEGERS = (
    "heads", "kv_heads", "group", "head_dim", "value_dim", "head_origin", "left", "right", "block_q",
    "block_k", "segment_count", "row_count", "key_extent", "heads_per_unit",
    "segments_per_unit", "strands", "tile_jobs", "job_count", "out_code", "bias_code", "seed", "threshold",
    "may_hide",
    "scratch_bytes", "at_q", "at_dout", "at_scores", "at_products", "at_derivatives", "at_keep", "at_k_lanes",
    "at_v_lanes", "at_keys", "at_dk", "at_dv", "at_dq", "at_column_sum", "at_rows",
    "at_kept_keys",
)
NUMBERS = ("scale", "q_factor", "unit", "dk_factor", "softcap", "keep_factor")

LAYOUT = Layout(STRIDES | dict.fromkeys(TABLES, ""), INTEGERS, NUMBERS, stride="{}_{}")
GRADIENT_CALL = LAYOUT.dtype
_FIELDS = struct.Struct(f"={len(INTEGERS)}q{len(NUMBERS)}d")


def make_gradient_call(
    arrays: dict[str, Any], integers: dict[str, int], numbers: dict[str, float]
) -> np.ndarray:
    """A record array of one call.

    Parameters
    ----------
    arrays : dict
        ndarray, Operand or None by name; absent ones have address 0.
    integers, numbers : dict
        The other fields; those left out are 0.
    """
    record = bytearray(GRADIENT_CALL.itemsize)
    for name, array in arrays.items():
        LAYOUT.place(record, name, array)
    given, others = integers.get, numbers.get
    _FIELDS.pack_into(
        record, LAYOUT.at_integers, *[given(name, 0) for name in INTEGERS], *[others(name, 0.0) for name in NUMBERS]
    )
    return np.frombuffer(record, GRADIENT_CALL)
