"""Tile sizes of the tensor-core kernels, and how a Problem chooses among them."""
import numpy as np

from numbaflash.arrays import Operand, bfloat16, float16, float32
from numbaflash.cuda.backward_sm80 import BackwardConfig
from numbaflash.cuda.forward_sm80 import ForwardConfig
from numbaflash.cuda.panels import CHUNK
from numbaflash.cuda.scores import scoring_of
from numbaflash.cuda.simt_config import shared_limit
from numbaflash.problem import Problem
from numbaflash.segments import Q_LENGTH

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


BACKWARD_KEYS = {
    # width: (warps, row_tiles, columns, step, resident, parts, blocks)
    32: (4, 2, 64, 32, False, ("both",), 2),
    64: (4, 2, 64, 16, False, ("both",), 1),
    96: (4, 1, 64, 32, False, ("both",), 1),
    128: (4, 1, 64, 32, False, ("both",), 1),
    192: (4, 1, 32, 16, False, ("dv", "dk"), 1),
    256: (4, 1, 16, 16, False, ("dv", "dk"), 1),
}
"""dk and dv, within the 99 KB of shared memory that every architecture from sm_86 on has."""

BACKWARD_KEYS_GENERAL = BACKWARD_KEYS | {
    32: (4, 1, 64, 32, False, ("both",), 1),
    64: (4, 1, 64, 32, False, ("both",), 1),
    96: (4, 1, 64, 16, False, ("both",), 1),
    128: (4, 1, 64, 16, False, ("both",), 1),
}
"""The same for scores with stages and for dropout."""

BACKWARD_QUERIES = {
    32: (4, 2, 64, 32, True, ("both",), 1),
    64: (4, 2, 64, 32, True, ("both",), 1),
    96: (4, 1, 64, 32, True, ("both",), 1),
    128: (4, 1, 64, 32, True, ("both",), 1),
    192: (4, 1, 32, 32, False, ("both",), 1),
    256: (4, 1, 16, 16, False, ("both",), 1),
}
"""dq."""

BACKWARD_QUERIES_GENERAL = BACKWARD_QUERIES | {
    32: (4, 1, 64, 32, True, ("both",), 1),
    64: (4, 1, 64, 32, True, ("both",), 1),
}
"""The same for scores with stages and for dropout."""


TURING = (32, 64, 96, 128)
"""Widths that fit into the 64 KB of shared memory of sm_75."""

FORWARD_WORDS = {
    # kind and width: float32 takes twice the shared memory, and tf32x3 more registers
    ("tf32", 32): (4, 2, 32, False, 1),
    ("tf32", 64): (4, 2, 32, False, 1),
    ("tf32", 96): (4, 1, 32, False, 1),
    ("tf32", 128): (4, 1, 32, False, 1),
    ("tf32x3", 32): (4, 1, 32, False, 1),
    ("tf32x3", 64): (4, 1, 32, False, 1),
    ("tf32x3", 96): (4, 1, 16, False, 1),
    ("tf32x3", 128): (4, 1, 16, False, 1),
}
"""Forward of float32 inputs."""


REDUCING = {"scalar": (32, 64), "vector": (32, 64, 128)}
"""Widths at which blocks of keys have the registers for dq too."""


def capability(arch: str) -> int:
    """90 for "sm_90a"."""
    return int(arch.removeprefix("sm_").rstrip("af"))


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
    words = dtype == float32 and problem.precision in ("tf32", "tf32x3") and not turing
    if not (words or dtype == float16 or dtype == bfloat16) or (turing and bfloat16 in (dtype, out.dtype)):
        raise NotImplementedError(f"{dtype} with precision={problem.precision!r} is not available on tensor cores here")
    kind = problem.precision if words else dtype.name
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    width, value_width = width_of(head_dim), width_of(value_dim)
    scoring = scoring_of(problem)
    plain = not scoring.general and not scoring.dropout
    table = FORWARD if plain else FORWARD_GENERAL
    if words:
        table = {width: row for (name, width), row in FORWARD_WORDS.items() if name == kind}
    elif turing:
        table = {width: table[width] for width in TURING}
    if max(width, value_width) not in table:
        raise NotImplementedError(f"head dimensions {head_dim} and {value_dim} are not available for {kind} on these "
                                  "tensor cores")
    warps, row_tiles, block_k, resident, blocks = table[max(width, value_width)]
    chunks = all(in_chunks(operand) for operand in (problem.q, problem.k, problem.v))
    whole = head_dim % 8 == 0 and value_dim % 8 == 0
    if chunks and not turing:
        copy = "async"
    elif chunks and whole:
        copy = "vector"
    else:
        copy = "word" if words else "element"
    staged = out.dtype in (float16, bfloat16, float32) and in_chunks(out) and value_dim % 8 == 0
    return ForwardConfig(
        kind, width, value_width, warps, row_tiles, block_k, 2, resident, blocks, copy, out.dtype.name, staged,
        turing, scoring,
    ).check()


def choose_backward(
    problem: Problem, dout: np.ndarray, dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, arch: str = "sm_80"
) -> "tuple[list[BackwardConfig], BackwardConfig]":
    """The configurations for a problem's gradients: of dk and dv (one or two launches), and of dq.

    Where the first one reduces dq, the last one is not needed.

    Raises
    ------
    NotImplementedError
        For dtypes and head dimensions that these kernels lack.
    """
    dtype = problem.q.dtype
    if dtype not in (float16, bfloat16) or dout.dtype != dtype:
        raise NotImplementedError(f"gradients of {dtype} from {dout.dtype} are not available on tensor cores")
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    width, value_width = width_of(head_dim), width_of(value_dim)
    scoring = scoring_of(problem)
    plain = not scoring.general and not scoring.dropout
    chunks = all(in_chunks(array) for array in (problem.q, problem.k, problem.v, dout))
    staged = all(in_chunks(array) for array in (dq, dk, dv)) and head_dim % 8 == 0 and value_dim % 8 == 0

    def config(row: tuple, parts: str, reduce: str = "") -> BackwardConfig:
        warps, row_tiles, columns, step, resident, _, blocks = row
        return BackwardConfig(
            dtype.name, width, value_width, warps, row_tiles, columns, step, resident, parts, reduce, blocks,
            "async" if chunks else "element", staged, scoring,
        ).check()

    keys = (BACKWARD_KEYS if plain else BACKWARD_KEYS_GENERAL)[max(width, value_width)]
    queries = (BACKWARD_QUERIES if plain else BACKWARD_QUERIES_GENERAL)[max(width, value_width)]
    reduce = ""
    rows = problem.segments[:, Q_LENGTH]
    even = len(rows) * rows.max(initial=0) <= 4 * rows.sum()        # the buffer has room for the longest, everywhere
    if plain and even and not problem.deterministic:
        way = "vector" if capability(arch) >= 90 else "scalar"
        if max(width, value_width) in REDUCING[way] and config(keys, "both", way).shared_bytes <= shared_limit(arch):
            reduce = way
    return [config(keys, parts, reduce) for parts in keys[5]], config(queries, "both")
