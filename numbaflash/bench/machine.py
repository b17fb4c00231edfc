"""What a measurement ran on: machine, versions, threads, and the path of the package measured."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import numbaflash
from numbaflash.cpu.config import machine as vector_machine
from numbaflash.cpu.threads import get_num_threads

LIBRARIES = ("numpy", "numba", "llvmlite", "ml_dtypes", "torch", "jax", "jaxlib", "onnxruntime", "onnx")


def cpu_name() -> str:
    """The processor's name as the operating system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Version of each library that is installed."""
    found = {"numbaflash": numbaflash.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def describe() -> dict[str, Any]:
    """Everything that a number needs beside it to mean something."""
    here = vector_machine()
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "vector_bits": here.vector_bits,
        "vector_registers": here.registers,
        "l1_bytes": here.l1,
        "l2_bytes": here.l2,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": versions(),
        "numpy_blas": f"{blas.get('name')} {blas.get('version')}",
        "threads": {"numbaflash": get_num_threads()} | _blas_threads(),
        "package": str(Path(numbaflash.__file__).parent),
        "settings": {name: value for name, value in sorted(os.environ.items()) if _matters(name)},
    }


def warnings(avx2: bool) -> list[str]:
    """What makes the numbers of this run doubtful or special."""
    found = []
    core = os.environ.get("OPENBLAS_CORETYPE")
    if core and not avx2:
        found.append(
            f"OPENBLAS_CORETYPE={core} is set: NumPy's BLAS may not use what this machine has; unset it"
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.5:
        found.append(f"other work is running (load average {load:.1f}): trust ratios, not times")
    return found


def text(described: dict[str, Any]) -> str:
    """The description in a few lines."""
    d = described
    lines = [
        f"machine   {d['cpu']}, {d['machine']}, {d['cpus_usable']} CPUs usable",
        f"vectors   {d['vector_bits']} bits, {d['vector_registers']} registers; "
        f"L1 {d['l1_bytes'] >> 10} KiB, L2 {d['l2_bytes'] >> 10} KiB",
        "versions  " + ", ".join(f"{name} {version}" for name, version in d["versions"].items()),
        "threads   "
        + ", ".join(f"{name} {count}" for name, count in d["threads"].items())
        + f"; NumPy's BLAS is {d['numpy_blas']}",
        f"package   {d['package']}",
    ]
    if d["settings"]:
        shown = (f"{name}={v if len(v) <= 40 else v[:39] + '…'}" for name, v in d["settings"].items())
        lines.append("settings  " + " ".join(shown))
    return "\n".join(lines)


def _matters(name: str) -> bool:
    prefixes = (
        "NUMBAFLASH_",
        "NUMBA_",
        "OMP_",
        "KMP_",
        "OPENBLAS_",
        "MKL_",
        "ONEDNN_",
        "ATEN_",
        "XLA_",
        "NPY_",
    )
    return name.startswith(prefixes)


def _blas_threads() -> dict[str, int]:
    try:
        import threadpoolctl
    except ImportError:
        return {}
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    numpy_folder = str(Path(np.__file__).parent.parent)
    return {"numpy": pool["num_threads"] for pool in pools if pool["filepath"].startswith(numpy_folder)}
