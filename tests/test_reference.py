"""The oracle on its own feet: closed forms by hand, finite differences, torch's float64 math path."""

import math

import ml_dtypes
import numpy as np
import pytest

from numbaflash import reference
from numbaflash.dropout import keep_pattern
from numbaflash.options import Options
from numbaflash.problem import make_problem

WIDE = np.finfo(np.longdouble).eps < 1e-18
HEADS, KV_HEADS, ROWS, KEYS, DIM, VALUE_DIM = 4, 2, 5, 7, 3, 2


def inputs(seed=0, dtype=np.float64, batch=2, rows=ROWS, keys=KEYS, dim=DIM, value_dim=VALUE_DIM):
    rng = np.random.default_rng(seed)
    shapes = [(batch, HEADS, rows, dim), (batch, KV_HEADS, keys, dim), (batch, KV_HEADS, keys, value_dim)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


OPTION_MIXES = {
    "plain": {},
    "causal": dict(causal=True),
    "causal, top left, more keys": dict(causal=True, q_offset=0),
    "rows that see nothing": dict(causal=True, q_offset=-3),
    "window": dict(window=(1, 2), q_offset=[0, 1]),
    "left window": dict(window=(0, None)),
    "scale": dict(scale=-0.7),
    "softcap": dict(softcap=0.8),
    "alibi": dict(alibi_slopes=np.array([0.1, 0.2, 0.3, -0.4])),
    "bias of full shape": dict(bias=normal(2, HEADS, ROWS, KEYS)),
    "bias per key": dict(bias=normal(2, 1, 1, KEYS)),
    "bias per row": dict(bias=normal(ROWS, 1)),
    "mask": dict(mask=normal(1, HEADS, ROWS, KEYS) > 0),
    "sinks": dict(sinks=normal(HEADS), causal=True, q_offset=-2),
    "lengths": dict(q_lengths=[3, 5], kv_lengths=[4, 0]),
    "dropout": dict(dropout_p=0.4, seed=2**63 + 5),
    "everything": dict(
        causal=True,
        window=(3, None),
        q_offset=[2, 1],
        scale=0.9,
        softcap=1.5,
        bias=normal(HEADS, 1, KEYS),
        mask=normal(2, 1, ROWS, KEYS) > -1,
        alibi_slopes=normal(2, HEADS) ** 2,
        sinks=normal(HEADS),
        q_lengths=[5, 4],
        kv_lengths=[6, 7],
        dropout_p=0.25,
        seed=11,
    ),
}


@pytest.mark.skipif(not WIDE, reason="long double is no wider than float64 here")
@pytest.mark.parametrize("name", OPTION_MIXES)
def test_gradients_are_finite_differences(name):
    q, k, v = inputs()
    options = dict(OPTION_MIXES[name])
    out, lse = reference.attention(q, k, v, **options)
    dout, dlse = normal(*out.shape, seed=2), normal(*lse.shape, seed=3)

    def loss(**changed):
        arrays = {"q": q, "k": k, "v": v} | options | changed
        out, lse = reference.attention(**arrays)
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()

    gradients = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    arrays = {"q": q, "k": k, "v": v} | {name: options[name] for name in ("bias", "sinks") if name in options}
    for which, array in arrays.items():
        gradient = getattr(gradients, f"d{which}")
        assert gradient.shape == array.shape
        rng = np.random.default_rng(4)
        for at in {tuple(rng.integers(array.shape)) for _ in range(12)}:
            up, down = array.copy(), array.copy()
            up[at] += 1e-5
            down[at] -= 1e-5
            difference = (loss(**{which: up}) - loss(**{which: down})) / (up[at] - down[at])
            assert abs(difference - gradient[at]) < 2e-8, (which, at)


def test_two_keys_by_hand():
    q, k, v = np.array([[2.0]]), np.array([[1.0], [3.0]]), np.array([[10.0], [20.0]])
    out, lse = reference.attention(q, k, v, scale=0.5)
    assert lse[0] == pytest.approx(math.log(math.exp(1) + math.exp(3)))
    assert out[0, 0] == pytest.approx((10 * math.exp(1) + 20 * math.exp(3)) / (math.exp(1) + math.exp(3)))


def test_every_score_stage_by_hand():
    q, k, v = np.array([[1.5]]), np.array([[2.0], [4.0]]), np.array([[1.0], [0.0]])
    options = dict(scale=0.5, softcap=2.0, bias=np.array([[0.25, -0.5]]), alibi_slopes=[0.125], q_offset=-3)
    out, lse = reference.attention(q, k, v, **options)
    s0 = 2 * math.tanh(1.5 / 2) + 0.25 - 0.125 * 3
    s1 = 2 * math.tanh(3.0 / 2) - 0.5 - 0.125 * 4
    assert lse[0] == pytest.approx(math.log(math.exp(s0) + math.exp(s1)))
    assert out[0, 0] == pytest.approx(math.exp(s0) / (math.exp(s0) + math.exp(s1)))


def test_a_sink_is_one_more_logit_without_a_value():
    q, k, v = np.zeros((2, 1)), np.zeros((3, 1)), np.full((3, 1), 5.0)
    sinks = np.array([math.log(2.0)])
    out, lse = reference.attention(q, k, v, sinks=sinks)
    assert out.ravel() == pytest.approx([3.0, 3.0])
    assert lse == pytest.approx(math.log(5.0))
    gradients = reference.attention_backward(np.ones((2, 1)), q, k, v, sinks=sinks)
    assert gradients.dsinks[0] == pytest.approx(-2 * 3 * 2 / 5)


def test_a_row_that_sees_only_the_sink_has_its_lse_and_gives_it_the_gradient():
    q, k, v = normal(1, 2), normal(2, 2), normal(2, 2)
    options = dict(sinks=np.array([0.75]), mask=np.zeros((1, 2), bool))
    out, lse = reference.attention(q, k, v, **options)
    assert (out == 0).all() and lse[0] == 0.75
    gradients = reference.attention_backward(np.ones((1, 2)), q, k, v, dlse=np.array([3.0]), **options)
    assert gradients.dsinks[0] == 3.0
    assert not any(np.any(g) for g in gradients)


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient():
    q, k, v = inputs()
    options = dict(causal=True, q_offset=-2, bias=normal(ROWS, KEYS))
    out, lse = reference.attention(q, k, v, **options)
    assert (
        (out[:, :, :2] == 0).all() and (lse[:, :, :2] == -np.inf).all() and np.isfinite(lse[:, :, 2:]).all()
    )
    gradients = reference.attention_backward(normal(*out.shape), q, k, v, dlse=normal(*lse.shape), **options)
    assert not gradients.dq[:, :, :2].any() and not gradients.dbias[:2].any()
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_scores_give_the_plain_mean(dtype):
    q, k, v = inputs(dtype=dtype)
    out, lse = reference.attention(np.zeros_like(q), k, v, causal=True)
    for i in range(ROWS):
        seen = i + KEYS - ROWS + 1
        np.testing.assert_allclose(out[:, ::2, i], v[:, :, :seen].mean(axis=2), rtol=1e-6)
        np.testing.assert_allclose(np.exp(lse[:, :, i]), seen, rtol=1e-12)


def test_without_dimensions_the_output_is_the_mean():
    q, k, v = np.zeros((3, 0)), np.zeros((4, 0)), normal(4, 2)
    out, lse = reference.attention(q, k, v)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=0), (3, 2)))
    assert lse == pytest.approx(math.log(4))


