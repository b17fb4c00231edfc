"""Tile sizes of the tensor-core kernels, and how a Problem chooses among them."""
import numpy as np

from numbaflash.arrays import Operand, bfloat16, float16
from numbaflash.cuda.forward_sm80 import ForwardConfig
from numbaflash.cuda.panels import CHUNK
from numbaflash.cuda.scores import scoring_of
from numbaflash.problem import Problem

WIDTHS = (32, 64, 96, 128, 192, 256)
"""Head dimensions that are compiled; arrays are padded to the next one in shared memory."""

FORWARD = {
    # width: (warps, row_tiles, block_k, resident, blocks)
    32: (4, 2, 64, True, 2),
    64: (4, 2, 64, True, 2),
    96: (4, 2, 32, False, 1),
    128: (4, 2, 32, False, 1),
    192: (4, 1, 64, False, 1),
    256: (4, 1, 32, False, 1),
}
"""By the wider of the two head dimensions; measured: no spills on any architecture, plain scores."""

FORWARD_GENERAL = {
    32: (4, 2, 32, True, 2),
    64: (4, 2, 32, True, 2),
    96: (4, 1, 64, True, 1),
    128: (4, 1, 64, True, 1),
    192: (4, 1, 32, False, 1),
    256: (4, 1, 32, False, 1),
}
"""The same where scores have stages or weights are dropped, which take registers of their own."""


def width_of(dim: int) -> int:
    """The compiled head dimension for a given one.

    Raises
    ------
    NotImplementedError
        Beyond the widest.
    """
    for width in WIDTHS:
        if dim <= width:
            return width
    raise NotImplementedError(f"head dimensions beyond {WIDTHS[-1]} are not available on tensor cores; got {dim}")


def in_chunks(array: "np.ndarray | Operand") -> bool:
    """True where every row starts at a multiple of 16 bytes and is contiguous."""
    if isinstance(array, Operand):
        array = array.array
    if array.size == 0:
        return True
    pointer, (*outer, column) = array.__array_interface__["data"][0], array.strides
    sizes = array.shape[:-1]
    aligned = all(stride % CHUNK == 0 for stride, size in zip(outer, sizes) if size > 1)
    return pointer % CHUNK == 0 and aligned and (column == array.itemsize or array.shape[-1] <= 1)


def choose_forward(problem: Problem, out: np.ndarray, turing: bool = False) -> ForwardConfig:
    """The configuration for a problem.

    Raises
    ------
    NotImplementedError
        For dtypes and head dimensions that these kernels lack.
    """
    dtype = problem.q.dtype
    if dtype not in (float16, bfloat16) or (turing and bfloat16 in (dtype, out.dtype)):
        raise NotImplementedError(f"{dtype} is not available on these tensor cores")
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    width, value_width = width_of(head_dim), width_of(value_dim)
    scoring = scoring_of(problem)
    plain = not scoring.general and not scoring.dropout
    row = (FORWARD if plain else FORWARD_GENERAL)[max(width, value_width)]
    warps, row_tiles, block_k, resident, blocks = row
    chunks = all(in_chunks(operand) for operand in (problem.q, problem.k, problem.v))
    if turing:
        copy = "vector" if chunks and head_dim % 8 == 0 and value_dim % 8 == 0 else "element"
    else:
        copy = "async" if chunks else "element"
    staged = out.dtype in (float16, bfloat16) and in_chunks(out) and value_dim % 8 == 0
    return ForwardConfig(
        dtype.name, width, value_width, warps, row_tiles, block_k, 2, resident, blocks, copy, out.dtype.name, staged,
        turing, scoring,
    ).check()
