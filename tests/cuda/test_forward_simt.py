"""The SIMT forward kernel in the emulator, every check on, against the oracle."""

import numpy as np
import pytest
from simt_cases import CASES, Case, cases
from tolerances import assert_forward

import numbaflash
from numbaflash import emulator
from numbaflash.cuda.simt_config import SimtConfig
from numbaflash.cuda.simt_plan import plan_forward
from numbaflash.options import Options
from numbaflash.problem import make_problem

SIMT = {"backend": "emulator", "config": numbaflash.CUDAConfig(tensor_cores=False)}


def run(case: Case, seed: int = 0):
    arrays, options = case.make(seed)
    out, lse = numbaflash.attention(*arrays, return_lse=True, **SIMT, **options)
    return make_problem(*arrays, Options(**options)), out, lse


@pytest.mark.parametrize("name", cases())
def test_result_matches_the_oracle(name):
    problem, out, lse = run(CASES[name])
    assert_forward(problem, out, lse)


def test_packed_sequences_of_unequal_lengths():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((total, 2, 64), dtype=np.float32) for total in (150, 170, 170))
    cu_q, cu_k = np.array([0, 3, 3, 100, 140]), np.array([0, 90, 95, 95, 160])
    out, lse = numbaflash.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True,
                                           backend="emulator")
    assert_forward(make_problem(q, k, v, Options(causal=True), cu_q, cu_k), out, lse)
    assert (out[140:] == 0).all() and (lse[:, 140:] == -np.inf).all()


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": np.tri(70, dtype=bool)}],
                         ids=["band", "mask"])
def test_nan_reaches_exactly_the_rows_that_see_it(options):
    (q, k, v), _ = Case((1, 1, 1, 70, 70, 64, 64)).make()
    k[0, 0, 50, 3] = np.nan
    v[0, 0, 60, 5] = np.inf
    v[0, 0, 20, 7] = np.nan
    q[0, 0, 10, 0] = np.nan
    out, lse = numbaflash.attention(q, k, v, return_lse=True, backend="emulator", **options)
    problem = make_problem(q, k, v, Options(**options))
    assert_forward(problem, out, lse)
    assert np.isfinite(out[0, 0, :10]).all() and np.isfinite(out[0, 0, 11:20]).all()


def test_keys_that_nobody_sees_are_never_numbers():
    (q, k, v), _ = Case((1, 1, 1, 30, 100, 64, 64)).make()
    expected = numbaflash.attention(q, k, v, kv_lengths=[70], q_lengths=[20], backend="emulator")
    k[:, :, 70:], v[:, :, 70:], q[:, :, 20:] = np.nan, np.inf, np.nan
    np.testing.assert_array_equal(
        numbaflash.attention(q, k, v, kv_lengths=[70], q_lengths=[20], backend="emulator"), expected)


def test_more_blocks_than_a_grid_is_high():
    heads = 65_537
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, heads, 1, 1), dtype=np.float32)
    problem = make_problem(q, k, v, Options())
    plan = plan_forward(problem, np.empty_like(q), np.empty(q.shape[:3], np.float32))
    assert plan.launches[0].grid == (heads, 1, 1)


def traffic(n: int):
    (q, k, v), _ = Case((1, 1, 1, n, n, 64, 64)).make()
    problem = make_problem(q, k, v, Options())
    out, lse = np.empty_like(q), np.empty(q.shape[:3], np.float32)
    plan = plan_forward(problem, out, lse)
    return plan, emulator.execute(plan)


def test_traffic_is_what_the_papers_count():
    n, row = 256, 64 * 4
    plan, report = traffic(n)
    blocks, threads = plan.launches[0].grid[0], plan.launches[0].block[0]
    segment = report.global_load.bytes - (n * row + blocks * 2 * n * row)
    assert segment == blocks * threads * 9 * 8, "beyond Q + blocks (K + V): nine numbers of a table"
    assert report.global_store.bytes == n * row + 4 * n
    assert report.global_store.sectors * 32 <= 1.05 * report.global_store.bytes


def test_no_bank_conflicts_and_no_local_memory():
    _, report = traffic(128)
    assert report.shared_load.conflicts == 0
    assert report.shared_store.conflicts == 0
    assert report.local_bytes == 0


CONFIG = SimtConfig("float32", "float32", 64, 64, 8, 8, 2, False, True, False, "float32")


@pytest.mark.parametrize("field, value", [("dtype", "int8"), ("head_dim", 65), ("rows", 3), ("rows", 16),
                                          ("sliced", 3)])
def test_config_refuses_what_the_kernel_cannot_do(field, value):
    config = CONFIG._replace(head_dim=32) if field == "sliced" else CONFIG
    with pytest.raises(ValueError, match="head_dim" if field == "sliced" else field):
        SimtConfig(**(config._asdict() | {field: value}))