def test_dropout_drops_what_the_pattern_says_and_scales_the_rest():
    q, k = np.zeros((20, 1)), np.zeros((30, 1))
    out, lse = reference.attention(q, k, np.eye(30), dropout_p=0.3, seed=5)
    keep = keep_pattern(0.3, 5, 0, 0, np.arange(20)[:, None], np.arange(30))
    assert 0 < keep.sum() < keep.size
    np.testing.assert_allclose(out, keep / 30 / 0.7)
    assert lse == pytest.approx(math.log(30))


def test_dropout_counts_sequences_and_heads():
    q, k = np.zeros((3, HEADS, 6, 1)), np.zeros((3, 1, 8, 1))
    out, _ = reference.attention(q, k, np.broadcast_to(np.eye(8), (3, 1, 8, 8)), dropout_p=0.5, seed=9)
    for b, h in np.ndindex(3, HEADS):
        keep = keep_pattern(0.5, 9, b, h, np.arange(6)[:, None], np.arange(8))
        np.testing.assert_array_equal(out[b, h] > 0, keep)


def test_grouped_heads_share_keys_and_sum_their_gradients():
    q, k, v = inputs()
    dout = normal(*q.shape[:3], VALUE_DIM)
    grouped = reference.attention_backward(dout, q, k, v)
    repeated = reference.attention_backward(dout, q, *(np.repeat(x, 2, axis=1) for x in (k, v)))
    np.testing.assert_array_equal(
        reference.attention(q, k, v)[0], reference.attention(q, *(np.repeat(x, 2, axis=1) for x in (k, v)))[0]
    )
    np.testing.assert_allclose(grouped.dk, repeated.dk[:, 0::2] + repeated.dk[:, 1::2], rtol=1e-15)
    np.testing.assert_allclose(grouped.dv, repeated.dv[:, 0::2] + repeated.dv[:, 1::2], rtol=1e-15)


