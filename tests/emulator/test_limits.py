"""Launches that no GPU takes are refused, by name and with the limit."""
import numpy as np
import pytest

from numbaflash import emulator

EMPTY = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k()
{
    ret;
}
"""


@pytest.mark.parametrize("grid, block, message", [
    (1, (1, 1, 65), "block z is at most 64, not 65"),
    (1, 1025, "block x is at most 1024, not 1025"),
    ((1, 65536), 1, "grid y is at most 65535, not 65536"),
    ((1, 1, 65536), 1, "grid z is at most 65535, not 65536"),
    (2**31, 1, "grid x is at most 2147483647, not 2147483648"),
    (1, (32, 8, 8), "at most 1024 threads, not 2048"),
    (0, 1, "grid must be one to three positive ints"),
])
def test_sizes_beyond_those_of_any_gpu_are_refused(grid, block, message):
    with pytest.raises(ValueError, match=message):
        emulator.launch(EMPTY, grid, block)


@pytest.mark.parametrize("name, grid, block", [("grid", 2.7, 32), ("block", 1, 32.0), ("grid", (1, 1.5), 32),
                                               ("grid", "1", 32), ("block", 1, None)])
def test_sizes_that_are_no_integers_are_refused(name, grid, block):
    with pytest.raises(TypeError, match=f"{name} must be an int or a tuple"):
        emulator.launch(EMPTY, grid, block)


@pytest.mark.parametrize("block", [(1, 1, 64), (1024,), np.int64(32), np.array([4, 2, 2])])
def test_the_largest_blocks_and_numpy_integers_are_taken(block):
    emulator.launch(EMPTY, np.int32(2), block)
