"""Forward: exactness, dtypes, and shapes at the edges."""

import numpy as np
import pytest
from strategies import EVERY_DTYPE, bfloat16, f16, f32, f64
from tolerances import assert_forward, eps

import numbaflash
from numbaflash import reference
from numbaflash.options import Options
from numbaflash.problem import make_problem


@pytest.mark.parametrize("causal", [False, True])
def test_float32_is_as_exact_as_promised(causal):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2048, 64), dtype=np.float32)
    out = numbaflash.attention(q, k, v, causal=causal, backend="cpu")
    assert np.abs(out - reference.attention(q, k, v, causal=causal)[0]).max() <= 5e-7


def test_float64_is_as_exact_as_promised():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 512, 64))
    out = numbaflash.attention(q, k, v, backend="cpu")
    assert np.abs(out - reference.attention(q, k, v)[0]).max() <= 1e-14


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [f16, bfloat16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 150, 64)).astype(dtype)
    wide, lse = numbaflash.attention(q, k, v, out_dtype=f32, return_lse=True, backend="cpu")
    in_float32 = make_problem(*(x.astype(f32) for x in (q, k, v)), Options())
    assert_forward(in_float32, wide, lse)
    np.testing.assert_array_equal(numbaflash.attention(q, k, v, backend="cpu"), wide.astype(dtype))


@pytest.mark.parametrize("out_dtype", [f16, bfloat16, f32, f64, "float16", "bfloat16", float])
@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_every_input_and_output_dtype(backend, dtype, out_dtype):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 20, 8)).astype(dtype)
    out, lse = numbaflash.attention(q, k, v, out_dtype=out_dtype, return_lse=True, backend=backend.name)
    assert out.dtype == np.dtype(out_dtype)
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    tolerance = 4 * max(eps(out_dtype), eps(np.float32))
    np.testing.assert_allclose(
        out.astype(float), reference.attention(q, k, v)[0].astype(float), atol=tolerance
    )


@pytest.mark.emulated("6, 3)", "0, 3)")
@pytest.mark.parametrize(
    "shape",
    [
        dict(q=(0, 2, 5, 4), k=(0, 1, 6, 4), v=(0, 1, 6, 3)),
        dict(q=(2, 0, 5, 4), k=(2, 0, 6, 4), v=(2, 0, 6, 3)),
        dict(q=(2, 0, 5, 4), k=(2, 3, 6, 4), v=(2, 3, 6, 3)),
        dict(q=(2, 2, 0, 4), k=(2, 1, 6, 4), v=(2, 1, 6, 3)),
        dict(q=(2, 2, 5, 4), k=(2, 1, 0, 4), v=(2, 1, 0, 3)),
        dict(q=(2, 2, 5, 0), k=(2, 1, 6, 0), v=(2, 1, 6, 3)),
        dict(q=(2, 2, 5, 4), k=(2, 1, 6, 4), v=(2, 1, 6, 0)),
        dict(q=(2, 2, 0, 0), k=(2, 2, 0, 0), v=(2, 2, 0, 0)),
    ],
    ids=lambda s: f"{s['q']}{s['k']}{s['v']}",
)
def test_an_axis_may_be_empty(backend, shape):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape[name]).astype(np.float32) for name in "qkv")
    out, lse = numbaflash.attention(q, k, v, return_lse=True, backend=backend.name)
    exact, exact_lse = reference.attention(q, k, v)
    assert out.shape == exact.shape and lse.shape == exact_lse.shape
    np.testing.assert_allclose(out, exact, atol=1e-6)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-6)


def test_more_heads_than_a_grid_has_blocks_in_y():
    q = np.random.default_rng(0).standard_normal((70_000, 1, 2, 1), dtype=np.float32)
    out = numbaflash.attention(q, q, q, backend="cpu")
    np.testing.assert_allclose(out, reference_of_two(q), rtol=1e-5, atol=1e-6)


def reference_of_two(x):
    x = x[:, 0, :, 0].astype(float)
    p = 1 / (1 + np.exp(x * (x[:, ::-1] - x)))
    return (p * x + (1 - p) * x[:, ::-1])[:, None, :, None]


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_precision_has_no_effect_on_float64(backend, precision):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 30, 8))
    np.testing.assert_array_equal(
        numbaflash.attention(q, k, v, precision=precision, backend=backend.name),
        numbaflash.attention(q, k, v, backend=backend.name),
    )
