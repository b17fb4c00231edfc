"""From a Problem to launches of the SIMT kernels: which variant, which grid, how much shared memory."""
from collections.abc import Iterable

import numpy as np

from numbaflash.cuda.arguments import CALL, make_call
from numbaflash.cuda.forward_simt import make_forward
from numbaflash.cuda.forward_simt import shared_bytes as forward_bytes
from numbaflash.cuda.plan import KernelSpec, Launch, Plan
from numbaflash.cuda.simt_config import CLASSES, SLICE, VECTOR_BYTES, SimtConfig, dimension_class, shared_limit
from numbaflash.cuda.tiles import fill_grid
from numbaflash.problem import Problem
from numbaflash.segments import K_LENGTH

FORWARD = {
    "float32": {32: (8, 8), 64: (8, 8), 128: (8, 4), 256: (4, 4)},
    "float64": {32: (4, 8), 64: (4, 4), 128: (4, 2), 256: (2, 2)},
}
"""Scores per thread (rows, columns) by the precision and the value class: what 255 registers hold."""


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
    config = forward_config(problem, [problem.q.array, problem.k.array, problem.v.array, out], arch)
    call = make_call(problem, out, lse)
    call, blocks = fill_grid(call, problem.segments, config.block_rows, _kv_bytes(problem))
    if blocks == 0:
        return Plan([])
    groups = max(1, -(-call.value_dim // config.value_dim))
    kernel = KernelSpec(f"forward_simt_{config.name}", make_forward(config), (CALL,), config.threads)
    return Plan([Launch(kernel, (blocks, groups), config.threads, forward_bytes(config), (call,))])


def forward_config(problem: Problem, arrays: Iterable[np.ndarray], arch: str) -> SimtConfig:
    """The variant that a problem takes; `arrays` are all that the kernel reads or writes row by row."""
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    sliced = head_dim > CLASSES[-1]
    compute = problem.compute_dtype.name
    value_class = dimension_class(value_dim)
    rows, columns = FORWARD[compute][value_class]
    score = problem.score
    config = SimtConfig(
        dtype=problem.q.dtype.name, out_dtype=problem.out_dtype.name,
        head_dim=SLICE if sliced else dimension_class(head_dim), value_dim=value_class,
        rows=rows, columns=columns, warps=2, sliced=sliced, vector=all(map(_is_vector, arrays)),
        general=not score.is_empty or problem.mask is not None or problem.dropout is not None,
        bias_dtype=(problem.q.dtype if score.bias is None else score.bias.dtype).name,
    )
    return fit(config, forward_bytes, arch)


def fit(config: SimtConfig, shared_bytes, arch: str) -> SimtConfig:
    """The configuration, or a smaller one where an architecture has too little shared memory for it."""
    limit = shared_limit(arch)
    while shared_bytes(config) > limit:
        if config.columns > 2:
            config = config._replace(columns=config.columns // 2)
        elif config.warps > 1:
            config = config._replace(warps=config.warps // 2)
        else:
            config = config._replace(rows=config.rows // 2)
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
    return keys * (problem.k.shape[3] + problem.v.shape[3]) * problem.k.dtype.itemsize // problem.group
