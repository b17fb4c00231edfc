"""What the machine can do, measured: multiply-adds per second, and bytes read per second.

The yardsticks are a loop of independent fused multiply-adds, enough to keep the units busy, and a sum over an
array as large as the one in question; both on all threads that numbaflash may use.
"""

import time
from collections.abc import Callable
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numbaflash.cpu.compile import Kernel, Static
from numbaflash.cpu.config import machine, vector_static
from numbaflash.cpu.simd import I64, Lanes, fetch_add, store_f64
from numbaflash.cpu.threads import get_num_threads, run

# Short samples, many of them: on a busy machine some fall between the work of others.
_SECONDS = 5e-3
_TRIES = 60
_JOBS_PER_THREAD = 8


@intrinsic
def multiply_adds(typing_context, static, count, seed):
    """``count`` rounds of ``accumulators`` independent vector FMAs; the result depends on them all."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        factor = x.splat(builder.fptrunc(arguments[2], x.scalar) if x.bits == 32 else arguments[2])
        start = [x.constant(float(n)) for n in range(static["accumulators"])]
        sums = x.loop(arguments[1], start, lambda _, old: [x.fma(factor, factor, value) for value in old])
        return _one_number(x, builder, sums)

    return types.float64(static, types.intp, types.float64), generate


@intrinsic
def read_sum(typing_context, static, address, vectors):
    """Sum of ``vectors`` vectors (a multiple of ``accumulators``) from an address on."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        base, streams = x.pointer(arguments[1]), static["accumulators"]

        def body(index, old):
            at = x.at(base, x.times(index, x.bytes))
            return [builder.fadd(value, x.load(x.at(at, n * x.bytes))) for n, value in enumerate(old)]

        sums = x.loop(arguments[2], [x.constant(0.0)] * streams, body, step=streams)
        return _one_number(x, builder, sums)

    return types.float64(static, types.intp, types.intp), generate


def _one_number(x: Lanes, builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    total = vectors[0]
    for value in vectors[1:]:
        total = builder.fadd(total, value)
    number = builder.extract_element(total, ir.Constant(I64, 0))
    return builder.fpext(number, ir.DoubleType()) if x.bits == 32 else number


def _fma_kernel(counter, jobs, rounds, results, static):
    while True:
        job = fetch_add(counter.ctypes.data, 1)
        if job >= jobs:
            return
        store_f64(results + 8 * job, multiply_adds(static, rounds, 0.5))


def _read_kernel(counter, jobs, address, vectors, results, static):
    while True:
        job = fetch_add(counter.ctypes.data, 1)
        if job >= jobs:
            return
        store_f64(
            results + 8 * job, read_sum(static, address + job * vectors * static.lanes * static.size, vectors)
        )


_FMA, _READ = Kernel(_fma_kernel), Kernel(_read_kernel)
_COUNTER = types.int64[::1]
_FMA_ARGUMENTS = (_COUNTER, types.intp, types.intp, types.intp)


def _static(bits: int, accumulators: int) -> Static:
    return Static(**vector_static(bits), accumulators=accumulators)


def _fma_static(bits: int) -> Static:
    return _static(bits, 24 if machine().registers >= 32 else 12)


def fma_assembly(bits: int = 32) -> str:
    """Machine code of the loop that :func:`fma_peak` times."""
    return _FMA.assembly(_FMA_ARGUMENTS, _fma_static(bits))


@cache
def fma_peak(bits: int = 32) -> float:
    """Floating point operations per second of all threads together, best of several tries."""
    static = _fma_static(bits)
    entry = _FMA.specialise(_FMA_ARGUMENTS, static)
    jobs = _JOBS_PER_THREAD * get_num_threads()
    results = np.empty(jobs)
    rounds = 1000
    best = 0.0
    for _ in range(_TRIES):
        start = time.perf_counter()
        run(entry, (jobs, rounds, results.ctypes.data, None), jobs=jobs, keep=results)
        elapsed = time.perf_counter() - start
        best = max(best, jobs * rounds * static["accumulators"] * static["lanes"] * 2 / elapsed)
        rounds = max(rounds, min(2 * rounds, int(rounds * _SECONDS / elapsed)))
    return best


def reader(*arrays: np.ndarray) -> Callable[[], None]:
    """A call that reads contiguous arrays once, on all threads, and does nothing else; a short rest is left out."""
    static = _static(32, 8)
    round_bytes = static["accumulators"] * static["lanes"] * static["size"]
    parts = []
    for x in arrays:
        rounds = min(512, x.nbytes // round_bytes)
        if rounds:
            parts.append((x, rounds * static["accumulators"], x.nbytes // (rounds * round_bytes)))
    results = np.empty(max((jobs for _, _, jobs in parts), default=0))
    entry = _READ.specialise((_COUNTER, types.intp, types.intp, types.intp, types.intp), static)

    def read() -> None:
        for x, vectors, jobs in parts:
            run(entry, (jobs, x.ctypes.data, vectors, results.ctypes.data, None), jobs=jobs, keep=(x, results))

    return read


@cache
def read_bandwidth(size: int) -> float:
    """Bytes per second at which all threads together read an array of about ``size`` bytes, best try."""
    data = np.ones(size // 4, np.float32)
    read = reader(data)
    best = 0.0
    for _ in range(max(5, int(_TRIES * min(1.0, 2e7 / size)))):
        start = time.perf_counter()
        read()
        best = max(best, data.nbytes / (time.perf_counter() - start))
    return best
