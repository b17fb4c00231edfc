"""Gradients on tensor cores: every option against the oracle, in the emulator with all checks on.

The default sample shares a few compiled kernels; `-m exhaustive` takes every configuration.
"""

import ml_dtypes
import numpy as np
import pytest
from numba import types

from numbaflash import reference
from numbaflash.cuda.backward_arguments import BACKWARD_CALL
from numbaflash.cuda.backward_keys_sm80 import make_backward_keys
from numbaflash.cuda.backward_queries_sm80 import make_backward_queries
from numbaflash.cuda.backward_sm80 import BackwardConfig
from numbaflash.cuda.compile import compile_cubin
from numbaflash.cuda.configs_sm80 import BACKWARD_WORDS, WIDTHS, choose_backward
from numbaflash.cuda.plan_sm80 import plan_backward
from numbaflash.cuda.scores import Scoring
from numbaflash.cuda.simt_config import shared_limit
from tensor_cores import backward, gradients_in_callers_shape, inputs, problem_of, replaced
from tolerances import assert_backward

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
SEED = 0x0123456789ABCDEF


def check(problem, options=None, **launch):
    options = options or {}
    results = backward(problem, **launch)
    dout, dlse, report = results[5:]
    assert_backward(problem, reference.caller_major(problem, dout), dlse,
                    gradients_in_callers_shape(problem, results, options.get("bias")), options)
    return report


def mixture(batch, heads, rows, keys):
    """Every stage of a score at once, and dropout."""
    rng = np.random.default_rng(7)
    return dict(
        softcap=3.0, bias=rng.standard_normal((heads, 1, keys)).astype(f32),
        mask=rng.random((batch, 1, rows, keys)) < 0.8, alibi_slopes=rng.random(heads) * 0.2,
        dropout_p=0.3, seed=SEED,
    )


PLAIN = {
    "dense": ((1, 2, 128, 64), {}, {}),
    "causal, fewer queries, grouped heads": ((1, 4, 70, 64), dict(keys=150, kv_heads=2), dict(causal=True)),
    "causal, rows that see nothing": ((1, 2, 150, 64), dict(keys=70), dict(causal=True)),
    "causal, keys that nobody sees": ((1, 1, 70, 64), dict(keys=150), dict(causal=True, q_offset=0)),
    "window": ((1, 1, 260, 64), dict(keys=300), dict(window=(70, 20))),
    "no keys": ((1, 2, 20, 64), dict(keys=0), dict(deterministic=True)),
    "causal, whole tiles that see nothing":
        ((1, 1, 150, 64), dict(keys=150), dict(causal=True, q_offset=-140, deterministic=True)),
    "a single query": ((1, 2, 1, 64), dict(keys=130), {}),
    "narrow heads": ((2, 2, 65, 40), dict(keys=100, value_dim=56), dict(causal=True)),
    "sinks": ((1, 2, 80, 64), dict(keys=60), dict(sinks=np.array([1.5, -3.0]), causal=True)),
    "lengths": ((3, 1, 90, 64), dict(keys=130), dict(q_lengths=[90, 0, 37], kv_lengths=[130, 20, 0])),
}


@pytest.mark.parametrize("shape, sizes, options", PLAIN.values(), ids=PLAIN)
def test_geometry_is_exact(shape, sizes, options):
    check(problem_of(inputs(shape, dtype=bf16, **sizes), **options), options)


def test_packed_sequences_of_any_length():
    arrays = [x[0].transpose(1, 0, 2) for x in inputs((1, 2, 330, 64), keys=300, dtype=bf16)]
    offsets = np.array([0, 0, 130, 131, 320]), np.array([0, 50, 180, 180, 290])
    check(problem_of(arrays, offsets, causal=True))


