"""Every synchronisation of the SIMT kernels is needed: without any one of them the emulator reports an error.

The sample of the default run drops each barrier of the block in the forward kernel; `exhaustive` adds the
backward kernels and the synchronisations of warps.
"""

import re

import numpy as np
import pytest
from simt_cases import Case

import numbaflash.cuda.compile as compiler
from numbaflash import emulator
from numbaflash.cuda.simt_plan import plan_backward, plan_forward
from numbaflash.options import Options
from numbaflash.problem import make_problem

BARRIER = re.compile(r"^\s*(bar\.sync|barrier\.sync|bar\.warp\.sync)\b.*;", re.MULTILINE)


def problem_of(queries: int, keys: int, **options):
    """A call with blocks that see nothing, blocks that see one tile and blocks that see more."""
    (q, k, v), _ = Case((1, 1, 1, queries, keys, 32, 32)).make()
    return make_problem(q, k, v, Options(causal=True, **options))


def forward_plan():
    problem = problem_of(140, 70)
    out = np.empty(problem.out_shape, np.float32)
    return plan_forward(problem, out, np.empty(out.shape[:3], np.float32))


def backward_plan(queries: int, keys: int, **options):
    problem = problem_of(queries, keys, **options)
    out, dout = np.ones((2, *problem.out_shape), np.float32)
    gradients = [np.empty(operand.shape, np.float32) for operand in (problem.q, problem.k, problem.v)]
    lse = np.zeros(out.shape[:3], np.float32)
    return plan_backward(problem, dout, out, lse, None, *gradients, None, None)


def synchronisations(text: str, kind: str) -> list[re.Match]:
    return [match for match in BARRIER.finditer(text) if match[1].startswith(kind)]


def survivors(plan, prefix: str, kind: str, monkeypatch) -> list[str]:
    """Lines of the kernel that starts with `prefix` whose loss nothing notices."""
    (kernel,) = (launch.kernel for launch in plan.launches if launch.kernel.name.startswith(prefix))
    compile_ptx = compiler.compile_ptx
    text = compile_ptx(kernel.function, kernel.signature, "sm_80", launch_bounds=kernel.launch_bounds,
                       lineinfo=True)
    found = synchronisations(text, kind)
    assert found, "nothing to drop"
    alive = []
    for match in found:
        mutant = text[: match.start()] + text[match.end():]

        def compile_mutant(function, *arguments, mutant=mutant, **options):
            return mutant if function is kernel.function else compile_ptx(function, *arguments, **options)

        monkeypatch.setattr(compiler, "compile_ptx", compile_mutant)
        try:
            emulator.execute(plan, counters=False)
        except emulator.EmulatorError:
            continue
        alive.append(f"{match[0].strip()} at {match.start()}")
    monkeypatch.setattr(compiler, "compile_ptx", compile_ptx)
    return alive


@pytest.mark.slow
def test_forward_needs_every_barrier(monkeypatch):
    assert survivors(forward_plan(), "forward_simt", "bar", monkeypatch) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel, plan", [
    ("dkdv_simt", backward_plan(70, 140, q_offset=0)), ("dq_simt", backward_plan(140, 70)),
], ids=["dkdv", "dq"])
def test_backward_needs_every_barrier(kernel, plan, monkeypatch):
    assert survivors(plan, kernel, "bar", monkeypatch) == []
