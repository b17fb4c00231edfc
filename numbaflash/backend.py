"""Which backend runs a call: one readable table.

A backend is a module with

    forward(problem, out, lse)
        write every row of out (head-major 4-D view of ``out_dtype``) and lse ((batch, H, Nq), ``compute_dtype``)
        that belongs to a segment;
    backward(problem, dout, out, lse, dlse, dq, dk, dv) -> dbias, dsinks
        write every row of the gradients that belongs to a segment; return the gradient of bias in
        ``score.bias_shape`` and of sinks in (H,), or None where there are none.
"""

from importlib import import_module
from types import ModuleType

from .problem import BACKENDS, Problem, _one_of

MODULES = {"cpu": "numbaflash.cpu.backend"}
"""Modules of the backends; imported on first use, so that importing numbaflash compiles nothing."""


def choose(name: str, problem: Problem) -> ModuleType:
    """The module that runs a problem.

    Raises
    ------
    NotImplementedError
        A named backend that this version lacks, or that lacks what the problem asks for.
    """
    _one_of("backend", name, BACKENDS)
    if name == "auto":
        name = "cpu"
    if name not in MODULES:
        raise NotImplementedError(f"backend={name!r} is not available in this version; there is {', '.join(MODULES)}")
    return import_module(MODULES[name])