def test_hidden_memory_is_never_a_number():
    q, k, v = inputs((2, 1, 100, 64), keys=200, dtype=bf16)
    options = dict(window=(10, 5), q_lengths=[100, 40], kv_lengths=[200, 90], q_offset=20)
    clean = backward(problem_of((q, k, v), **options))
    q[1, :, 40:] = np.nan
    for x in (k, v):
        x[:, :, :10], x[0, :, 125:], x[1, :, 65:] = np.inf, np.nan, np.nan
    dirty = backward(problem_of((q, k, v), **options))
    for before, after in zip(clean[:3], dirty[:3]):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("copies, seed", [("early", None), ("late", 1)])
def test_the_order_of_copies_warps_and_blocks_changes_no_bit(copies, seed):
    problem = problem_of(inputs((1, 2, 150, 64), dtype=bf16), causal=True, deterministic=True)
    for x, y in zip(backward(problem)[:3], backward(problem, copies=copies, seed=seed)[:3]):
        np.testing.assert_array_equal(x, y)


def test_products_are_counted_exactly_and_banks_never_conflict():
    rows, dim = 256, 64
    for deterministic, products in ((True, 4 + 3), (False, 5)):
        report = check(problem_of(inputs((1, 1, rows, dim), dtype=bf16), deterministic=deterministic))
        assert report.flops["mma"] == products * 2 * rows * rows * dim
        assert report.local_bytes == 0
        assert report.shared_load.conflicts == report.shared_store.conflicts == 0


