"""Few queries against many keys: the same results as everywhere, keys split by the shape of a call alone."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numbaflash import reference
from numbaflash.arrays import address
from numbaflash.cpu import forward as cpu_forward
from numbaflash.cpu import threads
from numbaflash.cpu.config import key_parts
from numbaflash.cpu.jobs import part_jobs
from numbaflash.options import Options
from numbaflash.problem import make_problem

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def make(heads, kv_heads, n_q, n_k, dim, value_dim, dtype=np.float32, batch=1):
    rng = np.random.default_rng(0)
    shapes = ((batch, heads, n_q, dim), (batch, kv_heads, n_k, dim), (batch, kv_heads, n_k, value_dim))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def takes(problem):
    return cpu_forward.few_queries(cpu_forward._shape(problem))


def check(problem, tolerance):
    assert takes(problem)
    for mine, exact in zip(cpu_forward.forward(problem), reference.forward(problem)):
        hidden = np.isinf(exact)
        assert (mine[hidden] == exact[hidden]).all()
        np.testing.assert_allclose(mine[~hidden].astype(float), exact[~hidden], rtol=tolerance, atol=tolerance)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([(1, 1), (4, 1), (6, 2), (8, 1)]), st.integers(1, 2), st.integers(1, 1500),
       st.integers(16, 70), st.integers(16, 70),
       st.sampled_from([dict(), dict(causal=True), dict(window=(300, 0)), dict(window=(5, 5), q_offset=100),
                        dict(q_offset=-40, causal=True), dict(scale=-0.3)]))
def test_few_queries_agree_with_the_oracle(heads, n_q, n_k, dim, value_dim, options):
    problem = make_problem(*make(*heads, n_q, n_k, dim, value_dim, batch=2), Options(**options))
    check(problem, 3e-6)


def test_options_agree_with_the_oracle():
    rng = np.random.default_rng(1)
    q, k, v = make(6, 2, 3, 900, 40, 24, batch=2)
    bias = np.where(rng.random((6, 3, 900)) < 0.2, -np.inf, rng.standard_normal((6, 3, 900))).astype(np.float32)
    for options in (
        dict(softcap=2.0, sinks=np.ones(6, np.float32)), dict(bias=bias, causal=True),
        dict(mask=rng.random((2, 1, 3, 900)) < 0.5), dict(alibi_slopes=np.linspace(0, 1, 6)),
        dict(dropout_p=0.4, seed=7, causal=True, bias=bias), dict(kv_lengths=[900, 13], q_lengths=[2, 3]),
    ):
        check(make_problem(q, k, v, Options(**options)), 3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [(np.float16, 2e-3), (BFLOAT16, 2e-2), (np.float64, 1e-13)])
def test_other_dtypes_agree_with_the_oracle(dtype, tolerance):
    for options in (dict(), dict(causal=True), dict(softcap=3.0)):
        check(make_problem(*make(8, 2, 2, 1000, 40, 52, dtype), Options(**options)), tolerance)


@pytest.mark.slow
def test_queries_may_be_wider_than_the_cache():
    q, k, v = make(8, 2, 1, 700, 64, 64, BFLOAT16)
    narrow = make_problem(q, k, v, Options(out_dtype=np.float32))
    wide = narrow._replace(q=make_problem(*[x.astype(np.float32) for x in (q, k, v)], Options()).q)
    for mine, exact in zip(cpu_forward.forward(wide), reference.forward(narrow)):
        np.testing.assert_allclose(mine, exact, atol=3e-6, rtol=3e-6)


def test_a_cache_of_bfloat16_of_any_width_is_read_exactly():
    for dim, value_dim in [(16, 31), (32, 32), (47, 64), (64, 72), (96, 80), (128, 128), (131, 255)]:
        arrays = make(4, 1, 1, 300, dim, value_dim, BFLOAT16)
        check(make_problem(*arrays, Options(out_dtype=np.float32)), 3e-6)


def test_bits_do_not_depend_on_the_number_of_threads():
    problem = make_problem(*make(8, 2, 2, 3000, 64, 64), Options(causal=True))
    assert cpu_forward.prepare(problem).counters
    results = []
    for count in (1, 2, 5):
        threads.set_num_threads(count)
        try:
            results.append(cpu_forward.forward(problem))
        finally:
            threads.set_num_threads(None)
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


def test_hidden_keys_and_values_are_not_read_as_numbers():
    q, k, v = make(4, 1, 2, 1200, 40, 52)
    mask = np.random.default_rng(2).random(1200) < 0.5
    shown, _ = cpu_forward.forward(make_problem(q, k, v, Options(mask=mask)))
    k[:, :, ~mask], v[:, :, ~mask] = np.nan, np.inf
    hidden, _ = cpu_forward.forward(make_problem(q, k, v, Options(mask=mask)))
    np.testing.assert_array_equal(shown, hidden)


def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it():
    q, k, v = make(2, 1, 2, 1200, 40, 52)
    for column in (0, 15, 36, 48, 51):
        poisoned = v.copy()
        poisoned[0, 0, -1, column] = np.inf
        out, _ = cpu_forward.forward(make_problem(q, k, poisoned, Options(causal=True)))
        assert (out[:, :, 1, column] == np.inf).all() and np.isfinite(out).sum() == out.size - 2


def test_an_infinite_key_counts_once_where_vectors_overlap():
    q, k, v = make(1, 1, 1, 300, 20, 16)
    for column in range(20):
        poisoned = k.copy()
        poisoned[0, 0, 7, column] = -np.inf * np.sign(q[0, 0, 0, column])
        keep = np.arange(300) != 7
        out, _ = cpu_forward.forward(make_problem(q, poisoned, v, Options()))
        exact, _ = reference.forward(make_problem(q, k[:, :, keep], v[:, :, keep], Options()))
        np.testing.assert_allclose(out, exact, atol=2e-6)


@given(st.integers(1, 64), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 3000))
def test_parts_cover_the_visible_keys_once(n_q, n_k, offset, left):
    n_q = min(n_q, 4)
    q, k, v = (np.zeros((1, 1, n, 16), np.float32) for n in (n_q, n_k, n_k))
    problem = make_problem(q, k, v, Options(window=(left, 0), q_offset=offset))
    plan = cpu_forward.decode_plan(cpu_forward._shape(problem))
    jobs = part_jobs(problem, plan).table
    low, high = max(0, offset - left), min(n_k, offset + n_q)
    covered = [key for _, part, _, _ in jobs.tolist()
               for key in range(max(low, part * plan.part_keys), min(high, (part + 1) * plan.part_keys))]
    assert covered == list(range(low, high))
    assert (jobs[:, 2] == len(jobs)).all() and (jobs[:, 3] == 0).all() and len(jobs) >= 1


@pytest.mark.parametrize("units, keys", [(1, 8192), (8, 8192), (8, 1 << 20), (256, 4096)])
def test_long_caches_give_work_to_many_threads_in_parts_worth_it(units, keys):
    parts = key_parts(128, 128, 4, keys, units)
    assert units * -(-keys // parts.part_keys) >= 32 and parts.part_keys >= 192
    assert parts.part_keys % parts.block_k == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool"])
def test_addresses_are_those_that_numpy_reports(dtype):
    array = np.zeros((5, 6, 7), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    for view in (array, array[2:, ::-1, 3], array.transpose(2, 0, 1), array[:0], array[1, 2, 3:4], array[..., None]):
        assert address(view) == view.__array_interface__["data"][0]
