"""Kernels of the GPU benchmark, compiled ahead: into the cache, or a bundle for another machine.

Planning asks no device, so this needs none.
"""

import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from numbaflash.cuda.compile import Cubin
from numbaflash.cuda.plan import KernelSpec, Plan
from numbaflash.cuda.plans import plan_backward, plan_forward
from numbaflash.options import Options
from numbaflash.problem import make_problem

from ..pool import in_processes
from . import checks
from .cases import CASES, DIRECTIONS, FORWARD, GpuCase


class Job(NamedTuple):
    """One kernel: launch number `launch` of a call's plan."""

    call: str
    direction: str
    launch: int
    arch: str


@cache
def _calls() -> dict[str, GpuCase | checks.Check]:
    return {one.name: one for one in (*checks.CHECKS, *CASES)}


def plan_of(name: str, direction: str, arch: str) -> Plan:
    """The plan of a case or check; its arrays hold nothing.

    Raises
    ------
    NotImplementedError
        What no kernel computes.
    """
    one = _calls()[name]
    if isinstance(one, GpuCase):
        options = one.options()
        offsets = [options.pop(key, None) for key in ("cu_seqlens_q", "cu_seqlens_k")]
        q, k, v, dout = (np.empty(shape, one.dtype) for shape in one.shapes())
        problem = make_problem(q, k, v, Options(**options), *offsets)
    else:
        call = checks.make_call(one, np.random.default_rng(0))
        q, k, v, dout = call[:4]
        if one.strided:
            q, k, v, dout = (np.repeat(array, 2, axis=-1)[..., ::2] for array in call[:4])
        problem = call.problem(q, k, v)
    lse = np.empty(problem.q.shape[:3], problem.compute_dtype)
    # results are new arrays, contiguous as the caller lays them out
    out, dout_rows, dq, dk, dv = (
        _rows(problem.varlen, array)
        for array in (
            np.empty(dout.shape, dout.dtype),
            dout,
            *(np.empty(array.shape, array.dtype) for array in (q, k, v)),
        )
    )
    if direction == FORWARD:
        return plan_forward(problem, out, lse, arch)
    dbias = (
        None
        if problem.score.bias_shape is None
        else np.empty(problem.score.bias_shape, problem.compute_dtype)
    )
    dsinks = None if problem.sinks is None else np.empty(problem.sinks.shape)
    return plan_backward(problem, dout_rows, out, lse, None, dq, dk, dv, dbias, dsinks, arch)


def _rows(packed: bool, array: np.ndarray) -> np.ndarray:
    """Head-major, with a batch axis."""
    return array.transpose(1, 0, 2)[None] if packed else array


def jobs(arches: Iterable[str], names: Iterable[str] | None = None) -> list[Job]:
    """The different kernels of all cases and checks, or of some."""
    found: dict[tuple, Job] = {}
    for arch in arches:
        for name in _calls() if names is None else names:
            for direction in DIRECTIONS:
                try:
                    launches = plan_of(name, direction, arch).launches
                except NotImplementedError:
                    continue
                for number, launch in enumerate(launches):
                    found.setdefault((arch, *_key(launch.kernel)), Job(name, direction, number, arch))
    return list(found.values())


def _key(spec: KernelSpec) -> tuple[Any, ...]:
    return spec.function, tuple(spec.signature), spec.launch_bounds, spec.max_registers


def compile_job(job: Job) -> Cubin:
    """Machine code of one kernel, from the cache where it is there."""
    spec = plan_of(job.call, job.direction, job.arch).launches[job.launch].kernel
    return spec.cubin(job.arch)


def compile_all(wanted: list[Job], workers: int | None = None) -> Iterator[Cubin]:
    """Machine code of many kernels, as they get ready, in processes of their own."""
    workers = min(workers or os.cpu_count() or 1, max(1, len(wanted)))
    return map(compile_job, wanted) if workers == 1 else in_processes(compile_job, wanted, workers)
