"""A view of device memory can be moved about, and never read."""

import numpy as np
import pytest

from numbaflash.device import DeviceView, device_view

ADDRESS = 0x7F0000001000


def pointer(array):
    return array.__array_interface__["data"][0]


def test_views_move_address_and_strides_as_numpy_does():
    host = np.zeros((3, 4, 5), np.float32)
    view = device_view(ADDRESS, host.shape, host.strides, host.dtype)
    for move in (
        lambda a: a.transpose(1, 0, 2), lambda a: a[None], lambda a: a[1:, ::-1],
        lambda a: np.broadcast_to(a[:, :1], (2, 3, 7, 5), subok=True),
    ):
        there, here = move(view), move(host)
        assert isinstance(there, DeviceView)
        assert (there.shape, there.strides) == (here.shape, here.strides)
        assert pointer(there) - ADDRESS == pointer(here) - pointer(host)


def test_negative_strides_and_missing_strides_are_described():
    assert pointer(device_view(ADDRESS, (4, 2), (-8, 4), np.float32)) == ADDRESS
    assert device_view(ADDRESS, (2, 3), None, np.float16).strides == (6, 2)
    assert device_view(ADDRESS, (0, 3), None, np.float16).shape == (0, 3)


@pytest.mark.parametrize("read", [
    lambda a: a + 1, lambda a: np.sum(a), lambda a: a.sum(), lambda a: list(a), lambda a: a.astype(float),
    lambda a: np.exp(a), lambda a: a.__setitem__(0, 1.0), lambda a: np.array_equal(a, a), lambda a: a.copy(),
])
def test_reading_raises_instead_of_crashing(read):
    with pytest.raises(TypeError):
        read(device_view(ADDRESS, (2, 3), None, np.float32))


def test_printing_does_not_read():
    assert "shape=(2, 3)" in repr(device_view(ADDRESS, (2, 3), None, np.float32))
