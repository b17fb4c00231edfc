"""``bench.py traffic``: bytes that attention kernels move, counted, beside formulas and what texts claim.

Standard attention, one query row per block, and this package's tiled kernels run in the emulator, which
counts every byte; where a formula is exact the two must be equal. Larger N follow by the formulas so
verified. No GPU needed.
"""

import argparse
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numbaflash.cuda.compile import require_numba_cuda

from . import report

HELP = "bytes moved by attention kernels, counted beside formulas, and what texts claim"
FORWARD, BACKWARD = "forward", "backward"
TILES = ((4, 8, 1), (8, 8, 1), (8, 8, 2), (8, 8, 4))
"""Of the forward kernel: 16, 32, 64 and 128 query rows per block."""
CHECKED = 256
"""Up to so many tokens the emulator checks every access while it counts."""
HEADLINE, FAR, HEAD_DIM = 1024, 4096, 64
FEWEST_TIMES, STORE_EXCESS = 16, 1.05
MULTIPROCESSORS = {"RTX 3060 Ti": 38, "A100": 108, "H100": 132}
COLUMNS = (
    report.Column("kernel", "kernel", -10),
    report.Column("pass", "pass", -9),
    report.Column("n", "N", 5),
    report.Column("d", "D", 4),
    report.Column("block_q", "block_q", 7),
    report.Column("loads", "loads", 12, ",d"),
    report.Column("stores", "stores", 11, ",d"),
    report.Column("sectors", "in sectors", 12, ",d"),
    report.Column("distinct", "distinct", 12, ",d"),
    report.Column("store_excess", "stores/ideal", 12, ".3f"),
    report.Column("intensity", "flops/byte", 10, ".1f"),
    report.Column("verdict", "formula", -24),
)


class Case(NamedTuple):
    """What to count; `tiles` of the tiled kernel, None for the planner's."""

    kernel: str
    which: str
    n: int
    d: int = HEAD_DIM
    tiles: tuple[int, int, int] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="count more and longer cases; takes long")


