"""``bench.py kernels --sass``: what the tensor-core kernels execute per tile, and the bound that follows.

Every kernel is compiled and disassembled; the instructions of its main loop, for one tile, are counted by the
unit that executes them (`sass`, `pipes`).  The bound of a pass is that of all its kernels one after the
other.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from numbaflash.cuda import variants
from numbaflash.cuda.backward_sm80 import BackwardConfig
from numbaflash.cuda.forward_sm80 import ForwardConfig

from . import report
from .pipes import GPUS, GROUPS, OTHER, UNITS, legend, limit, matrix_flops, teraflops, usage
from .pool import in_processes
from .sass import SassError, disassemble, tile_path

PATTERNS = tuple(
    f"tensor-{rest}"
    for dim in (64, 128)
    for rest in (
        f"forward-bfloat16-d{dim}-plain",
        f"backward-bfloat16-d{dim}-plain",
        f"backward-bfloat16-d{dim}-deterministic",
    )
)
"""What is counted without ``--filter``."""
ARCHES = ("sm_80", "sm_90a")

GOALS = {
    # H200, TFLOP/s to reach times the room that the model must leave
    ("sm_90a", "forward", 64): 330 * 1.5,
    ("sm_90a", "forward", 128): 350 * 1.5,
    ("sm_90a", "backward", 64): 300 * 1.5,
    ("sm_90a", "backward", 128): 280 * 1.35,
}
"""Least bound of plain 16-bit kernels; bit-equal gradients are exempt."""

COUNTED = tuple(group for group in GROUPS if group not in ("FP64", "CTRL"))
NAME = (report.Column("kernel", "kernel", -36), report.Column("style", "style", -13))
COUNT_COLUMNS = (
    report.Column("gpu", "GPU", -8),
    *NAME,
    report.Column("tile", "tile", 8),
    report.Column("warps", "warps", 5),
    report.Column("instructions", "all", 5, ".0f"),
    *(report.Column(group, group, max(3, len(group)), ".0f") for group in COUNTED),
)
CLOCK_COLUMNS = (
    report.Column("gpu", "GPU", -8),
    *NAME,
    *(report.Column(f"clocks_{unit}", unit, max(5, len(unit)), ".0f") for unit in UNITS if unit != "fp64"),
    report.Column("limit", "limit", -10),
    report.Column("bound", "TFLOP/s", 7, ".0f"),
)
PASS_COLUMNS = (
    report.Column("gpu", "GPU", -8),
    report.Column("variant", "pass", -44),
    report.Column("bound", "TFLOP/s", 7, ".0f"),
    report.Column("percent", "% of mma", 8, ".0f"),
    report.Column("goal", "at least", 8, ".0f"),
    report.Column("verdict", "", -8),
)


class Tile(NamedTuple):
    """What one block computes of a tile: pairs of query and key, and operations with padding and repeats."""

    pairs: int
    flops: int
    text: str


def tile_of(config: ForwardConfig | BackwardConfig) -> Tile:
    """The tile of a configuration.

    Forward: S and P V.  Backward: S = Q K^T and dP = dO V^T again, and dV, dK and dQ where the kernel makes
    them.
    """
    d, dv = config.head_dim, config.value_dim
    times = 3 if config.kind == "tf32x3" else 1
    if isinstance(config, ForwardConfig):
        pairs = config.block_q * config.block_k
        return Tile(pairs, 2 * pairs * (d + dv) * times, f"{config.block_q}x{config.block_k}")
    pairs = config.block_rows * config.columns
    keys = {"both": 2 * d + 2 * dv, "dv": d + dv, "dk": 2 * d + dv}[config.parts] + (
        d if config.reduce else 0
    )
    return Tile(pairs, 2 * pairs * keys * times, f"{config.block_rows}x{config.columns}")


def queries_tile_of(config: BackwardConfig) -> Tile:
    """The tile of a kernel that makes dq alone: S, dP and dQ."""
    tile = tile_of(config)
    times = 3 if config.kind == "tf32x3" else 1
    return tile._replace(flops=2 * tile.pairs * (2 * config.head_dim + config.value_dim) * times)


def useful_flops(direction: str, dim: int) -> int:
    """Operations per pair that count: two products forward, five backward."""
    return {"forward": 4, "backward": 10}[direction] * dim


def measure(kernel: variants.Kernel) -> dict[str, Any]:
    """Compile a kernel and count its main loop; its row.

    Raises
    ------
    SassError
        If what is counted is not the work of a tile.
    """
    gpu, variant, spec = GPUS[kernel.arch], variants.VARIANTS[kernel.variant], kernel.planned.kernel
    config = variants.configurations(kernel.variant, kernel.arch)[kernel.launch]
    tile = queries_tile_of(config) if "queries" in spec.name else tile_of(config)
    try:
        path, tiles = tile_path(disassemble(spec.cubin(kernel.arch).code), matrix_flops, tile.flops // config.warps)
    except SassError as error:
        raise SassError(f"{spec.name} of {kernel.variant} for {kernel.arch}: {error}") from None
    used = usage(path, tiles, gpu)
    clocks = Counter({unit: config.warps * value for unit, value in used.clocks.items()})
    unit, most = limit(clocks)
    return {
        "gpu": gpu.name,
        "arch": kernel.arch,
        "variant": kernel.variant,
        "direction": variant.direction,
        "dim": variant.dim,
        "style": variant.style,
        "kernel": spec.name,
        "tile": tile.text,
        "warps": config.warps,
        "pairs": tile.pairs,
        "instructions": used.instructions,
        **{group: used.groups[group] for group in (*GROUPS, OTHER)},
        **{f"clocks_{name}": clocks[name] for name in UNITS},
        "limit": unit,
        "clocks": most,
        "bound": teraflops(tile.flops, most, gpu),
        "unknown": list(used.unknown),
    }


def passes(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bound of each pass, from the rows of its kernels; useful operations only."""
    clocks: dict[tuple[str, str], float] = {}
    sample = {}
    for row in rows:
        key = row["arch"], row["variant"]
        clocks[key] = clocks.get(key, 0.0) + row["clocks"] / row["pairs"]
        sample[key] = row
    found = []
    for (arch, variant), per_pair in clocks.items():
        row, gpu = sample[arch, variant], GPUS[arch]
        bound = teraflops(useful_flops(row["direction"], row["dim"]), per_pair, gpu)
        words = variants.VARIANTS[variant].kind.startswith("tf32")
        plain = row["style"] == "plain" and not words
        goal = GOALS.get((arch, row["direction"], row["dim"])) if plain else None
        peak = gpu.tensor / (2 if words else 1) * gpu.multiprocessors * gpu.ghz / 1e3
        found.append(
            {
                "gpu": gpu.name,
                "arch": arch,
                "variant": variant,
                "bound": bound,
                "percent": 100 * bound / peak,
                "goal": goal,
                "verdict": "" if goal is None else "ok" if bound >= goal else "too low",
            }
        )
    return found


