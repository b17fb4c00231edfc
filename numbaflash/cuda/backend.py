"""The CUDA backend: a Problem becomes a plan, and the driver runs it on the GPU of the arrays.

NumPy arrays are copied to GPU 0 and their results back; arrays on a device are used where they are, on the
stream of their library or the caller's.
"""

from typing import Any

import numpy as np

from numbaflash import segments as seg
from numbaflash.cuda.driver import device, execute
from numbaflash.cuda.plans import plan_backward, plan_forward
from numbaflash.problem import Problem


def forward(problem: Problem, out: np.ndarray, lse: np.ndarray, stream: int = 0) -> None:
    """Write out and lse; on a device also the rows that belong to no segment."""
    problem, ordinal = _cover(problem), problem.home.device or 0
    plan = plan_forward(problem, out, lse, device(ordinal).arch)
    execute(plan, ordinal, stream, _on_host(problem, out, lse))


def backward(
    problem: Problem, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, stream: int = 0,
) -> tuple[Any, Any]:
    """Write dq, dk and dv, likewise; return the gradients of bias and sinks as arrays of the caller's library."""
    problem, ordinal = _cover(problem), problem.home.device or 0
    dbias, dbias_view = _empty(problem, problem.score.bias_shape, problem.compute_dtype)
    dsinks, dsinks_view = _empty(problem, None if problem.sinks is None else problem.sinks.shape, np.float64)
    views = dq, dk, dv, dbias_view, dsinks_view
    plan = plan_backward(problem, dout, out, lse, dlse, *views, device(ordinal).arch)
    execute(plan, ordinal, stream, _on_host(problem, *views))
    return dbias, dsinks


def _cover(problem: Problem) -> Problem:
    if not problem.padded or problem.home.device is None:
        return problem
    batch, q_rows, k_rows = problem.q.shape[0], problem.q.shape[2], problem.k.shape[2]
    return problem._replace(segments=seg.covering(problem.segments, batch, q_rows, k_rows))


def _empty(problem: Problem, shape: tuple[int, ...] | None, dtype: Any) -> tuple[Any, np.ndarray | None]:
    """An array beside the caller's, and its view; on the host a plain NumPy array."""
    if shape is None:
        return None, None
    if problem.home.device is None:
        array = np.empty(shape, dtype)
        return array, array
    return problem.home.library.empty(shape, np.dtype(dtype), problem.home.like)


def _on_host(problem: Problem, *views: np.ndarray | None) -> list[np.ndarray]:
    return [view for view in views if view is not None] if problem.home.device is None else []
