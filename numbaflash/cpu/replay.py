"""A call made once more on other arrays, with everything but their addresses known already."""

from array import array
from collections.abc import Sequence

import numpy as np

from ..arrays import address
from ..options import Gradients
from ..problem import Problem
from . import backward, forward, gradient_call
from .call import CALL, LAYOUT
from .threads import get_num_threads, run
from .workspace import borrow

_Q, _K, _V, _OUT, _LSE, _PARTIALS, _COUNTERS = (
    LAYOUT.words[name] for name in ("q", "k", "v", "out", "lse", "partials", "counters")
)


class Replay:
    """A call to repeat: ``replay(q, k, v)`` gives out and lse in the caller's shapes.

    Parameters
    ----------
    problem : Problem
        A checked call of which every row of out and lse belongs to a segment.
    out, lse : ndarray
        Its results, in the caller's shapes.
    """

    __slots__ = ("counters", "generation", "lse", "out", "partial_bytes", "prepared", "record", "threads")

    def __init__(self, problem: Problem, out: np.ndarray, lse: np.ndarray) -> None:
        self.prepared = prepared = forward.prepare(problem)
        self.out, self.lse = (out.shape, out.dtype), (lse.shape, lse.dtype)
        self.partial_bytes = prepared.job_count * prepared.plan.partial_bytes if prepared.counters else 0
        rows, lse_rows = forward.empty_output(problem), np.empty(problem.out_shape[:3], problem.compute_dtype)
        self.record = array("q", forward.record(problem, prepared, rows, lse_rows, None, None).tobytes())
        self.threads, self.generation = get_num_threads(), forward.generation()

    def is_current(self) -> bool:
        """Whether a call would still be planned as it was then."""
        return self.threads == get_num_threads() and self.generation is forward.generation()

    def __call__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Out and lse for arrays of the same shapes, strides and dtypes."""
        out, lse, prepared, record = np.empty(*self.out), np.empty(*self.lse), self.prepared, self.record[:]
        record[_Q], record[_K], record[_V] = address(q), address(k), address(v)
        record[_OUT], record[_LSE] = address(out), address(lse)
        partials = counters = None
        if self.partial_bytes:
            partials = np.empty(self.partial_bytes, np.uint8)
            counters = np.zeros(prepared.counters, np.int64)
            record[_PARTIALS], record[_COUNTERS] = address(partials), address(counters)
        run(prepared.entry, (np.frombuffer(record, CALL), None), jobs=prepared.job_count, cost_ns=prepared.cost_ns,
            keep=(q, k, v, out, lse, prepared, partials, counters))
        return out, lse


class GradientReplay:
    """A backward call to repeat: ``replay(q, k, v, dout, out, lse, dlse)`` gives what `attention_backward` does.

    Parameters
    ----------
    problem : Problem
        A checked call without options that are arrays, of which every row and key belongs to a segment.
    rows : dict
        dout, out, lse, dlse (or None), dq, dk and dv as head-major views.
    made : sequence of ndarray
        dq, dk, dv in the caller's shapes.
    """

    __slots__ = ("compute", "generation", "made", "prepared", "record", "tables", "threads")

    def __init__(self, problem: Problem, rows: dict[str, np.ndarray | None], made: Sequence[np.ndarray]) -> None:
        self.prepared = backward.prepare(problem)
        self.made = [(one.shape, one.dtype) for one in made]
        self.record = array("q", backward.record(problem, self.prepared, rows).tobytes())
        self.compute, self.tables = problem.compute_dtype, problem.segments
        self.threads, self.generation = get_num_threads(), forward.generation()

    def is_current(self) -> bool:
        """Whether a call would still be planned as it was then."""
        return self.threads == get_num_threads() and self.generation is forward.generation()

    def __call__(self, *inputs: np.ndarray | None) -> Gradients:
        """Gradients for arrays of the same shapes, strides and dtypes."""
        prepared, record, words = self.prepared, self.record[:], gradient_call.LAYOUT.words
        gradients = [np.empty(shape, dtype) for shape, dtype in self.made]
        with borrow(prepared.shapes, self.compute) as work:
            arrays = dict(zip(_GIVEN, (*inputs, *gradients, *prepared.new_counters())), **work)
            for name, one in arrays.items():
                if one is not None:
                    record[words[name]] = address(one)
            run(prepared.entry, (np.frombuffer(record, gradient_call.GRADIENT_CALL), None, None, None),
                jobs=prepared.job_count, cost_ns=prepared.cost_ns, keep=(self, arrays))
        return Gradients(*gradients)


_GIVEN = ("q", "k", "v", "dout", "out", "lse", "dlse", "dq", "dk", "dv", "turns", "taken")
