"""What backward kernels receive: the forward `Call` and the tensors that only gradients need."""
from typing import NamedTuple

import numpy as np

from numbaflash.cuda.arguments import NOTHING, Call, Tensor, kernel_type, make_call, tensor
from numbaflash.cuda.plan import Pointer, Workspace
from numbaflash.problem import Problem


class BackwardCall(NamedTuple):
    """The gradient of one call.

    Attributes
    ----------
    call : Call
    dout, dlse, delta : Tensor
        dlse has pointer 0 where it is zero; delta is rowsum(dout * out) - dlse, made by the first launch.
    dq, dk, dv : Tensor
    dbias : Tensor
        Strides are 0 along axes where the bias was broadcast.
    dsinks : int
        Address of a float64 per head, or 0.
    sequences : int
        Rows of the segment table.
    """

    call: Call
    dout: Tensor
    dlse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor
    dsinks: np.int64
    sequences: np.int32


BACKWARD_CALL = kernel_type(BackwardCall)


def make_backward_call(
    problem: Problem, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, dbias: np.ndarray | None, dsinks: np.ndarray | None,
) -> tuple[BackwardCall, Workspace]:
    """Describe a gradient to the kernels, and the workspace of delta."""
    delta = Workspace("delta", lse.shape, np.dtype(lse.dtype))
    _, heads, rows = lse.shape
    size = lse.dtype.itemsize
    return BackwardCall(
        call=make_call(problem, out, lse), dout=tensor(dout), dlse=tensor(dlse),
        delta=Tensor(Pointer(delta), heads * rows * size, rows * size, size, 0),
        dq=tensor(dq), dk=tensor(dk), dv=tensor(dv), dbias=_broadcast(dbias),
        dsinks=0 if dsinks is None else Pointer(dsinks), sequences=len(problem.segments),
    ), delta


def _broadcast(dbias: np.ndarray | None) -> Tensor:
    if dbias is None:
        return NOTHING
    return Tensor(Pointer(dbias), *(stride if size > 1 else 0 for stride, size in zip(dbias.strides, dbias.shape)))
