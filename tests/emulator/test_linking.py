"""Kernels that call functions written in C++: Numba's half types, and files of the user's."""
import ml_dtypes
import numpy as np
import pytest
from numba import cuda, float32, int32

from numbaflash import emulator

BFLOAT16 = ml_dtypes.bfloat16


@pytest.fixture
def numbers():
    return np.linspace(0.25, 3, 32).astype(BFLOAT16)


def test_bfloat16_arithmetic(numbers):
    @cuda.jit
    def kernel(x, y):
        i = cuda.grid(1)
        y[i] = x[i] * x[i] + x[i]

    out = np.zeros_like(numbers)
    emulator.launch(kernel, 1, 32, numbers, out)
    assert np.array_equal(out, numbers * numbers + numbers)


def test_bfloat16_functions_and_conversions(numbers):
    from numba.cuda.bf16 import bfloat16, bfloat16_to_float32, hexp, htanh, hsqrt

    @cuda.jit
    def kernel(x, y):
        i = cuda.grid(1)
        y[0, i] = bfloat16_to_float32(hexp(x[i]))
        y[1, i] = bfloat16_to_float32(htanh(x[i]))
        y[2, i] = bfloat16_to_float32(hsqrt(x[i]))
        y[3, i] = float32(bfloat16(1.5))

    out = np.zeros((4, 32), np.float32)
    emulator.launch(kernel, 1, 32, numbers, out)
    x = numbers.astype(np.float32)
    for row, wanted in zip(out, (np.exp(x), np.tanh(x), np.sqrt(x), np.full(32, 1.5))):
        assert np.allclose(row, wanted, rtol=2**-7)


def test_float16_functions_that_only_exist_in_cpp():
    @cuda.jit
    def kernel(x, y):
        y[cuda.grid(1)] = cuda.fp16.hexp10(x[cuda.grid(1)])

    x = np.linspace(-1, 1, 32).astype(np.float16)
    out = np.zeros_like(x)
    emulator.launch(kernel, 1, 32, x, out)
    assert np.allclose(out.astype(float), 10.0 ** x.astype(float), rtol=2e-3)


CPP = """extern "C" __device__ int twice(int *result, int x) { *result = 2 * x; return 0; }"""
twice = cuda.declare_device("twice", int32(int32))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "twice.cu"
    path.write_text(CPP)
    return path


def calling(*link):
    @cuda.jit(link=list(link))
    def kernel(x):
        x[cuda.grid(1)] = twice(x[cuda.grid(1)])
    return kernel


@pytest.mark.parametrize("as_object", [False, True])
def test_a_kernel_is_linked_with_cpp(file, as_object):
    x = np.arange(8, dtype=np.int32)
    emulator.launch(calling(cuda.CUSource(CPP) if as_object else str(file)), 1, 8, x)
    assert x.tolist() == list(range(0, 16, 2))


def test_functions_that_nobody_defines_are_named_with_the_python_line():
    with pytest.raises(emulator.UnknownInstruction, match=r"(?s)call of twice, which .*test_linking.py:\d+"):
        emulator.launch(calling(), 1, 8, np.arange(8, dtype=np.int32))


def test_cpp_that_does_not_compile_is_quoted(file):
    file.write_text("int twice(")
    with pytest.raises(emulator.UnknownInstruction, match="(?s)twice.* does not compile.*error"):
        emulator.launch(calling(str(file)), 1, 8, np.arange(8, dtype=np.int32))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="link: .*nowhere.cu.* cannot be read"):
        emulator.launch(calling(str(tmp_path / "nowhere.cu")), 1, 8, np.arange(8, dtype=np.int32))
