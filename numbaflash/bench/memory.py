"""``bench.py memory``: peak memory of a call against sequence length, beside standard attention.

Each number comes from a process of its own that makes the inputs, calls once on a short sequence (which
compiles and loads), and then reads how far its resident set grows during the call: memory beyond the inputs,
results included.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numbaflash

from . import report
from .cases import BOTH, FORWARD, Case, make_inputs
from .contest import OURS
from .peers import ALL, NAMES, Numbaflash, find
from .resident import available_bytes, peak_growth

HELP = "peak memory against sequence length beside standard attention, and of a Llama-2 7B layer"
MIB = 1 << 20
# (name, heads, head_dim, sequence lengths); the second is one attention layer of Llama-2 7B.
LAYERS = (
    ("one-head", 1, 64, (512, 1024, 2048, 4096, 8192, 16384)),
    ("llama2-7b", 32, 128, (2048, 4096)),
)
QUICK_LENGTHS = (256, 1024)
COLUMNS = (
    report.Column("layer", "layer", -17),
    report.Column("tokens", "tokens", 7),
    report.Column("pass", "pass", -17),
    report.Column("who", "who", -13),
    report.Column("mib", "peak MiB", 10, ".1f"),
    report.Column("results_mib", "results", 9, ".1f"),
    report.Column("scores_mb", "scores MB", 10, ".1f"),
    report.Column("note", "", -30),
)
# Score-sized arrays that standard attention holds at its peak.
SCORE_ARRAYS = {FORWARD: 1, BOTH: 2}
FREE_SHARE = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [layer[0] for layer in LAYERS]
    parser.add_argument("--layer", choices=names, help=f"only one of {', '.join(names)}")
    parser.add_argument(
        "--tokens", type=int, nargs="+", metavar="N", help="sequence lengths instead of the usual ones"
    )
    parser.add_argument(
        "--peers",
        metavar="A,B",
        default="numpy,torch",
        help=f"of {', '.join(NAMES)}; default: numpy,torch; none: ''",
    )


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Peak memory of everyone; rows, and whether numbaflash could be measured everywhere."""
    peers = find(arguments.peers, arguments.avx2)
    print(
        "\nfloat32, causal. peak: growth of the resident set during the call; results: what it returns;\n"
        "scores: the N x N scores of all heads, in 10^6 bytes, which standard attention holds.\n"
    )
    table = report.Table(COLUMNS)
    table.head()
    rows, good = [], True
    layers = [layer for layer in LAYERS if arguments.layer in (None, layer[0])]
    for layer, heads, head_dim, lengths in layers[:1] if arguments.quick else layers:
        for tokens in arguments.tokens or (QUICK_LENGTHS if arguments.quick else lengths):
            for which in (FORWARD, BOTH):
                for who in (OURS, *(peer.name for peer in peers)):
                    row = measure(
                        layer,
                        Case("memory", heads=heads, n_q=tokens, head_dim=head_dim, causal=True),
                        which,
                        who,
                    )
                    rows.append(row)
                    table.row(row)
                    good &= who != OURS or row["mib"] is not None
    return rows, good


def measure(layer: str, case: Case, which: str, who: str) -> dict[str, Any]:
    """One row, from a child process; standard attention that would not fit is calculated."""
    results = case.heads * case.n_q * case.head_dim * 4 * (1 if which == FORWARD else 4)
    scores = case.heads * case.n_q * case.n_q * 4
    row = {
        "layer": layer,
        "tokens": case.n_q,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "pass": which,
        "who": who,
        "results_mib": results / MIB,
        "scores_mb": scores / 1e6,
        "calculated": False,
        "note": "",
    }
    standard = SCORE_ARRAYS[which] * scores + results
    free = available_bytes()
    if who == "numpy" and free is not None and standard > FREE_SHARE * free:
        return row | {"mib": standard / MIB, "calculated": True, "note": "calculated: would not fit"}
    specification = json.dumps({"who": who, "which": which, "case": case._asdict()})
    root = str(Path(numbaflash.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    child = subprocess.run(
        [sys.executable, "-m", __name__, specification],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if child.returncode != 0:
        reason = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        return row | {"mib": None, "note": f"failed: {reason[:60]}"}
    grown = json.loads(child.stdout.splitlines()[-1])
    return row | {"mib": None if grown is None else grown / MIB}


def measure_here(specification: str) -> int | None:
    """What the child does."""
    parts = json.loads(specification)
    peer = next(kind for kind in (Numbaflash, *ALL) if kind.name == parts["who"])()
    case = Case(**parts["case"] | {"passes": tuple(parts["case"]["passes"])})
    small = case._replace(n_q=64)
    peer.prepare(small, make_inputs(small), parts["which"])()
    call = peer.prepare(case, make_inputs(case), parts["which"])
    return peak_growth(call)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Peak memory against length, forward + backward, a panel for each layer."""
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    figure, plots = report.axes(
        "Peak memory beyond the inputs, forward + backward", len(layers), (5 * len(layers), 4)
    )
    for layer, axis in zip(layers, plots):
        mine = [
            row for row in rows if row["layer"] == layer and row["pass"] == BOTH and row["mib"] is not None
        ]
        for who in dict.fromkeys(row["who"] for row in mine):
            points = [(row["tokens"], max(row["mib"], 0.01)) for row in mine if row["who"] == who]
            axis.plot(*zip(*points), "o-", color=report.COLOURS[who], label=who, markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("tokens")
        axis.set_ylabel("MiB")
        axis.set_title(layer, fontsize=10)
    report.legend(figure, plots)
    report.save_picture(figure, path)


if __name__ == "__main__":
    print(json.dumps(measure_here(sys.argv[1])))
