"""Memory stays linear in the sequence length."""

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import ctypes, gc, sys
import numpy as np, numbaflash

def status(name):
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name))) / 1024

n, which = int(sys.argv[1]), sys.argv[2]
rng = np.random.default_rng(0)
small = rng.standard_normal((3, 256, 64), dtype=np.float32)
small, vjp = numbaflash.attention_vjp(*small, causal=True, backend="cpu")
if which == "backward":
    vjp(small)
q, k, v, out = rng.standard_normal((4, n, 64), dtype=np.float32)
lse = np.full(n, 10, np.float32)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")     # the peak counts from here
before = status("VmRSS")
if which == "backward":
    numbaflash.attention_backward(out, q, k, v, out, lse, causal=True, backend="cpu")
elif which == "forward":
    numbaflash.attention(q, k, v, causal=True, backend="cpu", out=out, return_lse=True)
else:
    np.ones((n, 64), np.float32)
print(status("VmHWM") - before)
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counter"
)


def peak_beyond_inputs(n, which):
    """MiB that a call took beyond its inputs and out; lse and gradients count as taken."""
    done = subprocess.run([sys.executable, "-c", MEASURE, str(n), which], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_the_measure_sees_an_array():
    assert 15 < peak_beyond_inputs(65536, "array") < 20


@pytest.mark.slow
def test_a_forward_call_of_65536_tokens_takes_under_64_mib():
    assert peak_beyond_inputs(65536, "forward") < 64


def test_a_forward_call_of_16384_tokens_takes_under_16_mib():
    assert peak_beyond_inputs(16384, "forward") < 16


@pytest.mark.slow
def test_a_backward_call_of_16384_tokens_takes_little_beyond_its_gradients():
    gradients = 3 * 16384 * 64 * 4 / 2**20
    assert peak_beyond_inputs(16384, "backward") < gradients + 32