def cases(quick: bool, full: bool) -> list[Case]:
    """What is counted."""
    if quick:
        return [Case(kernel, FORWARD, 128) for kernel in ("standard", "one-row", "tiled")]
    found = [
        Case(kernel, FORWARD, 128, d) for kernel in ("standard", "one-row", "tiled") for d in (32, 64, 128)
    ]
    found += [Case("tiled", FORWARD, 256, tiles=tiles) for tiles in TILES]
    found += [Case(kernel, BACKWARD, 128) for kernel in ("standard", "tiled")]
    found += [Case(kernel, FORWARD, HEADLINE) for kernel in ("tiled", "standard")]
    if full:
        found += [
            Case(kernel, BACKWARD, n, d)
            for kernel in ("standard", "tiled")
            for n, d in ((128, 32), (128, 128), (512, 64))
        ]
        found += [
            Case("one-row", FORWARD, 512),
            Case("standard", FORWARD, 512),
            Case("standard", FORWARD, 100, 40),
        ]
        found += [Case("tiled", FORWARD, 2048), Case("tiled", BACKWARD, HEADLINE)]
    return found


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Count, compare, and answer; rows, and whether formulas and promises hold."""
    try:
        require_numba_cuda()
    except ImportError as error:
        raise report.UsageError(str(error)) from None
    say(
        "float32, one head. loads, stores: bytes that threads ask for; in sectors: loads and stores in "
        "whole 32-byte sectors, warp by warp, no cache; distinct: every sector once per kernel, the least "
        "that device memory must move.",
        indent=0,
    )
    print()
    table = report.Table(COLUMNS)
    table.head()
    rows = []
    for case in cases(arguments.quick, arguments.full):
        row = measure(case)
        rows.append(row)
        table.row(row)
    good = all(row["good"] for row in rows)
    print(
        f"\nFormulas and counters {'agree' if good else 'DO NOT AGREE'}; "
        f"{sum(row['exact'] for row in rows)} of {len(rows)} rows are equal to the byte."
    )
    return rows, headline(rows) & good & answers(rows)


def measure(case: Case) -> dict[str, Any]:
    """Run a case in the emulator and hold its counters to the formula."""
    from . import ladder, movement

    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, case.n, case.d), dtype=np.float32)
    out, lse = np.empty_like(q), np.empty(case.n, np.float32)
    dq, dk, dv = (np.empty_like(q) for _ in range(3))
    exact = True
    if case.which == BACKWARD and case.kernel == "standard":
        weights = np.exp(_scores(q, k))
        weights /= weights.sum(1, keepdims=True)
        work = ladder.standard_backward(q, k, v, dout, weights, dq, dk, dv)
        wanted = movement.standard_backward(case.n, case.d)
    elif case.which == BACKWARD:
        scores = _scores(q, k)
        lse[:] = np.log(np.exp(scores).sum(1))
        out[:] = np.exp(scores - lse[:, None]) @ v
        work = ladder.tiled_backward(q, k, v, dout, out, lse, dq, dk, dv)
        wanted = movement.tiled_backward(case.n, case.d)
        exact = movement.is_exact(
            case.n, case.d, *(movement.chosen_tiles(case.d, one) for one in (movement.QUERIES, movement.KEYS))
        )
    elif case.kernel == "tiled":
        work = ladder.tiled(q, k, v, out, lse, case.tiles)
        wanted = movement.tiled(case.n, case.d, case.tiles)
        exact = movement.is_exact(case.n, case.d, case.tiles or movement.chosen_tiles(case.d))
    else:
        make, formula = {
            "standard": (ladder.standard, movement.standard),
            "one-row": (ladder.one_row, movement.one_row),
        }[case.kernel]
        work, wanted = make(q, k, v, out), formula(case.n, case.d)
        exact = case.n % 8 == 0 and case.d % 8 == 0
    reports = ladder.count(work, checks=case.n <= CHECKED)
    total = sum(reports[1:], reports[0])
    found = movement.Moved(total.global_load.bytes, total.global_store.bytes, total.dram_bytes)
    equal = found == wanted
    tiles = case.tiles or movement.chosen_tiles(case.d)
    return {
        "kernel": case.kernel,
        "pass": case.which,
        "n": case.n,
        "d": case.d,
        "block_q": movement.shape_of(tiles).rows
        if case.kernel == "tiled" and case.which == FORWARD
        else None,
        **found._asdict(),
        "sectors": total.l2_bytes,
        "store_excess": movement.SECTOR * total.global_store.sectors / found.stores,
        "flops": sum(total.flops.values()),
        "intensity": sum(total.flops.values()) / found.total,
        "formula": wanted._asdict(),
        "exact": equal,
        "good": equal or not exact,
        "verdict": "equal"
        if equal
        else f"{wanted.total:,d} asked for" + (" DIFFERS" if exact else " (edges)"),
    }


def _scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return q @ k.T / np.float32(np.sqrt(q.shape[1]))


# --- answers ------------------------------------------------------------------------------------------------


def say(text: str, indent: int = 3) -> None:
    """Print a paragraph."""
    print(textwrap.fill(text, 110, initial_indent=" " * indent, subsequent_indent=" " * indent))


def headline(rows: list[dict[str, Any]]) -> bool:
    """Flash against standard at N = 1024 (counted) and 4096 (formula), and whole sectors of stores."""
    from . import movement

    def line(label: str, n: int, ours: Any, theirs: Any, sectors: str) -> None:
        sizes = f"{theirs / 1e6:7.1f} MB against {ours / 1e6:5.2f} MB, {theirs / ours:5.1f}x fewer"
        print(f"  N = {n}, {label}: {sizes}{sectors}")

    print(f"\nFlash (tiled) against standard attention, forward, D = {HEAD_DIM}: distinct sectors")
    counted = {
        row["kernel"]: row
        for row in rows
        if row["n"] == HEADLINE
        and row["pass"] == FORWARD
        and row["d"] == HEAD_DIM
        and row["kernel"] != "one-row"
    }
    good = True
    if {"tiled", "standard"} <= counted.keys():
        ours, theirs = counted["tiled"], counted["standard"]
        ratio = theirs["sectors"] / ours["sectors"]
        line(
            "counted",
            HEADLINE,
            ours["distinct"],
            theirs["distinct"],
            f"  (sectors without a cache: {ratio:.1f}x)",
        )
        good = theirs["distinct"] >= FEWEST_TIMES * ours["distinct"]
    ours, theirs = movement.tiled(FAR, HEAD_DIM), movement.standard(FAR, HEAD_DIM)
    line("formula", FAR, ours.distinct, theirs.distinct, f"  (asked for: {theirs.total / ours.total:.1f}x)")
    worst = max(row["store_excess"] for row in rows if row["kernel"] == "tiled")
    print(f"  stores of the tiled kernels: at most {worst:.3f} of ideal sectors")
    stored = worst <= STORE_EXCESS
    for holds, text in (
        (good, f"at least {FEWEST_TIMES}x fewer at N = {HEADLINE}"),
        (stored, f"stores within {STORE_EXCESS} of ideal"),
    ):
        if not holds:
            print(f"  BROKEN PROMISE: {text}")
    return good and stored


def answers(rows: list[dict[str, Any]]) -> bool:
    """What texts claim, with numbers; True unless an answer contradicts the counters."""
    good = True
    for number, (claim, answer) in enumerate(ANSWERS.items(), 1):
        print(f"\n{number}. Claim: {claim}")
        good &= answer(rows)
    return good


def complexity(rows: list[dict[str, Any]]) -> bool:
    """How bytes scale with on-chip memory, from the counted tile sizes."""
    from . import movement

    n, d = 256, HEAD_DIM
    counted = {
        row["block_q"]: row
        for row in rows
        if row["kernel"] == "tiled" and row["pass"] == FORWARD and row["n"] == n and row["d"] == d
    }
    if counted:
        print("   block_q   tile of Q, bytes (M)   K and V read, bytes   that x M / (N^2 D^2)")
    else:
        print("   Tile sizes are not counted in a quick run; this is by the formula.")
    constants = []
    for block_q, row in sorted(counted.items()):
        m = block_q * d * movement.FLOAT
        # Without Q and the segment table, which do not grow with N^2.
        threads = next(
            movement.shape_of(tiles).threads for tiles in TILES if movement.shape_of(tiles).rows == block_q
        )
        streamed = row["loads"] - movement.FLOAT * n * d - n // block_q * threads * movement.TABLE_BYTES
        constants.append(streamed * m / (n * d) ** 2)
        print(f"   {block_q:7d}{m:23,d}{streamed:22,d}{constants[-1]:23.1f}")
    good = len(set(constants)) <= 1
    say(
        "Holds, with M the memory that holds the tile of Q, and no cache behind it: K and V are read N / "
        f"block_q times, {constants[0] if constants else 32:.0f} N^2 D^2 / M bytes in float32, whatever "
        "the tile. On a GPU that is traffic between L2 and the multiprocessors. Device memory sees less: "
        "while K and V fit into L2 (8 N D bytes: 0.5 MB at N = 1024, 34 MB at 65536, D = 64) it moves the "
        "distinct bytes, 16 N D + 4 N, linear in N. For standard attention O(N D + N^2) is likewise the "
        f"distinct count, 16 N^2 + 16 N D; without a cache its products by tiles of {movement.TILE} add "
        f"{16 / movement.TILE:g} N^2 D. One row per block asks for 8 N^2 D bytes, more than standard "
        "attention: an online softmax alone saves nothing, sharing tiles of K and V does. Where block_q < "
        "D / 2 the claimed order is no gain either: 8 N^2 D / block_q then exceeds the 16 N^2 of S and P."
    )
    return good


def percentage(rows: list[dict[str, Any]]) -> bool:
    """Savings at 4096 under each count."""
    from . import movement

    ours, theirs = movement.tiled(FAR, HEAD_DIM), movement.standard(FAR, HEAD_DIM)
    backward, standard_backward = (
        movement.tiled_backward(FAR, HEAD_DIM),
        movement.standard_backward(FAR, HEAD_DIM),
    )
    matrices = 4 * movement.score_matrix(FAR)
    savings = {
        "forward, distinct sectors": (ours.distinct, theirs.distinct),
        f"forward, asked for (block_q = 64, products by {movement.TILE})": (ours.total, theirs.total),
        "forward, asked for, against S and P alone (16 N^2)": (ours.total, matrices),
        "backward, distinct sectors": (backward.distinct, standard_backward.distinct),
        "backward, asked for": (backward.total, standard_backward.total),
    }
    for label, (few, many) in savings.items():
        print(f"   {label:52}{1 - few / many:7.1%} fewer")
    needed = 2 * movement.FLOAT * FAR * FAR * HEAD_DIM / (0.13 * matrices)
    say(
        "No single number: it depends on what is counted and on the tile. Of what device memory must move "
        "the saving is larger than claimed, and grows with N; without a cache it hardly depends on N. 87% "
        f"of the 16 N^2 bytes, without a cache, takes block_q = {needed:.0f} at D = 64."
    )
    return True


def matrix(rows: list[dict[str, Any]]) -> bool:
    """Memory of the scores."""
    from . import movement

    sizes = {n: movement.score_matrix(n) for n in (2048, 8192)}
    for n, size in sizes.items():
        print(f"   N = {n}: {size:,d} bytes = {size / 1e6:.1f} MB")
    say(
        "Holds: per head, in float32, with MB of 10^6 bytes, for one matrix. Standard attention that "
        "keeps S and P has two, and its gradients two more. Tiled: 4 N bytes of lse."
    )
    return [round(size / 1e6, 1) for size in sizes.values()] == [16.8, 268.4]


def block_sizes(rows: list[dict[str, Any]]) -> bool:
    """Blocks and bytes for each tile size and N."""
    from . import movement

    print("   MB asked for by one head (D = 64), and its blocks:")
    print("   block_q " + "".join(f"{f'N = {n}':>20}" for n in (256, 1024, 4096, 16384)))
    for tiles in TILES:
        rows_of_block = movement.shape_of(tiles).rows
        cells = (
            f"{movement.tiled(n, HEAD_DIM, tiles).total / 1e6:10.1f} MB {n // rows_of_block:4d} b"
            for n in (256, 1024, 4096, 16384)
        )
        print(f"   {rows_of_block:7d} " + "".join(f"{cell:>20}" for cell in cells))
    say(
        "Bytes halve as block_q doubles, for every N alike; N only decides how many blocks there are to "
        "fill a GPU: heads x batch x N / block_q. So the best block_q is the largest that registers hold "
        "and that still gives each multiprocessor a block; where it does not, smaller tiles keep more of "
        "them busy for more bytes. This package takes 64 rows at D = 64, where 255 registers hold scores "
        "and result. Heads x batch that then fill a GPU:"
    )
    for name, count in MULTIPROCESSORS.items():
        needed = ", ".join(f"{-(-count * 64 // n)} at N = {n}" for n in (256, 1024, 4096))
        print(f"   {name + f' ({count} multiprocessors)':32}{needed}")
    return True


ANSWERS: dict[str, Callable[[list[dict[str, Any]]], bool]] = {
    "flash attention moves O(N^2 D^2 / M) bytes, standard attention O(N D + N^2)": complexity,
    "87% fewer bytes at N = 4096": percentage,
    "the score matrix takes 16.8 MB at N = 2048 and 268 MB at 8192": matrix,
    "a certain block size suits a certain N": block_sizes,
}


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Bytes against N by the verified formulas, with the counted points."""
    from . import movement

    figure, plots = report.axes(f"Bytes moved by one head, float32, D = {HEAD_DIM}, forward", 2, (10, 4.2))
    lengths = [128 * 2**i for i in range(9)]
    kernels = (
        ("standard", movement.standard, report.ORANGE),
        ("one-row", movement.one_row, report.GREY),
        ("tiled", movement.tiled, report.BLUE),
    )
    for axis, field, title in (
        (plots[0], "distinct", "distinct sectors"),
        (plots[1], "total", "asked for, no cache"),
    ):
        for name, formula, colour in kernels:
            axis.plot(
                lengths,
                [getattr(formula(n, HEAD_DIM), field) / 1e6 for n in lengths],
                color=colour,
                label=name,
            )
            points = [
                (row["n"], row["distinct"] if field == "distinct" else row["loads"] + row["stores"])
                for row in rows
                if row["kernel"] == name and row["pass"] == FORWARD and row["d"] == HEAD_DIM
            ]
            axis.plot(
                [n for n, _ in points], [moved / 1e6 for _, moved in points], "o", color=colour, markersize=4
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens")
        axis.set_ylabel("MB")
        axis.set_title(title, fontsize=10)
    report.legend(figure, plots)
    report.save_picture(figure, path)
