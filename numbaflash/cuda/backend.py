"""The CUDA backend: a Problem becomes a plan, and the driver runs it on the GPU of the arrays.

NumPy arrays are copied to GPU 0 and their results back; arrays on a device are used where they are, on the
stream of their library or the caller's.  Calls alike but for where their arrays lie share one recorded plan.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from numbaflash import segments as seg
from numbaflash.arrays import address
from numbaflash.cuda.driver import Recording, device, record, replay
from numbaflash.cuda.plans import plan_backward, plan_forward
from numbaflash.problem import Problem


def forward(problem: Problem, out: np.ndarray, lse: np.ndarray, stream: int = 0) -> None:
    """Write out and lse; on a device also the rows that belong to no segment."""
    _run(plan_forward, problem, (out, lse), stream, (out, lse))


def backward(
    problem: Problem, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, stream: int = 0,
) -> tuple[Any, Any]:
    """Write dq, dk and dv, likewise; return the gradients of bias and sinks as arrays of the caller's library."""
    dbias, dbias_view = _empty(problem, problem.score.bias_shape, problem.compute_dtype)
    dsinks, dsinks_view = _empty(problem, None if problem.sinks is None else problem.sinks.shape, np.float64)
    views = dq, dk, dv, dbias_view, dsinks_view
    _run(plan_backward, problem, (dout, out, lse, dlse, *views), stream, views)
    return dbias, dsinks


RECORDINGS: dict[tuple, Recording] = {}
MOST_RECORDINGS = 256


def _run(
    planner: Callable, problem: Problem, arguments: tuple, stream: int, written: Sequence[np.ndarray | None]
) -> None:
    """Run what a planner makes of a problem and its arguments, from a recording where there is one."""
    ordinal = problem.home.device or 0
    score = problem.score
    arrays = (
        problem.q.array, problem.k.array, problem.v.array, problem.sinks,
        *(None if one is None else one.array for one in (score.bias, score.alibi, problem.mask)), *arguments,
    )
    key = (planner, ordinal, _fixed(problem), *_alike(arrays))
    recording = RECORDINGS.get(key)
    if recording is None:
        recording = record(planner(_cover(problem), *arguments, device(ordinal).arch), ordinal, arrays)
        if recording.is_open:
            if len(RECORDINGS) >= MOST_RECORDINGS:
                RECORDINGS.clear()
            RECORDINGS[key] = recording
    replay(recording, arrays, stream, _on_host(problem, *written))


def _fixed(problem: Problem) -> tuple:
    """All of a problem that is no array of numbers."""
    score = problem.score
    return (
        problem.segments.shape, problem.segments.tobytes(), problem.band, score.softcap, score.bias_shape,
        problem.scale, problem.dropout, problem.out_dtype, problem.head_origin, problem.deterministic,
        problem.precision, problem.config, problem.padded, problem.home.device,
    )


def _alike(arrays: tuple) -> list[tuple | None]:
    """What plans depend on: shapes, strides, dtypes, alignment, and which arrays are one object."""
    first = {}
    return [None if array is None else (
        array.shape, array.strides, array.dtype, address(array) % 16, first.setdefault(id(array), number))
        for number, array in enumerate(arrays)]


def _cover(problem: Problem) -> Problem:
    if not problem.padded or problem.home.device is None:
        return problem
    batch, q_rows, k_rows = problem.q.shape[0], problem.q.shape[2], problem.k.shape[2]
    return problem._replace(segments=seg.covering(problem.segments, batch, q_rows, k_rows))


def _empty(problem: Problem, shape: tuple[int, ...] | None, dtype: Any) -> tuple[Any, np.ndarray | None]:
    """An array beside the caller's, and its view; on the host a plain NumPy array."""
    if shape is None:
        return None, None
    if problem.home.device is None:
        array = np.empty(shape, dtype)
        return array, array
    return problem.home.library.empty(shape, np.dtype(dtype), problem.home.like)


def _on_host(problem: Problem, *views: np.ndarray | None) -> list[np.ndarray]:
    return [view for view in views if view is not None] if problem.home.device is None else []