@pytest.mark.parametrize("name", ["lengths", "everything"])
def test_lengths_are_the_shorter_call(name):
    options = dict(OPTION_MIXES[name])
    nq, nk = options.pop("q_lengths"), options.pop("kv_lengths")
    q, k, v = inputs()
    whole, lse = reference.attention(q, k, v, q_lengths=nq, kv_lengths=nk, **options)
    offset = options.pop("q_offset", None)
    for b in range(2):
        if "seed" in options and b:
            break  # sequence 1 alone would draw the pattern of sequence 0
        part = dict(options)
        if "everything" in name:
            part |= dict(
                bias=options["bias"][:, :, : nk[b]],
                mask=options["mask"][b, 0, : nq[b], : nk[b]],
                alibi_slopes=options["alibi_slopes"][b],
                q_offset=offset[b],
            )
        out, part_lse = reference.attention(q[b, :, : nq[b]], k[b, :, : nk[b]], v[b, :, : nk[b]], **part)
        np.testing.assert_array_equal(whole[b, :, : nq[b]], out)
        np.testing.assert_array_equal(lse[b, :, : nq[b]], part_lse)
        assert not whole[b, :, nq[b] :].any() and (lse[b, :, nq[b] :] == -np.inf).all()


def test_packed_sequences_are_separate_calls():
    cu_q, cu_k = np.array([0, 3, 3, 8]), np.array([0, 5, 6, 7], np.int32)
    q, k, v = normal(10, HEADS, 3), normal(7, 2, 3), normal(7, 2, 2)
    dout = normal(10, HEADS, 2)
    out, lse = reference.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    dq, dk, dv = reference.attention_backward(
        dout, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True
    )
    assert lse.shape == (HEADS, 10)
    for s in range(3):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        one = dict(causal=True, layout="BNHD")
        part, part_lse = reference.attention(q[rows], k[keys], v[keys], **one)
        np.testing.assert_array_equal(out[rows], part)
        np.testing.assert_array_equal(lse[:, rows], part_lse)
        parts = reference.attention_backward(dout[rows], q[rows], k[keys], v[keys], **one)
        for whole, at, part in zip((dq, dk, dv), (rows, keys, keys), parts):
            np.testing.assert_array_equal(whole[at], part)
    assert not out[8:].any() and (lse[:, 8:] == -np.inf).all() and not dq[8:].any()


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_the_layout_swaps_heads_and_rows(ndim):
    arrays = [np.ascontiguousarray(x[(0,) * (4 - ndim)]) for x in inputs()]
    swapped = [x if ndim == 2 else x.swapaxes(-3, -2) for x in arrays]
    out, lse = reference.attention(*arrays, causal=True)
    out_swapped, lse_swapped = reference.attention(*swapped, causal=True, layout="BNHD")
    np.testing.assert_array_equal(out, out_swapped if ndim == 2 else out_swapped.swapaxes(-3, -2))
    np.testing.assert_array_equal(lse, lse_swapped)


