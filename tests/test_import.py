"""Importing is quick, light, and works anywhere."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import numbaflash

PACKAGE = Path(numbaflash.__file__).parent


def run(code, **environment):
    env = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(PACKAGE.parent)} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd="/", timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_takes_under_a_second_once_warm():
    code = "import time; t = time.perf_counter(); import numbaflash; print(time.perf_counter() - t)"
    assert min(float(run(code)[0]) for _ in range(4)) < 1.0


def test_importing_loads_no_other_array_library_and_no_gpu_driver():
    loaded = run("import sys, numbaflash; print(*sys.modules)")
    heavy = {
        "torch",
        "cupy",
        "jax",
        "matplotlib",
        "scipy",
        "pytest",
        "hypothesis",
        "numbaflash.cpu.forward",
        "numbaflash.reference",
        "numbaflash.cuda",
        "numbaflash.emulator",
    }
    assert not heavy & set(loaded)


def test_the_public_names_are_few_and_documented():
    assert sorted(numbaflash.__all__) == [
        "CPUConfig",
        "CUDAConfig",
        "Gradients",
        "Options",
        "attention",
        "attention_backward",
        "attention_varlen",
        "attention_vjp",
        "autotune",
        "merge_states",
        "warmup",
    ]
    for name in numbaflash.__all__:
        assert len(getattr(numbaflash, name).__doc__) > 100, name


CALL = """
import numpy as np, numbaflash
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 16), dtype=np.float32)
out, vjp = numbaflash.attention_vjp(q, k, v, causal=True, backend="cpu")
vjp(out)
print(numbaflash.__file__, float(out.sum()))
"""


WITHOUT_CAPABILITIES = """
import ctypes
ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # modes bind root
"""


@pytest.mark.slow
def test_it_runs_from_an_unwritable_folder_with_an_unwritable_home(tmp_path):
    site, home = tmp_path / "site", tmp_path / "home"
    shutil.copytree(PACKAGE, site / "numbaflash", ignore=shutil.ignore_patterns("__pycache__"))
    home.mkdir()
    paths = [home, site, *site.rglob("*")]
    for path in paths:
        path.chmod(stat.S_IRUSR | (stat.S_IXUSR if path.is_dir() else 0))
    try:
        root = sys.platform == "linux" and os.geteuid() == 0
        environment = dict(HOME=str(home), XDG_CACHE_HOME=str(home / "cache"), PYTHONPATH=str(site))
        file, total = run((WITHOUT_CAPABILITIES if root else "") + CALL, **environment)
        assert Path(file).parent == site / "numbaflash"
        assert not list(home.iterdir()) and set(site.rglob("*")) <= set(paths)
        assert float(total) == float(run(CALL)[1])
    finally:
        for path in paths:
            path.chmod(stat.S_IRWXU)


@pytest.mark.slow
def test_it_runs_where_a_cache_folder_is_writable(tmp_path):
    environment = dict(HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert run(CALL, **environment)[1] == run(CALL, **environment)[1]
