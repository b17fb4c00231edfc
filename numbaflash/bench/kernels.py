"""``bench.py kernels``: what the assembler makes of the CUDA kernels; no GPU needed.

Compiles kernels for several architectures and holds each to what makes it fast: no local memory, no spills,
registers and shared memory within what a multiprocessor has, matrix instructions where there should be some.
Without options a fixed sample; ``--all`` takes every kernel, for sm_80 and sm_90a in full.

To compile with CUDA 12 instead of 13, run it in an environment of its own made by ``pip install '.[cuda12]'``.
"""

import argparse
import os
import time
from typing import Any

from numbaflash.cuda import variants
from numbaflash.cuda.compile import ARCHITECTURES, Resources, require_numba_cuda
from numbaflash.cuda.plan import Launch
from numbaflash.cuda.simt_config import shared_limit

from . import bounds, report
from .pool import in_processes

HELP = "registers, spills and shared memory of the CUDA kernels, held to their limits"
REGISTER_FILE, MOST_REGISTERS, WARP_UNIT = 65536, 255, 8
RESERVED = 1024
"""Shared memory that the driver takes of every block, beyond the limit of one block."""
TENSOR, CONVERTS = "_sm80_", "_reduced_"
"""In the names of kernels that use tensor cores, but for those that only convert their sums."""
MATRIX = "mma.sync"
COLUMNS = (
    report.Column("arch", "arch", -7),
    report.Column("kernel", "kernel", -50),
    report.Column("style", "style", -13),
    report.Column("registers", "reg", 3),
    report.Column("spills", "spill", 5),
    report.Column("stack", "local", 5),
    report.Column("shared", "shared", 6),
    report.Column("limit", "limit", 6),
    report.Column("blocks", "blk/SM", 6),
    report.Column("matrix", "mma", 4),
    report.Column("seconds", "sec", 5, ".1f"),
    report.Column("verdict", "", -12),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="every kernel; takes hours")
    parser.add_argument(
        "--arch", nargs="+", metavar="SM", choices=ARCHITECTURES, help="only these, like sm_80"
    )
    parser.add_argument(
        "--filter", nargs="+", metavar="PATTERN", help="variants by name, like 'simt-*-float32-d64-*'"
    )
    parser.add_argument(
        "--sass", action="store_true", help="instructions per tile of the tensor-core kernels, and their bound"
    )
    parser.add_argument("--list", action="store_true", help="print the names of what would be compiled")


