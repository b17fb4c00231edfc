"""Timing the cases beside the peers, and what a call costs the host."""

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import numbaflash

from ..pipes import GPUS
from .cases import CASES, DIRECTIONS, HIDDEN, TOKENS, GpuCase
from .device import Gpu, interleave, ratio
from ..contest import OURS, Unsupported
from .peers import Numbaflash, Peer, matmul_peak

CALLS = 200
PREPARE_SECONDS = 40.0
"""For a peer that compiles, over all cases."""
SECONDS = 0.12
"""GPU time for a case and direction, all contestants together, where they are not slower."""


class Peaks:
    """Operations per second that a kind of number reaches: of a matrix product, else from the data sheet."""

    def __init__(self, gpu: Gpu, measured: Callable[[Gpu, str], float | None] = matmul_peak) -> None:
        self.gpu, self._measured, self._found = gpu, measured, {}

    def of(self, kind: str) -> tuple[float | None, str]:
        """The peak, and where it is from."""
        kind = "tf32" if kind == "tf32x3" else kind
        if kind not in self._found:
            peak, source = self._measured(self.gpu, kind), "matmul"
            if peak is None and self.gpu.arch in GPUS:
                rates = GPUS[self.gpu.arch]
                rate = 2 * rates.fp32 if kind == "float32" else rates.tensor / (2 if kind == "tf32" else 1)
                peak, source = rate * rates.multiprocessors * rates.ghz * 1e9, f"data sheet of {rates.name}"
            self._found[kind] = peak, source if peak is not None else "unknown"
        return self._found[kind]


class Pool:
    """Random numbers on the GPU, drawn once for each dtype; a case's arrays are views of them."""

    def __init__(self, gpu: Gpu, rng: np.random.Generator, size: int = TOKENS * HIDDEN) -> None:
        self.gpu, self.size, self._flat = gpu, size, {}
        self._host = [rng.standard_normal(size, dtype=np.float32) for _ in range(4)]

    def arrays(self, case: GpuCase) -> tuple[Any, ...]:
        """q, k, v and dout."""
        if case.dtype.name not in self._flat:
            self._flat = {case.dtype.name: [self.gpu.upload(x.astype(case.dtype)) for x in self._host]}
        flat = self._flat[case.dtype.name]
        return tuple(x[: int(np.prod(shape))].reshape(shape) for x, shape in zip(flat, case.shapes()))


def sample(gpu: Gpu, array: Any) -> np.ndarray:
    """Some 2^16 numbers of an array on the GPU, at an odd distance: of all rows and columns."""
    step = max(1, math.prod(array.shape) >> 16) | 1
    return gpu.host(array.reshape(-1)[::step]).astype(np.float64)


def difference(gpu: Gpu, ours: Any, theirs: Any) -> float:
    """Root mean square of the difference, relative to that of the peer's result; the worst of all arrays."""
    worst = 0.0
    for pair in zip(ours, theirs) if isinstance(ours, tuple) else [(ours, theirs)]:
        a, b = (sample(gpu, array) for array in pair)
        with np.errstate(invalid="ignore"):
            error = float(np.sqrt(((a - b) ** 2).mean()) / (np.sqrt((b * b).mean()) or 1.0))
        worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst


AGREEMENT = {
    "float16": 2.0**-9,
    "bfloat16": 2.0**-6,
    "float32": 2.0**-10,
    "tf32": 2.0**-9,
    "tf32x3": 2.0**-10,
}
"""Largest relative difference of two kernels that rounding explains; some peers use tf32 for float32."""


