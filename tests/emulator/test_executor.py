"""Plans run launch by launch on NumPy arrays and workspaces."""
import numpy as np
import pytest
from numba import cuda, types

from numbaflash import emulator
from numbaflash.cuda import ptx
from numbaflash.cuda.plan import KernelSpec, Launch, Plan, Pointer, Workspace

POINTER = types.int64


def square(x, y):
    i = cuda.grid(1)
    value = ptx.ld_global_f32(x + 4 * i)
    ptx.st_global_f32(y + 4 * i, value * value)


def copy(x, y):
    i = cuda.grid(1)
    ptx.st_global_f32(y + 4 * i, ptx.ld_global_f32(x + 4 * i))


SQUARE, COPY = (KernelSpec(f.__name__, f, (POINTER, POINTER)) for f in (square, copy))


def scratch(fill=None):
    return Workspace("scratch", (64,), np.dtype(np.float32), fill)


def test_launches_run_in_order_and_their_counters_add_up():
    x, out, between = np.arange(64, dtype=np.float32), np.zeros(64, np.float32), scratch()
    plan = Plan([Launch(SQUARE, 2, 32, arguments=(Pointer(x), Pointer(between))),
                 Launch(COPY, 2, 32, arguments=(Pointer(between), Pointer(out)))], [between])
    report = emulator.execute(plan)
    assert (out == x * x).all()
    assert report.flops["f32"] == 64 and report.global_store.bytes == 512


def test_a_pointer_can_point_into_an_array():
    x = np.arange(64, dtype=np.float32)
    emulator.execute(Plan([Launch(COPY, 1, 32, arguments=(Pointer(x, 128), Pointer(x)))]))
    assert (x == np.r_[np.arange(32, 64), np.arange(32, 64)]).all()


def test_a_workspace_holds_its_fill_and_otherwise_nothing():
    out = np.zeros(64, np.float32)

    def plan(between):
        return Plan([Launch(COPY, 2, 32, arguments=(Pointer(between), Pointer(out)))], [between])

    emulator.execute(plan(scratch(2.5)))
    assert (out == 2.5).all()
    with pytest.raises(emulator.UninitializedRead, match="scratch at byte 0 of 256"):
        emulator.execute(plan(scratch()))


def test_a_workspace_that_was_written_in_part_is_known_in_part():
    x, out, between = np.arange(64, dtype=np.float32), np.zeros(64, np.float32), scratch()
    first = Launch(SQUARE, 1, 32, arguments=(Pointer(x), Pointer(between)))

    def plan(blocks):
        return Plan([first, Launch(COPY, blocks, 32, arguments=(Pointer(between), Pointer(out)))], [between])

    emulator.execute(plan(1))
    assert (out[:32] == x[:32] ** 2).all()
    with pytest.raises(emulator.UninitializedRead, match="scratch at byte 128"):
        emulator.execute(plan(2))


def test_a_fault_names_the_argument_of_the_kernel():
    x = np.zeros(64, np.float32)
    with pytest.raises(emulator.MemoryFault, match="just past the end of x"):
        out = np.zeros(96, np.float32)
        emulator.execute(Plan([Launch(COPY, 3, 32, arguments=(Pointer(x), Pointer(out)))]))


def test_an_empty_plan_is_an_error():
    with pytest.raises(ValueError, match="no launches"):
        emulator.execute(Plan([]))
