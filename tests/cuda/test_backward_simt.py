"""The SIMT backward kernels in the emulator, every check on, against the oracle."""

import numpy as np
import pytest
from simt_cases import CASES, Case, bias, cases, sinks
from tolerances import assert_backward

import numbaflash
from numbaflash.options import Options
from numbaflash.problem import make_problem

SIMT = {"backend": "emulator", "config": numbaflash.CUDAConfig(tensor_cores=False)}


def run(arrays, options, *, with_dlse=True, seed=1):
    """Gradients by the emulator, checked against the oracle's."""
    rng = np.random.default_rng(seed)
    out, lse = numbaflash.attention(*arrays, return_lse=True, **SIMT, **options)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype) if with_dlse else None
    gradients = numbaflash.attention_backward(dout, *arrays, out, lse, dlse=dlse, **SIMT, **options)
    return gradients, (make_problem(*arrays, Options(**options)), dout, dlse)


@pytest.mark.parametrize("name", cases())
def test_gradients_match_the_oracle(name):
    arrays, options = CASES[name].make()
    gradients, (problem, dout, dlse) = run(arrays, options, with_dlse="float16" not in name)
    assert_backward(problem, dout, dlse, gradients, options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("broadcast", [
    (False, False, False, False), (True, True, False, False), (True, True, True, False), (False, True, False,
                                                                                          True),
    (True, False, True, True),
], ids=str)
def test_gradient_of_bias_sums_over_broadcast_axes(broadcast):
    arrays, options = Case((2, 2, 1, 70, 90, 33, 20),
                           options={"bias": bias(*broadcast), "window": (30, 5), "sinks": sinks}).make()
    gradients, (problem, dout, dlse) = run(arrays, options)
    assert_backward(problem, dout, dlse, gradients, options)


def test_two_runs_are_equal_to_the_bit():
    arrays, options = CASES["everything"].make()
    first, _ = run(arrays, options)
    second, _ = run(arrays, options)
    for name in ("dq", "dk", "dv", "dbias", "dsinks"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": np.tri(70, dtype=bool)}],
                         ids=["band", "mask"])
def test_nan_reaches_exactly_what_sees_it(options):
    (q, k, v), _ = Case((1, 1, 1, 70, 70, 64, 64)).make()
    k[0, 0, 50, 3] = np.nan
    v[0, 0, 60, 5] = np.inf
    q[0, 0, 10, 0] = np.nan
    gradients, (problem, dout, dlse) = run((q, k, v), options)
    assert_backward(problem, dout, dlse, gradients, options)
    assert np.isfinite(gradients.dq[0, 0, :10]).all()  # rows that see no NaN; every key is seen by one that does


def test_rows_and_keys_that_nobody_sees_are_never_numbers():
    (q, k, v), _ = Case((1, 1, 1, 30, 100, 64, 64)).make()
    options = {"kv_lengths": [70], "q_lengths": [20], "backend": "emulator"}
    out, lse = numbaflash.attention(q, k, v, return_lse=True, **options)
    dout = np.random.default_rng(2).standard_normal(out.shape).astype(np.float32)
    expected = numbaflash.attention_backward(dout, q, k, v, out, lse, **options)
    k[:, :, 70:], v[:, :, 70:], q[:, :, 20:] = np.nan, np.inf, np.nan
    dout[:, :, 20:], out[:, :, 20:], lse[:, :, 20:] = np.nan, np.nan, np.nan
    actual = numbaflash.attention_backward(dout, q, k, v, out, lse, **options)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
        assert np.isfinite(getattr(actual, name)).all()


def test_packed_sequences_of_unequal_lengths():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((total, 2, 64), dtype=np.float32) for total in (150, 170, 170))
    cu = {"cu_seqlens_q": np.array([0, 3, 3, 100, 140]), "cu_seqlens_k": np.array([0, 90, 95, 95, 160])}
    out, lse = numbaflash.attention_varlen(q, k, v, *cu.values(), causal=True, return_lse=True,
                                           backend="emulator")
    dout = rng.standard_normal(out.shape).astype(np.float32)
    gradients = numbaflash.attention_backward(dout, q, k, v, out, lse, causal=True, backend="emulator", **cu)
    assert_backward(make_problem(q, k, v, Options(causal=True), *cu.values()), dout, None, gradients, {})
