"""The thread pool: equal results from any number of threads, callers and processes.

Run as a script, it measures the pool beside ThreadPoolExecutor and Numba's own parallel layer.
"""

import _thread
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from numbaflash.cpu import threads


@intrinsic
def next_job(context, counter):
    def codegen(context, builder, signature, arguments):
        address = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", address, context.get_constant(types.int64, 1), "seq_cst")

    return types.int64(counter), codegen


@njit(nogil=True)
def fill(counter, out, rounds):
    job = next_job(counter)
    while job < out.size:
        value = 1.0 + job
        for _ in range(rounds):
            value = value * 1.0000001 + 1e-9
        out[job] = value
        job = next_job(counter)


@njit(parallel=True, nogil=True)
def fill_with_numba_threads(out, rounds):
    for job in prange(out.size):
        value = 1.0 + job
        for _ in range(rounds):
            value = value * 1.0000001 + 1e-9
        out[job] = value


def alone(jobs, rounds):
    out = np.zeros(jobs)
    fill(np.zeros(1, np.int64), out, rounds)
    return out


@pytest.fixture(autouse=True)
def three_threads():
    threads.set_num_threads(3)
    yield
    threads.set_num_threads(None)


def in_new_process(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    return result.returncode, result.stdout.strip(), result.stderr


@pytest.mark.parametrize("jobs", [1, 2, 7, 1000])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_job_is_done_once_by_any_number_of_threads(jobs, count):
    threads.set_num_threads(count)
    out = np.zeros(jobs)
    threads.run(fill, (out, 100), jobs=jobs)
    np.testing.assert_array_equal(out, alone(jobs, 100))


def test_no_jobs_means_no_kernel():
    threads.run(None, (), jobs=0)


def test_a_call_uses_several_threads_and_the_calling_one():
    seen = set()
    together = threading.Barrier(3, timeout=20)

    def kernel(counter):
        seen.add(threading.get_ident())
        together.wait()

    threads.run(kernel, (), jobs=3)
    assert len(seen) == 3
    assert threading.get_ident() in seen


@pytest.mark.parametrize("options", [{"jobs": 1}, {"jobs": 100, "cost_ns": 1000.0}])
def test_small_calls_stay_on_the_calling_thread(options):
    seen = []
    threads.run(lambda counter: seen.append(threading.get_ident()), (), **options)
    assert seen == [threading.get_ident()]


def test_many_callers_at_once_get_the_bits_they_get_alone():
    wanted = {jobs: alone(jobs, 300) for jobs in range(1, 40)}

    def caller(seed):
        order = np.random.default_rng(seed).permutation(list(wanted))
        for jobs in order:
            out = np.zeros(jobs)
            threads.run(fill, (out, 300), jobs=int(jobs))
            if not np.array_equal(out, wanted[jobs]):
                return False
        return True

    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(caller, range(16)))


def test_a_kernel_may_start_calls_of_its_own():
    wanted = alone(50, 100)
    results = []

    def outer(counter):
        out = np.zeros(50)
        threads.run(fill, (out, 100), jobs=50)
        results.append(np.array_equal(out, wanted))

    threads.run(outer, (), jobs=8)
    assert results
    assert all(results)


def test_an_exception_reaches_the_caller_and_ends_the_other_threads():
    other_ended = []
    begun = threading.Barrier(2, timeout=20)
    threads.set_num_threads(2)

    def kernel(counter):
        begun.wait()
        if threading.current_thread() is threading.main_thread():
            while counter[0] < 1 << 40:
                time.sleep(0.001)
            other_ended.append(True)
        else:
            raise MemoryError("no room for the panels")

    with pytest.raises(MemoryError, match="no room for the panels"):
        threads.run(kernel, (), jobs=2)
    assert other_ended == [True]
    out = np.zeros(30)
    threads.run(fill, (out, 10), jobs=30)
    np.testing.assert_array_equal(out, alone(30, 10))


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, also where this process was started with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_leaves_no_thread_in_the_kernel(interrupts):
    inside = []
    threads.set_num_threads(2)
    begun = threading.Barrier(2, timeout=20)

    def kernel(counter):
        inside.append(threading.get_ident())
        begun.wait()
        if threading.current_thread() is threading.main_thread():
            _thread.interrupt_main(signal.SIGINT)
        else:
            while counter[0] < 1 << 40:
                time.sleep(0.001)
            time.sleep(0.05)
        inside.remove(threading.get_ident())

    with pytest.raises(KeyboardInterrupt):
        threads.run(kernel, (), jobs=2)
    assert threading.get_ident() in inside  # the interrupt came in the middle of the calling thread's part
    assert len(inside) == 1


