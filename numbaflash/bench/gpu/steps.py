"""Everything that a GPU has to show, one step after the other, each with its log and a limit of time.

Limits sum up to less than six minutes.  Steps that lack something are named, not failed.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numbaflash

from .. import report

TEST_MODULES = ("pytest", "hypothesis", "mpmath")
NOTHING_COLLECTED = 5
"""pytest's exit status where no test was selected."""
BUNDLE = "NUMBAFLASH_BUNDLE"
ROOT = Path(numbaflash.__file__).parent.parent
COLUMNS = (
    report.Column("step", "step", -22),
    report.Column("seconds", "sec", 6, ".1f"),
    report.Column("verdict", "", -60),
)


class Step(NamedTuple):
    """A command, the seconds it may take, what it lacks ("" for nothing), and its environment."""

    name: str
    command: tuple[str, ...]
    seconds: float
    missing: str = ""
    environment: Mapping[str, str] = MappingProxyType({})


def steps(out: Path, arch: str, bundle: str | None = None) -> list[Step]:
    """All steps, in their order: compiling, tests, timings with the GPU to themselves, and the sanitizer.

    Without a bundle one is made first, on all CPUs, so that no other step compiles; `BUNDLE` names it to all
    of them.
    """
    python, tests = sys.executable, ROOT / "tests"
    absent = [module for module in TEST_MODULES if find_spec(module) is None]
    lacking = f"needs {', '.join(absent)}" if absent else ""
    lacking = lacking or ("" if tests.is_dir() else "needs the tests of the source tree")
    # without the options of setup.cfg, which ask for pytest-xdist
    plain = ("-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider")
    pytest = (python, "-m", "pytest", *plain, "-m", "gpu", "-q")
    emulator = tests / "emulator"
    bench = (python, "-m", "numbaflash.bench", "gpu")
    kernels = bundle or str(out / "kernels.bundle")
    sanitizer = shutil.which("compute-sanitizer") or ""
    no_sanitizer = "" if sanitizer else "needs compute-sanitizer"
    checked = (sanitizer, "--error-exitcode", "9", "--tool")
    small = (*bench, "--bundle", kernels, "--checks", "bfloat16-d64-causal", "float32-d64-causal")
    return [
        Step(
            "compile",
            (*bench, "--make-bundle", kernels, "--arch", arch),
            90,
            "nothing: a bundle is given" * bool(bundle),
        ),
        Step("emulator-vs-hardware", (*pytest, str(emulator)), 45, lacking),
        Step("tests", (*pytest, str(tests), "--ignore", str(emulator)), 45, lacking, {BUNDLE: kernels}),
        Step("bench", (*bench, "--bundle", kernels, "--out", str(out), "--seconds", "75"), 125),
        Step("memcheck", (*checked, "memcheck", *small), 25, no_sanitizer),
        Step("racecheck", (*checked, "racecheck", *small), 25, no_sanitizer),
    ]


def run_all(
    out: Path, wanted: list[Step], runner: Callable[..., Any] = subprocess.run
) -> tuple[list[dict[str, Any]], bool]:
    """Run the steps; rows with their exit status and log, and whether none failed."""
    table, rows = report.Table(COLUMNS), []
    table.head()
    for step in wanted:
        row: dict[str, Any] = {
            "step": step.name,
            "command": list(step.command),
            "seconds": 0.0,
            "status": None,
        }
        if step.missing:
            row |= {"verdict": f"left out: {step.missing}"}
        else:
            row |= _run(out, step, runner)
        rows.append(row)
        table.row(row)
    good = not any(row["verdict"].startswith("FAILED") for row in rows)
    (out / "checks.json").write_text(json.dumps({"steps": rows, "good": good}, indent=1) + "\n")
    return rows, good


def _run(out: Path, step: Step, runner: Callable[..., Any]) -> dict[str, Any]:
    log, started = out / f"{step.name}.log", time.perf_counter()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with open(log, "w") as file:
        try:
            status = runner(
                step.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=step.seconds,
                env=os.environ | step.environment | {"PYTHONPATH": path},
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    taken = time.perf_counter() - started
    if status is None:
        verdict = f"FAILED: more than {step.seconds:.0f} s; see {log.name}"
    elif status == 0:
        verdict = "ok"
    elif status == NOTHING_COLLECTED and "pytest" in step.command:
        verdict = "left out: no tests selected"
    else:
        verdict = f"FAILED: exit status {status}; see {log.name}"
    return {"seconds": taken, "status": status, "log": log.name, "verdict": verdict}