def chosen(arguments: argparse.Namespace) -> list[variants.Kernel]:
    """What a command line asks for."""
    found = []
    for arch in arguments.arch or (
        variants.FULL[:1] if arguments.quick else variants.FULL + variants.SAMPLED
    ):
        full = arch in variants.FULL
        if arguments.filter:
            patterns = tuple(arguments.filter)
        elif arguments.all and full:
            patterns = ("*",)
        elif arguments.quick:
            patterns = variants.QUICK
        elif arch == variants.FULL[0] or arguments.arch:
            patterns = variants.SAMPLE
        elif arguments.all:
            patterns = variants.SAMPLE + variants.SAMPLE_ELSEWHERE
        else:
            patterns = variants.QUICK if not full else variants.SAMPLE_ELSEWHERE
        found += variants.kernels(variants.select(patterns), arch)
    if not found:
        raise report.UsageError(
            f"no kernel matches {' '.join(arguments.filter or ())}; see bench.py kernels --list"
        )
    return found


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Compile; rows, and whether all keep their limits."""
    try:
        require_numba_cuda()
    except ImportError as error:
        raise report.UsageError(str(error)) from None
    if arguments.sass:
        return bounds.run(arguments)
    kernels = chosen(arguments)
    if arguments.list:
        for kernel in kernels:
            print(f"{kernel.arch:8}{kernel.variant:45}{kernel.planned.kernel.name}")
        return [], True
    jobs = min(arguments.threads or os.cpu_count() or 1, len(kernels))
    print(
        f"{len(kernels)} kernels, {jobs} at a time. Bytes: local and spills per thread, shared per block.\n"
    )
    table = report.Table(COLUMNS)
    table.head()
    started, rows = time.perf_counter(), []
    for row in in_processes(measure, kernels, jobs):
        rows.append(row)
        table.row(row)
    bad = [row for row in rows if row["verdict"] != "ok"]
    print(f"\n{len(rows)} kernels in {time.perf_counter() - started:.0f} s, {len(bad)} over a limit")
    return rows, not bad


def measure(kernel: variants.Kernel) -> dict[str, Any]:
    """Compile one kernel; its row."""
    launch = kernel.planned
    spec, started = launch.kernel, time.perf_counter()
    cubin, matrix = spec.cubin(kernel.arch), None
    if TENSOR in spec.name and CONVERTS not in spec.name:
        matrix = spec.ptx(kernel.arch).count(MATRIX)
    shared = cubin.resources.static_shared + launch.shared_bytes
    wrong = breaches(cubin.resources, launch, kernel.arch, matrix)
    return {
        "arch": kernel.arch,
        "variant": kernel.variant,
        "kernel": spec.name,
        "style": variants.VARIANTS[kernel.variant].style,
        "registers": cubin.resources.registers,
        "spills": cubin.resources.spill_stores + cubin.resources.spill_loads,
        "stack": cubin.resources.stack,
        "shared": shared,
        "limit": shared_limit(kernel.arch),
        "matrix": matrix,
        "blocks": resident_blocks(cubin.resources, launch, kernel.arch),
        "seconds": time.perf_counter() - started,
        "verdict": "; ".join(wrong) or "ok",
    }


def _register_blocks(resources: Resources, launch: Launch) -> int:
    per_thread = -(-resources.registers // WARP_UNIT) * WARP_UNIT
    return REGISTER_FILE // (per_thread * launch.block[0])


def resident_blocks(resources: Resources, launch: Launch, arch: str) -> int:
    """Blocks that a multiprocessor's registers and shared memory hold at one time."""
    shared = resources.static_shared + launch.shared_bytes
    return min(_register_blocks(resources, launch), (shared_limit(arch) + RESERVED) // (shared + RESERVED))


def breaches(resources: Resources, launch: Launch, arch: str, matrix: int | None) -> list[str]:
    """What is wrong with a kernel; `matrix` counts its matrix instructions, None where none are expected."""
    bounds = launch.kernel.launch_bounds
    promised = bounds[1] if isinstance(bounds, tuple) and len(bounds) > 1 else 1
    shared = resources.static_shared + launch.shared_bytes
    found = {
        f"{resources.stack} bytes of local memory": resources.stack > 0,
        "spills": resources.spill_stores + resources.spill_loads > 0,
        f"more than {MOST_REGISTERS} registers": resources.registers > MOST_REGISTERS,
        f"registers for {_register_blocks(resources, launch)} blocks, not {promised}": _register_blocks(
            resources, launch
        )
        < promised,
        f"{shared} bytes of shared memory": shared > shared_limit(arch),
        f"no {MATRIX}": matrix == 0,
        **{warning: True for warning in resources.warnings},
    }
    return [text for text, wrong in found.items() if wrong]


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Registers against shared memory, a point for each kernel; or the clocks of ``--sass``."""
    if "clocks" in rows[0]:
        bounds.plot(rows, path)
        return
    figure, (axis,) = report.axes("Registers and shared memory of the CUDA kernels")
    palette = (report.BLUE, report.ORANGE, report.GREEN, report.GREY)
    for number, arch in enumerate(dict.fromkeys(row["arch"] for row in rows)):
        mine = [row for row in rows if row["arch"] == arch]
        axis.plot(
            [row["shared"] / 1024 for row in mine],
            [row["registers"] for row in mine],
            "o",
            color=palette[number % len(palette)],
            label=arch,
            markersize=5,
            alpha=0.7,
        )
    axis.axhline(MOST_REGISTERS, color=report.GREY, linewidth=1)
    axis.set_xlabel("KiB of shared memory per block")
    axis.set_ylabel("registers per thread")
    report.legend(figure, [axis])
    report.save_picture(figure, path)