def test_a_bias_of_minus_infinity_hides_like_a_mask():
    q, k, v = inputs()
    mask = normal(ROWS, KEYS) > 0
    bias = np.where(mask, 0.0, -np.inf)
    dout = normal(2, HEADS, ROWS, VALUE_DIM)
    for by_bias, by_mask in zip(
        [*reference.attention(q, k, v, bias=bias), *reference.attention_backward(dout, q, k, v, bias=bias)],
        [*reference.attention(q, k, v, mask=mask), *reference.attention_backward(dout, q, k, v, mask=mask)],
    ):
        np.testing.assert_array_equal(by_bias, by_mask)


def test_hidden_nan_changes_nothing():
    q, k, v = inputs()
    options = dict(q_lengths=[3, 4], kv_lengths=[5, 6], causal=True, mask=np.arange(KEYS) > 0)
    dout, dlse = normal(2, HEADS, ROWS, VALUE_DIM), normal(2, HEADS, ROWS)

    def results():
        gradients = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
        return [*reference.attention(q, k, v, **options), *gradients]

    clean = results()
    for b in range(2):
        for array in (q, dout, dlse):
            array[b, :, options["q_lengths"][b] :] = np.nan
        for array in (k, v):
            array[b, :, options["kv_lengths"][b] :] = np.nan
            array[b, :, 0] = np.inf
    for before, after in zip(clean, results()):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_visible_nan_reaches_the_rows_that_see_it_and_no_other(where):
    q, k, v = inputs()
    {"q": q, "k": k, "v": v}[where][1, 0, 3] = np.nan
    out, lse = reference.attention(q, k, v, causal=True, q_offset=0)
    rows, group = (slice(3, 4), 1) if where == "q" else (slice(3, None), 2)
    wanted = np.zeros(lse.shape, bool)
    wanted[1, :group, rows] = True
    np.testing.assert_array_equal(np.isnan(out).all(axis=3), wanted)
    np.testing.assert_array_equal(np.isnan(out).any(axis=3), wanted)
    np.testing.assert_array_equal(np.isnan(lse), wanted & (where != "v"))


def test_float64_is_computed_in_long_double_and_the_rest_in_float64():
    assert reference.attention(*inputs())[0].dtype == np.longdouble
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        assert reference.attention(*inputs(dtype=dtype))[0].dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_plain_code_errs_by_a_few_roundings(dtype):
    problem = make_problem(*inputs(dtype=dtype, rows=60, keys=50, dim=16, value_dim=16), Options(causal=True))
    eps = float(ml_dtypes.finfo(dtype).eps)
    dout = normal(*problem.out_shape)
    for exact, plain in zip(
        [*reference.forward(problem), *reference.backward(problem, dout)[:3]],
        [
            *reference.dense(problem, problem.q.dtype),
            *reference.dense_backward(problem, problem.q.dtype, dout)[:3],
        ],
    ):
        seen = np.isfinite(exact)
        error = np.abs(plain[seen] - exact[seen]).max()
        assert eps / 100 < error < 40 * eps


TORCH_CASES = {
    "plain": ({}, {}),
    "causal": (dict(causal=True, q_offset=0), dict(is_causal=True)),
    "scale": (dict(scale=0.3), dict(scale=0.3)),
    "mask": (dict(mask=normal(ROWS, KEYS) > -0.5), "mask"),
    "bias": (dict(bias=normal(2, 1, ROWS, KEYS)), "bias"),
}


@pytest.mark.parametrize("name", TORCH_CASES)
def test_torch_agrees_in_float64(name):
    torch = pytest.importorskip("torch")
    ours, theirs = TORCH_CASES[name]
    q, k, v = inputs()
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    if isinstance(theirs, str):
        tensors.append(torch.tensor(ours[theirs], requires_grad=theirs == "bias"))
        theirs = dict(attn_mask=tensors[-1])
    dout = normal(2, HEADS, ROWS, VALUE_DIM)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(*tensors[:3], enable_gqa=True, **theirs)
    out.backward(torch.tensor(dout))
    gradients = reference.attention_backward(dout, q, k, v, **ours)
    np.testing.assert_allclose(
        out.detach(), reference.attention(q, k, v, **ours)[0].astype(float), atol=1e-14
    )
    for gradient, tensor in zip((*gradients, gradients.dbias), tensors):
        if tensor.requires_grad:
            np.testing.assert_allclose(tensor.grad, gradient.astype(float), atol=1e-13)
