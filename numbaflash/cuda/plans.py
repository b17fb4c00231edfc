"""The launches of a call: tensor cores where they compute what is asked for, else plain multiply-adds.

=======================================  ============================================================
what                                     on tensor cores
=======================================  ============================================================
float16, bfloat16                        from sm_80; float16 with D and Dv up to 128 on sm_75
float32 with ``precision="tf32"``        from sm_80, with D and Dv up to 128
or ``"tf32x3"``
float32 otherwise, float64               never
D or Dv beyond 256                       never
gradients of an ``out_dtype`` that is    never
not q's
=======================================  ============================================================

Each family of kernels says itself what it lacks, by NotImplementedError; `plan_sm80` holds the tables.
"""
import numpy as np

from numbaflash.cuda import plan_sm80, simt_plan
from numbaflash.cuda.plan import Plan
from numbaflash.problem import Problem


def plan_forward(problem: Problem, out: np.ndarray, lse: np.ndarray, arch: str = "sm_80") -> Plan:
    """The launches of a forward call; see `simt_plan.plan_forward` for the arguments.

    Raises
    ------
    NotImplementedError
        What no CUDA kernel computes.
    """
    if _wants_tensor_cores(problem):
        try:
            return plan_sm80.plan_forward(problem, out, lse, arch)
        except NotImplementedError:
            pass
    return simt_plan.plan_forward(problem, out, lse, arch)


def plan_backward(
    problem: Problem, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, dbias: np.ndarray | None, dsinks: np.ndarray | None,
    arch: str = "sm_80",
) -> Plan:
    """The launches of a backward call; see `simt_plan.plan_backward` for the arguments.

    Raises
    ------
    NotImplementedError
        What no CUDA kernel computes.
    """
    arguments = problem, dout, out, lse, dlse, dq, dk, dv, dbias, dsinks, arch
    if _wants_tensor_cores(problem):
        try:
            return plan_sm80.plan_backward(*arguments)
        except NotImplementedError:
            pass
    return simt_plan.plan_backward(*arguments)


def _wants_tensor_cores(problem: Problem) -> bool:
    return problem.config is None or problem.config.tensor_cores
