"""Emulation of flash kernels is fast enough to be a test: two floors, with all checks on.

Medians of three; a run counts by its processor time where that is less than the time on the wall, so that
other processes on the machine do not count.
"""
import statistics
import time

import numpy as np
import pytest
from emulator_kernels.flash_simt import flash_simt_case
from emulator_kernels.tensor_cores import flash_mma_case

from numbaflash import emulator

pytestmark = pytest.mark.slow


def median_seconds(case, rounds=3):
    text = case.ptx()
    times = []
    for _ in range(rounds):
        wall, processor = time.perf_counter(), time.process_time()
        _, outputs = case.launch(emulator, text)
        times.append(min(time.perf_counter() - wall, time.process_time() - processor))
        assert case.error(outputs) <= case.tolerance
    return statistics.median(times)


def test_simt_flash_forward_of_4_heads_256_rows_takes_less_than_2_3_seconds():
    case = flash_simt_case(np.random.default_rng(0), heads=4, n=256, head_dim=64, block_q=64, block_k=32)
    assert median_seconds(case) < 2.3


@pytest.mark.parametrize("heads", [1, 4])
def test_tensor_core_flash_forward_takes_less_than_0_4_seconds(heads):
    assert median_seconds(flash_mma_case(np.random.default_rng(0), heads=heads, n=256)) < 0.4
