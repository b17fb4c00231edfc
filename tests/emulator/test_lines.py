"""Messages and counters point at lines of the kernel and of its PTX."""
import numpy as np
import pytest
from numba import cuda, float32

from numbaflash import emulator


@cuda.jit
def kernel(x, y):
    i = cuda.grid(1)
    a = x[i]
    for _ in range(10):
        a = a * float32(3) + x[i]
    y[i] = a


FIRST = kernel.py_func.__code__.co_firstlineno


@pytest.fixture(scope="module")
def report():
    x = np.ones(64, np.float32)
    return emulator.launch(kernel, 2, 32, x, x.copy())


def line(report, number, by="python"):
    return next(l for l in report.lines(by) if l.source[1] == FIRST + number)


def test_traffic_belongs_to_the_python_line_that_causes_it(report):
    assert line(report, 6).bytes == 256 and line(report, 6).sectors == 8
    assert line(report, 3).bytes >= 256
    assert line(report, 5).text.startswith("a = a * float32(3)")


def test_operations_belong_to_their_line(report):
    assert line(report, 5).flops == report.flops["f32"] == 64 * 20
    assert report.lines("python")[0].warps == max(l.warps for l in report.lines("python"))


def test_ptx_lines_add_up_to_the_whole(report):
    lines = report.lines()
    assert sum(l.warps for l in lines) == report.warp_instructions
    assert sum(l.bytes for l in lines) == report.global_load.bytes + report.global_store.bytes
    assert all(l.ptx_line > 0 and l.text for l in lines)
    assert len({l.ptx_line for l in lines}) == len(lines)


def test_the_line_table_is_readable(report):
    table = report.line_table("python", 5)
    assert "flops" in table.splitlines()[0] and "a = a * float32(3)" in table
    assert report.line_table("ptx").count("\n") <= 20
    with pytest.raises(ValueError, match="by must be"):
        report.lines("c")


def test_errors_carry_the_lines():
    with pytest.raises(emulator.MemoryFault) as caught:
        emulator.launch(kernel, 2, 32, np.ones(64, np.float32), np.ones(40, np.float32))
    assert caught.value.source == (__file__, FIRST + 6)
    assert f"{__file__}:{FIRST + 6}" in str(caught.value) and f"PTX line {caught.value.ptx_line}" in str(
        caught.value)
