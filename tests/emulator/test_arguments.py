"""What a launch takes and what it refuses: before any work, by name, saying what came and what is wanted."""
import array

import numpy as np
import pytest
from numba import cuda

from numbaflash import emulator


@cuda.jit
def copy(x, y):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = x[i]


class Foreign:
    """An array of another library, on a device."""

    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f8", "data": (4096, False), "version": 3}


@pytest.mark.parametrize("value, message", [
    ([1.0, 2.0], "x must be a NumPy array, a number, a record, or a tuple of them, not a list"),
    (Foreign(), r"x must be a NumPy array, not a [\w.]+\.Foreign"),
    (memoryview(b"abc"), "x must be a NumPy array, a number, a record, or a tuple of them, not a memoryview"),
    (array.array("d", [1.0]), "x must be a NumPy array, a number, .* not a array.array"),
    (b"abc", "x must be .* not a bytes"),
    (range(3), "x must be .* not a range"),
    (2**64, "x must be .* not 18446744073709551616: Int value is too large"),
    (np.longdouble(1), "x must be .* not a numpy.longdouble"),
    (np.zeros(3, object), "x must be an array of numbers or records, not of dtype object"),
    (np.zeros(3, ">f8"), "x must be .*>f8"),
    (np.ma.array([1.0, 2.0]), "x must be .*MaskedArray"),
    ((np.zeros(2), Foreign()), r"x\[1\] must be a NumPy array, not a [\w.]+\.Foreign"),
    (((1, [2]), 3), r"x\[0\]\[1\] must be .* not a list"),
], ids=lambda value: type(value).__name__ if not isinstance(value, str) else "")
def test_an_argument_that_no_kernel_takes_is_refused_by_name(value, message):
    with pytest.raises(TypeError, match=f"(?s){message}"):
        emulator.launch(copy, 1, 4, value, np.zeros(4))


@cuda.jit(device=True)
def on_device(x, y):
    y[0] = x[0]


@pytest.mark.parametrize("kernel", [None, 3, b"ptx", len, dict, on_device, copy[1024, 128]],
                         ids=lambda kernel: type(kernel).__name__)
def test_what_is_no_kernel_is_refused(kernel):
    with pytest.raises(TypeError, match="kernel must"):
        emulator.launch(kernel, 1, 4, np.zeros(4), np.zeros(4))


@pytest.mark.parametrize("option, value, error", [
    ("arch", "hopper", ValueError), ("arch", "sm_70", ValueError), ("arch", None, ValueError),
    ("arch", "sm_80a", ValueError), ("seed", "x", TypeError), ("seed", 1.5, TypeError), ("seed", -1, ValueError),
    ("counters", "no", TypeError), ("names", "xy", TypeError), ("names", 3, TypeError),
    ("names", [1, 2], TypeError), ("entry", "copy", ValueError),
])
def test_wrong_options_are_refused_by_name(option, value, error):
    with pytest.raises(error, match=option):
        emulator.launch(copy, 1, 4, np.zeros(4), np.zeros(4), **{option: value})


def test_an_offset_of_an_address_is_an_integer():
    with pytest.raises(TypeError, match="offset must be an integer, not 1.5"):
        emulator.address(np.zeros(4), 1.5)


RECORD = np.dtype([("n", np.int32), ("x", np.float32), ("y", np.float64)], align=True)


def test_records_dates_and_time_spans_are_passed_and_a_record_is_written_in_place():
    @cuda.jit
    def kernel(record, pair, when, span, numbers, dates):
        i = cuda.grid(1)
        numbers[i] = record.n + record.x + record.y + pair[0].y
        dates[i] = when + span
        if i == 0:
            pair[0].n = 7

    table = np.zeros(2, RECORD)
    table[0], table[1] = (1, 0.5, 3), (0, 0, 100)
    numbers, dates = np.zeros(4), np.zeros(4, "M8[s]")
    emulator.launch(kernel, 1, 4, table[0], (table[1], 5), np.datetime64(5, "s"), np.timedelta64(3, "s"), numbers,
                    dates)
    assert (numbers == 104.5).all() and (dates == np.datetime64(8, "s")).all()
    assert table["n"].tolist() == [1, 7]


PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry fill(.param .u64 out, .param .f32 value, .param .u32 n, .param .b32 bits)
{
    .reg .b64 %rd<4>; .reg .f32 %f<2>; .reg .b32 %r<4>; .reg .pred %p;
    ld.param.u64 %rd1, [out]; ld.param.f32 %f1, [value]; ld.param.u32 %r2, [n]; ld.param.b32 %r3, [bits];
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p, %r1, %r2;
    @%p bra DONE;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], %f1;
DONE:
    ret;
}
"""


@pytest.mark.parametrize("place, value, message", [
    (0, 2.0, "argument 0 must be an integer, not 2.0: parameter out is .u64"),
    (0, [1, 2], "argument 0 must be an integer, not a list"),
    (1, np.zeros(4), "argument 1 is an array, but parameter value is .f32"),
    (1, (1, 2), "argument 1 must be a number, not a tuple: parameter value is .f32"),
    (1, 1j, "argument 1 must be a number, not 1j"),
    (2, 1.5, "argument 2 must be an integer, not 1.5: parameter n is .u32"),
    (2, None, "argument 2 must be an integer, not a NoneType"),
    (2, 2**32, "argument 2 must fit into 32 bits, which 4294967296 does not"),
    (2, b"abc", "argument 2 must have the 4 bytes of parameter n, not 3"),
])
def test_a_value_that_does_not_fit_a_parameter_of_ptx_is_refused(place, value, message):
    arguments = [np.zeros(4, np.float32), 2.0, 4, 0]
    arguments[place] = value
    with pytest.raises((TypeError, ValueError), match=message):
        emulator.launch(PTX, 1, 4, *arguments)


@pytest.mark.parametrize("count", [4, np.int64(4), b"\4\0\0\0"])
@pytest.mark.parametrize("bits", [-1, 2**32 - 1, 1.5, np.float32(1.5)])
def test_values_that_fit_a_parameter_of_ptx_are_taken(count, bits):
    out = np.zeros(6, np.float32)
    emulator.launch(PTX, 1, 6, out, 2, count, bits)
    assert out.tolist() == [2, 2, 2, 2, 0, 0]


def test_text_that_is_cut_off_anywhere_is_no_ptx():
    out = np.zeros(4, np.float32)
    for end in range(len(PTX) - 2):
        with pytest.raises(ValueError, match="must be PTX text"):
            emulator.launch(PTX[:end], 1, 4, out, 2, 4, 0)
    assert not out.any()


@pytest.mark.parametrize("text, message", [
    ("", "no .entry in it"), ("kernel.ptx", "line 1, 'kernel.ptx': a semicolon is missing"),
    ("__global__ void f(float *x) { x[0] = 1; }", "line 1, '__global__"), ("\x7fELF", "line 1"),
    (PTX + PTX, "line 20, .*: fill is defined twice"),
    (PTX + PTX.replace("entry fill", "entry other"), "entry must name one kernel of the PTX text, not None; it has: "
     "fill, other"),
    (PTX.replace("add.s64", "?"), "line 12, .*this is no instruction"),
])
def test_what_is_no_ptx_is_refused_with_its_line(text, message):
    with pytest.raises(ValueError, match=message):
        emulator.launch(text, 1, 4, np.zeros(4, np.float32), 2, 4, 0)


def read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("wrap", [lambda a: a, emulator.address], ids=["array", "address"])
def test_a_write_to_a_read_only_array_is_found(wrap):
    out = np.zeros(4, np.float32)
    with pytest.raises(emulator.MemoryFault, match="write of 4 bytes to read-only memory: argument 0 at byte 0 of 16"):
        emulator.launch(PTX, 1, 4, wrap(read_only(out)), 2, 4, 0)
    assert not out.any()


def test_a_read_only_array_is_read_and_its_writable_base_is_written():
    out = np.arange(4.0)

    @cuda.jit
    def double(x, y):
        y[cuda.grid(1)] = 2 * x[cuda.grid(1)]

    emulator.launch(double, 1, 4, read_only(out), out)
    assert out.tolist() == [0, 2, 4, 6]
