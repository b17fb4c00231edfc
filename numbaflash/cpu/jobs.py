"""The jobs of a forward call: blocks of queries or parts of keys, as tables of integers that kernels read."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..problem import Problem
from ..segments import K_LENGTH, Q_LENGTH, Q_OFFSET
from ..visibility import Band
from .call import Plan


class Jobs(NamedTuple):
    """Jobs of one head unit.

    Attributes
    ----------
    table : ndarray of int64
        (count, 2) of segment and block of queries, heavy ones first; or, where keys are split, (count, 4): segment,
        part, parts of the segment, entry of the segment's first part.
    pairs : float
        Rows times keys of all jobs: the work.
    """

    table: np.ndarray
    pairs: float


def block_jobs(problem: Problem, plan: Plan) -> Jobs:
    """Blocks of queries."""
    table, block_q = problem.segments, plan.block_q
    scale = plan.group if plan.packed_heads else 1
    if not table.flags.writeable:  # a dense batch: all segments are alike
        first = table[0]
        return _uniform_blocks(len(table), int(first[Q_LENGTH]), int(first[K_LENGTH]), int(first[Q_OFFSET]), scale,
                               block_q, problem.band)
    rows = table[:, Q_LENGTH] * scale
    blocks = -(-rows // block_q)
    segment = np.repeat(np.arange(len(table)), blocks)
    block = np.arange(len(segment)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    pairs = _pairs(problem.band, block * block_q, np.minimum((block + 1) * block_q, rows[segment]),
                   table[segment, Q_LENGTH], table[segment, K_LENGTH], table[segment, Q_OFFSET], scale)
    order = np.argsort(-pairs, kind="stable")
    return Jobs(np.ascontiguousarray(np.stack([segment[order], block[order]], axis=1)), float(pairs.sum()))


@lru_cache(maxsize=256)
def _uniform_blocks(
    segments: int, q_length: int, k_length: int, offset: int, scale: int, block_q: int, band: Band
) -> Jobs:
    block = np.arange(-(-q_length * scale // block_q))
    pairs = _pairs(band, block * block_q, np.minimum((block + 1) * block_q, q_length * scale), q_length, k_length,
                   offset, scale)
    order = np.argsort(-pairs, kind="stable")
    table = np.empty((len(block), segments, 2), np.int64)
    table[..., 0] = np.arange(segments)
    table[..., 1] = block[order, None]
    return Jobs(table.reshape(-1, 2), float(pairs.sum()) * segments)


def _pairs(band: Band, low, high, q_length, k_length, offset, scale) -> np.ndarray:
    """Rows times keys of blocks of rows: the measure of a job's work."""
    rows = high - low
    if scale > 1:  # rows of several heads: taken for all queries
        low, high = 0 * low, 0 * high + q_length
    first = np.maximum(0, low + offset - band.left)
    last = np.minimum(k_length, high + offset + band.right)
    return rows * np.maximum(0, last - first)


def part_jobs(problem: Problem, plan: Plan) -> Jobs:
    """Parts of keys; a segment that sees none has one empty part, which writes its rows."""
    table, band = problem.segments, problem.band
    present = np.flatnonzero(table[:, Q_LENGTH] > 0)
    q_length, k_length, offset = (table[present, column] for column in (Q_LENGTH, K_LENGTH, Q_OFFSET))
    low = np.maximum(0, offset - band.left)
    high = np.minimum(k_length, q_length + offset + band.right)
    first = low // plan.part_keys
    parts = np.maximum(1, -(-high // plan.part_keys) - first)
    begin = np.cumsum(parts) - parts
    jobs = np.empty((int(parts.sum()), 4), np.int64)
    jobs[:, 0] = np.repeat(present, parts)
    jobs[:, 1] = np.arange(len(jobs)) - np.repeat(begin - first, parts)
    jobs[:, 2] = np.repeat(parts, parts)
    jobs[:, 3] = np.repeat(begin, parts)
    return Jobs(jobs, float((q_length * np.maximum(0, high - low)).sum()) * plan.group)
