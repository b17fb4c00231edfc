"""A SIMT kernel with one instruction left out or changed never passes for the right one.

The sample of the default run drops each barrier of the block in the forward kernel; `exhaustive` adds the
backward kernels, the synchronisations of warps, and changes of stores, shuffles and index arithmetic.
A change of arithmetic may show in the work done alone: a tile that is taken for an edge tile, or visited
though nothing in it is seen, gives the right result too late.
"""

import re
from collections.abc import Callable

import numpy as np
import pytest
from simt_cases import Case

from numbaflash import emulator
from numbaflash.cuda.plan import KernelSpec, Plan
from numbaflash.cuda.simt_plan import plan_backward, plan_forward
from numbaflash.options import Options
from numbaflash.problem import make_problem


def left_out(line: str) -> str:
    return ""


def to_index(line: str) -> str:
    return line.replace("bfly", "idx")


def terms_swapped(line: str) -> str:
    """a * b + c becomes c * b + a."""
    return re.sub(r"(\S+), (\S+), (\S+), (\S+);", r"\1, \4, \3, \2;", line)


def turned(line: str) -> str:
    """a - b becomes b - a."""
    return re.sub(r"(\S+), (\S+), (\S+);", r"\1, \3, \2;", line)


CHANGES: dict[str, tuple[str, Callable[[str], str]]] = {
    "synchronisation left out": (r"^\s*(bar\.sync|barrier\.sync|bar\.warp\.sync)", left_out),
    "store left out": (r"\bst\.(shared|global)", left_out),
    "shuffle by index": (r"\bshfl\.sync\.bfly", to_index),
    "terms swapped": (r"\bmad\.(lo|wide)\.[su]\d+", terms_swapped),
    "difference turned": (r"\bsub\.s\d+", turned),
}


class Call:
    """A plan, and the arrays that it writes."""

    def __init__(self, plan: Plan, *results: np.ndarray) -> None:
        self.plan, self.results = plan, results

    def run(self) -> tuple[list[bytes], int]:
        """The bits of the results, and the instructions that it took."""
        for array in self.results:
            array.fill(np.nan)
        report = emulator.execute(self.plan, counters=False)
        return [array.tobytes() for array in self.results], report.warp_instructions


def problem_of(shape, **options):
    """A call with blocks that see nothing, blocks that see one tile and blocks that see more."""
    (q, k, v), _ = Case(shape).make()
    return make_problem(q, k, v, Options(causal=True, **options))


def forward_call(shape=(1, 1, 1, 140, 70, 32, 32), **options):
    problem = problem_of(shape, **options)
    out = np.empty(problem.out_shape, np.float32)
    lse = np.empty(out.shape[:3], np.float32)
    return Call(plan_forward(problem, out, lse), out, lse)


def backward_call(shape, **options):
    problem = problem_of(shape, **options)
    out, dout = np.random.default_rng(1).standard_normal((2, *problem.out_shape), dtype=np.float32)
    gradients = [np.empty(operand.shape, np.float32) for operand in (problem.q, problem.k, problem.v)]
    lse = np.ones(out.shape[:3], np.float32)
    if problem.score.bias is not None:
        gradients += [np.empty(problem.score.bias_shape, np.float32), np.empty(problem.sinks.shape)]
    plan = plan_backward(problem, dout, out, lse, None, *[*gradients, None, None][:5])
    return Call(plan, *gradients)


