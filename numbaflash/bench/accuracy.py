"""``bench.py accuracy``: errors against dense float64 attention (long double for float64), beside peers."""

import argparse
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from numbaflash import reference

from . import report
from .cases import BOTH, FORWARD, Case, make_inputs, our_options
from .contest import OURS, Unsupported
from .peers import NAMES, Numbaflash, Omissions, Peer, find

HELP = "max and rms error by dtype, forward and gradients, beside the same peers"
DTYPES = ("float64", "float32", "float16", "bfloat16")
RESULTS = ("out", "dq", "dk", "dv")
# Largest error of out with N = 2048, D = 64, one head and normal inputs; that of float32 gradients / torch's.
LIMITS = {"float32": 5e-7, "float64": 1e-14}
TORCH_FACTOR, CHECKED_HEADS = 1.2, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, help="sequence length (2048; with --quick 256)")
    parser.add_argument(
        "--heads", type=int, help=f"(1; with --check {CHECKED_HEADS}: of one head, chance decides)"
    )
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="can be repeated; default: all")
    parser.add_argument(
        "--seeds", type=int, help="number of random inputs; the median counts (5; with --quick 1)"
    )
    parser.add_argument(
        "--peers", metavar="A,B", help=f"of {', '.join(NAMES)}; default: those installed; none: ''"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"exit with 1 if float32 gradients have more than {TORCH_FACTOR} times torch's error",
    )


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Errors of everyone, one row for each result of each contestant."""
    tokens = arguments.tokens or (256 if arguments.quick else 2048)
    seeds = arguments.seeds or (1 if arguments.quick else 5)
    heads = arguments.heads or (CHECKED_HEADS if arguments.check else 1)
    # Folding heads into rows is for decoding.
    peers = [peer for peer in find(arguments.peers, arguments.avx2) if peer.name != "torch-folded"]
    print(
        f"\n{tokens} tokens, {heads} heads of {arguments.head_dim}, normal inputs; largest error / "
        f"rms error, medians of {seeds} inputs\n"
    )
    whos = [OURS, *(peer.name for peer in peers)]
    table = report.Table(
        [
            report.Column("dtype", "dtype", -9),
            report.Column("mask", "mask", -7),
            report.Column("what", "what", -4),
            *(report.Column(who, who, 17) for who in whos),
        ]
    )
    table.head()
    rows, good, omitted = [], True, Omissions()
    for dtype in arguments.dtype or DTYPES:
        for causal in (False, True):
            case = Case(
                "accuracy",
                heads=heads,
                n_q=tokens,
                head_dim=arguments.head_dim,
                dtype=dtype,
                causal=causal,
            )
            new = list(measure(case, peers, seeds, omitted))
            rows += new
            for what in RESULTS:
                found = {row["who"]: row for row in new if row["what"] == what}
                cells = {who: f"{row['max']:.1e}/{row['rms']:.1e}" for who, row in found.items()}
                table.row({"dtype": dtype, "mask": "causal" if causal else "full", "what": what} | cells)
                good &= all(judge(found, what, dtype, arguments.check))
    omitted.show()
    return rows, good


def judge(found: dict[str, dict[str, Any]], what: str, dtype: str, strict: bool) -> Iterator[bool]:
    """Whether the project's own limits are kept; says which is broken."""
    case = found[OURS]
    ours = case["max"]
    if what == "out" and (case["tokens"], case["heads"], case["head_dim"]) == (2048, 1, 64) and dtype in LIMITS:
        if ours > LIMITS[dtype]:
            print(f"TOO LARGE: the error of {dtype} out is {ours:.1e}; the limit is {LIMITS[dtype]:.1e}")
        yield ours <= LIMITS[dtype]
    if strict and what != "out" and dtype == "float32" and "torch" in found:
        limit = TORCH_FACTOR * found["torch"]["max"]
        if ours > limit:
            print(f"TOO LARGE: the error of {what} is {ours / found['torch']['max']:.2f} times torch's")
        yield ours <= limit


def measure(case: Case, peers: list[Peer], seeds: int, omitted: Omissions) -> Iterator[dict[str, Any]]:
    """One row for each contestant and result: medians over the seeds."""
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in range(seeds):
        inputs = make_inputs(case, seed)
        q, k, v, dout = inputs[:4]
        options = our_options(case, inputs)
        gradients = reference.attention_backward(dout, q, k, v, **options)
        exact = dict(zip(RESULTS, (reference.attention(q, k, v, **options)[0], *gradients)))
        for peer in (Numbaflash(), *peers):
            for which, names in ((FORWARD, RESULTS[:1]), (BOTH, RESULTS[1:])):
                try:
                    _, results = peer.attempt(case, inputs, which)
                except Unsupported as reason:
                    if peer.name == OURS:
                        raise
                    omitted.add(peer.name, reason, f"{case.dtype} {which}")
                    continue
                for name, result in zip(names, results, strict=True):
                    error = np.abs(np.asarray(result).astype(exact[name].dtype) - exact[name])
                    pair = float(error.max()), float(np.sqrt(np.square(error).mean()))
                    errors.setdefault((peer.name, name), []).append(pair)
    for (who, what), pairs in errors.items():
        largest, rms = (median(column) for column in zip(*pairs))
        yield {
            "dtype": case.dtype,
            "causal": case.causal,
            "tokens": case.n_q,
            "heads": case.heads,
            "head_dim": case.head_dim,
            "what": what,
            "who": who,
            "max": largest,
            "rms": rms,
            "seeds": seeds,
        }


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Largest errors of causal results, a panel for each dtype."""
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    figure, plots = report.axes(
        "Largest error against dense float64 attention, causal", len(dtypes), (3.2 * len(dtypes) + 1, 4)
    )
    for dtype, axis in zip(dtypes, plots):
        mine = [row for row in rows if row["dtype"] == dtype and row["causal"]]
        whos = list(dict.fromkeys(row["who"] for row in mine))
        for number, who in enumerate(whos):
            points = {row["what"]: row["max"] for row in mine if row["who"] == who}
            at = [RESULTS.index(what) + 0.8 * (number - len(whos) / 2) / len(whos) for what in points]
            axis.bar(
                at,
                list(points.values()),
                width=0.8 / len(whos),
                color=report.COLOURS[who],
                label=who,
                align="edge",
            )
        axis.set_yscale("log")
        axis.set_xticks(range(len(RESULTS)), RESULTS)
        axis.set_title(dtype, fontsize=10)
    report.legend(figure, plots)
    report.save_picture(figure, path)
