"""Gradients: shapes, dtypes, closed forms and finite differences."""

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import EVERY_DTYPE, Variant, calls, f16, f32, f64
from tolerances import assert_forward

import numbaflash
from numbaflash import reference


def test_vjp_is_the_forward_and_the_backward_call(backend):
    @settings(max_examples=max(1, int(20 * backend.examples * settings().max_examples / 30)))
    @given(calls(backend, variant=Variant(f32, frozenset({"bias"}))))
    def agree(call):
        (out, lse), vjp = call.vjp(backend.name)
        assert_forward(call.problem, out, lse)
        for _ in range(2):
            gradients = vjp(call.dout, call.dlse)
            for ours, theirs in zip(
                (*gradients, gradients.dbias, gradients.dsinks),
                (*(b := call.backward(backend.name, out, lse)), b.dbias, b.dsinks),
            ):
                np.testing.assert_array_equal(ours, theirs)

    agree()


def test_vjp_without_lse_returns_the_output_alone(backend):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 30, 8), dtype=np.float32)
    out, vjp = numbaflash.attention_vjp(q, k, v, causal=True, backend=backend.name)
    np.testing.assert_array_equal(out, numbaflash.attention(q, k, v, causal=True, backend=backend.name))
    for ours, exact in zip(vjp(out), reference.attention_backward(out, q, k, v, causal=True)):
        np.testing.assert_allclose(ours, exact, atol=2e-6)
    with pytest.raises(TypeError, match="return_lse"):
        vjp(out, np.zeros((2, 30), np.float32))


def test_the_gradient_of_lse_alone(backend):
    q, k, v = np.random.default_rng(1).standard_normal((3, 2, 40, 8))
    (out, lse), vjp = numbaflash.attention_vjp(q, k, v, causal=True, return_lse=True, backend=backend.name)
    dlse = np.random.default_rng(2).standard_normal(lse.shape)
    dq, dk, dv = vjp(np.zeros_like(out), dlse)
    exact = reference.attention_backward(np.zeros_like(out), q, k, v, dlse=dlse, causal=True)
    np.testing.assert_allclose(dq, exact.dq.astype(float), atol=1e-14)
    np.testing.assert_allclose(dk, exact.dk.astype(float), atol=1e-14)
    assert not dv.any()


@pytest.mark.emulated
def test_gradients_are_finite_differences_of_the_forward_call(backend):
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 2, 13, 6))
    options = dict(
        causal=True,
        softcap=2.0,
        bias=rng.standard_normal((13, 13)),
        sinks=rng.standard_normal(2),
        dropout_p=0.2,
        seed=4,
        backend=backend.name,
    )
    (out, lse), vjp = numbaflash.attention_vjp(q, k, v, return_lse=True, **options)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    gradients = vjp(dout, dlse)

    def loss(step, direction):
        moved = {name: value + step * direction[name] for name, value in inputs.items()}
        out, lse = numbaflash.attention(
            moved.pop("q"), moved.pop("k"), moved.pop("v"), return_lse=True, **(options | moved)
        )
        return (out * dout).sum() + (lse * dlse).sum()

    inputs = {"q": q, "k": k, "v": v, "bias": options["bias"], "sinks": options["sinks"]}
    for name in inputs:
        direction = {other: np.zeros_like(value) for other, value in inputs.items()}
        direction[name] = rng.standard_normal(inputs[name].shape)
        slope = (loss(1e-5, direction) - loss(-1e-5, direction)) / 2e-5
        assert slope == pytest.approx(
            (getattr(gradients, f"d{name}") * direction[name]).sum(), rel=1e-7, abs=1e-8
        )


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_gradients_have_the_dtypes_of_their_inputs(backend, dtype):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 10, 8)).astype(dtype)
    options = dict(
        bias=rng.standard_normal((1, 10)).astype(f16),
        sinks=rng.standard_normal(2).astype(f64),
        backend=backend.name,
    )
    out, vjp = numbaflash.attention_vjp(q, k, v, out_dtype=f32, **options)
    gradients = vjp(out)
    assert [g.dtype for g in gradients] == [dtype] * 3
    assert gradients.dbias.dtype == f16 and gradients.dbias.shape == (1, 10)
    assert gradients.dsinks.dtype == f64 and gradients.dsinks.shape == (2,)
    assert gradients.dmod_args is None


