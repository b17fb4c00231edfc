"""The numeric rule of the project, in one place.

A result computed in dtype T passes where its largest error is at most

    factor * err_plain(T) + 4 * eps(T) * max|exact| + u * magnitude

with factor 2 for outputs and 3 for gradients; eps is 2^-11 where float32 is computed in tf32. ``exact`` is the oracle's result and ``err_plain`` the error of
plain code that rounds S and P to T. The last term, u the eps of the accumulator, is what every order of
summation may lose: ``magnitude`` is the same result with all its terms taken as absolute values. It matters
only where terms cancel (one visible key makes every dq an exact zero) or where there are so few numbers that
plain code is exact by luck.
"""

import ml_dtypes
import numpy as np

from numbaflash import reference
from numbaflash.bench.magnitudes import (
    backward_magnitudes,
    coarser,
    eps,
    forward_magnitudes,
    product_eps,
)
from numbaflash.problem import Problem


def assert_within(name, actual, exact, plain, dtype, *, factor, magnitude=0.0, unit=0.0, coarse=0.0):
    """Apply the rule to one result; NaN and infinities must stand where the exact result has them."""
    actual, exact = np.asarray(actual), np.asarray(exact)
    assert actual.shape == exact.shape, f"{name} has shape {actual.shape}, not {exact.shape}"
    actual = actual.astype(exact.dtype if actual.dtype != ml_dtypes.bfloat16 else np.float64)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(actual[~finite], exact[~finite], err_msg=f"{name}: NaN and infinities")
    if not finite.any():
        return
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    largest = np.abs(exact[finite]).max()
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - exact)[finite]
        plain_error = np.nan_to_num(np.abs(plain - exact)[finite], nan=0.0, posinf=0.0).max()
    bound = factor * plain_error + 4 * max(eps(dtype), coarse) * largest + unit * magnitude + tiny
    if not error.max() <= bound:
        worst = np.argwhere(finite)[np.argmax(np.nan_to_num(error, nan=np.inf))]
        at = tuple(int(x) for x in worst)
        raise AssertionError(
            f"{name}[{at}] is {actual[at]}, exactly {exact[at]}: off by {float(error.max()):.3g}, "
            f"allowed {float(bound):.3g} "
            f"(plain code errs by {float(plain_error):.3g}, max|exact| {float(largest):.3g}, "
            f"{int((~(error <= bound)).sum())} of {error.size} numbers are off)"
        )


def assert_forward(problem: Problem, out, lse):
    """Check out and lse, in the caller's shapes, against the oracle."""
    dtype = coarser(problem.q.dtype, problem.out_dtype)
    unit, coarse = eps(problem.compute_dtype), product_eps(problem)
    exact, plain = reference.forward(problem), reference.dense(problem, problem.q.dtype)
    sizes = forward_magnitudes(problem)
    out, lse = reference.problem_major(problem, np.asarray(out)), np.reshape(lse, problem.q.shape[:3])
    assert out.dtype == problem.out_dtype and lse.dtype == problem.compute_dtype
    assert_within(
        "out", out, exact[0], plain[0], dtype, factor=2, magnitude=sizes[0], unit=unit, coarse=coarse
    )
    plain_lse = reference.dense(problem, problem.compute_dtype)[1]
    assert_within(
        "lse", lse, exact[1], plain_lse, problem.compute_dtype, factor=2, magnitude=sizes[1], unit=unit,
        coarse=coarse,
    )


def assert_backward(problem: Problem, dout, dlse, gradients, options):
    """Check gradients, in the caller's shapes, against the oracle."""
    unit, coarse = eps(problem.compute_dtype), product_eps(problem)
    dout = reference.problem_major(problem, dout)
    dlse = None if dlse is None else np.reshape(dlse, problem.q.shape[:3])
    exact = reference.backward(problem, dout, dlse)
    plain = reference.dense_backward(problem, problem.q.dtype, dout, dlse)
    sizes = backward_magnitudes(problem, dout, dlse)
    actual = [reference.problem_major(problem, array) for array in gradients]
    actual += [gradients.dbias, gradients.dsinks]
    for i, name in enumerate(("dq", "dk", "dv", "dbias", "dsinks")):
        if exact[i] is None:
            assert actual[i] is None, f"{name} is a gradient of nothing"
            continue
        result, dtype = actual[i], coarser(problem.q.dtype, problem.out_dtype)
        if name in ("dbias", "dsinks"):
            given = options[name[1:]]
            assert result.dtype == given.dtype and result.shape == given.shape, name
            result, dtype = result.reshape(exact[i].shape), coarser(dtype, given.dtype)
        else:
            assert result.dtype == problem.q.dtype, name
        assert_within(
            name, result, exact[i], plain[i], dtype, factor=3, magnitude=sizes[i], unit=unit, coarse=coarse
        )
