"""Packed sequences of different lengths: each is a call of its own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Variant, calls, f32, variants
from tolerances import assert_backward, assert_forward

import numbaflash


@pytest.mark.slow
def test_any_packed_call_agrees_with_the_oracle(backend):
    @settings(max_examples=max(1, int(40 * backend.examples)))
    @given(variants.flatmap(lambda variant: calls(backend, variant=variant, packed=True)))
    def agree(call):
        out, lse = call.forward(backend.name)
        assert_forward(call.problem, out, lse)
        gradients = call.backward(backend.name, out, lse)
        assert_backward(call.problem, call.dout, call.dlse, gradients, call.options)

    agree()


def packed_inputs(cu_q, cu_k, heads=4, kv_heads=2, dim=16, value_dim=8, spare=0, dtype=np.float64):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((cu_q[-1] + spare, heads, dim)).astype(dtype)
    k = rng.standard_normal((cu_k[-1] + spare, kv_heads, dim)).astype(dtype)
    v = rng.standard_normal((cu_k[-1] + spare, kv_heads, value_dim)).astype(dtype)
    return q, k, v, rng.standard_normal((len(q), heads, value_dim)).astype(dtype)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(causal=True),
        dict(causal=True, q_offset=0),
        dict(window=(3, 2)),
        dict(sinks=np.zeros(4)),
        dict(scale=0.7, softcap=2.0),
        dict(alibi_slopes=np.array([0.1, 0.2, 0.3, 0.4])),
    ],
    ids=str,
)
def test_each_sequence_is_a_call_of_its_own(backend, options):
    cu_q, cu_k = np.array([0, 33, 33, 34, 100]), np.array([0, 40, 47, 47, 130])
    q, k, v, dout = packed_inputs(cu_q, cu_k)
    packed = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    (out, lse), vjp = numbaflash.attention_vjp(
        q, k, v, return_lse=True, backend=backend.name, **packed, **options
    )
    dq, dk, dv = vjp(dout)
    assert out.shape == (100, 4, 8) and lse.shape == (4, 100)
    for s in range(4):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        (part, part_lse), part_vjp = numbaflash.attention_vjp(
            q[rows], k[keys], v[keys], layout="BNHD", return_lse=True, backend=backend.name, **options
        )
        np.testing.assert_allclose(out[rows], part, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[:, rows], part_lse, rtol=1e-13)
        for whole, at, gradient in zip((dq, dk, dv), (rows, keys, keys), part_vjp(dout[rows])):
            np.testing.assert_allclose(whole[at], gradient, rtol=1e-10, atol=1e-13)


def test_a_padded_batch_is_its_packed_form(backend):
    q_lengths, kv_lengths = np.array([30, 1, 0, 77]), np.array([40, 9, 5, 80])
    cu_q, cu_k = np.cumsum([0, *q_lengths]), np.cumsum([0, *kv_lengths])
    q, k, v, dout = packed_inputs(cu_q, cu_k)
    options = dict(causal=True, dropout_p=0.3, seed=8, return_lse=True, backend=backend.name)

    def padded(x, lengths, longest):
        whole = np.full((4, longest, *x.shape[1:]), np.nan)
        for s, start in enumerate(np.cumsum([0, *lengths])[:-1]):
            whole[s, : lengths[s]] = x[start : start + lengths[s]]
        return whole

    (out, lse), vjp = numbaflash.attention_vjp(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    (padded_out, padded_lse), padded_vjp = numbaflash.attention_vjp(
        padded(q, q_lengths, 80),
        padded(k, kv_lengths, 90),
        padded(v, kv_lengths, 90),
        layout="BNHD",
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        **options,
    )
    gradients, padded_gradients = vjp(dout), padded_vjp(padded(dout, q_lengths, 80))
    pairs = [(out, padded_out, q_lengths), (np.moveaxis(lse, 0, 1), np.moveaxis(padded_lse, 1, 2), q_lengths)]
    pairs += zip(gradients, padded_gradients, (q_lengths, kv_lengths, kv_lengths))
    for packed, whole, lengths in pairs:
        for s, start in enumerate(np.cumsum([0, *lengths])[:-1]):
            np.testing.assert_allclose(
                whole[s, : lengths[s]], packed[start : start + lengths[s]], rtol=1e-11, atol=1e-13
            )
    for s in range(4):
        assert not padded_out[s, q_lengths[s] :].any() and (padded_lse[s, :, q_lengths[s] :] == -np.inf).all()
        assert not any(
            g[s, n[s] :].any() for g, n in zip(padded_gradients, (q_lengths, kv_lengths, kv_lengths))
        )


@pytest.mark.emulated
def test_rows_past_the_last_sequence_are_constants_and_never_read(backend):
    cu_q, cu_k = np.array([0, 20, 50], np.int32), np.array([0, 30, 60], np.int32)
    q, k, v, dout = packed_inputs(cu_q, cu_k, spare=7, dtype=np.float32)
    for array, end in ((q, 50), (k, 60), (v, 60), (dout, 50)):
        array[end:] = np.nan
    (out, lse), vjp = numbaflash.attention_vjp(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, backend=backend.name
    )
    assert not out[50:].any() and (lse[:, 50:] == -np.inf).all()
    assert np.isfinite(out).all() and np.isfinite(lse[:, :50]).all()
    for gradient, end in zip(vjp(dout), (50, 60, 60)):
        assert np.isfinite(gradient).all() and not gradient[end:].any() and gradient[:end].any()


@pytest.mark.emulated
def test_per_sequence_arguments_have_one_value_per_sequence(backend):
    cu_q, cu_k = np.array([0, 30, 70]), np.array([0, 50, 90])
    q, k, v, _ = packed_inputs(cu_q, cu_k)
    rng = np.random.default_rng(1)
    options = dict(
        causal=True,
        q_offset=[3, -2],
        q_lengths=[25, 40],
        kv_lengths=[50, 33],
        alibi_slopes=rng.random((2, 4)),
        mask=rng.random((2, 4, 40, 50)) < 0.8,
        bias=rng.standard_normal((2, 1, 40, 50)),
    )
    out, lse = numbaflash.attention_varlen(
        q, k, v, cu_q, cu_k, return_lse=True, backend=backend.name, **options
    )
    for s in range(2):
        n, m = np.diff(cu_q)[s], np.diff(cu_k)[s]
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        part, part_lse = numbaflash.attention(
            q[rows][None],
            k[keys][None],
            v[keys][None],
            layout="BNHD",
            causal=True,
            return_lse=True,
            q_offset=options["q_offset"][s],
            q_lengths=options["q_lengths"][s : s + 1],
            kv_lengths=options["kv_lengths"][s : s + 1],
            alibi_slopes=options["alibi_slopes"][s],
            mask=options["mask"][s, :, :n, :m],
            bias=options["bias"][s, :, :n, :m],
            backend=backend.name,
        )
        np.testing.assert_allclose(out[rows], part[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[:, rows], part_lse[0], rtol=1e-13)


@pytest.mark.emulated
@pytest.mark.parametrize("cu", [[0], [0, 0], [0, 0, 0]])
def test_there_may_be_no_sequences_or_only_empty_ones(backend, cu):
    q = np.full((5, 2, 4), np.nan, np.float32)
    cu = np.array(cu)
    (out, lse), vjp = numbaflash.attention_vjp(
        q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True, backend=backend.name
    )
    assert not out.any() and (lse == -np.inf).all()
    assert not any(gradient.any() for gradient in vjp(q))


def test_many_short_sequences(backend):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 6, 300)
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v, _ = packed_inputs(cu, cu, heads=2, kv_heads=1, dtype=np.float32)
    q[:] = 0
    out, lse = numbaflash.attention_varlen(
        q, k, v, cu, cu, causal=True, return_lse=True, backend=backend.name
    )
    for start, n in zip(cu, lengths):
        means = np.cumsum(v[start : start + n], axis=0) / np.arange(1, n + 1)[:, None, None]
        np.testing.assert_allclose(out[start : start + n], np.repeat(means, 2, axis=1), atol=1e-6)
        np.testing.assert_allclose(
            lse[:, start : start + n], np.log(np.arange(1, n + 1)) * np.ones((2, 1)), atol=1e-6
        )


@given(st.data())
def test_lists_and_either_integer_dtype_give_the_same_bits(backend, data):
    call = data.draw(calls(backend._replace(rows=60), variant=Variant(f32), packed=True))
    out, lse = call.forward(backend.name)
    for dtype in (np.int32, np.int64):
        cu = [x.astype(dtype) for x in call.packed.values()]
        again, _ = numbaflash.attention_varlen(
            call.q, call.k, call.v, *cu, return_lse=True, backend=backend.name, **call.options
        )
        np.testing.assert_array_equal(again, out)
    again = numbaflash.attention_varlen(
        call.q,
        call.k,
        call.v,
        *(x.tolist() for x in call.packed.values()),
        backend=backend.name,
        **call.options,
    )
    np.testing.assert_array_equal(again, out)
