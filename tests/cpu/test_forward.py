"""The forward kernel's own matters: plans, jobs, widths, threads. What it computes is tested for all backends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbaflash
from numbaflash import reference
from numbaflash.cpu import forward as cpu_forward
from numbaflash.cpu import threads
from numbaflash.cpu.jobs import block_jobs
from numbaflash.cpu.storage import FLOAT32, FLOAT64
from numbaflash.options import Options
from numbaflash.problem import make_problem
from numbaflash.segments import K_LENGTH, Q_LENGTH, Q_OFFSET
from numbaflash.visibility import visible_range


def problem_of(lengths_q, lengths_k, heads=2, kv_heads=1, dim=4, **options):
    """A packed problem of sequences with these lengths."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((sum(lengths_q), heads, dim)).astype(np.float32)
    k, v = rng.standard_normal((2, sum(lengths_k), kv_heads, dim)).astype(np.float32)
    cu_q, cu_k = (np.cumsum([0, *lengths]) for lengths in (lengths_q, lengths_k))
    return make_problem(q, k, v, Options(**options), cu_q, cu_k)


def plan_of(storage=FLOAT32, head_dim=64, value_dim=64, max_q=1000, max_k=1000, segments=1, heads=8, group=1,
            in_place=True, threads=2):
    shape = cpu_forward.Shape(storage, False, head_dim, value_dim, max_q, max_k, segments, heads, group, in_place,
                              in_place, True)
    return cpu_forward.block_plan(shape, threads)


# ---------------------------------------------------------------------------------------------- plans and jobs


@pytest.mark.parametrize("storage", [FLOAT32, FLOAT64])
@pytest.mark.parametrize("dim", [1, 64, 128, 256, 1024])
def test_scratch_stays_in_the_cache_whatever_the_length(storage, dim):
    long = plan_of(storage, dim, dim, 1 << 20, 1 << 20, heads=1, in_place=False)
    assert long == plan_of(storage, dim, dim, 1 << 24, 1 << 24, heads=1, in_place=False)
    assert long.scratch_bytes < 4 << 20


def test_small_calls_take_small_scratch():
    assert plan_of(max_q=1, max_k=1, heads=1).scratch_bytes < 64 << 10


@given(st.integers(1, 300), st.integers(1, 4000), st.integers(1, 3), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_parts_of_scratch_do_not_overlap(dim, length, kv_heads, group, in_place):
    plan = plan_of(FLOAT32, dim, 2 * dim, length, length, heads=kv_heads * group, group=group, in_place=in_place)
    offsets = [plan.at_q, plan.at_out, plan.at_scores, plan.at_state, plan.at_keys, plan.at_values, plan.at_clean,
               plan.at_lanes, plan.scratch_bytes]
    assert offsets == sorted(offsets) and all(offset % 64 == 0 for offset in offsets)
    assert plan.at_out - plan.at_q >= plan.block_q * dim * 4
    assert plan.at_scores - plan.at_out >= plan.block_q * 2 * dim * 4
    assert plan.block_k >= 2 and (in_place or plan.at_values - plan.at_keys >= plan.block_k * dim * 4)


def test_few_queries_of_a_group_share_a_panel():
    assert plan_of(max_q=1, heads=32, group=4).packed_heads
    assert not plan_of(max_q=4096, heads=32, group=4).packed_heads
    assert not plan_of(max_q=1, heads=32, group=1).packed_heads


def test_one_head_gives_work_to_every_thread():
    plan = plan_of(max_q=1024, heads=1, threads=4)
    assert 1024 / plan.block_q >= 4


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=5), st.booleans(),
       st.sampled_from([(2, 1), (2, 2), (8, 1)]))
