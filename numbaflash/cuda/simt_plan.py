"""From a Problem to launches of the SIMT kernels: which variant, which grid, how much shared memory."""
from collections.abc import Callable, Sequence

import numpy as np

from numbaflash.cuda.arguments import CALL, Call, make_call
from numbaflash.cuda.backward_arguments import BACKWARD_CALL, BackwardCall, make_backward_call
from numbaflash.cuda.backward_bias_simt import SINK_BYTES, SINK_THREADS, make_dbias, make_dsinks
from numbaflash.cuda.backward_simt import make_backward, make_delta
from numbaflash.cuda.forward_simt import make_forward
from numbaflash.cuda.forward_simt import shared_bytes as forward_bytes
from numbaflash.cuda.plan import KernelSpec, Launch, Plan
from numbaflash.cuda.simt_config import (
    CLASSES, SLICE, VECTOR_BYTES, SimtConfig, dimension_class, shared_limit)
from numbaflash.cuda.simt_gradients import shared_bytes as backward_bytes
from numbaflash.cuda.tiles import fill_grid
from numbaflash.problem import Problem
from numbaflash.segments import K_LENGTH, Q_LENGTH, Q_OFFSET

FORWARD = {
    "float32": {32: (8, 8, 2), 64: (8, 8, 2), 128: (4, 8, 2), 256: (4, 4, 2)},
    "float64": {32: (4, 8, 2), 64: (4, 4, 2), 128: (4, 2, 2), 256: (2, 2, 2)},
}
"""Rows and columns per thread, and warps, by precision and the wider class: what 255 registers hold."""
QUERIES = {
    "float32": {32: (8, 4, 2), 64: (8, 4, 2), 128: (4, 4, 2), 256: (4, 4, 2)},
    "float64": {32: (4, 4, 2), 64: (4, 2, 2), 128: (2, 4, 2), 256: (2, 2, 2)},
}
KEYS = {
    "float32": {32: (8, 4, 2), 64: (4, 4, 4), 128: (4, 4, 2), 256: (2, 4, 2)},
    "float64": {32: (4, 4, 2), 64: (2, 4, 2), 128: (2, 4, 2), 256: (1, 4, 2)},
}
BLACKWELL = ("sm_10", "sm_12")
Tiling = dict[str, dict[int, tuple[int, int, int]]]


