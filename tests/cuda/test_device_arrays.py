"""Arrays on a GPU, of every library: results of the caller's kind, beside its arrays, on its stream.

The libraries and GPUs are fakes (`fake_devices`), the kernels are the real ones, in the emulator.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from fake_devices import KINDS, STREAMS, install

import numbaflash

ORDINAL = 1


@pytest.fixture
def machine(monkeypatch):
    return install(monkeypatch)


def host_arrays():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 2, 9), dtype=np.float32) for n in (20, 30, 30))
    options = {
        "bias": rng.standard_normal((2, 1, 20, 30), dtype=np.float32),
        "sinks": rng.standard_normal(2, dtype=np.float32),
        "alibi_slopes": rng.random(2),
        "mask": rng.random((20, 30)) < 0.8,
    }
    return q, k, v, options


def plain():
    """Options that are no arrays, for a layout that is not the kernels'."""
    return {"layout": "BNHD", "causal": True, "q_lengths": [20, 11], "kv_lengths": [30, 7]}


@pytest.mark.parametrize("library", KINDS)
def test_results_are_of_the_callers_kind_on_its_device_and_stream(machine, library):
    q, k, v, options = host_arrays()
    def there(array):
        return machine.place(library, array, ORDINAL)
    tables = {name: there(array) for name, array in options.items() if name != "alibi_slopes"}
    tables["alibi_slopes"] = options["alibi_slopes"]
    (expected, expected_lse), vjp = numbaflash.attention_vjp(
        q, k, v, return_lse=True, backend="emulator", **plain(), **options)
    (out, lse), device_vjp = numbaflash.attention_vjp(
        there(q), there(k), there(v), return_lse=True, **plain(), **tables)
    dout = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    dlse = np.ones_like(expected_lse)
    wanted, got = vjp(dout, dlse), device_vjp(there(dout), there(dlse))

    results = {"out": (out, expected), "lse": (lse, expected_lse)}
    for name in ("dq", "dk", "dv", "dbias", "dsinks"):
        results[name] = getattr(got, name), getattr(wanted, name)
    for name, (actual, right) in results.items():
        assert type(actual) is KINDS[library] and actual.ordinal == ORDINAL, name
        np.testing.assert_array_equal(actual.host, right, err_msg=name)
        assert actual.host.dtype == right.dtype and actual.host.shape == right.shape, name
    stream = {"cupy": STREAMS[ORDINAL], "torch": STREAMS[ORDINAL]}.get(library, 0)
    assert machine.executed == [(ORDINAL, stream)] * 2
    assert (ORDINAL in machine.synchronized) == (library == "jax")


@pytest.mark.parametrize("stream, handle", [
    (5, 5), (SimpleNamespace(ptr=6), 6), (SimpleNamespace(cuda_stream=7), 7),
    (SimpleNamespace(handle=SimpleNamespace(value=8)), 8), (SimpleNamespace(handle=9), 9),
], ids=["integer", "cupy", "torch", "numba", "cuda.core"])
def test_the_callers_stream_is_taken(machine, stream, handle):
    q = machine.place("cupy", np.ones((1, 4), np.float32), 0)
    numbaflash.attention(q, q, q, stream=stream)
    assert machine.executed == [(0, handle)]


def test_out_is_written_in_place(machine):
    x = np.random.default_rng(0).standard_normal((4, 5), dtype=np.float32)
    q, out = machine.place("torch", x, 0), machine.place("torch", np.zeros_like(x), 0)
    assert numbaflash.attention(q, q, q, out=out) is out
    np.testing.assert_array_equal(out.host, numbaflash.attention(x, x, x, backend="emulator"))


def test_arrays_on_two_devices_and_of_two_kinds_are_refused(machine):
    x = np.ones((2, 4), np.float32)
    here, there = (machine.place("cupy", x.copy(), ordinal) for ordinal in (0, 1))
    with pytest.raises(TypeError, match="k lies on GPU 1 and q on GPU 0"):
        numbaflash.attention(here, there, here)
    with pytest.raises(TypeError, match="v is a torch array and q is a cupy one"):
        numbaflash.attention(here, here, machine.place("torch", x.copy(), 0))
    with pytest.raises(TypeError, match="k is a numpy array and q is a cupy one"):
        numbaflash.attention(here, x, here)
    for backend in ("cpu", "emulator"):
        with pytest.raises(ValueError, match="q lies on GPU 0"):
            numbaflash.attention(here, here, here, backend=backend)
    assert machine.executed == []


def test_traced_values_of_jax_have_no_memory(machine):
    import sys

    class Traced(KINDS["jax"], sys.modules["jax"].core.Tracer):
        __module__ = "jax"

    q = Traced(np.ones((2, 4), np.float32), 0)
    with pytest.raises(TypeError, match="traced JAX values"):
        numbaflash.attention(q, q, q)


def test_the_simulator_of_numba_is_no_gpu(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    x = np.ones((2, 4), np.float32)
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM.*backend='emulator'"):
        numbaflash.attention(x, x, x, backend="cuda")


def test_without_a_gpu_the_error_names_what_works(monkeypatch):
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    monkeypatch.setattr(numbaflash.backend, "gpu_is_usable", lambda: False)
    x = np.ones((2, 4), np.float32)
    with pytest.raises(RuntimeError, match="backend='cpu'.*backend='emulator'"):
        numbaflash.attention(x, x, x, backend="cuda")
