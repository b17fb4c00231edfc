"""The command line of ``bench.py``."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from . import environment, report

SUBCOMMANDS = ("cpu", "accuracy", "memory", "kernels", "traffic", "gpu")
"""Modules with HELP, add_arguments(parser), run(arguments) -> (rows, good) and plot(rows, path)."""

EPILOG = """\
examples:
  bench.py cpu                                      every case, every peer that is installed
  bench.py cpu 'n4096*' --peers torch --runs 3      some cases beside torch, three times
  bench.py cpu --avx2 --threads 2 --peers torch,torch-folded --runs 3 --check    the project's floors
  bench.py accuracy --json accuracy.json            errors of every dtype, kept in a file
  bench.py memory --plot memory.png                 peak memory against length, as a picture
  bench.py kernels --arch sm_90a --filter '*-d64-*' registers and spills of some CUDA kernels
  bench.py kernels --sass                           instructions per tile by unit, and the bound that follows
  bench.py gpu --out results                        everything on a GPU: checks, timings, a picture
  bench.py gpu --make-bundle kernels.bundle         its kernels, compiled here for a machine with only a driver
  bench.py traffic                                  bytes moved, counted, and what texts claim about them

Each run prints machine, versions, threads and the path of the package it measures.
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--threads", type=int, metavar="N", help="threads and CPUs for everyone (default: all CPUs)"
    )
    common.add_argument(
        "--avx2", action="store_true", help="hold everyone to AVX2, on a machine that has AVX-512"
    )
    common.add_argument("--quick", action="store_true", help="a small selection, in seconds")
    common.add_argument("--json", metavar="FILE", help="write machine and rows to a file")
    common.add_argument("--plot", metavar="FILE.png", help="draw a picture (needs matplotlib)")
    main = argparse.ArgumentParser(
        prog="bench.py",
        description="Measure numbaflash.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subcommands = main.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name in SUBCOMMANDS:
        module = import_module(f"{__package__}.{name}")
        module.add_arguments(
            subcommands.add_parser(
                name, help=module.HELP, description=module.__doc__.partition(": ")[2], parents=[common]
            )
        )
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0: all is well, 1: a result is wrong or a floor missed, 2: a wrong command line."""
    arguments = parser().parse_args(argv)
    try:
        report.check_outputs(arguments.json, arguments.plot)
        if arguments.threads is not None and arguments.threads < 1:
            raise report.UsageError(f"--threads must be at least 1, not {arguments.threads}")
        status = environment.restart(environment.wanted(arguments.threads, arguments.avx2), arguments.threads)
        if status is not None:
            return status
        return _run(arguments)
    except report.UsageError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    from . import machine

    described = machine.describe()
    print(machine.text(described))
    for warning in machine.warnings(arguments.avx2):
        print(f"WARNING   {warning}")
    print(flush=True)
    module = import_module(f"{__package__}.{arguments.subcommand}")
    rows, good = module.run(arguments)
    if arguments.json:
        report.save_json(
            arguments.json,
            {
                "subcommand": arguments.subcommand,
                "arguments": sys.argv[1:],
                "machine": described,
                "rows": rows,
            },
        )
    if arguments.plot and rows:
        module.plot(rows, arguments.plot)
    return 0 if good else 1
