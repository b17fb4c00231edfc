"""A shuffle may read only from threads that its member mask names."""
import numpy as np
import pytest
from numba import cuda

from numbaflash import emulator
from numbaflash.emulator import EmulatorError


@cuda.jit
def broadcast(x, mask, lane):
    t = cuda.threadIdx.x
    if t < 16:
        x[t] = cuda.shfl_sync(mask, x[t], lane)


@pytest.mark.parametrize("seed", [None, 0])
def test_reading_from_a_lane_outside_the_member_mask_is_an_error(seed):
    x = np.arange(64)
    with pytest.raises(EmulatorError, match="reads from lane 20, which is not in the membermask") as caught:
        emulator.launch(broadcast, 1, 32, x, np.uint32(0xFFFF), 20, seed=seed)
    assert "thread (0, 0, 0) and 15 more" in str(caught.value)
    emulator.launch(broadcast, 1, 32, x, np.uint32(0xFFFF), 7, seed=seed)
    assert (x[:16] == 7).all() and (x[16:] == np.arange(16, 64)).all()
