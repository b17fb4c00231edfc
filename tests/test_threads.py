"""Calls from several threads at once, and after fork, give the bits they give alone."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import numbaflash

MIXES = [
    (np.float32, dict(causal=True)),
    (np.float32, dict(softcap=3.0, dropout_p=0.2, seed=5)),
    (np.float64, dict(window=(20, 20))),
    (np.float16, dict(alibi_slopes=[0.1, 0.2], kv_lengths=[150, 3], q_lengths=[100, 3])),
]


def make(mix, backend, seed):
    dtype, options = MIXES[mix]
    rng = np.random.default_rng(seed)
    n = min(190, backend.rows)
    q, k, v, dout = rng.standard_normal((4, 2, 2, n, 32)).astype(dtype)
    if "kv_lengths" in options:
        options = options | dict(kv_lengths=[min(150, n), 3], q_lengths=[min(100, n), 3])

    def call():
        (out, lse), vjp = numbaflash.attention_vjp(q, k, v, return_lse=True, backend=backend.name, **options)
        return [out, lse, *vjp(dout)]

    return call


def same(ours, theirs):
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "mixes",
    [
        pytest.param([0] * 4, id="same"),
        pytest.param([0, 0, 1, 1, 2, 2], id="different"),
        pytest.param([0, 1, 2, 3, 0, 1, 2, 3], id="with half precision", marks=pytest.mark.slow),
    ],
)
def test_calls_from_several_threads_give_the_bits_they_give_alone(backend, mixes):
    calls = [make(mix, backend, seed) for seed, mix in enumerate(mixes)]
    alone = [call() for call in calls]
    wrong, barrier = [], threading.Barrier(len(calls))

    def work(number):
        barrier.wait()
        for _ in range(15):
            if not same(calls[number](), alone[number]):
                wrong.append(number)
                return

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not any(worker.is_alive() for worker in workers), "a call hangs"
    assert not wrong


def test_the_first_calls_may_come_from_several_threads_at_once(backend):
    """Compiling included: this head_dim, dtype and option mix is used by no other test here."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 70, 48), dtype=np.float32)
    results, barrier = [], threading.Barrier(4)

    def work():
        barrier.wait()
        results.append(numbaflash.attention(q, k, v, out_dtype=np.float64, backend=backend.name))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
    assert len(results) == 4 and all(np.array_equal(results[0], result) for result in results)


def in_child(function, seconds=60):
    """Exit status of a forked child that runs a function: 0 where it returned True."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if function() else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_gives_the_same_bits(backend):
    if backend.name == "cuda":
        pytest.skip("a CUDA context does not survive fork")
    calls = [make(mix, backend, mix) for mix in range(3)]
    alone = [call() for call in calls]
    assert in_child(lambda: all(same(call(), result) for call, result in zip(calls, alone))) == 0
    assert in_child(lambda: in_child(lambda: same(calls[0](), alone[0])) == 0) == 0
    assert all(same(call(), result) for call, result in zip(calls, alone))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_fork_in_the_middle_of_other_threads_calls(backend):
    if backend.name == "cuda":
        pytest.skip("a CUDA context does not survive fork")
    call = make(0, backend, 0)
    alone = call()
    stop = threading.Event()

    def work():
        while not stop.is_set():
            call()

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        assert [in_child(lambda: same(call(), alone)) for _ in range(10)] == [0] * 10
    finally:
        stop.set()
        for worker in workers:
            worker.join(60)
    assert same(call(), alone)