def test_gradients_of_options_that_were_not_given_are_none(backend):
    q = np.ones((3, 2), np.float32)
    _, vjp = numbaflash.attention_vjp(q, q, q, backend=backend.name)
    gradients = vjp(q)
    assert gradients.dbias is None and gradients.dsinks is None and gradients.dmod_args is None


@pytest.mark.emulated("shape3", "shape7", "shape8")
@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (5, 1), (5, 7), (1, 5, 7), (4, 1, 1), (2, 1, 1, 7), (2, 4, 5, 7)]
)
def test_the_gradient_of_a_bias_has_its_shape(backend, shape):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 4, n, 3)) for n in (5, 7, 7))
    bias, dout = np.asarray(rng.standard_normal(shape)), rng.standard_normal(q.shape)
    out, vjp = numbaflash.attention_vjp(q, k, v, bias=bias, backend=backend.name)
    exact = reference.attention_backward(dout, q, k, v, bias=bias).dbias
    assert vjp(dout).dbias.shape == shape == exact.shape
    np.testing.assert_allclose(vjp(dout).dbias, exact.astype(float), atol=1e-14)


@pytest.mark.emulated
def test_keys_that_no_query_sees_get_a_zero_gradient(backend):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 1, n, 5), dtype=np.float32) for n in (40, 90, 90))
    options = dict(window=(10, 0), q_offset=[20, 0], kv_lengths=[80, 15])
    out, vjp = numbaflash.attention_vjp(q, k, v, **options, backend=backend.name)
    dq, dk, dv = vjp(np.ones_like(out))
    for gradient in (dk, dv):
        assert (
            not gradient[0, :, :10].any()
            and not gradient[0, :, 60:].any()
            and gradient[0, :, 10:60].any(axis=-1).all()
        )
        assert not gradient[1, :, 15:].any() and gradient[1, :, :15].any()


@pytest.mark.emulated("6, 3)", "0, 3)")
@pytest.mark.parametrize(
    "shape",
    [
        dict(q=(0, 2, 5, 4), k=(0, 1, 6, 4), v=(0, 1, 6, 3)),
        dict(q=(2, 0, 5, 4), k=(2, 3, 6, 4), v=(2, 3, 6, 3)),
        dict(q=(2, 2, 0, 4), k=(2, 1, 6, 4), v=(2, 1, 6, 3)),
        dict(q=(2, 2, 5, 4), k=(2, 1, 0, 4), v=(2, 1, 0, 3)),
        dict(q=(2, 2, 5, 0), k=(2, 1, 6, 0), v=(2, 1, 6, 3)),
        dict(q=(2, 2, 5, 4), k=(2, 1, 6, 4), v=(2, 1, 6, 0)),
    ],
    ids=lambda s: f"{s['q']}{s['k']}{s['v']}",
)
def test_an_axis_may_be_empty(backend, shape):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape[name]).astype(np.float32) for name in "qkv")
    options = dict(bias=np.zeros((1, 1), np.float32), sinks=np.zeros(q.shape[1], np.float32))
    (out, lse), vjp = numbaflash.attention_vjp(q, k, v, return_lse=True, backend=backend.name, **options)
    gradients = vjp(np.ones_like(out), np.ones_like(lse))
    exact = reference.attention_backward(np.ones_like(out), q, k, v, dlse=np.ones_like(lse), **options)
    for ours, theirs in zip(
        (*gradients, gradients.dbias, gradients.dsinks), (*exact, exact.dbias, exact.dsinks)
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_equal_calls_give_equal_bits(backend):
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 4, min(200, backend.rows), 32), dtype=np.float32)
    _, vjp = numbaflash.attention_vjp(q, k[:2], v[:2], causal=True, deterministic=True, backend=backend.name)
    first = vjp(dout)
    for _ in range(3):
        for ours, theirs in zip(first, vjp(dout)):
            np.testing.assert_array_equal(ours, theirs)
