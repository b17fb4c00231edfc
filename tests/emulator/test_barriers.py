"""A barrier that not all threads of the block reach together ends in an error on every schedule, never in a
hang."""
import numpy as np
import pytest
from numba import cuda, float32

from numbaflash import emulator
from numbaflash.emulator import BarrierError


@cuda.jit
def barrier_behind_an_early_exit(x, n):
    i = cuda.grid(1)
    if i >= n:
        return
    buffer = cuda.shared.array(64, float32)
    buffer[cuda.threadIdx.x] = 1
    cuda.syncthreads()
    x[i] = buffer[cuda.threadIdx.x]


@cuda.jit
def one_barrier_per_branch(x, n):
    i = cuda.threadIdx.x
    if i < n:
        x[i] = 2
        cuda.syncthreads()
    else:
        cuda.syncthreads()
        x[i] = 1


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("n", [16, 50])
@pytest.mark.parametrize("kernel", [barrier_behind_an_early_exit, one_barrier_per_branch])
def test_a_warp_without_all_its_threads_beside_a_whole_one_is_an_error(kernel, n, seed):
    with pytest.raises(BarrierError, match="divergent code"):
        emulator.launch(kernel, 1, 64, np.zeros(64, np.float32), n, seed=seed)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_an_early_exit_of_nobody_is_fine(seed):
    x = np.zeros(64, np.float32)
    emulator.launch(barrier_behind_an_early_exit, 1, 64, x, 64, seed=seed)
    assert (x == 1).all()
