"""From textbook attention to FlashAttention in numba.cuda: three that are right, and one that is not.

    python examples/kernel_ladder.py            no GPU needed; --quick for a shorter run, --tokens N

Every kernel runs in the emulator, which executes the PTX that numba.cuda makes, checks each access, and
counts. Its result is held to dense attention in float64. Where a GPU is present, each is timed there too.

The kernels are in numbaflash/bench/ladder.py, and our own in numbaflash/cuda/.
"""

import argparse
import sys
import textwrap
import time
from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

import numbaflash
from numbaflash import reference
from numbaflash.bench import ladder

TOLERANCE = 2e-6
"""Largest absolute error in float32; the published kernel of one row per block has 4.12e-7."""
GPU_TOKENS = 2048


class Rung(NamedTuple):
    """A kernel, what it does, and whether its result is expected to be right."""

    name: str
    story: str
    make: Callable[..., Any]
    right: bool = True


RUNGS = (
    Rung(
        "standard, three kernels", "S = QK', softmax, PV: S and P go to memory and come back", ladder.standard
    ),
    Rung(
        "one row per block", "online softmax, nothing N x N; every row reads all of K and V", ladder.one_row
    ),
    Rung(
        "the same, not rescaled",
        "as many texts print it",
        lambda *a: ladder.one_row(*a, rescale=False),
        False,
    ),
    Rung(
        "tiled (numbaflash)",
        "a tile of rows shares each tile of K and V: FlashAttention-2",
        lambda q, k, v, out: ladder.tiled(q, k, v, out, np.empty(len(q), np.float32)),
    ),
)


def random_inputs(tokens: int, head_dim: int) -> tuple[np.ndarray, ...]:
    """q, k and v of one head."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((3, tokens, head_dim), dtype=np.float32))


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Dense attention in float64."""
    return reference.attention(q[None, None], k[None, None], v[None, None])[0][0, 0]


def climb(tokens: int, head_dim: int) -> bool:
    """Run all rungs in the emulator; True if each is as right, or as wrong, as it should be."""
    q, k, v = random_inputs(tokens, head_dim)
    truth = exact(q, k, v)
    print(f"N = {tokens} tokens, D = {head_dim}, float32, one head; in the emulator. KB are 1000 bytes.\n")
    print(
        "                            asked for    sectors   distinct     flops   flops per byte      largest"
    )
    print(
        "kernel                             KB         KB         KB   million   asked  distinct       error"
    )
    good, wrong = True, None
    for rung in RUNGS:
        out = np.full_like(q, np.nan)
        reports = ladder.count(rung.make(q, k, v, out))
        report = sum(reports[1:], reports[0])
        asked = report.global_load.bytes + report.global_store.bytes
        flops = sum(report.flops.values())
        error = float(np.abs(out - truth).max())
        right = error <= TOLERANCE
        good &= right == rung.right
        if not rung.right:
            wrong = out
        verdict = "ok" if right else "WRONG"
        if right != rung.right:
            verdict += ", unexpectedly"
        elif not right:
            verdict += ", as shown below"
        sizes = "".join(f"{size / 1e3:11,.0f}" for size in (asked, report.l2_bytes, report.dram_bytes))
        intensity = f"{flops / asked:8.2f}{flops / report.dram_bytes:10.1f}"
        print(f"{rung.name:26}{sizes}{flops / 1e6:10.1f}{intensity}{error:12.1e}  {verdict}")
    print(
        "\nasked for: what threads read and write; sectors: the same in whole 32-byte sectors, warp by\n"
        "warp, no cache; distinct: every sector once per kernel, the least that device memory must move.\n"
    )
    for rung in RUNGS:
        print(f"  {rung.name:26}{rung.story}")
    explain(q, k, truth, wrong)
    return good


def explain(q: np.ndarray, k: np.ndarray, truth: np.ndarray, wrong: np.ndarray) -> None:
    """Why the kernel without rescaling fails, on the row where it fails most."""
    row = int(np.abs(wrong - truth).max(axis=1).argmax())
    scores = (k.astype(np.float64) @ q[row].astype(np.float64)) / sqrt(q.shape[1])
    blocks = [scores[lo : lo + ladder.KEYS] for lo in range(0, len(scores), ladder.KEYS)]
    tops = np.maximum.accumulate([block.max() for block in blocks])
    rise = tops[-1] - tops[0]
    untouched = np.abs(wrong - truth).max(axis=1) <= TOLERANCE
    print("\nWhy it is wrong")
    print(
        textwrap.fill(
            f"Weights are exp(s - m), where m is the largest score so far. In row {row} m is {tops[0]:.2f} "
            f"after the first {ladder.KEYS} keys and {tops[-1]:.2f} at the end, so what the first keys "
            f"added counts exp({rise:.2f}) = {np.exp(rise):.1f} times too much. Multiplying the sums by "
            f"exp(m_old - m_new) whenever m grows puts that right. {int(untouched.sum())} of {len(truth)} "
            f"rows come out right without it, those whose largest score is among the first {ladder.KEYS} "
            "keys: a test on few keys, or on scores that are nearly equal, does not notice.",
            104,
            initial_indent="  ",
            subsequent_indent="  ",
        )
    )


def best_time(call: Callable[[], None], rounds: int = 20) -> float:
    """Shortest of several runs on the GPU, seconds."""
    call()
    cuda.synchronize()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def race(tokens: int, head_dim: int) -> bool:
    """Time all rungs on the GPU; True if those that should be right are."""
    arrays = random_inputs(tokens, head_dim)
    truth = exact(*arrays)
    q, k, v = map(cuda.to_device, arrays)
    good = True
    name = cuda.get_current_device().name
    name = name.decode() if isinstance(name, bytes) else name  # it was bytes before numba-cuda used cuda.core
    print(f"\nOn this GPU ({name}), N = {tokens}. One row per block, as")
    print("published, on an RTX 3060 Ti: 8.7 ms at N = 2048, error 4.12e-7.")
    for rung in RUNGS:
        out = cuda.device_array_like(q)
        if rung.make is RUNGS[-1].make:
            four = [array.reshape(1, 1, tokens, head_dim) for array in (q, k, v)]
            results = []

            def call() -> None:
                results[:] = [numbaflash.attention(*four, backend="cuda")]
        else:
            empty = {"empty": cuda.device_array} if rung.make is ladder.standard else {}
            steps = rung.make(q, k, v, out, **empty)

            def call() -> None:
                for step in steps:
                    step.kernel[step.grid, step.block](*step.arguments)

        seconds = best_time(call)
        found = results[0].copy_to_host()[0, 0] if rung.make is RUNGS[-1].make else out.copy_to_host()
        error = float(np.abs(found - truth).max())
        good &= (error <= TOLERANCE) is rung.right
        print(f"  {rung.name:26}{1e3 * seconds:9.3f} ms   largest error {error:.2e}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="sequence length in the emulator (default: 256)"
    )
    parser.add_argument("--head-dim", type=int, default=64, metavar="D")
    parser.add_argument("--quick", action="store_true", help="128 tokens")
    arguments = parser.parse_args()
    tokens = arguments.tokens or (128 if arguments.quick else 256)
    if tokens <= ladder.KEYS:
        parser.error(
            f"--tokens must be more than {ladder.KEYS}: with one block of keys nothing needs rescaling"
        )
    if arguments.head_dim < 1:
        parser.error(f"--head-dim must be at least 1, not {arguments.head_dim}")
    good = climb(tokens, arguments.head_dim)
    if cuda.is_available():
        good &= race(GPU_TOKENS, arguments.head_dim)
    else:
        print("\nNo GPU here, so nothing is timed.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