def test_jobs_cover_every_row_once_and_the_heavy_come_first(lengths, causal, heads):
    problem = problem_of(*zip(*lengths), heads=heads[0], kv_heads=heads[1], causal=causal)
    plan = plan_of(head_dim=4, value_dim=4, max_q=max(n for n, _ in lengths), max_k=max(m for _, m in lengths),
                   segments=len(lengths), heads=heads[0], group=problem.group)
    jobs = block_jobs(problem, plan)
    scale = problem.group if plan.packed_heads else 1
    rows, work = [], []
    for segment, block in jobs.table.tolist():
        n = problem.segments[segment, Q_LENGTH] * scale
        low, high = block * plan.block_q, min(n, (block + 1) * plan.block_q)
        assert low < high
        rows += [(segment, row) for row in range(low, high)]
        span = (0, n // scale) if scale > 1 else (low, high)
        seen = visible_range(*span, problem.segments[segment, K_LENGTH], problem.segments[segment, Q_OFFSET],
                             *problem.band)
        work.append((high - low) * (seen[3] - seen[0]))
    assert sorted(rows) == [(s, r) for s, (n, _) in enumerate(lengths) for r in range(n * scale)]
    assert work == sorted(work, reverse=True) and jobs.pairs == sum(work)


# ----------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(77, 30)), dict(window=(200, 0), q_offset=50)])
def test_results_do_not_depend_on_the_number_of_threads(options):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 700, 32), dtype=np.float32)
    results, blocks = [], set()
    for count in (1, 2, 5):
        threads.set_num_threads(count)
        try:
            problem = make_problem(q, k, v, Options(**options))
            results.append(cpu_forward.forward(problem))
            blocks.add(plan_of(head_dim=32, value_dim=32, max_q=700, max_k=700, heads=2, threads=count).block_q)
        finally:
            threads.set_num_threads(None)
    assert len(blocks) > 1
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


def test_all_zero_scale_and_tiny_scale_are_honest_numbers():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 50, 8), dtype=np.float32)
    for scale in (0.0, 1e-42, -1e-42):
        out, _ = cpu_forward.forward(make_problem(q, k, v, Options(scale=scale, causal=True)))
        exact = np.cumsum(v.astype(float), axis=2) / np.arange(1, 51)[:, None]
        np.testing.assert_allclose(out, exact, atol=1e-6)


def test_given_arrays_of_any_strides_are_written_whole():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 3, 37, 12), dtype=np.float32)
    problem = make_problem(q, k, v, Options())
    exact, _ = reference.forward(problem)
    for view in (lambda x: x, lambda x: x[..., ::-1], lambda x: x.transpose(3, 2, 0, 1).copy().transpose(2, 3, 1, 0)):
        out, lse = view(np.full(exact.shape, np.nan, np.float32)), np.full(exact.shape[:3], np.nan, np.float32)
        cpu_forward.forward(problem, out, lse)
        np.testing.assert_allclose(out, exact, atol=2e-6)
        assert np.isfinite(lse).all()


WIDTHS = """
import json
import numpy as np
from numbaflash import reference
from numbaflash.cpu import config
from numbaflash.cpu.forward import forward
from numbaflash.options import Options
from numbaflash.problem import make_problem

worst = {}
for dtype in (np.float32, np.float64):
    for n, m, heads, d in [(70, 150, 2, 20), (3, 61, 4, 64), (129, 40, 2, 7)]:
        rng = np.random.default_rng(0)
        q = rng.standard_normal((2, heads, n, d)).astype(dtype)
        k, v = (rng.standard_normal((2, 1, m, d + e)).astype(dtype) for e in (0, 3))
        bias = np.where(rng.random((heads, n, m)) < 0.1, -np.inf, rng.standard_normal((heads, n, m)))
        for options in (
            dict(causal=True), dict(window=(9, 4), q_offset=11, sinks=np.ones(heads)),
            dict(softcap=3.0, bias=bias, alibi_slopes=np.full(heads, 0.1), mask=rng.random((n, m)) < 0.8,
                 dropout_p=0.3, seed=5, causal=True, q_offset=30),
        ):
            problem = make_problem(q, k, v, Options(**options))
            for name, mine, exact in zip(("out", "lse"), forward(problem), reference.forward(problem)):
                hidden = np.isinf(exact)
                assert (mine[hidden] == exact[hidden]).all()
                error = np.abs(mine - exact)[~hidden].max() / np.finfo(dtype).eps
                worst[name] = max(worst.get(name, 0.0), float(error))
print(json.dumps([config.machine().vector_bits, worst]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("bits", [128, 256, 512])
def test_every_vector_width_agrees_with_the_oracle(bits):
    package = str(Path(numbaflash.__file__).resolve().parent.parent)
    variables = os.environ | {"PYTHONPATH": package, "NUMBAFLASH_VECTOR_BITS": str(bits)}
    done = subprocess.run([sys.executable, "-c", WIDTHS], env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    width, worst = json.loads(done.stdout)
    assert width == bits
    assert worst["out"] < 40 and worst["lse"] < 40
