"""What kernels receive: one NamedTuple, made from a Problem.

Numba passes a NamedTuple of scalars (nested ones too) as its leaves, one kernel parameter each, and a leaf that
a kernel does not read costs nothing.  So each direction has one signature, whatever options are on, and kernels
read ``call.q.row`` instead of the thirty-first of fifty arguments.

In a plan an address is a `Pointer`; the executor puts a number in its place (`plan.leaves`).
"""
from typing import NamedTuple

import numpy as np
from numba import types
from numba.np.numpy_support import from_dtype

from numbaflash import dropout
from numbaflash.arrays import Operand
from numbaflash.cuda.plan import Pointer
from numbaflash.problem import Problem
from numbaflash.segments import COVER, K_LENGTH, Q_LENGTH, Q_OFFSET, SEQUENCE

COUNTED = (Q_LENGTH, K_LENGTH, Q_OFFSET)

LARGEST = 1 << 30
"""Rows, keys and offsets up to here are counted in int32 by the kernels."""


class Tensor(NamedTuple):
    """An array: the address of element 0 and the distance in bytes between neighbours along each axis."""

    pointer: np.int64
    batch: np.int64
    head: np.int64
    row: np.int64
    column: np.int64


class Call(NamedTuple):
    """One attention call.

    Attributes
    ----------
    q, k, v, out, lse : Tensor
        Head-major, whatever the caller's layout; lse has no columns.
    bias, mask : Tensor
        The batch axis counts segments, rows and columns within the segment; pointer 0 where there is none.
    slopes : Tensor
        float64, by segment and head.
    sinks : int
        Address of a float64 per head, or 0.
    segments : int
        Address of the segment table (int64, `segments.COLUMNS` to a row).
    sequences : int
        Rows of that table which are sequences; those behind them (`segments.covering`) have no bias, mask, slope
        or sink.
    work : int
        Address of (segment, tile) int32 pairs, one per block and head, or 0: then every segment has `tiles` tiles.
    tiles, units, chunk : int
        The grid: `tiles` x `units` blocks, where a unit is a head of a segment; see `tiles.locate`.
    heads, group : int
        Query heads (of a grid of packed tiles: tiles across a head's group), and how many share a head of k and v.
    shift : int
        Where heads are packed into a tile: see `packing`.
    head_dim, value_dim : int
    head_origin : int
        Number of head 0 for dropout.
    left, right : int
        The band.
    scale, softcap : float
    seed, threshold, keep_scale
        Dropout: pairs whose word is below the threshold are dropped, the others multiplied by keep_scale.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    bias: Tensor
    mask: Tensor
    slopes: Tensor
    sinks: np.int64
    segments: np.int64
    sequences: np.int32
    work: np.int64
    tiles: np.int32
    units: np.int32
    chunk: np.int32
    heads: np.int32
    group: np.int32
    shift: np.int32
    head_dim: np.int32
    value_dim: np.int32
    head_origin: np.int64
    left: np.int64
    right: np.int64
    scale: np.float64
    softcap: np.float64
    seed: np.uint64
    threshold: np.uint32
    keep_scale: np.float64


NOTHING = Tensor(0, 0, 0, 0, 0)


def kernel_type(record: type) -> types.NamedTuple:
    """Numba's type of a NamedTuple whose fields are annotated with NumPy scalars or other such NamedTuples."""
    fields = [
        kernel_type(kind) if hasattr(kind, "_fields") else from_dtype(np.dtype(kind))
        for kind in record.__annotations__.values()
    ]
    return types.NamedTuple(fields, record)


CALL = kernel_type(Call)


def tensor(array: "np.ndarray | Operand | None") -> Tensor:
    """Describe an array; missing leading (batch, head) or trailing axes have no extent."""
    if array is None:
        return NOTHING
    if isinstance(array, Operand):
        array = array.array
    strides = tuple(array.strides) + (0,) * (4 - array.ndim)
    return Tensor(Pointer(array), *strides)


def make_call(problem: Problem, out: np.ndarray, lse: np.ndarray) -> Call:
    """Describe a call to the kernels; the grid (`work`, `tiles`, `units`, `chunk`) is the planner's to fill in.

    Raises
    ------
    NotImplementedError
        Where a sequence has more rows or keys, or a larger offset, than int32 arithmetic is safe for.
    """
    table = problem.segments
    if table.size and np.abs(table[:, COUNTED]).max() > LARGEST:
        raise NotImplementedError(f"sequences of more than {LARGEST} rows or keys, or such offsets, are not "
                                  "available on this backend")
    drop = problem.dropout
    return Call(
        q=tensor(problem.q), k=tensor(problem.k), v=tensor(problem.v), out=tensor(out), lse=tensor(lse),
        bias=tensor(problem.score.bias), mask=tensor(problem.mask), slopes=tensor(problem.score.alibi),
        sinks=0 if problem.sinks is None else Pointer(problem.sinks),
        segments=Pointer(table), sequences=int((table[:, SEQUENCE] != COVER).sum()), work=0, tiles=0, units=0, chunk=1,
        heads=problem.q.shape[1], group=problem.group, shift=0,
        head_dim=problem.q.shape[3], value_dim=problem.v.shape[3], head_origin=problem.head_origin,
        left=problem.band.left, right=problem.band.right,
        scale=problem.scale, softcap=problem.score.softcap or 0.0,
        seed=0 if drop is None else drop.seed,
        threshold=0 if drop is None else dropout.threshold(drop.p),
        keep_scale=1.0 if drop is None else 1.0 / (1.0 - drop.p),
    )
