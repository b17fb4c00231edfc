"""Kernels compiled on one machine run on another that has a driver and no compiler."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

from numbaflash.bench import cli
from numbaflash.bench.gpu import bundle
from numbaflash.cuda import compile, fingerprint

pytest.importorskip("cuda.bindings.driver")

WITHOUT_COMPILER = """
import sys
from cuda import pathfinder

load = pathfinder.load_nvidia_dynamic_lib

def without_compilers(name, *arguments, **options):
    if name != "cudart":            # which numba-cuda asks for its version when it is imported
        raise pathfinder.DynamicLibNotFoundError(name)
    return load(name, *arguments, **options)

pathfinder.load_nvidia_dynamic_lib = without_compilers
import hashlib
import numpy as np
sys.path.insert(0, {support!r})
from fake_driver import FakeDriver
import numbaflash
from numbaflash import backend
from numbaflash.bench.gpu import bundle
from numbaflash.cuda import driver

fake = FakeDriver({capability})
driver._bindings = lambda: fake
backend.gpu_is_usable = lambda: True
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 2, 64, 64)).astype(np.float16)
numbaflash.attention(q, k, v, backend="cuda")
(load,) = fake.called("cuLibraryLoadData")
(launch,) = fake.called("cuLaunchKernel")
assert not fake.memory, "memory of the device is not given back"
print(hashlib.sha256(load[0]).hexdigest(), launch[1:7])
"""


def run_elsewhere(path: Path | None, capability: tuple[int, int] = (9, 0)) -> subprocess.CompletedProcess:
    """A call in a process that has no compiler, with a bundle named in its environment."""
    script = WITHOUT_COMPILER.format(
        support=str(Path(__file__).parents[1] / "support"), capability=capability
    )
    root = str(Path(compile.__file__).parents[2])
    environment = os.environ | {"NUMBAFLASH_CACHE_DIR": "", "PYTHONPATH": root}
    environment |= {} if path is None else {"NUMBAFLASH_BUNDLE": str(path)}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_a_bundle_made_here_runs_where_nothing_can_be_compiled(tmp_path, monkeypatch):
    import hashlib

    path = tmp_path / "kernels.bundle"
    arguments = [
        "--make-bundle",
        str(path),
        "--quick",
        "float16-d64-full",
        "--arch",
        "sm_90a",
        "--threads",
        "1",
    ]
    parsed = cli.parser().parse_args(["gpu", *arguments])
    monkeypatch.setattr(bundle, "DIRECTIONS", ("forward",))
    monkeypatch.setattr("numbaflash.bench.gpu._checks", lambda arguments: [])
    from numbaflash.bench.gpu import make_bundle

    rows, good = make_bundle(parsed)
    (cubin,) = compile.load_bundle(path)
    assert good and [row["arch"] for row in rows] == ["sm_90a"]
    done = run_elsewhere(path)
    assert done.returncode == 0, done.stderr
    code, grid = done.stdout.split(maxsplit=1)
    assert code == hashlib.sha256(cubin.code).hexdigest()
    assert grid.startswith("(2, 1, 1, ")  # two heads of one tile each

    other = run_elsewhere(path, (8, 0))
    assert other.returncode != 0 and "numbaflash[cuda13]" in other.stderr


def test_without_a_bundle_the_error_says_what_is_missing():
    done = run_elsewhere(None)
    assert done.returncode != 0
    assert "ImportError" in done.stderr and "numbaflash[cuda13]" in done.stderr


def test_a_bundle_that_is_named_and_broken_is_an_error_and_not_ignored(tmp_path):
    (tmp_path / "broken").write_bytes(b"nothing")
    done = run_elsewhere(tmp_path / "broken")
    assert done.returncode != 0 and "ValueError: path:" in done.stderr


def test_what_a_kernel_is_called_does_not_depend_on_the_libraries_that_are_installed():
    """Numba's own default for ``lto`` says whether nvJitLink is there."""

    def kernel_of(lto):
        @cuda.jit(device=True, forceinline=True)
        def twice(x):
            return x + x

        twice.targetoptions["lto"] = lto

        def kernel(x):
            x[0] = twice(x[0])

        return kernel

    digests = {fingerprint.function_digest(kernel_of(lto)) for lto in (True, False)}
    assert len(digests) == 1


def test_a_plan_does_not_read_its_arrays():
    """Bundles are planned with arrays of the benchmark's size, which nobody fills."""
    plan = bundle.plan_of("d64-full-512", "forward", "sm_90a")
    assert plan.launches[0].block == (128, 1, 1)
    assert np.prod(plan.launches[0].grid) == 32 * 32 * 512 // 128
