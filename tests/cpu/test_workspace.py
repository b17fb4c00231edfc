"""Memory that calls of the backward pass share, one after the other."""

import threading

import numpy as np
import pytest

from numbaflash.cpu import workspace
from numbaflash.cpu.workspace import borrow

FLOAT32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(workspace, "_kept", [])


def address(array):
    return array.ctypes.data


def test_arrays_have_the_shape_asked_for_and_lie_apart_on_cache_lines():
    shapes = {"a": (3, 5), "none": (0,), "b": (7,), "c": (2, 2, 2)}
    with borrow(shapes, FLOAT32) as arrays:
        assert {name: array.shape for name, array in arrays.items()} == shapes
        assert all(array.dtype == FLOAT32 for array in arrays.values())
        assert not any(address(array) % 64 for array in arrays.values() if array.size)
        for number, array in enumerate(arrays.values()):
            array[...] = number
        assert all((array == number).all() for number, array in enumerate(arrays.values()))


def test_the_next_borrower_gets_the_same_memory_even_after_an_error():
    with pytest.raises(KeyError), borrow({"a": (100,)}, FLOAT32) as arrays:
        first = address(arrays["a"])
        raise KeyError
    with borrow({"b": (90,)}, FLOAT32) as arrays:
        assert address(arrays["b"]) == first


def test_who_borrows_at_the_same_time_gets_other_memory():
    inside, errors = threading.Barrier(4), []

    def work(number):
        for _ in range(20):
            with borrow({"a": (1000 + number,)}, FLOAT32) as arrays:
                arrays["a"][:] = number
                inside.wait(10)
                if not (arrays["a"] == number).all():
                    errors.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(workspace._kept) <= 4


def test_no_more_is_kept_than_promised(monkeypatch):
    monkeypatch.setattr(workspace, "MOST_KEPT", 1 << 20)
    with borrow({"a": (1 << 18,)}, FLOAT32):
        pass
    assert not workspace._kept
    with borrow({"a": (1 << 17,)}, FLOAT32), borrow({"a": (1 << 17,)}, FLOAT32):
        pass
    assert len(workspace._kept) == 1
