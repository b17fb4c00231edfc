"""Calls alike share one recorded plan: it is made once, and takes the arrays of each call."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from host_driver import Driver

from numbaflash.arrays import NUMPY, Home, operand
from numbaflash.cuda import backend, driver
from numbaflash.cuda.plan import KernelSpec
from numbaflash.device import device_view
from numbaflash.options import Options
from numbaflash.problem import make_problem

SHAPE = (1, 2, 20, 16)


class Launches:
    """A GPU whose kernels do nothing; what each launch got, and how many plans were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parameters, self.planned = [], 0
        fake = Driver({})
        monkeypatch.setattr(Driver, "_cuLaunchKernel", lambda driver, *arguments: ())
        monkeypatch.setattr(driver, "_bindings", lambda: fake)
        code = SimpleNamespace(code=b"", entry="forward")
        monkeypatch.setattr(KernelSpec, "cubin", lambda spec, arch: code)
        monkeypatch.setattr(backend, "RECORDINGS", {})
        driver.device.cache_clear()
        pack, plan = driver.pack_parameters, backend.plan_forward

        def remember(kinds, values):
            self.parameters.append(values)
            return pack(kinds, values)

        def count(*arguments):
            self.planned += 1
            return plan(*arguments)

        monkeypatch.setattr(driver, "pack_parameters", remember)
        monkeypatch.setattr(backend, "plan_forward", count)

    def forward(self, arrays, out, **options):
        """A call on the device; the parameters of its launch."""
        self.parameters.clear()
        q, k, v = arrays
        problem = make_problem(q, k, v, Options(**options))._replace(home=Home(NUMPY, 0))
        there = {name: operand(view(array)) for name, array in zip("qkv", arrays)}
        lse = np.zeros(SHAPE[:3], np.float32)
        backend.forward(problem._replace(**there), view(out), view(lse), 5)
        (values,) = self.parameters
        return values


def view(array):
    return device_view(array.ctypes.data, array.shape, array.strides, array.dtype, array)


def arrays_of(count=4, shape=SHAPE):
    return [np.zeros(shape, np.float32) for _ in range(count)]


@pytest.fixture
def launches(monkeypatch):
    yield Launches(monkeypatch)
    driver.device.cache_clear()


def test_the_second_call_makes_no_plan_and_takes_its_own_arrays(launches):
    calls = [arrays_of(), arrays_of()]
    for *inputs, out in calls:
        values = launches.forward(inputs, out, causal=True)
        assert {array.ctypes.data for array in (*inputs, out)} <= set(values)
    assert launches.planned == 1
    others = {array.ctypes.data for array in calls[0]}
    assert not others & set(values)


@pytest.mark.parametrize("change", [
    dict(causal=False), dict(scale=0.5), dict(q_lengths=[7]), dict(softcap=2.0), dict(dropout_p=0.5, seed=1),
    dict(deterministic=True), dict(window=(3, 3)), dict(sinks=np.zeros(2)),
], ids=lambda change: next(iter(change)))
def test_any_other_option_is_another_plan(launches, change):
    *inputs, out = arrays_of()
    launches.forward(inputs, out, **{"causal": True})
    launches.forward(inputs, out, **({"causal": True} | change))
    assert launches.planned == 2


def test_other_strides_alignment_or_one_array_for_two_is_another_plan(launches):
    *inputs, out = arrays_of()
    shifted = np.zeros(inputs[0].size + 1, np.float32)[1:].reshape(SHAPE)
    turned = np.zeros((*SHAPE[:2], SHAPE[3], SHAPE[2]), np.float32).transpose(0, 1, 3, 2)
    seen = set()
    for q in (inputs[0], shifted, turned):
        launches.forward([q, *inputs[1:]], out)
        seen.add(launches.planned)
    assert seen == {1, 2, 3}
    values = launches.forward([inputs[0], inputs[1], inputs[1]], out)
    assert values.count(inputs[1].ctypes.data) == 2


def test_a_recording_keeps_no_array_of_a_caller_alive(launches):
    *inputs, out = arrays_of()
    alive = [weakref.ref(array) for array in (*inputs, out)]
    launches.forward(inputs, out)
    del inputs, out
    gc.collect()
    assert backend.RECORDINGS and not any(reference() is not None for reference in alive)


def test_recordings_do_not_pile_up(launches, monkeypatch):
    monkeypatch.setattr(backend, "MOST_RECORDINGS", 3)
    *inputs, out = arrays_of()
    for seed in range(10):
        launches.forward(inputs, out, dropout_p=0.5, seed=seed)
        assert len(backend.RECORDINGS) <= 3
