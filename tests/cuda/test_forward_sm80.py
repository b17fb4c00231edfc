"""Forward on tensor cores: every option against the oracle, in the emulator with all checks on.

The default sample shares a few compiled kernels; `-m exhaustive` takes every configuration.
"""

import ml_dtypes
import numpy as np
import pytest

from numbaflash import reference
from numbaflash.cuda.compile import compile_cubin
from numbaflash.cuda.arguments import CALL
from numbaflash.cuda.configs_sm80 import WIDTHS, choose_forward
from numbaflash.cuda.forward_sm80 import ForwardConfig, make_forward
from numbaflash.cuda.scores import Scoring
from tensor_cores import forward, in_callers_shape, inputs, problem_of, replaced
from tolerances import assert_forward

bf16, f16, f32, f64 = ml_dtypes.bfloat16, np.float16, np.float32, np.float64
SEED = 0x0123456789ABCDEF


def check(problem, **launch):
    out, lse, report = forward(problem, **launch)
    assert_forward(problem, in_callers_shape(problem, out), lse)
    return report


def mixture(batch, heads, rows, keys):
    """Every stage of a score at once, and dropout."""
    rng = np.random.default_rng(7)
    bias = rng.standard_normal((heads, 1, keys)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    return dict(
        softcap=3.0, bias=bias, mask=rng.random((batch, 1, rows, keys)) < 0.8, alibi_slopes=rng.random(heads) * 0.2,
        dropout_p=0.3, seed=SEED,
    )


# --- geometry and memory: one compiled kernel ---------------------------------------------------------------

PLAIN = {
    "dense": ((1, 2, 128, 64), {}, {}),
    "a single query": ((1, 2, 1, 64), dict(keys=130), {}),
    "a single key": ((1, 1, 130, 64), dict(keys=1), {}),
    "causal, square": ((1, 2, 200, 64), {}, dict(causal=True)),
    "causal, fewer queries, grouped heads": ((1, 4, 70, 64), dict(keys=150, kv_heads=2), dict(causal=True)),
    "causal, rows that see nothing": ((1, 2, 150, 64), dict(keys=70), dict(causal=True)),
    "causal from the top left": ((1, 1, 70, 64), dict(keys=150), dict(causal=True, q_offset=0)),
    "window": ((1, 1, 260, 64), dict(keys=300), dict(window=(70, 20))),
    "window that leaves keys unseen on both sides": ((1, 1, 30, 64), dict(keys=300), dict(window=(5, 3), q_offset=150)),
    "window of nothing": ((1, 1, 30, 64), dict(keys=40), dict(window=(0, 0), q_offset=100)),
    "narrow heads": ((2, 2, 65, 40), dict(keys=100, value_dim=56), dict(causal=True)),
    "no keys": ((1, 2, 20, 64), dict(keys=0), {}),
    "sinks": ((1, 2, 80, 64), dict(keys=60), dict(sinks=np.array([1.5, -np.inf]), causal=True)),
    "lengths": ((3, 1, 90, 64), dict(keys=130), dict(q_lengths=[90, 0, 37], kv_lengths=[130, 20, 0])),
    "lengths, causal": ((3, 2, 90, 64), {}, dict(q_lengths=[90, 1, 37], kv_lengths=[90, 20, 64], causal=True)),
    "head_dim 0": ((1, 1, 5, 0), dict(keys=70, value_dim=64), {}),
}


@pytest.mark.parametrize("shape, sizes, options", PLAIN.values(), ids=PLAIN)
def test_geometry_is_exact(shape, sizes, options):
    check(problem_of(inputs(shape, dtype=bf16, **sizes), **options))


def test_packed_sequences_of_any_length():
    arrays = [x[0].transpose(1, 0, 2) for x in inputs((1, 2, 330, 64), keys=300, dtype=bf16)]
    offsets = np.array([0, 0, 130, 131, 320]), np.array([0, 50, 180, 180, 290])
    check(problem_of(arrays, offsets, causal=True))


@pytest.mark.parametrize("layout", ["BNHD", "BHND"])
def test_strided_and_reversed_arrays_are_read_in_place(layout):
    q, k, v = (x.transpose(0, 2, 1, 3) if layout == "BNHD" else x for x in inputs((2, 2, 70, 64), dtype=bf16))
    problem = problem_of((q[:, ::-1], k[::-1], np.broadcast_to(v[:1], v.shape)), layout=layout)
    assert choose_forward(problem, np.empty(problem.out_shape, bf16)).copy == "async"
    check(problem)


def test_hidden_memory_is_never_a_number():
    q, k, v = inputs((2, 1, 100, 64), keys=200, dtype=bf16)
    options = dict(window=(10, 5), q_lengths=[100, 40], kv_lengths=[200, 90], q_offset=20)
    clean = forward(problem_of((q, k, v), **options))
    q[1, :, 40:] = np.nan
    for x in (k, v):
        x[:, :, :10], x[0, :, 125:], x[1, :, 65:] = np.inf, np.nan, np.nan
    dirty = forward(problem_of((q, k, v), **options))
    for before, after in zip(clean[:2], dirty[:2]):
        np.testing.assert_array_equal(before, after)


def test_nan_in_sight_reaches_exactly_the_rows_that_see_it_from_a_full_tile():
    q, k, v = inputs((1, 1, 200, 64), dtype=bf16)
    k[0, 0, 70], q[0, 0, 3] = np.nan, np.nan
    out, lse, _ = forward(problem_of((q, k, v)))
    assert np.isnan(out.astype(f32)).all() and np.isnan(lse).all()
    k[0, 0, 70] = 0
    out, lse, _ = forward(problem_of((q, k, v)))
    assert np.isnan(lse[0, 0, 3]) and np.isfinite(np.delete(lse[0, 0], 3)).all()
    assert np.isnan(out[0, 0, 3].astype(f32)).all() and np.isfinite(np.delete(out[0, 0], 3, 0).astype(f32)).all()


def test_inputs_are_not_written():
    arrays = inputs((1, 2, 70, 64), dtype=bf16)
    copies = [x.copy() for x in arrays]
    forward(problem_of(arrays, causal=True))
    for x, copy in zip(arrays, copies):
        np.testing.assert_array_equal(x, copy)


@pytest.mark.parametrize("copies, seed", [("early", None), ("late", 1), ("early", 2)])
def test_the_order_of_copies_and_warps_changes_no_bit(copies, seed):
    problem = problem_of(inputs((1, 2, 200, 64), dtype=bf16), causal=True)
    expected = forward(problem)
    actual = forward(problem, copies=copies, seed=seed)
    for x, y in zip(expected[:2], actual[:2]):
        np.testing.assert_array_equal(x, y)


# --- counters -----------------------------------------------------------------------------------------------


def test_traffic_is_what_tiling_promises():
    rows, keys, dim, config = 256, 256, 64, ForwardConfig()
    report = check(problem_of(inputs((1, 1, rows, dim), keys=keys, dtype=bf16)))
    tiles = rows // config.block_q
    table = 8 * 10 * 4 * config.threads * tiles
    assert report.flops["mma"] == 4 * rows * keys * dim
    assert report.shared_load.conflicts == report.shared_store.conflicts == 0
    assert report.global_store.bytes == 2 * rows * dim + 4 * rows
    assert report.global_store.sectors == report.global_store.bytes // 32
    loaded = 2 * dim * (rows + 2 * keys * tiles)
    assert loaded <= report.global_load.bytes <= loaded + table


def test_causal_tiles_that_no_row_sees_cost_nothing():
    rows, dim = 512, 64
    config = ForwardConfig()
    report = check(problem_of(inputs((1, 1, rows, dim), dtype=bf16), causal=True))
    warp_rows, warps = 16 * config.row_tiles, rows // (16 * config.row_tiles)
    tiles = sum(-(-warp_rows * (w + 1) // config.block_k) for w in range(warps))
    assert report.flops["mma"] == 4 * warp_rows * config.block_k * dim * tiles


# --- stages, dropout, dtypes --------------------------------------------------------------------------------

GENERAL = {
    "softcap": dict(softcap=2.0),
    "bias": dict(bias=np.random.default_rng(1).standard_normal((2, 100, 130)).astype(f32)),
    "bias, broadcast rows": dict(bias=np.random.default_rng(1).standard_normal((130,)).astype(f32)),
    "mask": dict(mask=np.random.default_rng(1).random((100, 130)) < 0.3),
    "mask that hides whole rows": dict(mask=np.arange(100)[:, None] % 3 > 0),
    "alibi": dict(alibi_slopes=np.array([0.5, 0.03]), causal=True),
    "negative scale": dict(scale=-0.3, causal=True),
    "scale 0": dict(scale=0.0, causal=True),
    "softcap, alibi, window": dict(softcap=4.0, alibi_slopes=np.array([0.5, 0.03]), window=(40, 40)),
}


@pytest.mark.parametrize("options", GENERAL.values(), ids=GENERAL)
def test_stages_of_the_score(options):
    check(problem_of(inputs((1, 2, 100, 64), keys=130, dtype=f16), **options))


def test_all_stages_and_dropout_together():
    check(problem_of(inputs((2, 2, 70, 64), keys=130, dtype=f16), causal=True, **mixture(2, 2, 70, 130)))


@pytest.mark.slow
def test_dropout_counts_shards_globally():
    problem = problem_of(inputs((1, 2, 90, 64), keys=130, dtype=bf16), dropout_p=0.4, seed=SEED)
    table = problem.segments.copy()
    table[:, 7:] = 5, 33, 9
    shifted = replaced(problem, segments=table, head_origin=3)
    assert choose_forward(shifted, np.empty(problem.out_shape, bf16)).scoring.dropout == "element"
    check(shifted)


@pytest.mark.parametrize("dim, value_dim, dtype, out_dtype", [(33, 7, bf16, None)])
def test_rows_of_any_alignment(dim, value_dim, dtype, out_dtype):
    q, k, v = inputs((1, 2, 70, dim), keys=90, value_dim=value_dim, dtype=dtype)
    check(problem_of((q, k, v), causal=True, out_dtype=out_dtype))


@pytest.mark.slow
@pytest.mark.parametrize("out_dtype", [f32, f64, f16])
def test_results_are_rounded_once_to_any_dtype(out_dtype):
    check(problem_of(inputs((1, 2, 70, 64), dtype=bf16), causal=True, out_dtype=out_dtype))


# --- float32 inputs, and Turing -----------------------------------------------------------------------------


def tf32(x):
    """Rounded to ten bits of mantissa, ties away from zero, as cvt.rna does."""
    bits = np.asarray(x, f32).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).view(f32)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_tf32_errs_no_more_than_plain_code_with_rounded_factors(dim):
    q, k, v = inputs((1, 2, 100, dim), keys=130, dtype=f32)
    problem = problem_of((q, k, v), precision="tf32")
    out, lse, _ = forward(problem)
    exact, exact_lse = reference.forward(problem)
    s = tf32(q).astype(f64) @ tf32(k).astype(f64).transpose(0, 1, 3, 2) * dim**-0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    plain = tf32(p).astype(f64) @ tf32(v).astype(f64) / p.sum(-1, keepdims=True)
    allowed = 2 * np.abs(plain - exact).max() + 4 * 2.0**-11 * np.abs(exact).max()
    assert np.abs(out - exact).max() <= allowed
    assert np.abs(lse - exact_lse).max() <= 2 * np.abs(np.log(np.exp(s).sum(-1)) - exact_lse).max() + 2.0**-11


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_tf32x3_is_within_four_times_the_error_of_float32(dim):
    problem = problem_of(inputs((1, 2, 100, dim), keys=130, dtype=f32), precision="tf32x3", causal=True)
    out, lse, _ = forward(problem)
    exact, plain = reference.forward(problem), reference.dense(problem, np.dtype(f32))
    for actual, want, ordinary in zip((out, lse), exact, plain):
        assert np.abs(actual - want).max() <= 4 * np.abs(ordinary - want).max()


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_float32_rows_of_any_alignment(precision):
    problem = problem_of(inputs((1, 2, 70, 33), keys=90, value_dim=7, dtype=f32), precision=precision, causal=True)
    out, _, _ = forward(problem)
    assert np.abs(out - reference.forward(problem)[0]).max() < {"tf32": 3e-3, "tf32x3": 3e-6}[precision]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_turing_computes_the_same_without_asynchronous_copies(dim):
    report = check(problem_of(inputs((1, 2, 140, dim), keys=150, dtype=f16), causal=True), arch="sm_75")
    assert report.shared_load.conflicts == report.shared_store.conflicts == 0


# --- every configuration ------------------------------------------------------------------------------------

SCORINGS = [Scoring(), Scoring(True), Scoring(False, dropout="block"), Scoring(True, "float16", "element")]


def options_for(scoring):
    options = dict(softcap=3.0) if scoring.general else {}
    return options | (dict(dropout_p=0.2, seed=SEED) if scoring.dropout else {})


WIDE = pytest.mark.parametrize("width", [
    pytest.param(width, marks=[] if width == 128 else pytest.mark.exhaustive) for width in WIDTHS])


@WIDE
@pytest.mark.slow
def test_every_head_dimension(width):
    check(problem_of(inputs((1, 1, 140, width), dtype=bf16), causal=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("width, value_dim", [(w, v) for w in WIDTHS for v in (w, 64, 256)])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("aligned", [True, False])
def test_every_configuration(width, value_dim, scoring, dtype, aligned):
    dim = width if aligned else width - 3
    check(problem_of(inputs((1, 2, 75, dim), keys=140, value_dim=value_dim, dtype=dtype), causal=True,
                     **options_for(scoring)))


ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")


def assert_clean(config, arch):
    resources = compile_cubin(make_forward(config), (CALL,), arch,
                              launch_bounds=(config.threads, config.blocks)).resources
    assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0), f"{config} on {arch}"
    assert resources.registers * config.threads * config.blocks <= 65536
    assert resources.warnings == ()
    assert config.shared_bytes <= 99 * 1024
    assert (config.shared_bytes + 1024) * config.blocks <= 100 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("width", [64, 128])
def test_shipped_kernels_use_no_local_memory(width, arch):
    problem = problem_of(inputs((1, 1, 8, width), dtype=bf16))
    assert_clean(choose_forward(problem, np.empty(problem.out_shape, bf16)), arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_every_turing_kernel_uses_no_local_memory(width):
    problem = problem_of(inputs((1, 1, 8, width), dtype=f16))
    config = choose_forward(problem, np.empty(problem.out_shape, f16), turing=True)
    assert config.shared_bytes <= 64 * 1024
    assert_clean(config._replace(blocks=1), "sm_75")


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_every_float32_kernel_uses_no_local_memory(width, precision, arch):
    problem = problem_of(inputs((1, 1, 8, width), dtype=f32), precision=precision)
    assert_clean(choose_forward(problem, np.empty(problem.out_shape, f32)), arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_uses_no_local_memory(width, scoring, arch):
    problem = problem_of(inputs((1, 1, 8, width), dtype=bf16), **options_for(scoring))
    assert_clean(choose_forward(problem, np.empty(problem.out_shape, bf16)), arch)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, dim", [(f32, 64), (f64, 64), (bf16, 257)])
def test_what_these_kernels_lack_is_said(dtype, dim):
    problem = problem_of(inputs((1, 1, 4, dim), dtype=dtype))
    with pytest.raises(NotImplementedError):
        choose_forward(problem, np.empty(problem.out_shape, dtype))


@pytest.mark.parametrize("change", [
    dict(kind="float32"), dict(head_dim=40), dict(warps=3), dict(row_tiles=3), dict(block_k=40), dict(stages=3),
    dict(copy="guess"), dict(out_dtype="float64"), dict(turing=True)])
def test_configurations_check_themselves(change):
    with pytest.raises(ValueError):
        ForwardConfig()._replace(**change).check()
