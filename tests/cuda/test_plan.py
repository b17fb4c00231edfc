"""Plans are plain values that cannot describe an impossible launch."""
import dataclasses

import numpy as np
import pytest
from numba import types

from numbaflash.cuda.plan import KernelSpec, Launch, Plan, Pointer, Workspace


def body(x, n):
    pass


KERNEL = KernelSpec("body", body, (types.int64, types.int32), launch_bounds=128)
X = np.zeros(8, np.float32)


def test_sizes_are_kept_as_three_numbers():
    launch = Launch(KERNEL, 7, (np.int64(32), 2), arguments=[Pointer(X), 8])
    assert launch.grid == (7, 1, 1) and launch.block == (32, 2, 1)
    assert launch.arguments[1] == 8 and type(launch.block[0]) is int


@pytest.mark.parametrize("grid, block, message", [
    (0, 32, "grid must be one to three positive"), ((1, 1, 1, 1), 32, "grid must be one to three"),
    ((1, 65536), 32, "grid must be at most"), (2**31, 32, "grid must be at most"),
    (1, (32, 33), "block must have at most 1024"), (1, (), "block must be one to three"),
    (1, -1, "block must be one to three"),
])
def test_a_size_that_no_gpu_takes_is_an_error(grid, block, message):
    with pytest.raises(ValueError, match=message):
        Launch(KERNEL, grid, block, arguments=(Pointer(X), 8))


def test_arguments_must_match_the_signature():
    with pytest.raises(ValueError, match="arguments: body takes 2, got 1"):
        Launch(KERNEL, 1, 32, arguments=(Pointer(X),))


def test_a_workspace_must_belong_to_the_plan():
    scratch, twin = (Workspace("scratch", (4, 2), np.dtype(np.float64), 0) for _ in range(2))
    launch = Launch(KERNEL, 1, 32, arguments=(Pointer(scratch, 8), 8))
    assert Plan([launch], [scratch]).workspace_bytes == 64
    with pytest.raises(ValueError, match="body refers to 'scratch'"):
        Plan([launch], [twin])


def test_nothing_of_a_plan_can_be_changed():
    launch = Launch(KERNEL, 1, 32, arguments=(Pointer(X), 8))
    plan = Plan([launch])
    for value, field in ((KERNEL, "name"), (launch, "grid"), (plan, "launches"), (Pointer(X), "target")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, None)
