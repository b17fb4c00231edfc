"""Cases with an answer on paper. With q = 0 a row is the plain mean of the values it sees."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbaflash


def seen_by_counting(n, m, backend, **options):
    """Which keys each row sees, as the kernels have it: v holds a power-of-two code of one key at a time."""
    q, k = np.zeros((n, 4)), np.zeros((m, 4))
    out, lse = numbaflash.attention(q, k, np.eye(m), return_lse=True, backend=backend.name, **options)
    count = np.exp(lse)
    seen = out * count[:, None]
    np.testing.assert_allclose(seen, np.round(seen), atol=1e-9)
    np.testing.assert_allclose(seen.sum(axis=1), count, atol=1e-9)
    return np.round(seen).astype(bool)


def seen_on_paper(n, m, *, causal=False, window=(None, None), q_offset=None, mask=None):
    """The table of the documentation, pair by pair."""
    offset = m - n if q_offset is None else q_offset
    left, right = window
    seen = np.zeros((n, m), bool)
    for i, j in np.ndindex(n, m):
        pos = i + offset
        seen[i, j] = (
            (not causal or j <= pos)
            and (left is None or pos - left <= j)
            and (right is None or j <= pos + right)
            and (mask is None or bool(mask[i, j]))
        )
    return seen


side = st.none() | st.integers(0, 5) | st.integers(0, 150)


@given(
    n=st.integers(0, 140),
    m=st.integers(1, 140),
    causal=st.booleans(),
    window=st.tuples(side, side),
    q_offset=st.none() | st.integers(-150, 150),
)
def test_causal_window_and_offset_show_exactly_their_keys(backend, n, m, causal, window, q_offset):
    options = dict(causal=causal, window=window, q_offset=q_offset)
    np.testing.assert_array_equal(seen_by_counting(n, m, backend, **options), seen_on_paper(n, m, **options))


@pytest.mark.parametrize("n, m", [(1, 1), (1, 300), (300, 1), (64, 64), (63, 65), (65, 63), (128, 257)])
@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True),
        dict(causal=True, q_offset=0),
        dict(causal=True, q_offset=-40),
        dict(causal=True, q_offset=70),
        dict(window=(0, 0)),
        dict(window=(0, 0), q_offset=0),
        dict(window=(17, None)),
        dict(window=(None, 31)),
        dict(causal=True, window=(31, 5)),
        dict(causal=True, window=(0, None)),
        dict(q_offset=10_000, causal=True),
        dict(window=(2**50, 2**50)),
        dict(window=(1, 1), q_offset=10_000),
    ],
    ids=str,
)
def test_edges_of_tiles_and_of_the_keys(backend, n, m, options):
    np.testing.assert_array_equal(seen_by_counting(n, m, backend, **options), seen_on_paper(n, m, **options))


@given(
    st.integers(1, 100), st.integers(1, 140), st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.5, 0.99])
)
def test_a_mask_shows_exactly_its_keys(backend, n, m, seed, share):
    mask = np.random.default_rng(seed).random((n, m)) < share
    np.testing.assert_array_equal(seen_by_counting(n, m, backend, mask=mask), mask)
    both = dict(mask=mask, causal=True)
    np.testing.assert_array_equal(seen_by_counting(n, m, backend, **both), seen_on_paper(n, m, **both))


@given(st.integers(1, 100), st.integers(1, 140), st.integers(0, 2**32 - 1))
def test_a_bias_of_minus_infinity_hides_exactly_its_pairs(backend, n, m, seed):
    seen = np.random.default_rng(seed).random((n, m)) < 0.3
    bias = np.where(seen, 0.0, -np.inf)
    np.testing.assert_array_equal(seen_by_counting(n, m, backend, bias=bias), seen)


@pytest.mark.parametrize("kv_length", [0, 1, 2, 63, 64, 65, 99, 100])
@pytest.mark.parametrize("q_length", [0, 1, 33, 80])
def test_lengths_end_exactly_where_they_say(backend, q_length, kv_length):
    q, k, v = np.zeros((1, 1, 80, 3)), np.zeros((1, 1, 100, 3)), np.eye(100)[None, None]
    out, lse = numbaflash.attention(
        q, k, v, q_lengths=[q_length], kv_lengths=[kv_length], return_lse=True, backend=backend.name
    )
    wanted = np.zeros((80, 100))
    wanted[:q_length, :kv_length] = 1 / max(1, kv_length)
    np.testing.assert_allclose(out[0, 0], wanted, atol=1e-15)
    there = math.log(kv_length) if kv_length else -math.inf
    np.testing.assert_allclose(lse[0, 0], np.where(np.arange(80) < q_length, there, -math.inf), rtol=1e-15)


def test_lengths_move_the_causal_corner(backend):
    q, k, v = np.zeros((2, 1, 5, 2)), np.zeros((2, 1, 8, 2)), np.broadcast_to(np.eye(8), (2, 1, 8, 8))
    _, lse = numbaflash.attention(
        q, k, v, causal=True, q_lengths=[5, 3], kv_lengths=[8, 4], return_lse=True, backend=backend.name
    )
    np.testing.assert_allclose(np.exp(lse[:, 0]), [[4, 5, 6, 7, 8], [2, 3, 4, 0, 0]], rtol=1e-12)


@pytest.mark.parametrize("dtype", [pytest.param(np.float16, marks=pytest.mark.slow), np.float32, np.float64])
def test_one_key_gives_its_value_and_no_gradient_to_the_scores(backend, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, n, 16)).astype(dtype) for n in (50, 1, 1))
    (out, lse), vjp = numbaflash.attention_vjp(q, k, v, return_lse=True, backend=backend.name)
    np.testing.assert_allclose(out, np.broadcast_to(v, out.shape), rtol=2 * np.finfo(dtype).eps)
    np.testing.assert_allclose(lse, (q.astype(float) * k).sum(-1) / 4, rtol=1e-3, atol=1e-6)
    dq, dk, dv = vjp(np.ones_like(out))
    tolerance = 64 * np.finfo(dtype).eps
    np.testing.assert_allclose(dq, 0, atol=tolerance)
    np.testing.assert_allclose(dk, 0, atol=50 * tolerance)
    np.testing.assert_allclose(dv, 50)


def test_identical_keys_share_the_weight_equally(backend):
    rng = np.random.default_rng(0)
    q, v = rng.standard_normal((70, 8)), rng.standard_normal((90, 8))
    k = np.broadcast_to(rng.standard_normal(8), (90, 8))
    out, lse = numbaflash.attention(q, k, v, return_lse=True, backend=backend.name)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=0), out.shape), atol=1e-15)
    np.testing.assert_allclose(lse, (q * k[0]).sum(-1) / math.sqrt(8) + math.log(90), rtol=1e-14)


@pytest.mark.parametrize("options", [dict(scale=0), dict(scale=0.0), dict(scale=-0.0)])
def test_scale_zero_gives_the_mean(backend, options):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 60, 8))
    out = numbaflash.attention(q, k, v, backend=backend.name, **options)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=0), out.shape), atol=1e-15)


def test_a_negative_scale_is_a_negated_query(backend):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 60, 8))
    np.testing.assert_allclose(
        numbaflash.attention(q, k, v, scale=-0.3, backend=backend.name),
        numbaflash.attention(-q, k, v, scale=0.3, backend=backend.name),
        rtol=1e-14,
    )


def test_without_dimensions_the_output_is_the_mean(backend):
    v = np.random.default_rng(0).standard_normal((40, 8))
    (out, lse), vjp = numbaflash.attention_vjp(
        np.zeros((30, 0)), np.zeros((40, 0)), v, return_lse=True, backend=backend.name
    )
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=0), (30, 8)), atol=1e-15)
    np.testing.assert_allclose(lse, math.log(40))
    dq, dk, dv = vjp(np.ones_like(out))
    assert dq.shape == (30, 0) and dk.shape == (40, 0)
    np.testing.assert_allclose(dv, 30 / 40)


@pytest.mark.emulated("float32")
@pytest.mark.parametrize("size", [1e3, 1e6, 1e15])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_scores_pick_the_largest_without_overflow(backend, dtype, size):
    rng = np.random.default_rng(0)
    keys = rng.permutation(200)
    q, k = np.full((3, 1), size, dtype), keys[:, None].astype(dtype)
    v = rng.standard_normal((200, 5)).astype(dtype)
    out, lse = numbaflash.attention(q, k, v, scale=1.0, return_lse=True, backend=backend.name)
    np.testing.assert_allclose(
        out, np.broadcast_to(v[np.argmax(keys)], out.shape), rtol=4 * np.finfo(dtype).eps
    )
    np.testing.assert_allclose(lse, 199 * size, rtol=1e-6)


@pytest.mark.emulated("float32")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_scores_have_gradients_as_exact_as_their_lse(backend, dtype):
    size, keys = 100, np.random.default_rng(0).permutation(200)
    q, k = np.full((3, 1), size, dtype), keys[:, None].astype(dtype)
    v = np.random.default_rng(1).standard_normal((200, 5)).astype(dtype)
    out, vjp = numbaflash.attention_vjp(q, k, v, scale=1.0, backend=backend.name)
    dq, dk, dv = vjp(np.ones_like(out))
    lost = 4 * 199 * size * np.finfo(dtype).eps
    np.testing.assert_allclose(
        dv, np.where(keys[:, None] == 199, 3.0, 0.0) * np.ones_like(v), rtol=lost, atol=1e-30
    )
    assert np.abs(dq).max() < 200 * 10 * lost and np.abs(dk).max() < 300 * 10 * lost


@pytest.mark.parametrize("size", [-1e3, -1e6, -1e15])
def test_scores_far_below_zero_lose_nothing(backend, size):
    q, k = np.full((3, 1), size), np.ones((150, 1))
    v = np.random.default_rng(0).standard_normal((150, 5))
    out, lse = numbaflash.attention(q, k, v, scale=1.0, return_lse=True, backend=backend.name)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=0), out.shape), atol=1e-15)
    np.testing.assert_allclose(lse, size + math.log(150), rtol=1e-15)


def test_rising_and_falling_scores_rescale_exactly(backend):
    m = 257
    for keys in (np.arange(m), np.arange(m)[::-1]):
        q, k = np.ones((2, 1)), 3.0 * keys[:, None]
        out, lse = numbaflash.attention(q, k, np.eye(m), scale=1.0, return_lse=True, backend=backend.name)
        weights = np.exp(3.0 * (keys - (m - 1.0)))
        np.testing.assert_allclose(out[1], weights / weights.sum(), rtol=1e-12, atol=1e-300)
        np.testing.assert_allclose(lse, 3.0 * (m - 1) + math.log(weights.sum()), rtol=1e-15)


def test_a_softcap_bounds_the_scores(backend):
    q, k, v = np.full((1, 1), 1e6), np.array([[1.0], [-1.0]]), np.array([[1.0], [0.0]])
    out, lse = numbaflash.attention(q, k, v, softcap=3.0, backend=backend.name, return_lse=True)
    assert out[0, 0] == pytest.approx(1 / (1 + math.exp(-6)))
    assert lse[0] == pytest.approx(math.log(math.exp(3) + math.exp(-3)))


@pytest.mark.parametrize("options", [dict(), dict(q_offset=0), dict(q_offset=-7), dict(causal=True)])
def test_alibi_is_the_bias_that_it_stands_for(backend, options):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, n, 8)) for n in (70, 90, 90))
    slopes = np.array([0.5, 0.0, -0.01])
    pos = np.arange(70)[:, None] + options.get("q_offset", 20)
    bias = -slopes[:, None, None] * np.abs(pos - np.arange(90))
    for ours, theirs in zip(
        numbaflash.attention(q, k, v, alibi_slopes=slopes, return_lse=True, backend=backend.name, **options),
        numbaflash.attention(q, k, v, bias=bias, return_lse=True, backend=backend.name, **options),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_scales_the_row_and_joins_its_lse(backend, causal):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 8)) for n in (70, 50, 50))
    sinks = np.array([1.5, -np.inf])
    options = dict(causal=causal, return_lse=True, backend=backend.name)
    out, lse = numbaflash.attention(q, k, v, **options)
    sunk, sunk_lse = numbaflash.attention(q, k, v, sinks=sinks, **options)
    np.testing.assert_allclose(sunk_lse, np.logaddexp(lse, sinks[:, None]), rtol=1e-13)
    with np.errstate(invalid="ignore"):
        share = np.where(lse == -np.inf, 0, np.exp(lse - sunk_lse))
    np.testing.assert_allclose(sunk, out * share[..., None], atol=1e-14)


@pytest.mark.emulated
def test_a_row_that_sees_nothing_is_zero_and_so_are_its_gradients(backend):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 8), dtype=np.float32) for n in (100, 60, 60))
    (out, lse), vjp = numbaflash.attention_vjp(
        q, k, v, causal=True, q_offset=-70, return_lse=True, backend=backend.name
    )
    assert not out[:, :70].any() and (lse[:, :70] == -np.inf).all()
    assert np.isfinite(lse[:, 70:]).all() and out[:, 70:].any(axis=-1).all()
    dq, dk, dv = vjp(np.ones_like(out), np.ones_like(lse))
    assert not dq[:, :70].any() and not dk[:, 30:].any() and not dv[:, 30:].any()
    assert all(np.isfinite(g).all() for g in (dq, dk, dv))


@pytest.mark.emulated
def test_a_row_that_sees_only_its_sink_has_the_sink_for_its_lse(backend):
    q, k, v = np.ones((3, 40, 4)), np.ones((3, 20, 4)), np.ones((3, 20, 4))
    sinks = np.array([0.25, -2.0, 60.0])
    (out, lse), vjp = numbaflash.attention_vjp(
        q, k, v, sinks=sinks, mask=np.zeros((1, 1), bool), return_lse=True, backend=backend.name
    )
    assert not out.any()
    np.testing.assert_allclose(lse, np.broadcast_to(sinks[:, None], lse.shape), rtol=1e-15)
    gradients = vjp(np.ones_like(out), np.full_like(lse, 2.0))
    np.testing.assert_allclose(gradients.dsinks, 80.0)
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("scale", [1e3, 1e5, 1e8, -1e5])
def test_huge_scores_leave_a_one_hot_gradient_of_v(scale):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((16, 8)).astype(np.float32) for _ in "qkv")
    out, vjp = numbaflash.attention_vjp(q, k, v, scale=scale)
    expected = np.zeros_like(v)
    np.add.at(expected, np.argmax(scale * (q.astype(np.float64) @ k.astype(np.float64).T), axis=1), 1)
    np.testing.assert_allclose(vjp(np.ones_like(out)).dv, expected, atol=2e-3 if scale == 1e3 else 1e-6)
