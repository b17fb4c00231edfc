"""``bench.py cpu``: speed on the CPU beside peers, and how far it is from what the machine can do."""

import argparse
import fnmatch
from statistics import median
from typing import Any

import numpy as np

from . import peaks, report
from .cases import BOTH, CASES, FORWARD, PASSES, QUICK, Case, bytes_read, make_inputs, operations
from .contest import OURS, Unsupported
from .peers import NAMES, Numbaflash, Omissions, Peer, find
from .timing import interleave, ratio

HELP = "speed beside torch, jax, onnxruntime and NumPy; percent of the machine's measured peak"
READING = "reading K and V"
# Largest relative difference between two contestants: rounding may differ, the task may not.
AGREEMENT = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
COLUMNS = (
    report.Column("case", "case", -20),
    report.Column("shape", "(B,H,N,D)", -22),
    report.Column("pass", "pass", -17),
    report.Column("who", "who", -13),
    report.Column("milliseconds", "ms", 9, ".3f"),
    report.Column("percent", "% peak", 7, ".0f"),
    report.Column("ratio", "x ours", 7, ".2f"),
    report.Column("floor", "floor", 6, ".2f"),
    report.Column("difference", "differs", 8, ".0e"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "filter", nargs="*", metavar="CASE", help="cases by name, * and ? allowed; default: all"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument(
        "--pass",
        dest="passes",
        action="append",
        choices=PASSES,
        help="what to time, can be repeated; default: forward and forward+backward",
    )
    parser.add_argument(
        "--peers", metavar="A,B", help=f"of {', '.join(NAMES)}; default: those installed; none: ''"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each case and pass (4)")
    parser.add_argument(
        "--runs", type=int, default=1, help="repeat each measurement; the median ratio counts (1)"
    )
    parser.add_argument("--tokens", type=int, help="no sequence longer than this: for a quick look")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a floor is not reached")


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Time the chosen cases; rows, and whether contestants agreed and, if asked, floors were reached."""
    cases = choose(arguments.filter, arguments.quick, arguments.tokens)
    if arguments.list:
        for case in cases:
            print(f"{case.name:20} {case.shape():24} {case.dtype:9} {', '.join(case.passes)}")
        return [], True
    peers = find(arguments.peers, arguments.avx2)
    print_peaks(cases)
    print(
        "\nx ours: time of a peer / time of numbaflash, median over turns; above 1 numbaflash is faster.\n"
        "differs: largest difference from numbaflash's result / largest value.\n"
    )
    report.Table(COLUMNS).head()
    seconds = 0.3 if arguments.quick else arguments.seconds
    rows, good, omitted = [], True, Omissions()
    for case in cases:
        for which in arguments.passes or case.passes:
            if which not in case.passes and which != "backward":
                continue
            try:
                new = measure(case, which, peers, seconds, arguments.runs, omitted)
            except Unsupported as failure:
                omitted.add(OURS, failure, case.name)
                good = False
                continue
            rows += new
            for number, row in enumerate(new):
                shown = row if number == 0 else row | {"case": "", "shape": "", "pass": ""}
                report.Table(COLUMNS).row(shown)
                good &= row["agrees"] and not (arguments.check and missed(row))
    omitted.show()
    if arguments.check:
        count = sum(row["floor"] is not None for row in rows)
        print(f"\n{count - sum(map(missed, rows))} of {count} floors reached")
    return rows, good


def choose(patterns: list[str], quick: bool, tokens: int | None) -> list[Case]:
    """Cases that match, their lengths clipped to ``tokens``."""
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in CASES], pattern):
            raise report.UsageError(f"no case is called {pattern!r}; `bench.py cpu --list` shows them")
    wanted = patterns or (QUICK if quick else ["*"])
    found = [case for case in CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in wanted)]
    return found if tokens is None else [clip(case, tokens) for case in found]


def clip(case: Case, tokens: int) -> Case:
    lengths = case.lengths and tuple(min(n, tokens) for n in case.lengths)
    clipped = case._replace(
        n_q=min(case.n_q, tokens), n_k=case.n_k and min(case.n_k, tokens), lengths=lengths
    )
    return clipped if clipped == case else clipped._replace(floors={})


def print_peaks(cases: list[Case]) -> None:
    bits = sorted({64 if case.dtype == "float64" else 32 for case in cases if not case.decode})
    for size in bits:
        print(f"peak      {peaks.fma_peak(size) / 1e9:.0f} GFLOP/s, fused multiply-adds in float{size}")
    for size in sorted({bytes_read(case) for case in cases if case.decode}):
        print(f"peak      {peaks.read_bandwidth(size) / 1e9:.1f} GB/s, reading {size / 1e6:.0f} MB")


def measure(
    case: Case, which: str, peers: list[Peer], seconds: float, runs: int, omitted: Omissions
) -> list[dict[str, Any]]:
    """One row for each contestant that can do the case, ours first; Unsupported if we cannot."""
    inputs = make_inputs(case)
    call, expected = Numbaflash().attempt(case, inputs, which)
    calls = {OURS: call}
    differences: dict[str, float | None] = {OURS: None}
    for peer in peers:
        try:
            calls[peer.name], result = peer.attempt(case, inputs, which)
        except Unsupported as reason:
            omitted.add(peer.name, reason, case.name)
            continue
        differences[peer.name] = None if case.dropout else difference(result, expected)
    names = list(calls)
    if case.decode:  # the yardstick takes turns too: a call after a pause is slower than one of many in a row
        calls[READING] = peaks.reader(inputs.k, inputs.v)
    repeated = [interleave(calls, seconds) for _ in range(runs)]
    rows = []
    for name in names:
        times = [t for samples in repeated for t in samples[name]]
        one = {
            "case": case.name,
            "shape": case.shape(),
            "dtype": case.dtype,
            "pass": which,
            "who": name,
            "milliseconds": 1e3 * median(times),
            "best_milliseconds": 1e3 * min(times),
            "turns": len(times),
            "percent": percent(case, which, name, repeated),
            "ratio": None if name == OURS else median(ratio(samples, name, OURS) for samples in repeated),
            "floor": case.floors.get((which, name)),
            "difference": differences[name],
        }
        one["agrees"] = one["difference"] is None or one["difference"] <= AGREEMENT[case.dtype]
        if not one["agrees"]:
            print(f"{name} DISAGREES by {one['difference']:.1e}, more than {AGREEMENT[case.dtype]:.0e}")
        rows.append(one)
    return rows


def difference(result: list[np.ndarray], expected: list[np.ndarray]) -> float:
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(result, expected, strict=True)
    ]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def percent(case: Case, which: str, name: str, repeated: list[dict[str, list[float]]]) -> float:
    """For decoding, of the speed of reading K and V and nothing else, in turns; else of the multiply-add peak."""
    if case.decode:
        return 100 * median(ratio(samples, READING, name) for samples in repeated)
    seconds = median(t for samples in repeated for t in samples[name])
    return 100 * operations(case, which) / seconds / peaks.fma_peak(64 if case.dtype == "float64" else 32)


def missed(row: dict[str, Any]) -> bool:
    return row["floor"] is not None and row["ratio"] < row["floor"]


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Ratios to each peer, a panel for each pass."""
    passes = [which for which in (FORWARD, "backward", BOTH) if any(row["pass"] == which for row in rows)]
    figure, plots = report.axes(
        "Time of a peer / time of numbaflash: above 1, numbaflash is faster",
        len(passes),
        (5 * len(passes), 1.5 + 0.3 * len({row["case"] for row in rows})),
    )
    for which, axis in zip(passes, plots):
        mine = [row for row in rows if row["pass"] == which and row["ratio"] is not None]
        names = list(dict.fromkeys(row["case"] for row in mine))
        for who in dict.fromkeys(row["who"] for row in mine):
            points = [(row["ratio"], names.index(row["case"])) for row in mine if row["who"] == who]
            axis.scatter(*zip(*points), color=report.COLOURS[who], label=who, s=28)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_title(which, fontsize=10)
    report.legend(figure, plots)
    report.save_picture(figure, path)
