"""``bench.py gpu``: correctness and speed on an NVIDIA GPU beside PyTorch's kernels, in under five minutes.

First small calls of every kind against the float64 oracle, on fresh random numbers and poisoned results. Then
forward and backward for head dimensions 64, 128 and 256, 512 to 16384 tokens (16384 in all, 2048 hidden
columns), 16-bit and float32, grouped heads, a window and packed sequences, beside whatever of torch's flash,
cuDNN and efficient kernels, FlexAttention (Triton), flash-attn and a matrix product is installed; what is
missing is named.

``--make-bundle FILE`` compiles all of these kernels here, without a GPU, for a machine that has a driver but
no compiler; there ``--bundle FILE`` runs them. ``--all-checks`` runs everything that a GPU has to show and
keeps the logs: tests, emulator against hardware, this benchmark, compute-sanitizer.
"""

import argparse
import os
import secrets
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .. import report
from . import bundle, checks, device, measure, model, peers, steps
from .cases import CASES, DIRECTIONS, FORWARD, QUICK

HELP = "correctness and speed on an NVIDIA GPU beside PyTorch's kernels; bundles of compiled kernels"
ARCHES = ("sm_80", "sm_90a")
COLOURS = {
    peers.OURS: report.BLUE,
    "torch-flash": report.ORANGE,
    "torch-cudnn": report.GREEN,
    "torch-efficient": report.GREY,
}
CHECK_COLUMNS = (
    report.Column("check", "check", -26),
    report.Column("worst", "worst", -7),
    report.Column("used", "of allowed", 10, ".2f"),
    report.Column("verdict", "", -80),
)
COLUMNS = (
    report.Column("case", "case", -30),
    report.Column("direction", "pass", -9),
    report.Column("who", "who", -16),
    report.Column("milliseconds", "ms", 8, ".3f"),
    report.Column("teraflops", "TFLOP/s", 8, ".1f"),
    report.Column("percent", "% peak", 7, ".1f"),
    report.Column("ratio", "ratio", 6, ".2f"),
    report.Column("best", "to", -15),
    report.Column("difference", "differs by", 10, ".1e"),
    report.Column("verdict", "", -8),
)
HOST_COLUMNS = (
    report.Column("direction", "pass", -9),
    report.Column("who", "who", -16),
    report.Column("microseconds", "us", 8, ".1f"),
)
MODEL_COLUMNS = (
    report.Column("model", "pass", -44),
    report.Column("measured", "TFLOP/s", 8, ".1f"),
    report.Column("bound", "bound", 8, ".1f"),
    report.Column("percent", "%", 6, ".1f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", help="only cases whose names contain one of these")
    parser.add_argument("--out", metavar="DIR", help="folder for gpu.json and gpu.png, made if need be")
    parser.add_argument(
        "--seconds", type=float, default=150.0, metavar="S", help="for the timings (default: 150)"
    )
    parser.add_argument("--bundle", metavar="FILE", help="take compiled kernels from a file")
    parser.add_argument("--make-bundle", metavar="FILE", help="only compile, into a file; needs no GPU")
    parser.add_argument("--arch", nargs="+", metavar="SM", default=list(ARCHES), help="for --make-bundle")
    parser.add_argument("--checks", nargs="+", metavar="NAME", help="only these checks, no timings; or: all")
    parser.add_argument(
        "--all-checks", action="store_true", help="everything a GPU has to show, with logs in --out"
    )


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Whatever the command line asks for; rows, and whether all is well."""
    if arguments.make_bundle:
        return make_bundle(arguments)
    gpu = device.find()
    out = None
    if arguments.out or arguments.all_checks:
        out = Path(arguments.out or "gpu-checks")
        out.mkdir(parents=True, exist_ok=True)
    if arguments.all_checks:
        return steps.run_all(out, steps.steps(out.absolute(), gpu.arch, arguments.bundle))
    return bench(arguments, gpu, out)


def make_bundle(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Compile for other machines."""
    from numbaflash.cuda.compile import ARCHITECTURES, require_numba_cuda, save_bundle

    unknown = [arch for arch in arguments.arch if arch not in ARCHITECTURES]
    if unknown:
        raise report.UsageError(f"--arch knows {', '.join(ARCHITECTURES)}, not {', '.join(unknown)}")
    try:
        require_numba_cuda()
    except ImportError as error:
        raise report.UsageError(str(error)) from None
    report.check_outputs(arguments.make_bundle, None)
    wanted = bundle.jobs(arguments.arch, _names(arguments) if arguments.cases or arguments.quick else None)
    print(f"compiling {len(wanted)} kernels for {', '.join(arguments.arch)}", flush=True)
    started, cubins = time.perf_counter(), []
    for cubin in bundle.compile_all(wanted, arguments.threads):
        cubins.append(cubin)
    save_bundle(arguments.make_bundle, cubins)
    size = Path(arguments.make_bundle).stat().st_size
    print(
        f"wrote {arguments.make_bundle}: {len(cubins)} kernels, {size / 2**20:.1f} MiB, "
        f"{time.perf_counter() - started:.0f} s"
    )
    rows = [
        {
            "entry": one.entry,
            "arch": one.arch,
            "registers": one.resources.registers,
            "spills": one.resources.spill_stores,
        }
        for one in cubins
    ]
    return rows, True


def _chosen(arguments: argparse.Namespace) -> tuple:
    if arguments.cases:
        found = tuple(case for case in CASES if any(part in case.name for part in arguments.cases))
        if not found:
            raise report.UsageError(
                f"no case has {' or '.join(arguments.cases)} in its name; there are "
                f"{', '.join(case.name for case in CASES[:6])}, ..."
            )
        return found
    return tuple(case for case in CASES if not arguments.quick or case.name in QUICK)


def _names(arguments: argparse.Namespace) -> list[str]:
    return [one.name for one in (*_checks(arguments), *_chosen(arguments))]


def _checks(arguments: argparse.Namespace) -> list[checks.Check]:
    wanted = arguments.checks
    if wanted is None or wanted == ["all"]:
        return list(checks.CHECKS[:1] if arguments.quick else checks.CHECKS)
    known = {one.name: one for one in checks.CHECKS}
    for name in wanted:
        if name not in known:
            raise report.UsageError(f"--checks has {name!r}; there is {', '.join(known)}")
    return [known[name] for name in wanted]


def prepare(arguments: argparse.Namespace, gpu: device.Gpu) -> str:
    """Have the kernels ready before anything is timed; how, in words."""
    from numbaflash.cuda.compile import load_bundle

    if arguments.bundle:
        try:
            loaded = load_bundle(arguments.bundle)
        except (OSError, ValueError) as error:
            raise report.UsageError(f"--bundle: {error}") from None
        mine = sum(cubin.arch == gpu.arch for cubin in loaded)
        if not mine:
            raise report.UsageError(f"--bundle: {arguments.bundle} has no kernels for {gpu.arch}")
        return f"{mine} kernels for {gpu.arch} from {arguments.bundle}"
    if find_spec("numba_cuda") is None or os.environ.get("NUMBAFLASH_BUNDLE"):
        return "kernels as they are"
    names = [one.name for one in _checks(arguments)] + (
        [] if arguments.checks else [c.name for c in _chosen(arguments)]
    )
    started = time.perf_counter()
    try:
        count = sum(1 for _ in bundle.compile_all(bundle.jobs([gpu.arch], names), arguments.threads))
    except ImportError as error:
        raise report.UsageError(f"{error}; or bring the kernels with --bundle") from None
    return f"{count} kernels compiled, or found in the cache, in {time.perf_counter() - started:.0f} s"


def bench(
    arguments: argparse.Namespace,
    gpu: device.Gpu,
    out: Path | None,
    contestants: list[peers.Peer] | None = None,
    peaks: measure.Peaks | None = None,
    pool: measure.Pool | None = None,
) -> tuple[list[dict[str, Any]], bool]:
    """Checks, then timings; rows, and whether everything was right.  Layers may be given, for tests."""
    described, seed = gpu.describe(), secrets.randbits(32)
    print(f"GPU       {described}\nseed      {seed}, of fresh random numbers")
    missing: dict[str, str] = {}
    if contestants is None:
        contestants, missing = peers.find(gpu)
    print(f"kernels   {prepare(arguments, gpu)}")
    print(f"beside    {', '.join(peer.name for peer in contestants) or 'nobody'}")
    for name, reason in missing.items():
        print(f"missing   {name}: {reason}")
    rng = np.random.default_rng(seed)
    print("\nagainst the float64 oracle, results poisoned, share of the allowed error:\n")
    table = report.Table(CHECK_COLUMNS)
    table.head()
    rows = []
    for check in _checks(arguments):
        rows.append(checks.run_check(check, gpu, rng))
        table.row(rows[-1])
    good = all(row["verdict"] == "ok" for row in rows)
    if not arguments.checks:
        timed, right = _timings(arguments, gpu, contestants, peaks or measure.Peaks(gpu), pool, rng)
        rows, good = rows + timed, good and right
    if out is not None:
        document = {
            "gpu": described,
            "seed": seed,
            "versions": measure.versions(),
            "missing": missing,
            "rows": rows,
        }
        report.save_json(str(out / "gpu.json"), document)
        if find_spec("matplotlib") is None:
            print("missing   the picture: matplotlib is not installed")
        elif not arguments.checks:
            plot(rows, str(out / "gpu.png"))
    return rows, good


def _timings(
    arguments: argparse.Namespace,
    gpu: device.Gpu,
    contestants: list[peers.Peer],
    peaks: measure.Peaks,
    pool: measure.Pool | None,
    rng: np.random.Generator,
) -> tuple[list[dict[str, Any]], bool]:
    done = measure.Run(gpu, contestants, pool or measure.Pool(gpu, rng), peaks)
    peak, source = peaks.of("bfloat16")
    known = "unknown" if peak is None else f"{peak / 1e12:.0f} TFLOP/s of bfloat16"
    print(
        f"\n% of peak: {known} ({source}). ratio: best peer's time / ours.\n"
        "TFLOP/s: 4 B H N N D operations, half where causal, 2.5 times that backward.\n"
    )
    table = report.Table(COLUMNS)
    table.head()
    done.all(_chosen(arguments), arguments.seconds, table.row)
    print("\nhost time per call, where the GPU waits for the host:\n")
    overhead = measure.host_overhead(gpu, contestants)
    host = report.Table(HOST_COLUMNS)
    host.head()
    for row in overhead:
        host.row(row)
    held = _hold_against_model(gpu.arch, done.rows, _chosen(arguments))
    if done.omitted:
        print("\nnot measured:")
    for (who, reason), what in done.omitted.items():
        print(f"  {who}: {reason}  [{len(what)}: {', '.join(what[:4])}{', ...' if len(what) > 4 else ''}]")
    return done.rows + overhead + held, done.good


def _hold_against_model(arch: str, rows: list[dict[str, Any]], cases: tuple) -> list[dict[str, Any]]:
    held, reason = model.against_model(arch, rows, cases)
    print("\nbeside the bound that follows from the machine code (bench.py kernels --sass):\n")
    table = report.Table(MODEL_COLUMNS)
    table.head()
    for row in held:
        table.row(row)
    if reason:
        print(f"missing   more of these: {reason}")
    return held


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """TFLOP/s against length, a panel for each pass and head dimension, causal dashed."""
    timed = [
        row
        for row in rows
        if row.get("kind") == "bfloat16"
        and row["case"].startswith("d")
        and not row["case"].startswith("deterministic")
    ]
    if not timed:
        return
    panels = [(direction, dim) for direction in DIRECTIONS for dim in (64, 128, 256)]
    figure, plots = report.axes("TFLOP/s, bfloat16; dashed: causal", len(panels), (4 * len(panels), 4))
    for (direction, dim), axis in zip(panels, plots):
        for who in dict.fromkeys(row["who"] for row in timed):
            for causal in (False, True):
                points = sorted(
                    (row["length"], row["teraflops"])
                    for row in timed
                    if row["who"] == who
                    and (row["direction"], row["head_dim"], row["causal"]) == (direction, dim, causal)
                )
                if points:
                    axis.plot(
                        *zip(*points),
                        "--" if causal else "-",
                        marker="o",
                        markersize=3,
                        color=COLOURS.get(who, "#7b5ea7"),
                        label=None if causal else who,
                    )
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens")
        axis.set_title(f"{'forward' if direction == FORWARD else 'backward'}, D = {dim}", fontsize=10)
    report.legend(figure, plots)
    report.save_picture(figure, path)
