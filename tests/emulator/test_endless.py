"""A launch ends, also when its kernel does not."""
import numpy as np
import pytest
from numba import cuda

from numbaflash import emulator
from numbaflash.emulator import DeadlockError, StepLimitError


@cuda.jit
def wait_for_last_block(flag):
    if cuda.blockIdx.x == 0:
        while cuda.atomic.add(flag, 0, 0) == 0:
            pass
    if cuda.blockIdx.x == cuda.gridDim.x - 1:
        cuda.atomic.add(flag, 0, 1)


@cuda.jit
def count_for_ever(x, n):
    while n != 0:                       # a linear congruential generator that takes ages to come to 0
        n = n * 6364136223846793005 + 1442695040888963407
        x[cuda.grid(1)] = n


@cuda.jit
def go_round(x, n):
    i = 0
    while i < n:
        x[cuda.grid(1)] = i
        i = i + 1 if i < 7 else 0


def test_waiting_for_a_block_that_has_not_started_is_reported():
    flag = np.zeros(1, np.int32)
    with pytest.raises(DeadlockError, match="(?s)endless loop.*64 threads, first block \\(0, 0, 0\\).*"
                       "test_endless.py:.*blocks have not started: .*resident_blocks"):
        emulator.launch(wait_for_last_block, 200, 64, flag)
    assert flag[0] == 0


@pytest.mark.parametrize("grid, resident", [(20, None), (200, 200)])
def test_blocks_that_run_together_may_wait_for_each_other(grid, resident):
    flag = np.zeros(1, np.int32)
    emulator.launch(wait_for_last_block, grid, 64, flag, resident_blocks=resident)
    assert flag[0] == 64


def test_going_round_in_circles_is_noticed_long_before_the_limit():
    with pytest.raises(DeadlockError, match="(?s)nothing changes any more.*128 threads.*test_endless.py"):
        emulator.launch(go_round, 2, 64, np.zeros(128, np.int32), 1000)


@pytest.mark.parametrize("seed", [None, 3])
def test_the_limit_of_steps_names_the_threads_and_where_they_are(seed):
    with pytest.raises(StepLimitError, match="(?s)max_steps is 20000.*32 threads, first block.*"
                       "test_endless.py:") as caught:
        emulator.launch(count_for_ever, 1, 32, np.zeros(32, np.int64), 1, max_steps=20000, checks=False,
                        seed=seed)
    assert caught.value.source and caught.value.ptx_line


def test_a_long_loop_with_an_end_is_not_endless():
    @cuda.jit
    def collatz(x, n):
        steps = 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        for i in range(40_000):
            if x[0] == i:
                x[0] = i + 1
        x[1] = steps

    x = np.zeros(2, np.int64)
    emulator.launch(collatz, 1, 1, x, 27, checks=False)
    assert x.tolist() == [40_000, 111]


@pytest.mark.parametrize("option", ["max_steps", "resident_blocks"])
def test_limits_must_be_positive(option):
    with pytest.raises(ValueError, match=f"{option} must be positive, not 0"):
        emulator.launch(wait_for_last_block, 1, 32, np.zeros(1, np.int32), **{option: 0})
