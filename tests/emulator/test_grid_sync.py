"""grid.sync() of cooperative groups: a barrier for all blocks, and the order it makes."""
import numpy as np
import pytest
from numba import cuda

from numbaflash import emulator


@cuda.jit
def reverse_twice(x, y, z, synchronised):
    grid = cuda.cg.this_grid()
    i, last = cuda.grid(1), cuda.gridsize(1) - 1
    y[last - i] = 2 * x[i]
    if synchronised > 0:
        grid.sync()
    z[i] = y[i] + y[last - i]
    if synchronised > 1:
        grid.sync()
    y[last - i] = 0


@pytest.fixture
def arrays():
    return np.arange(600.0), np.zeros(600), np.zeros(600)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_all_blocks_see_what_all_have_written_and_may_overwrite_it_later(arrays, seed):
    x, y, z = arrays
    emulator.launch(reverse_twice, 6, 100, x, y, z, 2, seed=seed)
    assert (z == 2 * 599).all() and not y.any()


def test_a_grid_larger_than_a_batch_runs_at_once():
    x = np.arange(20480.0)
    y, z = np.zeros_like(x), np.zeros_like(x)
    emulator.launch(reverse_twice, 20, 1024, x, y, z, 2)
    assert (z == 2 * (x.size - 1)).all()


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("synchronised", [0, 1])
def test_a_missing_synchronisation_is_a_race(arrays, synchronised, seed):
    with pytest.raises(emulator.RaceError, match="race on global memory"):
        emulator.launch(reverse_twice, 6, 100, *arrays, synchronised, seed=seed)


@cuda.jit
def some_leave(x, leave):
    if cuda.grid(1) >= leave:
        return
    cuda.cg.this_grid().sync()
    x[cuda.grid(1)] = 1


@pytest.mark.parametrize("leave", [64, 65, 127])
def test_threads_that_leave_before_are_found(leave):
    with pytest.raises((emulator.BarrierError, emulator.DeadlockError), match="exited"):
        emulator.launch(some_leave, 4, 32, np.zeros(128), leave)


def test_blocks_that_are_not_resident_are_no_grid():
    with pytest.raises(emulator.BarrierError, match=r"grid.sync\(\) of 4 blocks, of which only 2 run at a time"):
        emulator.launch(some_leave, 4, 32, np.zeros(128), 128, resident_blocks=2)