def chosen(arguments: argparse.Namespace) -> list[variants.Kernel]:
    """The kernels that a command line asks for.

    Raises
    ------
    UsageError
        For architectures without rates, and filters that match nothing.
    """
    unknown = [arch for arch in arguments.arch or () if arch not in GPUS]
    if unknown:
        raise report.UsageError(f"--sass knows the rates of {', '.join(GPUS)}, not of {', '.join(unknown)}")
    names = [
        name
        for name in variants.select(tuple(arguments.filter or PATTERNS))
        if variants.VARIANTS[name].family == "tensor"
    ]
    kernels = []
    for arch in arguments.arch or (ARCHES[1:] if arguments.quick else ARCHES):
        for name in names:
            try:
                kernels += [
                    variants.Kernel(name, number, arch) for number in variants.configurations(name, arch)
                ]
            except NotImplementedError:
                continue
    if not kernels:
        raise report.UsageError(
            f"--sass: no kernel of tensor cores matches {' '.join(arguments.filter or PATTERNS)}"
        )
    return kernels


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Count; rows of kernels and of passes, and whether every bound leaves the room that it must."""
    kernels = chosen(arguments)
    jobs = min(arguments.threads or os.cpu_count() or 1, len(kernels))
    print(legend(GPUS[arch] for arch in dict.fromkeys(kernel.arch for kernel in kernels)))
    rows = list(in_processes(measure, kernels, jobs, ordered=True))
    print("\ninstructions of one warp per tile (rows x columns of scores), by group:\n")
    _show(COUNT_COLUMNS, rows)
    print("\nclocks of a multiprocessor per tile, by unit, and the bound of each kernel's own operations:\n")
    _show(CLOCK_COLUMNS, rows)
    whole = passes(rows)
    print(
        "\nbounds of whole passes: 4 D operations per pair forward, 10 D backward; what runs over rows once\n"
        "is not counted:\n"
    )
    _show(PASS_COLUMNS, whole)
    unknown = sorted({opcode for row in rows for opcode in row["unknown"]})
    if unknown:
        print(f"\nopcodes without a rule, counted as issued only: {', '.join(unknown)}")
    low = [row for row in whole if row["verdict"] == "too low"]
    print(f"\n{len(rows)} kernels, {len(whole)} passes, {len(low)} with too low a bound")
    return rows + whole, not low


def _show(columns: tuple[report.Column, ...], rows: list[dict[str, Any]]) -> None:
    table = report.Table(columns)
    table.head()
    for row in rows:
        table.row(row)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Clocks by unit, as shares of the busiest, a group of bars for each kernel."""
    kernels = [row for row in rows if "clocks" in row]
    figure, (axis,) = report.axes(
        "Clocks per tile, share of the busiest unit", size=(10, 0.5 * len(kernels) + 2)
    )
    palette = (report.BLUE, report.ORANGE, report.GREEN, report.GREY)
    for number, unit in enumerate(("tensor", "shared", "issue", "alu")):
        heights = [row[f"clocks_{unit}"] / row["clocks"] for row in kernels]
        axis.barh(
            [n + 0.2 * number for n in range(len(kernels))], heights, 0.18, color=palette[number], label=unit
        )
    axis.set_yticks(
        [n + 0.3 for n in range(len(kernels))], [f"{r['gpu']} {r['kernel']}" for r in kernels], fontsize=7
    )
    report.legend(figure, [axis])
    report.save_picture(figure, path)
