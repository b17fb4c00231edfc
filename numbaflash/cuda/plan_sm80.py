"""From a Problem to launches of the tensor-core kernels."""
import numpy as np
from numba import types

from numbaflash.cuda import simt_plan
from numbaflash.cuda.backward_arguments import BACKWARD_CALL
from numbaflash.cuda.backward_keys_sm80 import make_backward_keys
from numbaflash.cuda.backward_queries_sm80 import make_backward_queries
from numbaflash.cuda.backward_reduced_sm80 import make_backward_reduced
from numbaflash.cuda.configs_sm80 import capability, choose_backward, choose_forward
from numbaflash.cuda.forward_sm80 import plan_forward as plan_configured_forward
from numbaflash.cuda.plan import KernelSpec, Launch, Plan, Pointer, Workspace
from numbaflash.cuda.simt_plan import key_grid, query_grid
from numbaflash.problem import Problem
from numbaflash.segments import Q_LENGTH

OLDEST = 75
"""Compute capability from which something here runs: of 75 float16, all else from 80."""


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
    if capability(arch) < OLDEST:
        raise NotImplementedError(f"{arch} has no tensor cores that these kernels use")
    return plan_configured_forward(problem, out, lse, choose_forward(problem, out, capability(arch) < 80))


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
        raise NotImplementedError(f"{arch} has no tensor cores that these kernels use")
    keys, queries = choose_backward(problem, dout, dq, dk, dv, arch)
    simt = simt_plan.plan_backward(problem, dout, out, lse, dlse, dq, dk, dv, dbias, dsinks, arch)
    reducing = keys[0] if keys[0].reduce else None
    rows = int(problem.segments[:, Q_LENGTH].max(initial=0))
    tiles = -(-rows // keys[0].columns)
    heads, numbers = problem.q.shape[1], keys[0].columns * keys[0].head_dim
    sums = Workspace("sums of dq", (len(problem.segments) * heads * tiles * numbers,), np.dtype(np.float32), 0)
    launches = []

    def launch(name, make, config, grid, block_rows):
        call, blocks = grid(back.call, problem, block_rows)
        buffer = (Pointer(sums), tiles) if reducing else (0, 0)
        kernel = KernelSpec(f"backward_{name}_sm80_d{config.head_dim}_{config.kind}", make(config),
                            (BACKWARD_CALL, types.int64, types.int32), (config.threads, config.blocks))
        arguments = (back._replace(call=call), *buffer)
        launches.append(Launch(kernel, blocks, config.threads, config.shared_bytes, arguments))

    for simt_launch in simt.launches:
        back = simt_launch.arguments[0]
        if simt_launch.kernel.name.startswith("dkdv_simt"):
            for config in keys:
                launch("keys", make_backward_keys, config, key_grid, config.block_rows)
        elif simt_launch.kernel.name.startswith("dq_simt"):
            if reducing:
                launch("reduced", make_backward_reduced, reducing, query_grid, reducing.columns)
            else:
                launch("queries", make_backward_queries, queries, query_grid, queries.block_rows)
        else:
            launches.append(simt_launch)
    return Plan(launches, [*simt.workspaces, *([sums] if reducing else [])])
