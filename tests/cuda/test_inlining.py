"""Compiling without a GPU, and what is said where the compiler is missing too."""

import pytest

from numbaflash.cuda.inlining import compiling_for


def test_missing_compiler_libraries_are_an_error_that_names_the_extra():
    class DynamicLibNotFoundError(RuntimeError):
        pass

    with pytest.raises(ImportError, match=r"numbaflash\[emulator\]"), compiling_for((8, 0)):
        raise DynamicLibNotFoundError("libnvrtc.so.13")


def test_other_errors_pass_and_the_device_is_numbas_own_again():
    import numba.cuda.dispatcher

    before = numba.cuda.dispatcher.get_current_device
    with pytest.raises(RuntimeError, match="register"), compiling_for((9, 0, "a")):
        assert numba.cuda.dispatcher.get_current_device().compute_capability == (9, 0, "a")
        raise RuntimeError("too many registers")
    assert numba.cuda.dispatcher.get_current_device is before