GENERAL = {
    "softcap": dict(softcap=2.0),
    "bias": dict(bias=np.random.default_rng(1).standard_normal((2, 100, 130)).astype(f32)),
    "bias, broadcast rows": dict(bias=np.random.default_rng(1).standard_normal((130,)).astype(f32)),
    "mask that hides whole rows": dict(mask=np.arange(100)[:, None] % 3 > 0),
    "alibi": dict(alibi_slopes=np.array([0.5, 0.03]), causal=True),
    "negative scale": dict(scale=-0.3, causal=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", GENERAL.values(), ids=GENERAL)
def test_stages_of_the_score(options):
    check(problem_of(inputs((1, 2, 100, 64), keys=130, dtype=f16), **options), options)


@pytest.mark.slow
def test_all_stages_and_dropout_together():
    options = mixture(2, 2, 70, 130)
    check(problem_of(inputs((2, 2, 70, 64), keys=130, dtype=f16), causal=True, **options), options)


@pytest.mark.exhaustive
def test_dropout_counts_shards_globally():
    problem = problem_of(inputs((1, 2, 90, 64), keys=130, dtype=bf16), dropout_p=0.4, seed=SEED)
    table = problem.segments.copy()
    table[:, 7:] = 5, 33, 9
    check(replaced(problem, segments=table, head_origin=3))


@pytest.mark.slow
def test_rows_of_any_alignment():
    check(problem_of(inputs((1, 2, 70, 33), keys=90, value_dim=7, dtype=bf16), causal=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_reductions_of_four_numbers_add_up(dim):
    report = check(problem_of(inputs((1, 4, 150, dim), keys=140, kv_heads=2, dtype=bf16), causal=True), arch="sm_90a")
    assert report.shared_load.conflicts == report.shared_store.conflicts == report.local_bytes == 0


# --- float32 inputs, and Turing -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_tf32_errs_no_more_than_plain_code_with_rounded_factors(dim):
    arrays = inputs((1, 2, 100, dim), keys=130, kv_heads=1, dtype=f32)
    report = check(problem_of(arrays, precision="tf32", causal=True))
    assert report.shared_load.conflicts == report.shared_store.conflicts == report.local_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_tf32x3_is_within_four_times_the_error_of_float32(dim):
    problem = problem_of(inputs((1, 2, 100, dim), keys=130, dtype=f32), precision="tf32x3", causal=True)
    *gradients, dout, dlse, _ = backward(problem)
    exact = reference.backward(problem, dout, dlse)
    plain = reference.dense_backward(problem, np.dtype(f32), dout, dlse)
    for actual, want, ordinary in zip(gradients[:3], exact, plain):
        assert np.abs(actual - want).max() <= 4 * np.abs(ordinary - want).max()


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_float32_rows_of_any_alignment_with_every_stage(precision):
    options = mixture(2, 2, 70, 130)
    problem = problem_of(inputs((2, 2, 70, 33), keys=130, value_dim=7, dtype=f32), precision=precision, **options)
    check(problem, options)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_turing_computes_the_same_without_asynchronous_copies(dim):
    report = check(problem_of(inputs((1, 2, 140, dim), keys=150, kv_heads=1, dtype=f16), causal=True), arch="sm_75")
    assert report.shared_load.conflicts == report.shared_store.conflicts == report.local_bytes == 0


# --- every configuration ------------------------------------------------------------------------------------

SCORINGS = [Scoring(), Scoring(True), Scoring(False, dropout="block"), Scoring(True, "float16", "element")]


def options_for(scoring):
    options = dict(softcap=3.0) if scoring.general else {}
    return options | (dict(dropout_p=0.2, seed=SEED) if scoring.dropout else {})


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_every_configuration(width, scoring, dtype):
    check(problem_of(inputs((1, 2, 75, width), keys=140, dtype=dtype), causal=True, **options_for(scoring)))


def kernels(width, scoring, arch, dtype=bf16, precision="ieee"):
    arrays = inputs((1, 1, 8, width), dtype=dtype)
    problem = problem_of(arrays, precision=precision, **options_for(scoring))
    arrays = [np.empty(problem.out_shape, dtype) for _ in range(4)]
    chosen = []
    for deterministic in (True, False):
        problem = problem._replace(deterministic=deterministic)
        keys, queries = choose_backward(problem, *arrays, arch)
        chosen += [(make_backward_keys, config) for config in keys if (make_backward_keys, config) not in chosen]
    return [*chosen, (make_backward_queries, queries)]


def assert_clean(width, scoring, arch, *kind):
    for make, config in kernels(width, scoring, arch, *kind):
        resources = compile_cubin(make(config), (BACKWARD_CALL, types.int64, types.int32), arch,
                                  launch_bounds=(config.threads, config.blocks)).resources
        assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0), f"{config} on {arch}"
        assert resources.warnings == ()
        assert config.shared_bytes <= shared_limit(arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_shipped_kernels_use_no_local_memory(arch):
    assert_clean(64, Scoring(), arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"))
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_uses_no_local_memory(width, scoring, arch):
    assert_clean(width, scoring, arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_every_turing_kernel_uses_no_local_memory(width, scoring):
    assert_clean(width, scoring, "sm_75", f16)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"))
@pytest.mark.parametrize("kind, width", BACKWARD_WORDS)
@pytest.mark.parametrize("scoring", [SCORINGS[0], SCORINGS[-1]])
def test_every_float32_kernel_uses_no_local_memory(width, scoring, kind, arch):
    assert_clean(width, scoring, arch, f32, kind)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, dim, arch, precision", [
    (f32, 64, "sm_80", "ieee"), (bf16, 257, "sm_80", "ieee"), (f32, 129, "sm_80", "tf32"), (f32, 64, "sm_75", "tf32"),
    (bf16, 64, "sm_75", "ieee"), (f16, 129, "sm_75", "ieee")])
def test_what_these_kernels_lack_is_said(dtype, dim, arch, precision):
    problem = problem_of(inputs((1, 1, 4, dim), dtype=dtype), precision=precision)
    x, lse = np.empty(problem.out_shape, dtype), np.empty(problem.out_shape[:3], f32)
    with pytest.raises(NotImplementedError, match="not available"):
        plan_backward(problem, x, x, lse, None, x, x, x, None, None, arch)


@pytest.mark.parametrize("change", [
    dict(kind="float32"), dict(turing=True), dict(kind="tf32", reduce="scalar"),
    dict(head_dim=40), dict(warps=3), dict(row_tiles=3), dict(columns=40), dict(step=24),
    dict(copy="guess"), dict(parts="dq")])
def test_configurations_check_themselves(change):
    with pytest.raises(ValueError):
        BackwardConfig()._replace(**change).check()
