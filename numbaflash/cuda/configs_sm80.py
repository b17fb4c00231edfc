"""Tile sizes of the tensor-core kernels, and how a Problem chooses among them."""
import numpy as np

from numbaflash.arrays import Operand, bfloat16, float16, float32
from numbaflash.cuda.backward_sm80 import BackwardConfig
from numbaflash.cuda.forward_sm80 import ForwardConfig
from numbaflash.cuda.fragments import HALVES
from numbaflash.cuda.packing import slot_shift
from numbaflash.cuda.panels import CHUNK
from numbaflash.cuda.scores import Scoring, scoring_of
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

CAREFUL = {128: (4, 1, 64, 16, False, ("both",), 1)}
"""The same where the compiler is that of sm_120 and spills eight bytes of a larger step."""

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
    128: (4, 1, 64, 32, False, ("both",), 1),
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

BACKWARD_WORDS = {
    # kind and width; of dk and dv, and of dq
    ("tf32", 32): (4, 1, 64, 32, False, ("both",), 1),
    ("tf32", 64): (4, 1, 32, 32, False, ("both",), 1),
    ("tf32", 96): (4, 1, 32, 16, False, ("both",), 1),
    ("tf32", 128): (4, 1, 16, 16, False, ("both",), 1),
    ("tf32x3", 32): (4, 1, 64, 16, False, ("both",), 1),
    ("tf32x3", 64): (4, 1, 32, 16, False, ("both",), 1),
    ("tf32x3", 96): (4, 1, 32, 16, False, ("both",), 1),
    ("tf32x3", 128): (4, 1, 16, 16, False, ("both",), 1),
}
"""Gradients of float32 inputs."""

BACKWARD_WORDS_GENERAL = {
    (kind, width): (*row[:5], ("both",) if width == 32 else ("dv", "dk"), *row[6:])
    for (kind, width), row in BACKWARD_WORDS.items()
}
"""The same for scores with stages and for dropout: dk and dv one after the other."""

BACKWARD_TURING = {
    32: (4, 1, 64, 16, False, ("both",), 1),
    64: (4, 1, 64, 16, False, ("both",), 1),
    96: (4, 1, 16, 16, False, ("both",), 1),
    128: (4, 1, 16, 16, False, ("both",), 1),
}
"""Gradients on sm_75."""


REDUCING = {
    # copies: width: step
    "async": {32: 32, 64: 32, 128: 64},
    "element": {32: 16, 64: 16},
}
"""Widths at which blocks of keys have the registers for dq too, and the step that leaves no spills."""


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
    kind = _kind(problem, out, turing)
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    width, value_width = width_of(head_dim), width_of(value_dim)
    scoring = scoring_of(problem)
    table = FORWARD if _is_plain(scoring) else FORWARD_GENERAL
    if turing:
        table = {width: table[width] for width in TURING}
    warps, row_tiles, block_k, resident, blocks = _row(FORWARD_WORDS, table, kind, max(width, value_width))
    staged = out.dtype in (float16, bfloat16, float32) and in_chunks(out) and value_dim % 8 == 0
    packed_tiles = row_tiles if _is_plain(scoring) else 1       # stages of packed rows take more registers
    packed = slot_shift(problem, 16 * warps * packed_tiles) > 0
    if packed:
        row_tiles = packed_tiles
        scoring = scoring._replace(dropout="element" if scoring.dropout else "")
    return ForwardConfig(
        kind, width, value_width, warps, row_tiles, block_k, 2, resident, blocks,
        _copy(problem, kind, turing, problem.q, problem.k, problem.v), out.dtype.name, staged, turing, scoring, packed,
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
    dtype, turing = problem.q.dtype, capability(arch) < 80
    if dout.dtype != dtype:
        raise NotImplementedError(f"gradients of {dtype} from {dout.dtype} are not available on tensor cores")
    kind = _kind(problem, dout, turing)
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    width, value_width = width_of(head_dim), width_of(value_dim)
    scoring = scoring_of(problem)
    plain = _is_plain(scoring)
    copy = _copy(problem, kind, turing, problem.q, problem.k, problem.v, dout)
    staged = all(in_chunks(array) for array in (dq, dk, dv)) and head_dim % 8 == 0 and value_dim % 8 == 0

    def config(row: tuple, parts: str, reduce: str = "") -> BackwardConfig:
        warps, row_tiles, columns, step, resident, _, blocks = row
        return BackwardConfig(
            kind, width, value_width, warps, row_tiles, columns, step, resident, parts, reduce, blocks, copy, staged,
            turing, scoring,
        ).check()

    tables = (BACKWARD_KEYS, BACKWARD_QUERIES) if plain else (BACKWARD_KEYS_GENERAL, BACKWARD_QUERIES_GENERAL)
    if plain and capability(arch) >= 120:
        tables = (BACKWARD_KEYS | CAREFUL, BACKWARD_QUERIES)
    if turing:
        tables = BACKWARD_TURING, BACKWARD_TURING
    words = BACKWARD_WORDS if plain else BACKWARD_WORDS_GENERAL
    keys, queries = (_row(words, table, kind, max(width, value_width)) for table in tables)
    reduce = ""
    rows = problem.segments[:, Q_LENGTH]
    even = len(rows) * rows.max(initial=0) <= 4 * rows.sum()        # the buffer has room for the longest, everywhere
    if plain and even and not problem.deterministic and kind == dtype.name and not turing:
        way = "vector" if capability(arch) >= 90 else "scalar"
        step = REDUCING[copy].get(max(width, value_width))
        reducing = (*keys[:3], step, *keys[4:])
        if step is not None and config(reducing, "both", way).shared_bytes <= shared_limit(arch):
            keys, reduce = reducing, way
    return [config(keys, parts, reduce) for parts in keys[5]], config(queries, "both")


def _kind(problem: Problem, result: np.ndarray, turing: bool) -> str:
    """Of products (a key of `fragments.HALVES`), or NotImplementedError where tensor cores here do not compute them."""
    dtype, words = problem.q.dtype, problem.q.dtype == float32 and problem.precision in ("tf32", "tf32x3")
    if turing and (words or bfloat16 in (dtype, result.dtype)) or not (words or dtype in (float16, bfloat16)):
        raise NotImplementedError(f"{dtype} with precision={problem.precision!r} is not available on tensor cores here")
    return problem.precision if words else dtype.name


def _row(words: dict, table: dict, kind: str, width: int) -> tuple:
    """What a table says of a width; of float32 inputs, the table `words`."""
    key, table = ((kind, width), words) if HALVES[kind] == 2 else (width, table)
    if key not in table:
        raise NotImplementedError(f"head dimensions of {width} are not available for {kind} on these tensor cores")
    return table[key]


def _is_plain(scoring: Scoring) -> bool:
    return not scoring.general and not scoring.dropout


def _copy(problem: Problem, kind: str, turing: bool, *arrays: "np.ndarray | Operand") -> str:
    """How tiles are loaded: one of `panels.COPIES`."""
    chunks = all(in_chunks(array) for array in arrays)
    if chunks and not turing:
        return "async"
    if chunks and problem.q.shape[3] % 8 == 0 and problem.v.shape[3] % 8 == 0:
        return "vector"
    return "word" if HALVES[kind] == 2 else "element"