def plan_forward(problem: Problem, out: np.ndarray, lse: np.ndarray, arch: str = "sm_80") -> Plan:
    """The launches of a forward call.

    Parameters
    ----------
    problem : Problem
    out : array, shape (batch, H, Nq, Dv)
        Head-major view of ``out_dtype``, any strides.
    lse : array, shape (batch, H, Nq)
    arch : str
        Such as ``"sm_80"``; decides how much shared memory a block may have.

    Returns
    -------
    Plan

    Raises
    ------
    NotImplementedError
        Where int32 cannot count the rows or keys of a sequence.
    """
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    sliced = head_dim > CLASSES[-1]
    arrays = [problem.q.array, problem.k.array, problem.v.array, out]
    value_class = dimension_class(value_dim)
    config = _config(problem, arrays, FORWARD, value_class, forward_bytes, arch, sliced,
                     SLICE if sliced else dimension_class(head_dim), value_class)
    call, blocks = fill_grid(make_call(problem, out, lse), problem.segments, config.block_rows,
                             _kv_bytes(problem))
    if blocks == 0:
        return Plan([])
    groups = max(1, -(-value_dim // config.value_dim))
    kernel = KernelSpec(f"forward_simt_{config.name}", make_forward(config), (CALL,), (config.threads, 1))
    return Plan([Launch(kernel, (blocks, groups), config.threads, forward_bytes(config), (call,))])


def plan_backward(
    problem: Problem, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, dbias: np.ndarray | None, dsinks: np.ndarray | None,
    arch: str = "sm_80",
) -> Plan:
    """The launches of a backward call.

    Parameters
    ----------
    problem : Problem
    dout, out : array, shape (batch, H, Nq, Dv)
        Head-major views of ``out_dtype``, any strides.
    lse, dlse : array, shape (batch, H, Nq)
        dlse is None where it is zero.
    dq, dk, dv : array
        Head-major views, of the shapes and dtypes of q, k and v.
    dbias : array or None
        Of ``score.bias_shape`` and ``compute_dtype``, where the problem has a bias.
    dsinks : array of float64 or None
        (H,), where the problem has sinks.
    arch : str

    Returns
    -------
    Plan
        Deterministic: no launch uses atomics.

    Raises
    ------
    NotImplementedError
        Where int32 cannot count the rows or keys of a sequence.
    """
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    sliced = max(head_dim, value_dim) > CLASSES[-1]
    arrays = [problem.q.array, problem.k.array, problem.v.array, out, dout, dq, dk, dv]
    back, delta = make_backward_call(problem, dout, out, lse, dlse, dq, dk, dv, dbias, dsinks)

    def configs(sliced: bool) -> list[SimtConfig]:
        classes = (SLICE, SLICE) if sliced else (dimension_class(head_dim), dimension_class(value_dim))
        return [_config(problem, arrays, tiling, max(classes), backward_bytes, arch, sliced, *classes)
                for tiling in (QUERIES, KEYS)]

    try:
        queries, keys = configs(sliced)
    except NotImplementedError:         # whole rows are too wide for this architecture's shared memory
        queries, keys = configs(True)
    groups = max(1, -(-max(head_dim, value_dim) // SLICE)) if queries.sliced else 1
    launches = []

    def launch(name: str, make: Callable, config: SimtConfig, call: Call, grid: object,
               shared: int = 0) -> None:
        kernel = KernelSpec(f"{name}_{config.name}", make, (BACKWARD_CALL,), (config.threads, 1))
        launches.append(Launch(kernel, grid, config.threads, shared, (back._replace(call=call),)))

    query_call, query_blocks = query_grid(back.call, problem, queries.block_rows)
    key_call, key_blocks = key_grid(back.call, problem, keys.block_rows)
    if query_blocks:
        launch("delta_simt", make_delta(queries), queries, query_call, query_blocks)
    if key_blocks:
        launch("dkdv_simt", make_backward(keys, keys=True), keys, key_call, (key_blocks, groups),
               backward_bytes(keys))
    if query_blocks:
        launch("dq_simt", make_backward(queries, keys=False), queries, query_call, (query_blocks, groups),
               backward_bytes(queries))
    if dbias is not None and dbias.size:
        sequences, heads, rows, columns = dbias.shape
        blocks = sequences * heads * -(-rows // queries.block_rows) * -(-columns // queries.block_columns)
        launch("dbias_simt", make_dbias(queries), queries, back.call, blocks, backward_bytes(queries))
    if dsinks is not None and dsinks.size:
        kernel = KernelSpec("dsinks_simt", make_dsinks(queries.compute), (BACKWARD_CALL,), SINK_THREADS)
        launches.append(Launch(kernel, dsinks.size, SINK_THREADS, SINK_BYTES, (back,)))
    return Plan(launches, [delta])


def query_grid(call: Call, problem: Problem, block_rows: int) -> tuple[Call, int]:
    """A `Call` whose tiles are tiles of queries, and the number of blocks."""
    return fill_grid(call, problem.segments, block_rows, _kv_bytes(problem))


def key_grid(call: Call, problem: Problem, block_rows: int) -> tuple[Call, int]:
    """A `Call` whose tiles are tiles of keys and whose heads are those of k, and the number of blocks."""
    seen_from_keys = problem.segments.copy()
    seen_from_keys[:, [Q_LENGTH, K_LENGTH]] = problem.segments[:, [K_LENGTH, Q_LENGTH]]
    seen_from_keys[:, Q_OFFSET] *= -1
    turned = call._replace(heads=problem.k.shape[1], left=call.right, right=call.left)
    turned, blocks = fill_grid(turned, seen_from_keys, block_rows, _kv_bytes(problem))
    return turned._replace(left=call.left, right=call.right), blocks


def _config(
    problem: Problem, arrays: Sequence[np.ndarray], tiling: Tiling, width: int,
    shared_bytes: Callable[[SimtConfig], int], arch: str, sliced: bool, head_dim: int, value_dim: int,
) -> SimtConfig:
    """The variant that a problem takes; `arrays` are all that the kernels read or write row by row."""
    rows, columns, warps = tiling[problem.compute_dtype.name][width]
    if width >= 64 and rows * columns == 64 and arch.startswith(BLACKWELL):
        columns //= 2       # its compiler spills a few bytes of the larger tile
    score = problem.score
    config = SimtConfig(
        dtype=problem.q.dtype.name, out_dtype=problem.out_dtype.name, head_dim=head_dim, value_dim=value_dim,
        rows=rows, columns=columns, warps=warps, sliced=sliced, vector=all(map(_is_vector, arrays)),
        general=not score.is_empty or problem.mask is not None or problem.dropout is not None,
        bias_dtype=(problem.q.dtype if score.bias is None else score.bias.dtype).name,
    )
    return fit(config, shared_bytes, arch)


def fit(config: SimtConfig, shared_bytes, arch: str) -> SimtConfig:
    """The configuration, or a smaller one where an architecture has too little shared memory for it."""
    limit = shared_limit(arch)
    while shared_bytes(config) > limit:
        if config.columns > 2:
            config = config._replace(columns=config.columns // 2)
        elif config.warps > 1:
            config = config._replace(warps=config.warps // 2)
        elif config.rows > 1:
            config = config._replace(rows=config.rows // 2)
        else:
            raise NotImplementedError(f"{config.name} needs {shared_bytes(config)} bytes of shared memory; "
                                      f"{arch} gives {limit}")
    return config


def _is_vector(array: np.ndarray) -> bool:
    """Can every row be read in 16-byte pieces?"""
    *strides, column = array.strides
    *sizes, width = array.shape
    return (
        (column == array.itemsize or width <= 1) and width * array.itemsize % VECTOR_BYTES == 0
        and array.__array_interface__["data"][0] % VECTOR_BYTES == 0
        and all(stride % VECTOR_BYTES == 0 for stride, size in zip(strides, sizes) if size > 1)
    )


def _kv_bytes(problem: Problem) -> int:
    """Bytes of k and v that all query heads of the longest sequence read, per query head."""
    keys = int(problem.segments[:, K_LENGTH].max(initial=0))
    row = (problem.k.shape[3] + problem.v.shape[3]) * problem.k.dtype.itemsize
    return keys * row // max(1, problem.group)
