"""NaN and infinities: hidden ones change nothing, visible ones reach the rows that see them and no other."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import HALVES, Variant, bfloat16, calls, f16, f32, f64
from tolerances import assert_backward, assert_forward

import numbaflash
from numbaflash import reference

VARIANTS = [
    Variant(f32),
    Variant(f64),
    Variant(f16),
    Variant(bfloat16, frozenset({"bias", "mask"})),
    Variant(f32, frozenset({"softcap", "bias", "alibi", "mask", "dropout"})),
]
POISON = [np.nan, np.inf, -np.inf]


def results(call, backend):
    out, lse = call.forward(backend.name)
    gradients = call.backward(backend.name, out, lse)
    return [out, lse, *gradients, gradients.dbias, gradients.dsinks]


def with_nan(call, data, names):
    """The call with NaN in a few places of some of its arrays."""
    changed = {}
    for name in names:
        array = getattr(call, name)
        if array is not None and array.size and data.draw(st.booleans(), label=f"NaN in {name}"):
            array = np.array(array)
            for _ in range(data.draw(st.integers(1, 3))):
                at = tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)
                array[at] = np.nan
            changed[name] = array
    return dataclasses.replace(call, **changed)


@pytest.mark.slow
def test_visible_nan_reaches_exactly_what_the_formula_says_forward(backend):
    @settings(max_examples=max(1, int(80 * backend.examples)))
    @given(st.data())
    def agree(data):
        call = data.draw(calls(backend._replace(rows=150), variant=data.draw(st.sampled_from(VARIANTS))))
        call = with_nan(call, data, ["q", "k", "v"])
        assert_forward(call.problem, *call.forward(backend.name))

    agree()


@pytest.mark.slow
def test_visible_nan_reaches_exactly_what_the_formula_says_backward(backend):
    @settings(max_examples=max(1, int(80 * backend.examples)))
    @given(st.data())
    def agree(data):
        call = data.draw(calls(backend._replace(rows=150), variant=data.draw(st.sampled_from(VARIANTS))))
        call = with_nan(call, data, ["q", "k", "v", "dout", "dlse"])
        out, lse = call.forward(backend.name)
        gradients = call.backward(backend.name, out, lse)
        assert_backward(call.problem, call.dout, call.dlse, gradients, call.options)

    agree()


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            v, id=f"{v.dtype}-{len(v.stages)}", marks=[pytest.mark.slow] if v.dtype in HALVES else []
        )
        for v in VARIANTS
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_hidden_memory_is_never_read_as_numbers(backend, poison, variant, packed):
    """Keys past kv_lengths, rows past q_lengths, and keys outside every row's window."""
    rng = np.random.default_rng(0)
    n, m = 100, 140
    options = dict(q_lengths=[90, 37], kv_lengths=[120, 41], window=(10, 5), causal=True)
    if "softcap" in variant.stages:
        options |= dict(softcap=5.0, alibi_slopes=[0.1, 0.2], dropout_p=0.2, seed=1)
    if "bias" in variant.stages:
        options |= dict(
            bias=rng.standard_normal((2, 1, n, m)).astype(variant.dtype), mask=rng.random((n, m)) < 0.9
        )
    q, dout = (rng.standard_normal((2, n, 2, 16)).astype(variant.dtype) for _ in range(2))
    k, v = (rng.standard_normal((2, m, 1, 16)).astype(variant.dtype) for _ in range(2))
    dlse = rng.standard_normal((2, 2, n)).astype(f64 if variant.dtype == f64 else f32)
    arguments = dict(return_lse=True, backend=backend.name, **options)

    def run(q, k, v, dout, dlse, poison_results=None):
        if packed:
            cu_q, cu_k = np.array([0, n, 2 * n]), np.array([0, m, 2 * m])
            q, k, v, dout = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, dout))
            keywords = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
            dlse = np.moveaxis(dlse, 0, 1).reshape(2, -1)
        else:
            keywords = dict(layout="BNHD")
        (out, lse), _ = numbaflash.attention_vjp(q, k, v, **keywords, **arguments)
        results = [out.copy(), lse.copy()]
        if poison_results is not None:
            for b, length in enumerate(options["q_lengths"]):
                rows = np.s_[b * n + length : (b + 1) * n] if packed else np.s_[b, length:]
                out[rows] = poison_results
                lse[(slice(None), rows) if packed else (b, slice(None), slice(length, None))] = poison_results
        gradients = numbaflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, backend=backend.name, **keywords, **options
        )
        return [*results, *gradients, *([] if gradients.dbias is None else [gradients.dbias])]

    clean = run(q, k, v, dout, dlse)
    for b in range(2):
        nq, nk = options["q_lengths"][b], options["kv_lengths"][b]
        first = max(0, (nk - nq) - 10)
        for array in (q, dout):
            array[b, nq:] = poison
        dlse[b, :, nq:] = poison
        for array in (k, v):
            array[b, nk:] = poison
            array[b, :first] = poison
        if "bias" in options:
            options["bias"][b, :, nq:] = poison
            options["bias"][b, :, :, nk:] = poison
    for before, after in zip(clean, run(q, k, v, dout, dlse, poison)):
        assert np.isfinite(before[before != -np.inf]).all()
        np.testing.assert_array_equal(after, before)


