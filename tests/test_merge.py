"""merge_states: partial results over disjoint keys become the result over all keys."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbaflash
from numbaflash import merge_states, reference


def inputs(rows=20, keys=50, heads=3, batch=2, dim=8, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((batch, heads, n, dim)) for n in (rows, keys, keys))


def partial(q, k, v, cuts, **options):
    """Oracle results over the keys between the cuts."""
    parts = []
    for lo, hi in zip(cuts[:-1], cuts[1:]):
        out, lse = reference.attention(q, k[..., lo:hi, :], v[..., lo:hi, :], **options)
        parts.append((out.astype(float), lse.astype(float)))
    return tuple(zip(*parts))


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_any_split_of_the_keys_gives_the_whole(cuts, heads, seed):
    q, k, v = inputs(heads=heads, seed=seed)
    whole, whole_lse = reference.attention(q, k, v)
    outs, lses = partial(q, k, v, [0, *sorted(cuts), 50])
    for given_outs, given_lses in ((outs, lses), (np.stack(outs), np.stack(lses)), (list(outs), list(lses))):
        out, lse = merge_states(given_outs, given_lses)
        np.testing.assert_allclose(out, whole.astype(float), atol=1e-13)
        np.testing.assert_allclose(lse, whole_lse.astype(float), rtol=1e-13)


@pytest.mark.parametrize("ndim", [2, 3, 4])
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_every_shape_and_layout(ndim, layout):
    arrays = [x[(0,) * (4 - ndim)] for x in inputs()]
    whole, whole_lse = reference.attention(*arrays)
    outs, lses = partial(*arrays, [0, 10, 50])
    if layout == "BNHD" and ndim > 2:
        outs, whole = [x.swapaxes(-2, -3) for x in outs], whole.swapaxes(-2, -3)
    out, lse = merge_states(outs, lses, layout=layout)
    assert out.shape == whole.shape and lse.shape == whole_lse.shape
    np.testing.assert_allclose(out, whole.astype(float), atol=1e-13)
    np.testing.assert_allclose(lse, whole_lse.astype(float), rtol=1e-13)


def test_a_state_that_saw_nothing_is_neutral_whatever_it_holds():
    q, k, v = inputs()
    out, lse = (x.astype(float) for x in reference.attention(q, k, v))
    for junk in (0.0, np.nan, np.inf):
        merged, merged_lse = merge_states([np.full_like(out, junk), out], [np.full_like(lse, -np.inf), lse])
        np.testing.assert_array_equal(merged, out)
        np.testing.assert_array_equal(merged_lse, lse)


def test_rows_that_are_empty_everywhere_stay_empty():
    out, lse = merge_states([np.full((3, 2), np.nan)] * 2, [np.full(3, -np.inf)] * 2)
    assert not out.any() and (lse == -np.inf).all()


def test_one_state_is_itself():
    q, k, v = inputs()
    out, lse = (x.astype(float) for x in reference.attention(q, k, v))
    merged, merged_lse = merge_states([out], [lse])
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_array_equal(merged_lse, lse)


def test_huge_lse_neither_overflow_nor_vanish():
    outs = [np.array([[1.0], [1.0], [1.0]]), np.array([[3.0], [3.0], [3.0]])]
    lses = [np.array([1e4, -1e4, 1e300]), np.array([1e4, -1e4 + np.log(3), -1e300])]
    out, lse = merge_states(outs, lses)
    np.testing.assert_allclose(out[:, 0], [2.0, 2.5, 1.0])
    np.testing.assert_allclose(lse, [1e4 + np.log(2), -1e4 + np.log(4), 1e300])


@pytest.mark.parametrize("causal", [False, True])
def test_sinks_are_added_once_after_the_merge(causal):
    q, k, v = inputs()
    sinks = np.array([0.5, -1.0, 3.0])
    whole, whole_lse = reference.attention(q, k, v, sinks=sinks)
    outs, lses = partial(q, k, v, [0, 5, 30, 50])
    out, lse = merge_states(outs, lses, sinks=sinks)
    np.testing.assert_allclose(out, whole.astype(float), atol=1e-13)
    np.testing.assert_allclose(lse, whole_lse.astype(float), rtol=1e-13)
    empty, empty_lse = merge_states([np.zeros((3, 4, 2))], [np.full((3, 4), -np.inf)], sinks=sinks)
    assert not empty.any()
    np.testing.assert_array_equal(empty_lse, np.broadcast_to(sinks[:, None], (3, 4)))


def test_nan_in_a_state_stays_in_its_row():
    outs = [np.ones((4, 2)), np.ones((4, 2))]
    lses = [np.zeros(4), np.zeros(4)]
    outs[0][1, 0] = np.nan
    lses[1][2] = np.nan
    out, lse = merge_states(outs, lses)
    np.testing.assert_array_equal(np.isnan(out), [[0, 0], [1, 0], [1, 1], [0, 0]])
    np.testing.assert_array_equal(np.isnan(lse), [0, 0, 1, 0])


def test_merging_twice_is_merging_once():
    q, k, v = inputs()
    outs, lses = partial(q, k, v, [0, 5, 20, 35, 50])
    halves = [merge_states(outs[s], lses[s]) for s in (slice(0, 2), slice(2, 4))]
    for ours, theirs in zip(merge_states(*zip(*halves)), merge_states(outs, lses)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_merge_is_rounded_once_to_the_dtype_asked_for(dtype):
    q, k, v = inputs()
    outs, lses = partial(q, k, v, [0, 20, 50])
    halves = [x.astype(dtype) for x in outs]
    singles = [x.astype(np.float32) for x in lses]
    out, lse = merge_states(halves, singles)
    wide, _ = merge_states(halves, singles, out_dtype=np.float64)
    assert out.dtype == dtype and lse.dtype == np.float32 and wide.dtype == np.float64
    np.testing.assert_array_equal(out, wide.astype(dtype))


def test_results_of_attention_merge(backend):
    q, k, v = (x.astype(np.float32) for x in inputs(rows=30, keys=60))
    parts = [
        numbaflash.attention(
            q, k[:, :, s], v[:, :, s], causal=True, q_offset=offset, return_lse=True, backend=backend.name
        )
        for s, offset in ((slice(0, 25), 30), (slice(25, 60), 5))
    ]
    out, lse = merge_states(*zip(*parts))
    whole, whole_lse = numbaflash.attention(q, k, v, causal=True, return_lse=True, backend=backend.name)
    np.testing.assert_allclose(out, whole, atol=2e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=2e-6)


OUT, LSE = np.ones((2, 3, 4, 5)), np.ones((2, 3, 4))
WRONG = [
    ("no states", ValueError, "outs", ([], []), {}),
    ("other counts", ValueError, "lses", ([OUT, OUT], [LSE]), {}),
    ("other shapes", ValueError, r"outs\[1\]", ([OUT, OUT[:1]], [LSE, LSE]), {}),
    ("lse of another shape", ValueError, r"lses\[1\]", ([OUT, OUT], [LSE, LSE[:1]]), {}),
    ("lse in out's layout", ValueError, r"lses\[0\]", ([OUT], [LSE]), dict(layout="BNHD")),
    ("layout", ValueError, "layout", ([OUT], [LSE]), dict(layout="HBND")),
    ("other dtypes", TypeError, r"outs\[1\]", ([OUT, OUT.astype(np.float32)], [LSE, LSE]), {}),
    ("integers", TypeError, r"outs\[0\]", ([OUT.astype(int)], [LSE]), {}),
    ("half lse", TypeError, "lses", ([OUT], [LSE.astype(np.float16)]), {}),
    ("lists", TypeError, "outs", ([[1.0]], [LSE]), {}),
    ("sinks shape", ValueError, "sinks", ([OUT], [LSE]), dict(sinks=np.ones(2))),
    ("sinks list", TypeError, "sinks", ([OUT], [LSE]), dict(sinks=[0.0] * 3)),
    ("sinks integers", TypeError, "sinks", ([OUT], [LSE]), dict(sinks=np.ones(3, int))),
    ("out_dtype", TypeError, "out_dtype", ([OUT], [LSE]), dict(out_dtype=np.int8)),
    ("one dimension", ValueError, "outs", ([np.ones(3)], [np.ones(())]), {}),
    ("a number", TypeError, "outs", (1.0, [LSE]), {}),
    ("None", TypeError, "lses", ([OUT], None), {}),
    ("0-d array", ValueError, "outs", (np.array(1.0), [LSE]), {}),
]


@pytest.mark.parametrize("what, error, name, states, options", WRONG, ids=[case[0] for case in WRONG])
def test_states_that_do_not_fit_are_refused(what, error, name, states, options):
    with pytest.raises(error, match=name):
        merge_states(*states, **options)
