"""A tensor-core kernel with one instruction left out or changed never passes for the right one.

Equivalent mutants, left out on purpose: none in the default kernels; `cp.async.wait_all` needs no commit.
"""

import re

import ml_dtypes
import numpy as np
import pytest

from numbaflash import emulator
from numbaflash.cuda import plan
from tensor_cores import backward, forward, inputs, problem_of

bf16 = ml_dtypes.bfloat16
SYNCHRONISATION = r"bar\.sync|cp\.async\.wait_all"
CHANGES = {
    "xor to or": (r"\bxor\.b32", "xor", "or"),
    "transposed": (r"ldmatrix\S*\.x4\.trans\.shared", ".trans", ""),
    "not transposed": (r"ldmatrix\S*\.x4\.shared", ".x4", ".x4.trans"),
    "shuffle": (r"shfl\.sync\.bfly", "bfly", "idx"),
    "copy left out": (r"cp\.async\.cg", None, None),
    "store left out": (r"st\.(shared|global)", None, None),
}


def lines_with(text, pattern):
    """Numbers of the lines that hold an instruction."""
    return [n for n, line in enumerate(text.splitlines()) if re.search(pattern, line.partition("//")[0])]


def changed(text, number, old, new):
    """The text with one line changed, or left out (old is None)."""
    lines = text.splitlines()
    lines[number] = "" if old is None else lines[number].replace(old, new)
    return "\n".join(lines)


class Mutants:
    """Runs a problem with one kernel of its plan changed."""

    def __init__(self, monkeypatch, kernel, run, same):
        self.kernel, self.run, self.same = kernel, run, same
        self.original = plan.compile_ptx
        self.text, self.mutant = None, None
        monkeypatch.setattr(plan, "compile_ptx", self.compile)
        self.expected = run()

    def compile(self, function, *arguments, **options):
        text = self.original(function, *arguments, **options)
        if function.__name__ != self.kernel:
            return text
        self.text = text
        return text if self.mutant is None else self.mutant

    def survives(self, number, old=None, new=None):
        """True where neither an error nor a wrong value tells."""
        self.mutant = changed(self.text, number, old, new)
        try:
            return self.same(self.expected, self.run())
        except emulator.EmulatorError:
            return False
        finally:
            self.mutant = None

    def survivors(self, pattern, old=None, new=None, sample=None):
        numbers = lines_with(self.text, pattern)
        if sample is not None and len(numbers) > sample:
            numbers = [numbers[i] for i in np.linspace(0, len(numbers) - 1, sample).astype(int)]
        lines = self.text.splitlines()
        return numbers, [f"{n + 1}: {lines[n].strip()}" for n in numbers if self.survives(n, old, new)]


def same_bits(expected, actual):
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(expected, actual))


@pytest.fixture
def forward_mutants(monkeypatch):
    problem = problem_of(inputs((1, 1, 300, 64), dtype=bf16), causal=True)
    return Mutants(monkeypatch, "forward", lambda: forward(problem, counters=False)[:2], same_bits)


CALLS = {
    # dtype, architecture, options
    "deterministic": (bf16, "sm_80", dict(deterministic=True)),
    "reducing": (bf16, "sm_80", {}),
    "vector reductions": (bf16, "sm_90a", {}),
    "tf32": (np.float32, "sm_80", dict(precision="tf32")),
    "Turing": (np.float16, "sm_75", {}),
}
EVERY_KERNEL = [
    (kernel, call) for call in CALLS
    for kernel in ("backward_keys", "backward_reduced" if "reduc" in call else "backward_queries")]
LACKING = {
    # of a kernel or a call: changes for which there is no instruction
    "backward_reduced": ("transposed", "not transposed", "copy left out"),
    "tf32": ("transposed",),
    "Turing": ("copy left out",),
}
KERNELS = [
    pytest.param(pair, id=", ".join(pair), marks=[] if pair[1] == "deterministic" else pytest.mark.exhaustive)
    for pair in EVERY_KERNEL]


@pytest.fixture
def backward_mutants(monkeypatch, request):
    kernel, (dtype, arch, options) = request.param[0], CALLS[request.param[1]]
    # some blocks of keys see no query, and some of queries no key
    arrays = inputs((1, 2, 270, 64), keys=330, kv_heads=1, dtype=dtype)
    problem = problem_of(arrays, causal=True, q_offset=-130, **options)
    mutants = Mutants(monkeypatch, kernel, lambda: backward(problem, arch=arch, counters=False)[:3], same_bits)
    mutants.names = request.param
    return mutants


def test_forward_without_any_one_barrier_or_wait_is_caught(forward_mutants):
    numbers, survivors = forward_mutants.survivors(SYNCHRONISATION)
    assert len(numbers) >= 6 and survivors == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", CHANGES)
def test_forward_with_any_one_change_is_caught(forward_mutants, change):
    numbers, survivors = forward_mutants.survivors(*CHANGES[change])
    assert numbers and survivors == []


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_forward_with_a_change_is_caught(forward_mutants, change):
    numbers, survivors = forward_mutants.survivors(*CHANGES[change], sample=2)
    assert numbers and survivors == []


@pytest.mark.slow
@pytest.mark.parametrize("backward_mutants", KERNELS, indirect=True)
def test_backward_without_any_one_barrier_or_wait_is_caught(backward_mutants):
    numbers, survivors = backward_mutants.survivors(SYNCHRONISATION)
    assert numbers and survivors == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", [name for name in CHANGES if name != "shuffle"])
@pytest.mark.parametrize("backward_mutants", KERNELS, indirect=True)
def test_backward_with_any_one_change_is_caught(backward_mutants, change):
    numbers, survivors = backward_mutants.survivors(*CHANGES[change])
    lacking = any(change in LACKING.get(name, ()) for name in backward_mutants.names)
    assert bool(numbers) != lacking and survivors == []