def survivors(call: Call, prefix: str, change: str, monkeypatch: pytest.MonkeyPatch) -> list[str] | None:
    """Lines of the kernel that starts with `prefix` whose change nothing notices, though threads execute them.

    None where there is nothing to change.
    """
    (kernel,) = (launch.kernel for launch in call.plan.launches if launch.kernel.name.startswith(prefix))
    pattern, mutate = CHANGES[change]
    original = KernelSpec.ptx
    lines, mutant = kernel.ptx("sm_80", lineinfo=True).splitlines(), None

    def ptx_or_mutant(spec, arch, lineinfo=False):
        return mutant if mutant is not None and spec.function is kernel.function else original(spec, arch, lineinfo)

    monkeypatch.setattr(KernelSpec, "ptx", ptx_or_mutant)
    numbers = [n for n, line in enumerate(lines) if re.search(pattern, line.partition("//")[0])]
    if not numbers:
        return None
    expected, alive, reached = call.run(), [], False
    for number in numbers:
        changed = mutate(lines[number])
        if changed == lines[number]:
            continue
        for text in (changed, "trap;"):         # where not even a trap is noticed, no thread comes by
            mutant = "\n".join([*lines[:number], text, *lines[number + 1:]])
            try:
                results, work = call.run()
                caught = results != expected[0] or mutate is not left_out and work != expected[1]
            except emulator.EmulatorError:
                caught = True
            if caught:
                reached = True
                break
        if text == "trap;" and caught:
            alive.append(f"{number + 1}: {lines[number].strip()}")
    assert reached, "the emulator ran no mutant"
    return alive


@pytest.mark.slow
def test_forward_needs_every_barrier(monkeypatch):
    assert survivors(forward_call(), "forward_simt", "synchronisation left out", monkeypatch) == []


KERNELS = {
    "forward_simt": lambda: forward_call(
        (2, 2, 1, 140, 200, 32, 32), q_offset=[60, -70], window=(150, None)),
    "delta_simt": lambda: backward_call((2, 2, 1, 70, 140, 32, 32)),
    "delta_simt of unequal lengths": lambda: backward_call((2, 2, 1, 70, 140, 32, 32), q_lengths=[70, 3]),
    "dkdv_simt": lambda: backward_call((2, 4, 2, 100, 140, 32, 32), q_offset=0),
    "dq_simt": lambda: backward_call((2, 2, 1, 140, 70, 32, 32), q_offset=[-50, -70], window=(60, None)),
}
ABSENT = {
    "delta_simt": ("synchronisation left out", "terms swapped"),
    "dkdv_simt": ("shuffle by index",),
    "dq_simt": ("shuffle by index",),
}
"""What a kernel has none of."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_change_of_a_kernel_goes_unnoticed(kernel, change, monkeypatch):
    prefix = kernel.split()[0]
    found = survivors(KERNELS[kernel](), prefix, change, monkeypatch)
    assert found == (None if change in ABSENT.get(prefix, ()) else [])


WIDE = (1, 2, 1, 40, 45, 300, 270)
OPTIONS = {
    "bias": np.zeros((1, 1, 140, 70), np.float32), "sinks": np.zeros(2, np.float32), "softcap": 2.0,
    "dropout_p": 0.3, "seed": 1, "window": (40, None),
}
MORE_KERNELS = {
    "forward_simt of wide heads": lambda: forward_call(WIDE),
    "dkdv_simt of wide heads": lambda: backward_call(WIDE),
    "dq_simt of wide heads": lambda: backward_call(WIDE),
    "forward_simt with options": lambda: forward_call((2, 2, 1, 140, 70, 32, 32), **OPTIONS),
    "dkdv_simt with options": lambda: backward_call(
        (2, 2, 1, 140, 270, 32, 32),
        **OPTIONS | {"bias": np.zeros((1, 1, 140, 270), np.float32), "q_offset": 0}),
    "dq_simt with options": lambda: backward_call((2, 2, 1, 140, 70, 32, 32), **OPTIONS),
    "dbias_simt": lambda: backward_call((2, 2, 1, 140, 70, 32, 32), **OPTIONS),
    "dbias_simt of wide heads": lambda: backward_call(
        WIDE, bias=np.zeros((2, 40, 1), np.float32), sinks=np.zeros(2, np.float32)),
    "dbias_simt of one number": lambda: backward_call(
        (2, 2, 1, 100, 70, 32, 32), bias=np.zeros((1, 1), np.float32), sinks=np.zeros(2, np.float32)),
    "dsinks_simt": lambda: backward_call((2, 2, 1, 140, 70, 32, 32), **OPTIONS),
}
"""Some blocks see nothing: only there is what they load not ordered by the barriers of the loop."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", MORE_KERNELS)
def test_every_kind_of_kernel_needs_every_synchronisation(kernel, monkeypatch):
    assert survivors(MORE_KERNELS[kernel](), kernel.split()[0], "synchronisation left out", monkeypatch) == []