class Run:
    """One run over the cases.

    Attributes
    ----------
    rows : list of dict
        One per case, direction and contestant.
    omitted : dict
        (who, reason) -> cases that were not measured.
    preparing : dict
        Seconds that each peer has taken before its first results.
    good : bool
        False once a result was wrong or ours could not be measured.
    """

    def __init__(self, gpu: Gpu, peers: list[Peer], pool: Pool, peaks: Peaks) -> None:
        self.gpu, self.peers, self.pool, self.peaks = gpu, peers, pool, peaks
        self.rows: list[dict[str, Any]] = []
        self.omitted: dict[tuple[str, str], list[str]] = {}
        self.good = True
        self.preparing: dict[str, float] = {}

    def omit(self, who: str, reason: str, what: str) -> None:
        """Note what was not measured."""
        self.omitted.setdefault((who, reason), []).append(what)

    def measure(self, case: GpuCase, direction: str, seconds: float = SECONDS) -> list[dict[str, Any]]:
        """Rows of one case and direction; ours first."""
        arrays, what = self.pool.arrays(case), f"{case.name} {direction}"
        try:
            call, result = Numbaflash().attempt(case, arrays, direction, self.gpu)
        except Unsupported as error:
            self.omit(OURS, str(error), what)
            self.good = False
            return []
        contestants, differences, verdicts = {OURS: call}, {OURS: None}, {OURS: ""}
        for peer in self.peers:
            if self.preparing.get(peer.name, 0.0) > PREPARE_SECONDS:
                self.omit(peer.name, "took too long to compile before", what)
                continue
            started = time.monotonic()
            try:
                contestants[peer.name], theirs = peer.attempt(case, arrays, direction, self.gpu)
            except Unsupported as error:
                self.omit(peer.name, str(error), what)
                continue
            finally:
                taken = time.monotonic() - started
                self.preparing[peer.name] = self.preparing.get(peer.name, 0.0) + taken
            apart = difference(self.gpu, result, theirs)
            differences[peer.name] = apart
            verdicts[peer.name] = "" if apart <= AGREEMENT[case.kind] else "DIFFERS"
            del theirs
        del result
        if len(verdicts) > 1 and all(verdicts[name] for name in list(verdicts)[1:]):
            verdicts[OURS], self.good = "WRONG", False  # nobody agrees with us
        times = interleave(self.gpu, contestants, seconds)
        peak, source = self.peaks.of(case.kind)
        middle = {name: median(samples) for name, samples in times.items()}
        agreeing = {name: t for name, t in middle.items() if name != OURS and not verdicts[name]}
        best = min(agreeing, key=agreeing.get, default=None)
        rows = []
        for name, seconds_per_call in middle.items():
            flops = case.flops(direction)
            rows.append(
                {
                    "case": case.name,
                    "direction": direction,
                    "kind": case.kind,
                    "head_dim": case.head_dim,
                    "length": case.length,
                    "causal": case.causal,
                    "who": name,
                    "milliseconds": 1e3 * seconds_per_call,
                    "teraflops": flops / seconds_per_call / 1e12,
                    "percent": None if peak is None else 100 * flops / seconds_per_call / peak,
                    "peak": source,
                    "best": best if name == OURS else None,
                    "ratio": ratio(times, best, OURS) if name == OURS and best else None,
                    "difference": differences[name],
                    "rounds": len(times[name]),
                    "verdict": verdicts[name],
                }
            )
        self.rows += rows
        return rows

    def all(
        self,
        cases: tuple[GpuCase, ...] = CASES,
        budget: float = 200.0,
        show: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> None:
        """Every case and direction, until the time is up."""
        end = time.monotonic() + budget
        for case in cases:
            for direction in DIRECTIONS:
                if time.monotonic() > end:
                    self.omit("everyone", "out of time", f"{case.name} {direction}")
                    continue
                for row in self.measure(case, direction):
                    show(row)


def host_overhead(gpu: Gpu, peers: list[Peer], calls: int = CALLS) -> list[dict[str, Any]]:
    """Microseconds of host time per call, of a call so small that the GPU waits for the host."""
    rng, case = np.random.default_rng(0), GpuCase("tiny", 64, 64)
    small = [
        gpu.upload(rng.standard_normal((1, 2, 64, 64), dtype=np.float32).astype(case.dtype)) for _ in range(4)
    ]
    rows = []
    for direction in DIRECTIONS:
        for peer in (Numbaflash(), *peers):
            try:
                call, _ = peer.attempt(case, tuple(small), direction, gpu)
            except Unsupported:
                continue
            samples = []
            for _ in range(5):
                gpu.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                samples.append((time.perf_counter() - start) / calls)
                gpu.synchronize()
            rows.append(
                {
                    "case": "host",
                    "direction": direction,
                    "who": peer.name,
                    "microseconds": 1e6 * median(samples),
                }
            )
    return rows


def versions() -> dict[str, str]:
    """What compiled and launched."""
    from importlib import metadata

    found = {"numbaflash": numbaflash.__version__}
    for name in ("numba", "numba-cuda", "cuda-bindings", "torch", "triton", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found
