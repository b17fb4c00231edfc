"""Run the tensor-core kernels' plans in the emulator, as a backend would on a GPU."""

import dataclasses

import numpy as np

from numbaflash import emulator, reference
from numbaflash import segments as seg
from numbaflash.cuda.configs_sm80 import choose_forward
from numbaflash.cuda.forward_sm80 import plan_forward
from numbaflash.cuda.plan_sm80 import plan_backward
from numbaflash.options import Gradients, Options
from numbaflash.problem import make_problem


def inputs(shape, *, dtype, seed=0, kv_heads=None, keys=None, value_dim=None):
    """Random q, k and v; `shape` is (batch, heads, rows, head_dim)."""
    batch, heads, rows, head_dim = shape
    kv_heads, keys, value_dim = kv_heads or heads, rows if keys is None else keys, value_dim or head_dim
    rng = np.random.default_rng(seed)
    shapes = (shape, (batch, kv_heads, keys, head_dim), (batch, kv_heads, keys, value_dim))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def problem_of(arrays, cu_seqlens=(None, None), **options):
    """The Problem of a call."""
    return make_problem(*arrays, Options(**options), *cu_seqlens)


def forward(problem, *, arch="sm_80", config=None, out=None, **launch):
    """out, lse and the emulator's report; rows that no kernel may touch hold what the api puts there.

    Outputs are poisoned, so that a row that nobody writes is found.
    """
    out = np.empty(problem.out_shape, problem.out_dtype) if out is None else out
    lse = np.empty(problem.out_shape[:3], np.float32)
    out[...], lse[...] = 12345.0, 12345.0
    for batch, start, stop in seg.uncovered(problem.segments, problem.q.shape[0], problem.q.shape[2]):
        out[batch, :, start:stop], lse[batch, :, start:stop] = 0, -np.inf
    config = choose_forward(problem, out, arch == "sm_75") if config is None else config
    plan = plan_forward(problem, out, lse, config)
    report = emulator.execute(plan, arch=arch, **launch) if plan.launches else None
    return out, lse, report


def in_callers_shape(problem, array):
    """A head-major result as the caller of the api would get it."""
    return reference.caller_major(problem, array)


def replaced(problem, **fields):
    """A Problem with some fields replaced, such as the numbers that shards start from."""
    return dataclasses.replace(problem, **fields) if dataclasses.is_dataclass(problem) else problem._replace(**fields)


def backward(problem, *, arch="sm_80", numbers=11, dlse=True, **launch):
    """dq, dk, dv, dbias and dsinks, what they are gradients of, and the emulator's report.

    out and lse are the oracle's, rounded; dout and dlse are random, from the seed `numbers`.
    """
    rng = np.random.default_rng(numbers)
    out, lse = reference.forward(problem)
    dtype = problem.out_dtype
    dout = rng.standard_normal(out.shape).astype(dtype)
    dlse = rng.standard_normal(lse.shape).astype(np.float32) if dlse else None
    gradients = [np.full(x.shape, 12345.0, x.dtype) for x in (problem.q, problem.k, problem.v)]
    for gradient, keys in zip(gradients, (False, True, True)):
        operand = problem.k if keys else problem.q
        for batch, start, stop in seg.uncovered(problem.segments, operand.shape[0], operand.shape[2], keys=keys):
            gradient[batch, :, start:stop] = 0
    shape = problem.score.bias_shape
    dbias = None if shape is None else np.full(shape, 12345.0, np.float32)
    dsinks = None if problem.sinks is None else np.full(problem.sinks.shape, 12345.0)
    plan = plan_backward(problem, dout, out.astype(dtype), lse.astype(np.float32), dlse, *gradients, dbias, dsinks, arch)
    report = emulator.execute(plan, arch=arch, **launch) if plan.launches else None
    return *gradients, dbias, dsinks, dout, dlse, report


def gradients_in_callers_shape(problem, results, bias=None):
    """`Gradients` of `backward`'s results, as the caller of the api would get them."""
    dq, dk, dv, dbias, dsinks = results[:5]
    if dbias is not None:
        dbias = dbias.astype(bias.dtype).reshape(bias.shape)
    return Gradients(*(reference.caller_major(problem, x) for x in (dq, dk, dv)), dbias=dbias, dsinks=dsinks)
