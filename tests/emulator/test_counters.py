"""What is counted is what can be counted by hand."""
import numpy as np
import pytest
from numba import cuda, float32, int32

from numbaflash import emulator


@cuda.jit
def copy_strided(x, y, stride):
    i = cuda.grid(1)
    y[i] = x[i * stride]


@pytest.mark.parametrize("stride, sectors", [(1, 4), (2, 8), (8, 32), (9, 32), (0, 1)])
def test_sectors_of_a_strided_load(stride, sectors):
    x, y = np.zeros(64 * 9 + 1, np.float32), np.zeros(64, np.float32)
    report = emulator.launch(copy_strided, 1, 64, x, y, stride)
    assert report.global_load.requests == 2 and report.global_load.bytes == 256
    assert report.global_load.sectors == 2 * sectors
    assert report.global_store.sectors == report.global_store.distinct_sectors == 8


def test_distinct_sectors_count_memory_that_is_read_twice_once():
    @cuda.jit
    def twice(x, y):
        i = cuda.threadIdx.x
        y[i + 32 * cuda.blockIdx.x] = x[i]

    report = emulator.launch(twice, 4, 32, np.zeros(32, np.float32), np.zeros(128, np.float32))
    assert report.global_load.sectors == 16 and report.global_load.distinct_sectors == 4
    assert report.dram_bytes == 32 * (4 + 16) and report.l2_bytes == 32 * (16 + 16)


@pytest.mark.parametrize("stride, conflicts", [(1, 0), (2, 1), (4, 3), (32, 31), (33, 0)])
def test_bank_conflicts_of_a_strided_shared_store(stride, conflicts):
    @cuda.jit
    def kernel(x, stride):
        buffer = cuda.shared.array(32 * 33, int32)
        i = cuda.threadIdx.x
        buffer[i * stride] = i
        cuda.syncthreads()
        x[i] = buffer[0]

    report = emulator.launch(kernel, 1, 32, np.zeros(32, np.int32), stride)
    assert (report.shared_store.wavefronts, report.shared_store.ideal) == (1 + conflicts, 1)
    assert report.shared_store.conflicts == conflicts
    assert report.shared_load.wavefronts == 1, "lanes that read one word share a pass"


def test_floating_point_operations_count_fused_ones_twice():
    @cuda.jit
    def kernel(x, y):
        i = cuda.grid(1)
        a = x[i]
        for _ in range(5):
            a = cuda.fma(a, float32(1.5), float32(2.5))
        x[i] = a + float32(1)
        y[i] = y[i] * 3.0

    report = emulator.launch(kernel, 2, 32, np.zeros(64, np.float32), np.zeros(64))
    assert report.flops["f32"] == 64 * 11 and report.flops["f64"] == 64 and report.flops["mma"] == 0


def test_only_lanes_that_run_are_counted():
    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        if i < 3:
            x[i] *= float32(2)

    report = emulator.launch(kernel, 1, 64, np.zeros(64, np.float32))
    assert report.flops["f32"] == 3
    assert report.global_load.bytes == 12 and report.global_load.requests == 1


def test_atomics_and_local_memory_are_counted():
    @cuda.jit
    def kernel(x):
        frame = cuda.local.array(8, int32)
        i = cuda.threadIdx.x
        for j in range(8):
            frame[j] = x[0] + j
        cuda.atomic.add(x, 1 + i % 2, frame[i % 8])

    report = emulator.launch(kernel, 1, 32, np.zeros(3, np.int32))
    assert report.global_atomic.bytes == 128 and report.global_atomic.requests == 1
    assert report.local_bytes == 32 * (8 + 1) * 4


def test_instructions_add_up():
    report = emulator.launch(copy_strided, 3, 96, np.zeros(288, np.float32), np.zeros(288, np.float32), 1)
    assert report.warp_instructions == sum(report.instructions.values())
    assert report.thread_instructions == 32 * report.warp_instructions
    assert report.instructions["memory"] % 9 == 0


def test_reports_add():
    x = np.zeros(64, np.float32)
    one = emulator.launch(copy_strided, 1, 32, x, x.copy(), 1)
    two = emulator.launch(copy_strided, 2, 32, x, x.copy(), 1)
    both = one + two
    assert both.global_load.bytes == one.global_load.bytes + two.global_load.bytes == 3 * 128
    assert both.instructions["memory"] == one.instructions["memory"] + two.instructions["memory"]


def test_without_counters_no_traffic_is_counted():
    x = np.zeros(64, np.float32)
    report = emulator.launch(copy_strided, 1, 32, x, x.copy(), 1, counters=False)
    assert report.global_load.bytes == 0 and report.warp_instructions > 0


def test_the_report_is_a_table():
    x = np.zeros(64, np.float32)
    text = str(emulator.launch(copy_strided, 2, 32, x, x.copy(), 1))
    assert "copy_strided" in text and "global load" in text and "256 bytes in 2 requests" in text
    assert "(1.00 x ideal)" in text


def test_a_report_calls_a_kernel_by_its_python_name():
    report = emulator.launch(copy_strided, 1, 64, np.zeros(64, np.float32), np.zeros(64, np.float32), 1)
    assert report.kernel == "copy_strided" and " copy_strided\n" in str(report)
