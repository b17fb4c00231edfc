"""Plans on the driver: memory, copies, parameters and errors, with a driver that is a fake on host memory."""

from types import SimpleNamespace

import numpy as np
import pytest
from host_driver import OPTIN, Driver, view
from numba import types

from numbaflash.cuda import driver
from numbaflash.cuda.plan import KernelSpec, Launch, Plan, Pointer, Workspace
from numbaflash.device import device_view

COUNT = 6


def scaled(x, y, partial, factor, count):
    """A kernel: y = factor * x, and one more in every number of the workspace."""
    view(y, np.float32, count)[:] = factor * view(x, np.float32, count)
    view(partial, np.int32, 3)[:] += 1


SPEC = KernelSpec("scaled", scaled, (types.int64, types.int64, types.int64, types.float64, types.int32))


@pytest.fixture
def fake(monkeypatch):
    """A machine of its own for each test."""
    fake = Driver({"scaled": ("qqqdi", scaled)})
    driver.device.cache_clear()
    monkeypatch.setattr(driver, "_bindings", lambda: fake)
    compiled = []

    def cubin(spec, arch):
        compiled.append((spec.name, arch))
        return SimpleNamespace(code=b"machine code", entry=spec.name)

    monkeypatch.setattr(KernelSpec, "cubin", cubin)
    fake.compiled = compiled
    yield fake
    driver.device.cache_clear()


def plan_of(x, y, shared_bytes=0, fill=7):
    partial = Workspace("partial", (3,), np.dtype(np.int32), fill)
    launch = Launch(SPEC, (2, 3), 64, shared_bytes, (Pointer(x), Pointer(y), Pointer(partial), 0.5, COUNT))
    return Plan([launch, launch], [partial])


def test_host_arrays_are_copied_in_and_results_out(fake):
    x, y = np.arange(COUNT, dtype=np.float32), np.zeros(COUNT, np.float32)
    driver.execute(plan_of(x, y), results=[y])
    np.testing.assert_array_equal(y, 0.5 * x)
    assert fake.calls("cuLaunchKernel")[0][1:8] == [2, 3, 1, 64, 1, 1, 0]
    assert fake.calls("cuStreamSynchronize"), "the caller may read y at once"
    assert fake.allocated == {}


def test_arrays_on_the_device_are_used_in_place_and_nobody_waits(fake):
    x, y = np.arange(COUNT, dtype=np.float32), np.zeros(COUNT, np.float32)
    there = [device_view(a.ctypes.data, a.shape, a.strides, a.dtype, a) for a in (x, y)]
    driver.execute(plan_of(*there), ordinal=1, stream=44)
    np.testing.assert_array_equal(y, 0.5 * x)
    assert all(made == ["context of device 1"] for made in fake.calls("cuCtxSetCurrent"))
    assert not fake.calls("cuMemcpyHtoDAsync") and not fake.calls("cuStreamSynchronize")
    assert {arguments[8] for arguments in fake.calls("cuLaunchKernel")} == {44}
    memory = fake.calls("cuMemAllocAsync") + fake.calls("cuMemFreeAsync")
    assert {arguments[-1] for arguments in memory} == {44}
    assert fake.allocated == {}


def test_nobody_waits_for_tables_beside_arrays_on_the_device(fake):
    table, y = np.arange(COUNT, dtype=np.float32), np.zeros(COUNT, np.float32)
    driver.execute(plan_of(table, device_view(y.ctypes.data, y.shape, y.strides, y.dtype, y)))
    assert len(fake.calls("cuMemcpyHtoDAsync")) == 1 and not fake.calls("cuStreamSynchronize")
    np.testing.assert_array_equal(y, 0.5 * table)


def test_workspaces_are_filled_and_shared_by_the_launches(fake):
    seen = []
    fake.kernels["scaled"] = ("qqqdi", lambda x, y, partial, factor, count: (
        scaled(x, y, partial, factor, count), seen.append(view(partial, np.int32, 3).copy())))
    x = np.zeros(COUNT, np.float32)
    driver.execute(plan_of(x, x.copy()))
    np.testing.assert_array_equal(seen, [[8, 8, 8], [9, 9, 9]])


def test_views_of_any_strides_reach_their_elements(fake):
    whole = np.arange(2 * COUNT, dtype=np.float32)
    y = np.zeros(COUNT, np.float32)
    found = []
    fake.kernels["scaled"] = ("qqqdi", lambda x, *rest: found.append(view(x, np.float32, 1)[0]))
    for x in (whole[::-1], whole[3:], whole[1::2], whole[-2::-3]):
        driver.execute(plan_of(x, y))
        assert found.pop() == found.pop() == x[0]


def test_a_kernel_is_compiled_and_loaded_once_for_the_gpu_that_is_there(fake):
    x = np.zeros(COUNT, np.float32)
    for _ in range(3):
        driver.execute(plan_of(x, x.copy()))
    assert fake.compiled == [("scaled", "sm_90a")] and len(fake.calls("cuLibraryLoadData")) == 1


def test_large_shared_memory_is_asked_for_once(fake):
    x = np.zeros(COUNT, np.float32)
    for size in (1000, 60_000, 60_000, 50_000, 70_000):
        driver.execute(plan_of(x, x.copy(), size))
    assert [arguments[1] for arguments in fake.calls("cuKernelSetAttribute")] == [60_000, 70_000]
    with pytest.raises(ValueError, match=f"scaled needs {OPTIN + 1} bytes of shared memory.*gives {OPTIN}"):
        driver.execute(plan_of(x, x.copy(), OPTIN + 1))


def test_a_failure_names_the_call_and_leaves_no_memory(fake):
    x = np.zeros(COUNT, np.float32)
    fake.failing = "cuLaunchKernel"
    with pytest.raises(driver.DriverError, match=r"cuLaunchKernel: out of memory \(CUDA_ERROR_OUT"):
        driver.execute(plan_of(x, x.copy()))
    assert fake.allocated == {}


def test_parameters_are_aligned_as_kernels_expect_them():
    parameters = driver.pack_parameters("BiqHdf", (1, -2, -(1 << 40), 3, 0.1, 0.5))
    offsets = parameters.addresses - parameters.data.ctypes.data
    assert offsets.tolist() == [0, 4, 8, 16, 24, 32]
    assert parameters.data[8:16].view(np.int64) == -(1 << 40)
    assert parameters.data[24:32].view(np.float64) == 0.1


@pytest.mark.parametrize(
    "major, minor, arch", [(7, 5, "sm_75"), (8, 9, "sm_89"), (9, 0, "sm_90a"), (12, 0, "sm_120a")])
def test_a_gpu_gets_the_code_for_its_architecture(major, minor, arch):
    assert driver.architecture(major, minor) == arch
