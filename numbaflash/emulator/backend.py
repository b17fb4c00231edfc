"""``backend="emulator"``: the plans of the CUDA backend, executed by the interpreter on NumPy arrays.

Its kernels are those of an A100; ``config=CUDAConfig(...)`` asks for another GPU, or for no tensor cores.
"""

import numpy as np

from numbaflash.cuda.plan import Plan
from numbaflash.cuda.plans import plan_backward, plan_forward
from numbaflash.emulator.executor import execute
from numbaflash.problem import Problem

ARCH = "sm_80"


def forward(problem: Problem, out: np.ndarray, lse: np.ndarray) -> None:
    """Write every row of out and lse that belongs to a segment."""
    arch = _arch(problem)
    _run(plan_forward(problem, out, lse, arch), arch)


def backward(
    problem: Problem, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Write every row of the gradients that belongs to a segment; return those of bias and sinks."""
    bias_shape, arch = problem.score.bias_shape, _arch(problem)
    dbias = None if bias_shape is None else np.empty(bias_shape, problem.compute_dtype)
    dsinks = None if problem.sinks is None else np.empty(problem.sinks.shape, np.float64)
    _run(plan_backward(problem, dout, out, lse, dlse, dq, dk, dv, dbias, dsinks, arch), arch)
    return dbias, dsinks


def _arch(problem: Problem) -> str:
    return ARCH if problem.config is None or problem.config.arch is None else problem.config.arch


def _run(plan: Plan, arch: str) -> None:
    if plan.launches:
        execute(plan, arch=arch, counters=False)
