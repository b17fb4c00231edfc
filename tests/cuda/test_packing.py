"""Few queries: heads of a group share tiles, so k and v are read once for all of them; results are as ever."""

import ml_dtypes
import numpy as np
import pytest

from numbaflash import reference
from numbaflash.cuda.configs_sm80 import choose_forward
from numbaflash.cuda.packing import parts_of, slot_shift
from tensor_cores import forward, inputs, problem_of
from tolerances import assert_forward

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
SEED = 0x0123456789ABCDEF


def check(problem, **launch):
    assert choose_forward(problem, np.empty(problem.out_shape, problem.out_dtype), launch.get("arch") == "sm_75").packed
    out, lse, report = forward(problem, **launch)
    assert_forward(problem, reference.caller_major(problem, out), lse)
    assert report.local_bytes == report.shared_load.conflicts == report.shared_store.conflicts == 0
    return report


PLAIN = {
    "decoding": ((2, 8, 1, 64), dict(keys=130, kv_heads=1), {}),
    "a few queries, causal": ((1, 6, 5, 64), dict(keys=90, kv_heads=2), dict(causal=True)),
    "a group of more than one block": ((1, 18, 3, 64), dict(keys=70, kv_heads=1), dict(causal=True)),
    "slots of more rows than a warp, the last one empty": ((1, 3, 40, 64), dict(keys=70, kv_heads=1), {}),
    "whole slots, window": ((1, 4, 32, 64), dict(keys=200, kv_heads=1), dict(window=(40, 10))),
    "rows that see nothing": ((1, 4, 20, 64), dict(keys=12, kv_heads=2), dict(causal=True)),
    "sinks": ((1, 4, 7, 64), dict(keys=60, kv_heads=2), dict(sinks=np.array([1.5, -np.inf, 0.0, -3.0]))),
    "lengths": ((3, 4, 9, 64), dict(keys=70, kv_heads=2), dict(q_lengths=[9, 0, 4], kv_lengths=[70, 20, 0])),
}


@pytest.mark.parametrize("shape, sizes, options", PLAIN.values(), ids=PLAIN)
def test_packed_heads_are_told_apart(shape, sizes, options):
    check(problem_of(inputs(shape, dtype=bf16, **sizes), **options))


def test_k_and_v_are_read_once_for_a_group():
    heads, dim, read = 8, 64, {}
    for keys in (64, 192):
        problem = problem_of(inputs((1, heads, 1, dim), keys=keys, kv_heads=1, dtype=bf16))
        config = choose_forward(problem, np.empty(problem.out_shape, bf16))
        for packed in (True, False):
            read[keys, packed] = forward(problem, config=config._replace(packed=packed))[2].global_load.bytes
    more = 2 * 2 * 128 * dim            # bytes of 128 keys and values
    assert read[192, True] - read[64, True] == more
    assert read[192, False] - read[64, False] == heads * more


def everything(batch, heads, rows, keys):
    rng = np.random.default_rng(7)
    bias = rng.standard_normal((heads, rows, keys)).astype(f32)
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    return dict(
        softcap=3.0, bias=bias, mask=rng.random((batch, heads, rows, keys)) < 0.8, sinks=rng.random(heads),
        alibi_slopes=rng.random((batch, heads)) * 0.2, dropout_p=0.3, seed=SEED, causal=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 6, 11, 64), pytest.param((1, 9, 20, 128), marks=pytest.mark.exhaustive)])
def test_every_option_knows_its_head_and_query(shape):
    batch, heads, rows, _ = shape
    check(problem_of(inputs(shape, keys=100, kv_heads=heads // 3, dtype=f16), **everything(batch, heads, rows, 100)))


@pytest.mark.exhaustive
def test_packed_rows_of_any_alignment():
    check(problem_of(inputs((1, 6, 13, 33), keys=70, kv_heads=2, value_dim=7, dtype=bf16), causal=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype, options, arch", [
    (f32, dict(precision="tf32"), "sm_80"), (f32, dict(precision="tf32x3"), "sm_80"), (f16, {}, "sm_75")])
def test_other_kinds_of_products_pack_too(dtype, options, arch):
    check(problem_of(inputs((1, 6, 13, 64), keys=70, kv_heads=2, dtype=dtype), causal=True, **options), arch=arch)


def test_slots_are_the_least_that_hold_the_longest_sequence():
    def shift(heads, kv_heads, rows, block_q=128):
        return slot_shift(problem_of(inputs((1, heads, rows, 16), keys=3, kv_heads=kv_heads, dtype=bf16)), block_q)

    assert [shift(8, 1, rows) for rows in (1, 8, 9, 16, 33, 64)] == [3, 3, 4, 4, 6, 6]
    assert shift(8, 1, 65) == shift(4, 4, 8) == shift(8, 1, 0) == 0
    assert [parts_of(group, 128, 3) for group in (2, 16, 17)] == [1, 1, 2]
