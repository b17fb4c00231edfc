"""What backward kernels receive: the forward `Call` and the tensors that only gradients need."""
from typing import NamedTuple

import numpy as np

from numbaflash.cuda.arguments import Call, Tensor, kernel_type, make_call, tensor
from numbaflash.cuda.plan import Pointer, Workspace
from numbaflash.problem import Problem


class Shape(NamedTuple):
    """Of the bias as it was given: 1 along axes where it was broadcast."""

    sequences: np.int32
    heads: np.int32
    rows: np.int32
    columns: np.int32


class BackwardCall(NamedTuple):
    """The gradient of one call.

    Attributes
    ----------
    call : Call
    dout, dlse, delta : Tensor
        dlse has pointer 0 where it is zero; delta is rowsum(dout * out) - dlse, made by the first launch.
    dq, dk, dv : Tensor
    dbias : Tensor
    bias_shape : Shape
    dsinks : int
        Address of a float64 per head, or 0.
    """

    call: Call
    dout: Tensor
    dlse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor
    bias_shape: Shape
    dsinks: np.int64


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
        dq=tensor(dq), dk=tensor(dk), dv=tensor(dv), dbias=tensor(dbias),
        bias_shape=Shape(*(problem.score.bias_shape or (0, 0, 0, 0))),
        dsinks=0 if dsinks is None else Pointer(dsinks),
    ), delta
