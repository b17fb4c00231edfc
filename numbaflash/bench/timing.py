"""Interleaved timing: contestants take turns, A B C, then C B A, so that all of them see the same machine."""

import time
from collections.abc import Callable, Mapping
from statistics import median

SAMPLE_SECONDS = 2e-3
MIN_ROUNDS, MAX_ROUNDS = 3, 101
# OpenMP threads spin for a while after their work; the next contestant must not pay for it.
PAUSE_SECONDS = 5e-3


def interleave(contestants: Mapping[str, Callable[[], object]], budget: float) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one number per round, after two calls that warm up.

    Parameters
    ----------
    contestants : mapping of str to callable
    budget : float
        Seconds to spend in all; at least 3 rounds are made, at most 101. Short calls are repeated within a
        sample.
    """
    repeats, round_seconds = {}, 0.0
    for name, call in contestants.items():
        call()
        once = _seconds(call, 1)
        repeats[name] = max(1, round(SAMPLE_SECONDS / once))
        round_seconds += once * repeats[name] + PAUSE_SECONDS
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(budget / round_seconds)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants.items())
        for name, call in order if number % 2 == 0 else reversed(order):
            time.sleep(PAUSE_SECONDS)
            times[name].append(_seconds(call, repeats[name]))
    return times


def ratio(times: Mapping[str, list[float]], peer: str, ours: str) -> float:
    """Median over rounds of peer / ours: above 1 where ours is faster."""
    return median(p / o for p, o in zip(times[peer], times[ours]))


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