@pytest.mark.emulated("64")
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("at", [0, 1, 63, 64, 77, 149])
def test_nan_under_a_causal_edge_reaches_the_rows_below_it_alone(backend, where, at):
    rng = np.random.default_rng(0)
    arrays = dict(zip("qkv", rng.standard_normal((3, 2, 150, 32), dtype=np.float32)))
    options = dict(causal=True, return_lse=True, backend=backend.name)
    clean, clean_lse = numbaflash.attention(**arrays, **options)
    arrays[where][0, at, 5] = np.nan
    out, lse = numbaflash.attention(**arrays, **options)
    hit = np.zeros((2, 150), bool)
    hit[0, at : at + 1 if where == "q" else None] = True
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), hit)
    np.testing.assert_allclose(out[~hit], clean[~hit], atol=1e-6)
    if where == "v":
        np.testing.assert_array_equal(np.isnan(out[hit]), np.broadcast_to(np.arange(32) == 5, out[hit].shape))
        np.testing.assert_allclose(lse, clean_lse, atol=1e-6)
    else:
        assert np.isnan(out[hit]).all()
        np.testing.assert_array_equal(np.isnan(lse), hit)
        np.testing.assert_allclose(lse[~hit], clean_lse[~hit], atol=1e-6)


@pytest.mark.emulated
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("hide", ["mask", "bias"])
def test_a_pair_hidden_by_mask_or_bias_carries_nothing(backend, poison, where, hide):
    rng = np.random.default_rng(0)
    arrays = dict(zip("qkv", rng.standard_normal((3, 1, 130, 16), dtype=np.float32)))
    seen = rng.random((130, 130)) < 0.7
    seen[:, 40] = np.arange(130) % 3 == 0
    hidden_by = (
        dict(mask=seen) if hide == "mask" else dict(bias=np.where(seen, 0, -np.inf).astype(np.float32))
    )
    clean = numbaflash.attention(**arrays, **hidden_by, backend=backend.name)
    arrays[where][0, 40, 3] = poison
    out, vjp = numbaflash.attention_vjp(**arrays, **hidden_by, backend=backend.name)
    np.testing.assert_allclose(out[0, ~seen[:, 40]], clean[0, ~seen[:, 40]], atol=1e-6)
    dq, dk, dv = vjp(np.ones_like(out))
    assert np.isfinite(dq[0, ~seen[:, 40]]).all()


def test_nan_in_a_visible_bias_reaches_its_row_alone(backend):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 100, 16), dtype=np.float32)
    bias = np.zeros((2, 100, 100), np.float32)
    bias[1, 70, 20] = np.nan
    bias[1, 10, 90] = np.nan
    out, lse = numbaflash.attention(q, k, v, bias=bias, causal=True, return_lse=True, backend=backend.name)
    hit = np.zeros((2, 100), bool)
    hit[1, 70] = True
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1), hit)
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), hit)
    np.testing.assert_array_equal(np.isnan(lse), hit)


@pytest.mark.emulated
def test_nan_in_a_sink_reaches_its_head_alone(backend):
    q, k, v = np.random.default_rng(0).standard_normal((3, 3, 50, 8), dtype=np.float32)
    sinks = np.array([0, np.nan, 0], np.float32)
    out, lse = numbaflash.attention(q, k, v, sinks=sinks, return_lse=True, backend=backend.name)
    for head in range(3):
        assert np.isnan(out[head]).all() == np.isnan(lse[head]).all() == (head == 1)
        assert np.isnan(out[head]).any() == np.isnan(lse[head]).any() == (head == 1)


def test_an_infinite_value_reaches_the_rows_that_see_it_as_itself(backend):
    v = np.random.default_rng(0).standard_normal((100, 8), dtype=np.float32)
    v[60, 2], v[70, 2], v[80, 3] = np.inf, -np.inf, -np.inf
    out = numbaflash.attention(
        np.zeros((100, 4), np.float32), np.zeros((100, 4), np.float32), v, causal=True, backend=backend.name
    )
    assert np.isfinite(out[:60]).all()
    assert (out[60:70, 2] == np.inf).all() and np.isnan(out[70:, 2]).all()
    assert np.isfinite(out[:80, 3]).all() and (out[80:, 3] == -np.inf).all()
    assert np.isfinite(np.delete(out, (2, 3), axis=1)).all()


