"""The SIMT planner has kernels for every call, on every architecture, and fits them into shared memory."""

import numpy as np
import pytest

from numbaflash.arrays import FLOATING
from numbaflash.cuda import simt_plan
from numbaflash.cuda.arguments import LARGEST, Tensor, kernel_type
from numbaflash.cuda.simt_config import shared_limit
from numbaflash.cuda.tiles import row_zero
from numbaflash.device import device_view
from numbaflash.options import Options
from numbaflash.problem import make_problem

ROWS, HEADS = 40, 2
DIMS = ((64, 64), (128, 128), (256, 256), (32, 256), (256, 32), (300, 64), (64, 300))


def plans(dtype, out_dtype, arch, dim=64, value_dim=64, **options):
    """The launches of a call forward and backward."""
    q, k, v = (np.zeros((1, HEADS, ROWS, width), dtype) for width in (dim, dim, value_dim))
    problem = make_problem(q, k, v, Options(out_dtype=out_dtype, **options))
    out, dout = np.zeros((2, *problem.out_shape), out_dtype)
    lse, dlse = np.zeros((2, *out.shape[:3]), problem.compute_dtype)
    shape = problem.score.bias_shape
    dbias = None if shape is None else np.zeros(shape, problem.compute_dtype)
    dsinks = None if problem.sinks is None else np.zeros(HEADS)
    gradients = [np.zeros_like(array) for array in (q, k, v)]
    forward = simt_plan.plan_forward(problem, out, lse, arch)
    return forward, simt_plan.plan_backward(problem, dout, out, lse, dlse, *gradients, dbias, dsinks, arch)


@pytest.mark.parametrize("out_dtype", FLOATING, ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_every_dtype_of_the_result_goes_with_every_dtype_of_the_inputs(dtype, out_dtype):
    bias = np.zeros((ROWS, ROWS), out_dtype)
    for options in ({}, {"bias": bias, "sinks": np.zeros(HEADS, dtype), "dropout_p": 0.5, "seed": 1}):
        for width in (64, 65):          # rows of whole 16-byte pieces, and not
            forward, backward = plans(dtype, out_dtype, "sm_80", width, width, **options)
            assert len(forward.launches) == 1 and len(backward.launches) == 3 + 2 * bool(options)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_every_head_dimension_fits_into_shared_memory(dtype, arch):
    bias = np.zeros((ROWS, ROWS), np.float32)
    for dim, value_dim in DIMS:
        for options in ({}, {"bias": bias}):
            for plan in plans(dtype, dtype, arch, dim, value_dim, **options):
                assert max(launch.shared_bytes for launch in plan.launches) <= shared_limit(arch)


def test_more_heads_than_a_grid_is_high_in_both_directions():
    heads = 70_000
    q, out, dout = (np.zeros((1, heads, 1, 1), np.float32) for _ in range(3))
    problem, lse = make_problem(q, q, q, Options()), np.zeros((1, heads, 1), np.float32)
    forward = simt_plan.plan_forward(problem, out, lse)
    backward = simt_plan.plan_backward(problem, dout, out, lse, None, q, q, q, None, None)
    grids = [launch.grid for launch in (*forward.launches, *backward.launches)]
    assert grids == [(heads, 1, 1)] * 4


def test_offsets_beyond_32_bits_reach_the_kernels_whole():
    """Strides of 6 GB between rows, and the address that the kernels' own arithmetic makes of them."""
    shape, strides = (2, 3, 4, 8), (1 << 40, -(1 << 36), 6_000_000_000, 4)
    views = [device_view((n + 1) << 44, shape, strides, np.float32) for n in range(4)]
    problem = make_problem(*views[:3], Options())
    lse = np.zeros(shape[:3], np.float32)
    (launch,) = simt_plan.plan_forward(problem, views[3], lse).launches
    (call,) = launch.arguments
    assert tuple(call.q[1:]) == strides and tuple(call.out[1:]) == strides
    field = dict(zip(Tensor._fields, kernel_type(Tensor).types))
    assert {str(kind) for kind in field.values()} == {"int64"}
    place = row_zero.py_func(call.k._replace(pointer=2 << 44), 1, 2, 3)
    assert place == views[1][1, 2, 3].__array_interface__["data"][0]


def test_rows_that_int32_cannot_count_are_refused():
    q = device_view(1 << 44, (1, 1, 8, 1), None, np.float16)
    k = device_view(1 << 44, (1, 1, LARGEST + 1, 1), None, np.float16)
    problem = make_problem(q, k, k, Options())
    with pytest.raises(NotImplementedError, match=f"more than {LARGEST} rows or keys"):
        simt_plan.plan_forward(problem, q, np.zeros((1, 1, 8), np.float32))
