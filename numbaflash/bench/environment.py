"""Settings that must be in place before anything is imported: number of threads, instruction set.

``--threads`` and ``--avx2`` are carried out by starting the same command once more, with these variables set.
"""

import os
import subprocess
import sys
from pathlib import Path

from .report import UsageError

THREAD_VARIABLES = ("NUMBAFLASH_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def wanted(threads: int | None, avx2: bool) -> dict[str, str]:
    """Environment variables that a run with these options needs."""
    variables = {}
    if threads is not None:
        variables |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    if avx2:
        variables |= avx2_variables()
    return variables


def avx2_variables() -> dict[str, str]:
    """Keep every library to AVX2, so that an AVX-512 machine stands in for the one most people have.

    numbaflash is compiled for the features that remain: vectors of 256 bits, 16 registers of them.
    onnxruntime has no such switch and is left out of these runs.
    """
    if os.environ.get("NUMBAFLASH_VECTOR_BITS") == "256" and "NUMBA_CPU_FEATURES" in os.environ:
        features = os.environ["NUMBA_CPU_FEATURES"]
    else:
        from llvmlite import binding

        host = binding.get_host_cpu_features()
        if not host.get("avx2"):
            raise UsageError("--avx2 is for x86 machines with AVX2 or more")
        newer = ("avx512", "amx", "avx10", "avxvnni", "vaes", "vpclmulqdq", "gfni")
        features = ",".join(
            ("+" if present and not name.startswith(newer) else "-") + name
            for name, present in sorted(host.items())
        )
    return {
        "NUMBAFLASH_VECTOR_BITS": "256",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": features,
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    } | _numpy_variables()


def _numpy_variables() -> dict[str, str]:
    import numpy as np

    known = np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", [])
    newer = [name for name in known if "AVX512" in name or name == "X86_V4"]
    if "NPY_DISABLE_CPU_FEATURES" in os.environ:
        return {}
    return {"NPY_DISABLE_CPU_FEATURES": ",".join(newer)} if newer else {}


def restart(variables: dict[str, str], threads: int | None) -> int | None:
    """Run the same command with these variables, return its exit status; None where they are set already."""
    crowded = (
        threads is not None and hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > threads
    )
    if not crowded and all(os.environ.get(name) == value for name, value in variables.items()):
        return None
    if crowded:
        os.sched_setaffinity(0, pick_cpus(threads))
    return subprocess.run([sys.executable, *sys.orig_argv[1:]], env=os.environ | variables).returncode


def pick_cpus(count: int) -> set[int]:
    """CPUs to run on: one of each core first, then their second hardware threads."""
    usable = sorted(os.sched_getaffinity(0))
    firsts = [cpu for cpu in usable if cpu == _siblings(cpu, usable)[0]]
    return set((firsts + [cpu for cpu in usable if cpu not in firsts])[:count])


def _siblings(cpu: int, usable: list[int]) -> list[int]:
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return [cpu]
    found = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return [one for one in found if one in usable] or [cpu]