def test_an_infinite_key_wins_nothing_where_its_score_is_minus_infinity(backend):
    q = np.where(np.arange(90) % 2, 1.0, -1.0)[:, None]
    k, v = np.zeros((70, 1)), np.random.default_rng(0).standard_normal((70, 3))
    k[33] = np.inf
    out, lse = numbaflash.attention(q, k, v, return_lse=True, backend=backend.name)
    others = np.delete(v, 33, axis=0).mean(axis=0)
    np.testing.assert_allclose(out[::2], np.broadcast_to(others, (45, 3)), atol=1e-14)
    np.testing.assert_allclose(lse[::2], np.log(69))
    assert np.isnan(out[1::2]).all() and not np.isfinite(lse[1::2]).any()


@pytest.mark.parametrize("dtype", [pytest.param(np.float16, marks=pytest.mark.slow), np.float32])
def test_scores_that_overflow_the_input_dtype_do_not_overflow(backend, dtype):
    q, k = np.full((40, 4), 200, dtype), np.full((50, 4), 200, dtype)
    v = np.random.default_rng(0).standard_normal((50, 3)).astype(dtype)
    out, lse = numbaflash.attention(q, k, v, scale=1.0, return_lse=True, backend=backend.name)
    np.testing.assert_allclose(
        out.astype(float), np.broadcast_to(v.astype(float).mean(axis=0), out.shape), atol=1e-3
    )
    np.testing.assert_allclose(lse, 160_000 + np.log(50), rtol=1e-6)


@pytest.mark.emulated
def test_dead_rows_do_not_poison_gradients(backend):
    """lse is -inf in rows that see nothing; exp(s - lse) must not be taken there."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 120, 16), dtype=np.float32)
    mask = rng.random((120, 120)) < 0.5
    mask[::3] = False
    (out, lse), vjp = numbaflash.attention_vjp(q, k, v, mask=mask, return_lse=True, backend=backend.name)
    assert (lse[:, ::3] == -np.inf).all() and not out[:, ::3].any()
    gradients = vjp(np.ones_like(out), np.ones_like(lse))
    assert all(np.isfinite(g).all() for g in gradients) and not gradients.dq[:, ::3].any()


SCORES = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout_p": 0.4, "seed": 3},
    "mask": {"mask": np.random.default_rng(1).random((6, 9)) < 0.6},
    "bias": {"bias": np.where(np.random.default_rng(2).random((6, 9)) < 0.6, 0, -np.inf).astype(np.float32)},
}


HIDING = ("mask", "bias", "dropout")
"""With these a score of -inf that q and k make counts as hidden: in every forward kernel, and in the CPU's backward."""


@pytest.mark.emulated
@pytest.mark.parametrize("where", ["row of q", "key under a score of -inf", "value under a score of -inf",
                                   "dout under a score of -inf"])
@pytest.mark.parametrize("score", SCORES)
def test_the_gradients_that_are_nan_are_those_of_the_formula(backend, score, where):
    """A weight of 0 that is seen times NaN is NaN; a hidden pair of a row of NaN carries nothing."""
    options = SCORES[score]
    if where != "row of q" and score in HIDING and (backend.name == "cpu" or where.startswith("value")):
        pytest.skip("not promised: see HIDING")
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 6, 16), dtype=np.float32)
    k, v = rng.standard_normal((2, 9, 16), dtype=np.float32)
    if where == "row of q":
        q[2, 3] = np.nan
    else:
        q[:, 0], k[1, 0] = 1, -np.inf
    if where.startswith("key"):
        q[2, 3:], k[4, 3] = 0, np.nan
    elif where.startswith("value"):
        v[1, 2] = np.nan
    elif where.startswith("dout"):
        dout[2, 2] = np.nan
    out, lse = numbaflash.attention(q, k, v, return_lse=True, backend=backend.name, **options)
    found = numbaflash.attention_backward(dout, q, k, v, out, lse, backend=backend.name, **options)
    expected = reference.attention_backward(dout, q, k, v, **options)
    for name in ("dq", "dk", "dv", *(["dbias"] if score == "bias" else [])):
        np.testing.assert_array_equal(
            np.isnan(getattr(found, name)), np.isnan(getattr(expected, name)), err_msg=name)
