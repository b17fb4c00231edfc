"""Whole kernels of the kinds people write: right values, and not one false alarm."""
import numpy as np
import pytest
from emulator_kernels.catalogue import CASES
from emulator_kernels.flash_simt import flash_simt_case
from emulator_kernels.tensor_cores import flash_mma_case, matmul_mma_case

from numbaflash import emulator


def check(case, **options):
    report, outputs = case.launch(emulator, **options)
    assert case.error(outputs) <= case.tolerance
    return report


@pytest.mark.parametrize("copies", ["late", "early"])
@pytest.mark.parametrize("name", CASES)
def test_gives_the_right_values_and_raises_nothing(name, copies):
    check(CASES[name](np.random.default_rng(1)), copies=copies)


SCHEDULES = [pytest.param(name, seed, marks=[pytest.mark.slow] if seed and name.startswith("flash") else [])
             for name in CASES for seed in range(3)]


@pytest.mark.parametrize("name, seed", SCHEDULES)
def test_any_schedule_gives_the_same_values(name, seed):
    case = CASES[name](np.random.default_rng(2))
    check(case, seed=seed)


@pytest.mark.parametrize("name", CASES)
def test_without_checks_the_values_are_the_same(name):
    case = CASES[name](np.random.default_rng(3))
    _, checked = case.launch(emulator)
    _, unchecked = case.launch(emulator, checks=False)
    for position in checked:
        np.testing.assert_array_equal(checked[position], unchecked[position])


@pytest.mark.parametrize("name", ["reduction", "matmul", "flash_mma"])
def test_line_info_changes_nothing(name):
    case = CASES[name](np.random.default_rng(4))
    _, outputs = case.launch(emulator, case.ptx(lineinfo=True))
    assert case.error(outputs) <= case.tolerance


@pytest.mark.parametrize("n", [1, 16, 33, 96])
@pytest.mark.parametrize("causal", [False, True])
def test_simt_flash_attention_of_any_length(n, causal):
    check(flash_simt_case(np.random.default_rng(n), heads=2, n=n, causal=causal))


@pytest.mark.parametrize("causal, heads, n, block_q, block_k",
                         [(False, 2, 128, 64, 64), (True, 1, 256, 64, 64), (True, 1, 128, 32, 64)])
def test_tensor_core_flash_attention(causal, heads, n, block_q, block_k):
    check(flash_mma_case(np.random.default_rng(n), heads, n, causal, block_q, block_k))


def test_tensor_core_operations_are_counted_exactly():
    m, n, k = 128, 96, 128
    report = check(matmul_mma_case(np.random.default_rng(0), m, n, k))
    assert report.flops["mma"] == 2 * m * n * k
