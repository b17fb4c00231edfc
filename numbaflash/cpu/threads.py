"""A small pool of threads for ``nogil`` kernels that pull their jobs from a shared counter.

Numba's own parallel layers do not fit a library: ``workqueue`` aborts the process when two Python threads
enter it, ``omp`` dies in a forked child. Here a *kernel* is any callable that releases the GIL and is called
as ``kernel(counter, *arguments)``, where ``counter`` is an int64 array of one element. Each thread that works
on a call runs the same kernel; the kernel takes job after job with an atomic fetch-and-add on ``counter`` and
returns once the counter has passed the last one. So it never matters how many threads take part, or when they
join: what a job writes must depend on its number alone, and then results are equal to the last bit.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np

__all__ = ["get_num_threads", "run", "set_num_threads"]

# One helper must have at least this much to do, or waking it costs more than it brings.
_WORTH_A_THREAD_NS = 20_000
# Above any job number: a counter set to this value ends every kernel at its next job.
_NO_MORE_JOBS = 1 << 62
_CALLER, _WORKER = "caller", "worker"


class _Ticket:
    """An invitation to work on one call; void as soon as the caller takes it back."""

    __slots__ = ("call", "done", "finished", "owner")

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.owner: dict[int, str] = {}
        self.finished = False
        self.done = threading.Lock()
        self.done.acquire()

    def belongs_to(self, who: str) -> bool:
        # setdefault is atomic, and asking again after an interrupted attempt gives the same answer.
        return self.owner.setdefault(0, who) is who


class _Call:
    """One kernel with its arguments: what its threads share, and what keeps its memory alive."""

    __slots__ = ("arguments", "counter", "error", "keep", "kernel", "tickets")

    def __init__(self, kernel: Callable[..., object], arguments: tuple, helpers: int, keep: object) -> None:
        self.kernel = kernel
        self.arguments = arguments
        self.counter = np.zeros(1, np.int64)
        self.error: BaseException | None = None
        self.keep = keep
        self.tickets = [_Ticket(self) for _ in range(helpers)]

    def work(self) -> None:
        try:
            self.kernel(self.counter, *self.arguments)
        except BaseException as error:
            self.stop(error)

    def stop(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self.counter[0] = _NO_MORE_JOBS

    def forget(self) -> None:
        """Break the reference cycles, so that arrays are freed now and not at the next collection."""
        self.tickets.clear()
        self.error = None

    def wait(self) -> None:
        """Return when no thread is in the kernel any more; an interrupt stops the jobs, not the waiting."""
        while True:
            try:
                for ticket in self.tickets:
                    if not ticket.belongs_to(_CALLER):
                        while not ticket.finished:
                            ticket.done.acquire()
                return
            except BaseException as error:
                self.stop(error)


class _Pool:
    """Daemon threads that sleep, each on a lock of its own, until a ticket lies in the inbox."""

    def __init__(self) -> None:
        self.inbox: deque[_Ticket] = deque()
        self.asleep: deque[threading.Lock] = deque()
        self.size = 0
        self.growing = threading.Lock()

    def grow(self, size: int) -> None:
        with self.growing:
            while self.size < size:
                name = f"numbaflash-{self.size + 1}"
                try:
                    threading.Thread(target=self._live, name=name, daemon=True).start()
                except RuntimeError:  # no more threads allowed, or the interpreter is about to exit
                    return
                self.size += 1

    def post(self, tickets: list[_Ticket]) -> None:
        if self.size < len(tickets):
            self.grow(len(tickets))
        self.inbox.extend(tickets)
        try:
            # Popped and released within one C call: a signal handler that raised between the two would
            # leave a thread asleep that nobody can wake any more.
            deque(map(_release, islice(iter(self.asleep.pop, None), len(tickets))), maxlen=0)
        except IndexError:
            pass  # the other threads are at work and look into the inbox before they sleep

    def _live(self) -> None:
        wake = threading.Lock()
        wake.acquire()
        listed = False
        while True:
            try:
                ticket = self.inbox.popleft()
            except IndexError:
                if listed:
                    wake.acquire()
                    listed = False
                else:  # look once more after listing: a ticket posted in between has woken nobody
                    self.asleep.append(wake)
                    listed = True
                continue
            if ticket.belongs_to(_WORKER):
                ticket.call.work()
                ticket.finished = True
                ticket.done.release()
            del ticket


_release = type(threading.Lock()).release
_pool = _Pool()
_num_threads: int | None = None


def _available_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _checked(count: object, name: str) -> int:
    if isinstance(count, (int, np.integer)) and not isinstance(count, bool):
        if count >= 1:
            return int(count)
        raise ValueError(f"{name} must be at least 1, got {count}")
    raise TypeError(f"{name} must be an integer, got {type(count).__name__}")


def _default_threads() -> int:
    text = os.environ.get("NUMBAFLASH_NUM_THREADS", "").strip()
    if not text:
        return _available_cpus()
    try:
        return _checked(int(text), "NUMBAFLASH_NUM_THREADS")
    except ValueError:
        raise ValueError(f"NUMBAFLASH_NUM_THREADS must be a whole number, at least 1, got {text!r}") from None


def get_num_threads() -> int:
    """Return how many threads one call on the CPU may use, the calling thread included.

    Returns
    -------
    int
        What `set_num_threads` was given; else the environment variable ``NUMBAFLASH_NUM_THREADS``; else the
        number of CPUs that this process may run on.

    Raises
    ------
    ValueError
        If ``NUMBAFLASH_NUM_THREADS`` is needed and is not a whole number, at least 1.

    Examples
    --------
    >>> from numbaflash.cpu.threads import get_num_threads
    >>> get_num_threads() >= 1
    True
    """
    global _num_threads
    if _num_threads is None:
        _num_threads = _default_threads()
    return _num_threads


def set_num_threads(count: int | None) -> None:
    """Set how many threads one call on the CPU may use, for the whole process.

    Results do not depend on it, not even in the last bit.

    Parameters
    ----------
    count : int or None
        At least 1; the calling thread counts. None goes back to the default, see `get_num_threads`.

    Raises
    ------
    TypeError, ValueError
        If `count` is not an integer, or is below 1.

    Examples
    --------
    >>> from numbaflash.cpu.threads import get_num_threads, set_num_threads
    >>> set_num_threads(1)
    >>> get_num_threads()
    1
    >>> set_num_threads(None)
    """
    global _num_threads
    _num_threads = None if count is None else _checked(count, "count")


def run(
    kernel: Callable[..., object],
    arguments: tuple,
    *,
    jobs: int,
    cost_ns: float = float("inf"),
    keep: object = None,
) -> None:
    """Run ``kernel(counter, *arguments)`` on the calling thread and as many others as are free and worth it.

    Safe to enter from several Python threads at once and from within a kernel: a call never waits for a
    thread that has not begun to work on it. It survives `os.fork`: the child starts with an empty pool.

    Parameters
    ----------
    kernel : callable
        Releases the GIL, takes job numbers from ``counter[0]`` by atomic fetch-and-add, returns when they are
        `jobs` or more. See the module's docstring.
    arguments : tuple
        Further arguments; held until the last thread has left the kernel.
    jobs : int
        Number of jobs; with none the kernel is not called.
    cost_ns : float
        Estimated time of all jobs on one thread, in nanoseconds: small calls run on the calling thread alone.
    keep : object
        Whatever owns memory that the kernel reaches by address only; held like `arguments`.

    Raises
    ------
    BaseException
        The first exception that a kernel raised, or `KeyboardInterrupt`; the jobs not begun are then dropped,
        and no thread is in the kernel any more.

    Notes
    -----
    Measured on two cores of a Xeon (Sapphire Rapids, virtual machine) by ``python
    tests/cpu/test_threads.py``, medians of 300 calls, in microseconds: a kernel that takes 0.9 / 7.6 / 63 /
    641 on the calling thread alone takes 8 / 13 / 43 / 329 here with two threads, 32 / 41 / 56 / 356 on
    `concurrent.futures.ThreadPoolExecutor` and 2 / 5 / 33 / 293 on Numba's own layer, whose threads spin
    between calls while ours sleep.
    """
    if jobs <= 0:
        return
    shares = jobs if cost_ns >= jobs * _WORTH_A_THREAD_NS else int(cost_ns / _WORTH_A_THREAD_NS)
    threads = min(get_num_threads(), jobs, shares)
    if threads <= 1:
        kernel(np.zeros(1, np.int64), *arguments)
        return
    call = _Call(kernel, arguments, threads - 1, keep)
    try:
        _pool.post(call.tickets)
        call.work()
    except BaseException as error:
        call.stop(error)
    finally:
        call.wait()
        error = call.error
        call.forget()
    if error is not None:
        try:
            raise error
        finally:
            del error


def _forget_threads_of_the_parent() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads_of_the_parent)
