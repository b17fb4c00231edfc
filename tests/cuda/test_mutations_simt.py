"""Every synchronisation of the SIMT kernels is needed: without any one of them the emulator reports an error.

The sample of the default run drops each barrier of the block in the forward kernel; `exhaustive` adds the backward
kernels and the synchronisations of warps.
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


def forward_plan():
    (q, k, v), _ = Case((1, 1, 1, 70, 140, 64, 64)).make()
    problem = make_problem(q, k, v, Options())
    return plan_forward(problem, np.empty_like(q), np.empty(q.shape[:3], np.float32))


def backward_plan():
    (q, k, v), _ = Case((1, 1, 1, 70, 140, 64, 64)).make()
    problem = make_problem(q, k, v, Options())
    out, lse = np.ones_like(q), np.zeros(q.shape[:3], np.float32)
    gradients = [np.empty_like(x) for x in (q, k, v)]
    return plan_backward(problem, np.ones_like(q), out, lse, None, *gradients, None, None)


def synchronisations(text: str, kind: str) -> list[re.Match]:
    return [match for match in BARRIER.finditer(text) if match[1].startswith(kind)]


def survivors(plan, prefix: str, kind: str, monkeypatch) -> list[str]:
    """Lines of the kernel that starts with `prefix` whose loss nothing notices."""
    (kernel,) = (launch.kernel for launch in plan.launches if launch.kernel.name.startswith(prefix))
    compile_ptx = compiler.compile_ptx
    text = compile_ptx(kernel.function, kernel.signature, "sm_80", launch_bounds=kernel.launch_bounds, lineinfo=True)
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
@pytest.mark.parametrize("kernel", ["dkdv_simt", "dq_simt"])
def test_backward_needs_every_barrier(kernel, monkeypatch):
    assert survivors(backward_plan(), kernel, "bar", monkeypatch) == []
