"""numbaflash in one minute: attention and its gradients on NumPy arrays, beside plain NumPy.

    python examples/quickstart.py

Needs numbaflash and nothing else; nothing is downloaded. The first run compiles, which takes some seconds.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import numbaflash
from numbaflash import reference
from numbaflash.bench import plain
from numbaflash.bench.machine import cpu_name
from numbaflash.bench.resident import peak_growth
from numbaflash.cpu.threads import get_num_threads

HEADS, HEAD_DIM = 4, 64
MIB = 1 << 20


def flash_forward(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return numbaflash.attention(q, k, v, causal=True)


def flash_gradients(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    out, vjp = numbaflash.attention_vjp(q, k, v, causal=True)
    return out, *vjp(dout)


def plain_forward(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return plain.attention(q, k, v, visible=np.tri(q.shape[2], dtype=bool))


def plain_gradients(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return plain.attention_and_gradients(dout, q, k, v, visible=np.tri(q.shape[2], dtype=bool))


CALLS = {
    "numbaflash": {"forward": flash_forward, "forward + backward": flash_gradients},
    "plain NumPy": {"forward": plain_forward, "forward + backward": plain_gradients},
}


def random_inputs(tokens: int) -> np.ndarray:
    """dout, q, k and v, stacked."""
    return np.random.default_rng(0).standard_normal((4, 1, HEADS, tokens, HEAD_DIM), dtype=np.float32)


def check_against_the_oracle(tokens: int) -> bool:
    """Every result beside dense attention in float64; prints the largest differences."""
    dout, q, k, v = random_inputs(tokens)
    results = flash_gradients(dout, q, k, v)
    exact = (
        reference.attention(q, k, v, causal=True)[0],
        *reference.attention_backward(dout, q, k, v, causal=True),
    )
    print(f"\nAgreement with dense attention in float64, {tokens} tokens, causal")
    good = True
    for name, result, truth in zip(("out", "dq", "dk", "dv"), results, exact):
        error = np.abs(result - truth).max() / np.abs(truth).max()
        good &= bool(error < 1e-5)
        verdict = "ok" if error < 1e-5 else "WRONG"
        print(f"  {name:4} largest difference {error:.1e} of the largest value  {verdict}")
    return good


def best_times(tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Shortest time of each call, seconds; the two take turns, so that both see the same machine."""
    inputs = random_inputs(tokens)
    times = {who: dict.fromkeys(calls, float("inf")) for who, calls in CALLS.items()}
    for step in CALLS["numbaflash"]:
        for _ in range(rounds):
            for who in CALLS:
                times[who][step] = min(times[who][step], seconds(lambda: CALLS[who][step](*inputs)))
    return times


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_memory(who: str, tokens: int) -> dict[str, int | None]:
    """Peak memory of each call beyond its inputs, measured in a fresh process."""
    command = [sys.executable, __file__, "--tokens", str(tokens), "--peak-memory-of", who]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure_peak_memory(who: str, tokens: int) -> dict[str, int | None]:
    for call in CALLS[who].values():
        call(*random_inputs(64))
    inputs = random_inputs(tokens)
    return {step: peak_growth(lambda: call(*inputs)) for step, call in CALLS[who].items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3072, help="sequence length of the comparison (3072)")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions; the best time counts (2)")
    parser.add_argument("--peak-memory-of", choices=CALLS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_memory_of:
        print(json.dumps(measure_peak_memory(arguments.peak_memory_of, arguments.tokens)))
        return 0

    start = time.perf_counter()
    print(f"numbaflash {numbaflash.__version__} on {cpu_name()}, {get_num_threads()} threads")
    good = check_against_the_oracle(min(512, arguments.tokens))
    times = best_times(arguments.tokens, arguments.rounds)
    memory = {who: peak_memory(who, arguments.tokens) for who in CALLS}
    print_table(arguments.tokens, times, memory)
    print(f"\nAll of this took {time.perf_counter() - start:.0f} s, compilation included.")
    return 0 if good else 1


def print_table(tokens: int, times: dict, memory: dict) -> None:
    scores = HEADS * tokens * tokens * 4
    print(f"\n{tokens} tokens, {HEADS} heads of {HEAD_DIM}, float32, causal")
    print(f"  {'':20}{'time':>24}{'peak memory beyond inputs':>32}")
    for step in CALLS["numbaflash"]:
        print(f"  {step}")
        for who in CALLS:
            peak = memory[who][step]
            size = "not measured" if peak is None else f"{peak / MIB:.1f} MiB"
            print(f"    {who:18}{times[who][step] * 1e3:21.0f} ms{size:>32}")
        flash, standard = memory["numbaflash"][step], memory["plain NumPy"][step]
        less = compared(standard, flash, "less", "more") if flash and standard else ""
        faster = compared(times["plain NumPy"][step], times["numbaflash"][step], "faster", "slower")
        print(f"    {'':18}{faster:>24}{less:>32}")
    print(
        f"\nPlain NumPy holds {tokens} x {tokens} scores for {HEADS} heads, {scores / MIB:.0f} MiB, twice in "
        "the backward pass.\nnumbaflash never does: beyond inputs and results it needs little, at any length."
    )


def compared(standard: float, flash: float, better: str, worse: str) -> str:
    ratio = standard / flash
    return f"{ratio:.1f} x {better}" if ratio >= 1 else f"{1 / ratio:.1f} x {worse}"


if __name__ == "__main__":
    sys.exit(main())
