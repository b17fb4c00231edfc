"""From a Problem to launches of the tensor-core kernels."""
import numpy as np

from numbaflash.cuda import simt_plan
from numbaflash.cuda.backward_arguments import BACKWARD_CALL
from numbaflash.cuda.backward_keys_sm80 import make_backward_keys
from numbaflash.cuda.backward_queries_sm80 import make_backward_queries
from numbaflash.cuda.backward_sm80 import BackwardConfig
from numbaflash.cuda.configs_sm80 import choose_backward, choose_forward
from numbaflash.cuda.forward_sm80 import plan_forward as plan_configured_forward
from numbaflash.cuda.plan import KernelSpec, Launch, Plan
from numbaflash.cuda.simt_plan import key_grid, query_grid
from numbaflash.problem import Problem

OLDEST = 80
"""Compute capability from which everything here runs; of 75, only the forward in float16."""


def capability(arch: str) -> int:
    """90 for "sm_90a"."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def plan_forward(problem: Problem, out: np.ndarray, lse: np.ndarray, arch: str = "sm_80") -> Plan:
    """The launches of a forward call.

    Parameters
    ----------
    problem : Problem
    out : array, shape (batch, H, Nq, Dv)
        Head-major view of ``out_dtype``, any strides.
    lse : array, shape (batch, H, Nq)
    arch : str

    Returns
    -------
    Plan

    Raises
    ------
    NotImplementedError
        What tensor cores, or those of this architecture, do not compute; SIMT kernels do.
    """
    if capability(arch) < 75:
        raise NotImplementedError(f"{arch} has no tensor cores that these kernels use")
    return plan_configured_forward(problem, out, lse, choose_forward(problem, out, capability(arch) < OLDEST))


def plan_backward(
    problem: Problem, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, dbias: np.ndarray | None, dsinks: np.ndarray | None,
    arch: str = "sm_80",
) -> Plan:
    """The launches of a backward call; arguments and result as of `simt_plan.plan_backward`.

    delta and the gradients of bias and sinks come from the SIMT kernels.

    Raises
    ------
    NotImplementedError
        What tensor cores do not compute; SIMT kernels do.
    """
    if capability(arch) < OLDEST:
        raise NotImplementedError(f"gradients on tensor cores need sm_80 or newer, not {arch}")
    keys, queries = choose_backward(problem, dout, dq, dk, dv)
    simt = simt_plan.plan_backward(problem, dout, out, lse, dlse, dq, dk, dv, dbias, dsinks, arch)
    launches = []
    for launch in simt.launches:
        (back,) = launch.arguments
        if launch.kernel.name.startswith("dkdv_simt"):
            for config in keys:
                call, blocks = key_grid(back.call, problem, config.block_rows)
                launches.append(_launch("keys", make_backward_keys, config, back._replace(call=call), blocks))
        elif launch.kernel.name.startswith("dq_simt"):
            call, blocks = query_grid(back.call, problem, queries.block_rows)
            launches.append(_launch("queries", make_backward_queries, queries, back._replace(call=call), blocks))
        else:
            launches.append(launch)
    return Plan(launches, simt.workspaces)


def _launch(name, make, config: BackwardConfig, back, blocks: int) -> Launch:
    kernel = KernelSpec(f"backward_{name}_sm80_d{config.head_dim}_{config.dtype}", make(config), (BACKWARD_CALL,),
                        (config.threads, config.blocks))
    return Launch(kernel, blocks, config.threads, config.shared_bytes, (back,))