def test_arguments_are_released_when_the_call_returns():
    out = np.zeros(64)
    count = sys.getrefcount(out)
    for _ in range(20):
        threads.run(fill, (out, 10), jobs=64, keep=out)
    deadline = time.monotonic() + 10
    while sys.getrefcount(out) > count and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sys.getrefcount(out) == count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_computes_even_if_another_thread_was_in_a_call():
    out = np.zeros(200)
    stop = threading.Event()

    def keep_busy():
        while not stop.is_set():
            threads.run(fill, (np.zeros(50), 20000), jobs=50)

    wanted = alone(200, 100)
    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        for _ in range(3):
            child = os.fork()
            if child == 0:
                threads.run(fill, (out, 100), jobs=200)
                os._exit(0 if np.array_equal(out, wanted) else 1)
            deadline = time.monotonic() + 20
            status = None
            while status is None and time.monotonic() < deadline:
                done, code = os.waitpid(child, os.WNOHANG)
                status = code if done else None
                time.sleep(0.005)
            if status is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            assert status == 0
    finally:
        stop.set()
        busy.join()


def test_the_interpreter_exits_while_the_pool_sleeps_and_while_a_daemon_computes():
    script = os.path.abspath(__file__)
    code = f"""
import importlib.util, threading, time
spec = importlib.util.spec_from_file_location("pool_tests", {script!r})
tests = importlib.util.module_from_spec(spec); spec.loader.exec_module(tests)
tests.threads.set_num_threads(3)
out = tests.np.zeros(100000)
tests.threads.run(tests.fill, (tests.np.zeros(9), 10), jobs=9)
def forever():
    while True:
        tests.threads.run(tests.fill, (out, 200000), jobs=out.size)
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.3)
print("end")
"""
    status, printed, errors = in_new_process(code)
    assert (status, printed) == (0, "end"), errors


def test_the_environment_sets_the_default():
    code = "from numbaflash.cpu.threads import get_num_threads as n; print(n())"
    assert in_new_process(code, NUMBAFLASH_NUM_THREADS="7")[:2] == (0, "7")
    for wrong in ("0", "-1", "two", "1.5"):
        status, _, errors = in_new_process(code, NUMBAFLASH_NUM_THREADS=wrong)
        assert status != 0
        assert f"NUMBAFLASH_NUM_THREADS must be a whole number, at least 1, got '{wrong}'" in errors


def test_the_default_is_the_number_of_usable_cpus(monkeypatch):
    monkeypatch.delenv("NUMBAFLASH_NUM_THREADS", raising=False)
    threads.set_num_threads(None)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert threads.get_num_threads() == usable
    threads.set_num_threads(np.int64(4))
    assert threads.get_num_threads() == 4


@pytest.mark.parametrize("count", [0, -3])
def test_a_count_below_one_is_refused(count):
    with pytest.raises(ValueError, match=f"count must be at least 1, got {count}"):
        threads.set_num_threads(count)


@pytest.mark.parametrize("count", [1.0, "2", True])
def test_a_count_that_is_no_integer_is_refused(count):
    with pytest.raises(TypeError, match="count must be an integer, got"):
        threads.set_num_threads(count)


def measure(rounds):
    out = np.zeros(16)
    executor = ThreadPoolExecutor(1)

    def with_executor():
        counter = np.zeros(1, np.int64)
        other = executor.submit(fill, counter, out, rounds)
        fill(counter, out, rounds)
        other.result()

    ways = {
        "inline": lambda: fill(np.zeros(1, np.int64), out, rounds),
        "pool": lambda: threads.run(fill, (out, rounds), jobs=16),
        "executor": with_executor,
        "numba": lambda: fill_with_numba_threads(out, rounds),
    }
    times = {}
    for name, way in ways.items():
        way()
        times[name] = []
        for _ in range(300):
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return "  ".join(f"{name} {statistics.median(values) * 1e6:7.1f} us" for name, values in times.items())


if __name__ == "__main__":
    threads.set_num_threads(2)
    for rounds in (0, 150, 1500, 15000):
        print(f"16 jobs of {rounds:5} steps: ", measure(rounds))
