"""The rows of work of a call: one line of an integer table per sequence.

A dense batch is B rows; packed sequences, padding lengths, cache calls and shards of a ring are other rows of the
same table, so kernels know nothing of them.
"""

from functools import lru_cache

import numpy as np

Q_BATCH, Q_START, Q_LENGTH, K_BATCH, K_START, K_LENGTH, Q_OFFSET, Q_INDEX, K_INDEX, SEQUENCE = range(10)
COLUMNS = 10
"""Columns of a segment table.

``q[q_batch, :, q_start : q_start + q_length]`` attends to ``k[k_batch, :, k_start : k_start + k_length]``; query i
of the segment stands at key position ``i + q_offset``. ``q_index`` and ``k_index`` number row 0 and key 0 of the
segment within their whole sequence and ``sequence`` numbers that sequence: dropout and mods count by these three.
"""
COVER = -1
"""`SEQUENCE` of the segments that `covering` adds."""


def empty_segments(count: int) -> np.ndarray:
    """A zeroed (count, COLUMNS) int64 table with the sequences numbered."""
    table = np.zeros((count, COLUMNS), np.int64)
    table[:, SEQUENCE] = np.arange(count)
    return table


@lru_cache(maxsize=256)
def dense_segments(batch: int, q_length: int, k_length: int, q_offset: int) -> np.ndarray:
    """The table of a dense batch without lengths; shared between calls and read-only."""
    table = empty_segments(batch)
    table[:, Q_BATCH] = table[:, K_BATCH] = table[:, SEQUENCE]
    table[:, Q_LENGTH] = q_length
    table[:, K_LENGTH] = k_length
    table[:, Q_OFFSET] = q_offset
    table.flags.writeable = False
    return table


def uncovered(table: np.ndarray, batch: int, length: int, *, keys: bool = False) -> list[tuple[int, int, int]]:
    """Row ranges ``(batch, start, stop)`` of the q (or k) side that belong to no segment.

    Results there are constants (out 0, lse -inf, gradients 0) that no kernel writes.
    """
    b, start, size = (K_BATCH, K_START, K_LENGTH) if keys else (Q_BATCH, Q_START, Q_LENGTH)
    gaps = []
    order = np.lexsort((table[:, start], table[:, b]))
    position = dict.fromkeys(range(batch), 0)
    for row in order:
        at, lo, n = int(table[row, b]), int(table[row, start]), int(table[row, size])
        if n == 0:
            continue
        if lo > position[at]:
            gaps.append((at, position[at], lo))
        position[at] = max(position[at], lo + n)
    gaps += [(at, end, length) for at, end in position.items() if end < length]
    return gaps


def covering(table: np.ndarray, batch: int, q_rows: int, k_rows: int) -> np.ndarray:
    """The table with segments added that cover the rest: queries without keys, and keys without queries.

    Where results lie on a device, the kernels so write the constants of rows that belong to no segment. The added
    segments come last; they have no entries in arrays that count sequences.
    """
    gaps = [(at, lo, hi, False) for at, lo, hi in uncovered(table, batch, q_rows)]
    gaps += [(at, lo, hi, True) for at, lo, hi in uncovered(table, batch, k_rows, keys=True)]
    extra = np.zeros((len(gaps), COLUMNS), np.int64)
    for row, (at, lo, hi, keys) in zip(extra, gaps, strict=True):
        row[[Q_BATCH, K_BATCH]], row[SEQUENCE] = at, COVER
        row[[K_START, K_LENGTH] if keys else [Q_START, Q_LENGTH]] = lo, hi - lo
    return np.concatenate([table, extra])
