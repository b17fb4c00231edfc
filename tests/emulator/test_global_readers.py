"""A write to global memory races with every earlier reader, not only with the last one."""
import numpy as np
import pytest
from numba import cuda

from numbaflash import emulator
from numbaflash.emulator import RaceError

SEEDS = [None, 0, 1, 2, 3, 4, 5]


def stencil(synchronise):
    @cuda.jit
    def kernel(x):
        t = cuda.threadIdx.x
        left = x[t - 1] if t > 0 else 0
        right = x[t + 1] if t < x.size - 1 else 0
        if synchronise:
            cuda.syncthreads()
        x[t] = left + right + x[t]
    return kernel


def last_thread_writes(synchronise):
    @cuda.jit
    def kernel(x):
        t = cuda.threadIdx.x
        v = x[0]
        if synchronise:
            cuda.syncthreads()
        if t == cuda.blockDim.x - 1:
            x[0] = v + 1
        elif t > 0:
            x[t] = v
    return kernel


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel, threads", [(stencil, 96), (last_thread_writes, 128)])
def test_a_write_to_what_another_thread_of_the_block_has_read_is_a_race(kernel, threads, seed):
    with pytest.raises(RaceError, match="global memory"):
        emulator.launch(kernel(False), 1, threads, np.ones(threads, np.int32), seed=seed)
    emulator.launch(kernel(True), 1, threads, np.ones(threads, np.int32), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("writer", [0, 3])
def test_a_write_to_what_other_blocks_read_in_the_same_step_is_a_race(writer, seed):
    @cuda.jit
    def kernel(x, o):
        v = x[0]
        cuda.syncthreads()
        o[cuda.grid(1)] = v
        if cuda.blockIdx.x == writer and cuda.threadIdx.x == 0:
            x[0] = v + 1

    with pytest.raises(RaceError, match="global memory"):
        emulator.launch(kernel, 4, 64, np.zeros(1, np.int32), np.zeros(256, np.int32), seed=seed)
