"""Correctness before speed: small calls of every kind, on fresh random numbers, against the float64 oracle.

Results are NaN before the kernels run, so that what they do not write shows.  The rule is the project's: an
error of at most twice that of plain code which rounds S and P to the dtype (three times for gradients), four
units in the last place of the largest number, and what every order of summation may lose (`magnitudes`).
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import numbaflash
from numbaflash import reference
from numbaflash.options import Options
from numbaflash.problem import Problem, make_problem

from ..magnitudes import backward_magnitudes, eps, forward_magnitudes, product_eps
from .cases import BACKWARD, FORWARD, PRECISIONS
from .device import Gpu, poisoned

TF32_EPS, TF32_DROPPED_BITS = 2.0**-11, 13
ROUNDED = {FORWARD: ("out", "lse"), BACKWARD: ("dq", "dk", "dv", "dbias", "dsinks")}


class Check(NamedTuple):
    """A small call; `options` may name "bias", "mask", "alibi_slopes", "sinks": random ones are made.

    `packed` holds the lengths of sequences that lie one after the other; `strided` skips every other column.
    """

    name: str
    kind: str
    head_dim: int = 64
    value_dim: int | None = None
    heads: int = 4
    kv_heads: int = 4
    n_q: int = 150
    n_k: int = 190
    packed: tuple[int, ...] = ()
    strided: bool = False
    options: dict[str, Any] = {}

    @property
    def dtype(self) -> np.dtype:
        name = "float32" if self.kind in PRECISIONS else self.kind
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


EVERYTHING = {
    "causal": True,
    "softcap": 5.0,
    "bias": True,
    "mask": True,
    "alibi_slopes": True,
    "sinks": True,
    "dropout_p": 0.2,
    "seed": 1,
}
CHECKS = tuple(
    [
        *(
            Check(f"{kind}-d{dim}-causal", kind, dim, options={"causal": True})
            for kind, dims in (
                ("bfloat16", (64, 128, 256)),
                ("float16", (64, 128)),
                ("tf32", (64, 128)),
                ("tf32x3", (64,)),
                ("float32", (64, 128)),
                ("float64", (64,)),
            )
            for dim in dims
        ),
        *(Check(f"{kind}-d64-full", kind, n_q=256, n_k=256) for kind in ("bfloat16", "float16", "float32")),
        Check("bfloat16-gqa", "bfloat16", 128, heads=8, kv_heads=2, options={"causal": True}),
        Check("bfloat16-window", "bfloat16", 128, options={"window": (40, 10)}),
        Check("bfloat16-deterministic", "bfloat16", 64, options={"deterministic": True}),
        Check("bfloat16-packed", "bfloat16", 128, packed=(70, 1, 130, 33), options={"causal": True}),
        Check("bfloat16-d40-dv72", "bfloat16", 40, 72, n_q=37, n_k=301),
        Check("bfloat16-strided", "bfloat16", 64, strided=True, n_q=65, n_k=97),
        *(
            Check(f"{kind}-everything", kind, 64, options=EVERYTHING)
            for kind in ("bfloat16", "float16", "float32")
        ),
    ]
)


class Call(NamedTuple):
    """Host arrays of a check, and its keywords."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    options: dict[str, Any]
    offsets: dict[str, np.ndarray]

    def problem(
        self, q: np.ndarray | None = None, k: np.ndarray | None = None, v: np.ndarray | None = None
    ) -> Problem:
        """The checked call, of other arrays where given."""
        q, k, v = (b if a is None else a for a, b in zip((q, k, v), self[:3]))
        return make_problem(q, k, v, Options(**self.options), *self.offsets.values())


def make_call(check: Check, rng: np.random.Generator) -> Call:
    """Random arrays for a check."""
    value_dim = check.head_dim if check.value_dim is None else check.value_dim
    dims = (check.head_dim, check.head_dim, value_dim, value_dim)
    heads = (check.heads, check.kv_heads, check.kv_heads, check.heads)
    rows = (check.n_q, check.n_k, check.n_k, check.n_q)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(check.dtype)

    if check.packed:
        total = sum(check.packed)
        arrays = [normal(total, h, d) for h, d in zip(heads, dims)]
        table = np.concatenate(([0], np.cumsum(check.packed))).astype(np.int32)
        offsets = {"cu_seqlens_q": table, "cu_seqlens_k": table}
    else:
        arrays, offsets = [normal(2, h, n, d) for h, n, d in zip(heads, rows, dims)], {}
    options = dict(check.options)
    made = {
        "bias": lambda: rng.standard_normal((1, check.heads, check.n_q, check.n_k)).astype(check.dtype),
        "mask": lambda: rng.random((2, 1, check.n_q, check.n_k)) < 0.8,
        "alibi_slopes": lambda: rng.random(check.heads).astype(np.float32),
        "sinks": lambda: rng.standard_normal(check.heads).astype(np.float32),
    }
    options |= {name: make() for name, make in made.items() if name in options}
    if check.kind in PRECISIONS:
        options["precision"] = check.kind
    return Call(*arrays, options, offsets)


def on_gpu(call: Call, gpu: Gpu, strided: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of numbaflash by name, forward and backward, from poisoned arrays."""
    if strided:
        q, k, v, dout = (gpu.upload(np.repeat(array, 2, axis=-1))[..., ::2] for array in call[:4])
    else:
        q, k, v, dout = (gpu.upload(array) for array in call[:4])
    arrays = {
        name: gpu.upload(call.options[name]) for name in ("bias", "mask", "sinks") if name in call.options
    }
    options = call.options | arrays | {"backend": gpu.backend}
    attention = numbaflash.attention_varlen if call.offsets else numbaflash.attention
    with poisoned(gpu, q):
        out, lse = attention(q, k, v, return_lse=True, **call.offsets, **options)
        gradients = numbaflash.attention_backward(dout, q, k, v, out, lse, **call.offsets, **options)
    gpu.synchronize()
    backward = {name: getattr(gradients, name) for name in ROUNDED[BACKWARD]}
    return (
        {"out": gpu.host(out), "lse": gpu.host(lse)},
        {name: None if x is None else gpu.host(x) for name, x in backward.items()},
    )


def to_tf32(array: np.ndarray) -> np.ndarray:
    """float32 rounded to the 10 bits of tf32."""
    words = array.view(np.uint32).astype(np.uint64) + (1 << (TF32_DROPPED_BITS - 1))
    return (words.astype(np.uint32) >> TF32_DROPPED_BITS << TF32_DROPPED_BITS).view(np.float32)


def expected(check: Check, call: Call) -> dict[str, tuple[np.ndarray, float]]:
    """Exact results by name, head-major, with the error that each may have."""
    problem, rough = call.problem(), call.problem()
    work, unit = check.dtype, eps(check.dtype)
    if check.kind == "tf32":
        rough, unit = call.problem(*(to_tf32(array) for array in call[:3])), TF32_EPS
    exact = dict(zip(ROUNDED[FORWARD], reference.forward(problem)))
    plain = dict(zip(ROUNDED[FORWARD], reference.dense(rough, work)))
    plain["lse"] = reference.dense(rough, problem.compute_dtype)[1]
    dout = reference.problem_major(problem, call.dout)
    exact |= zip(ROUNDED[BACKWARD], reference.backward(problem, dout))
    plain |= zip(ROUNDED[BACKWARD], reference.dense_backward(rough, work, dout))
    accumulator = eps(problem.compute_dtype)
    sizes = dict(zip(ROUNDED[FORWARD], forward_magnitudes(problem)))
    sizes |= zip(ROUNDED[BACKWARD], backward_magnitudes(problem, dout, None))
    found = {}
    for name, array in exact.items():
        if array is None:
            continue
        finite = np.isfinite(array)
        error = np.abs(np.where(finite, plain[name].astype(array.dtype) - array, 0)).max(initial=0.0)
        largest = np.abs(np.where(finite, array, 0)).max(initial=0.0)
        factor = 2 if name in ROUNDED[FORWARD] else 3
        units = max(accumulator, product_eps(problem)) if name == "lse" else unit
        found[name] = (
            array,
            float(factor * error + 4 * units * largest + accumulator * sizes[name]),
        )
    return found


def run_check(check: Check, gpu: Gpu, rng: np.random.Generator) -> dict[str, Any]:
    """One check; its row: the worst result, and "ok" or what is wrong."""
    call = make_call(check, rng)
    row: dict[str, Any] = {"check": check.name, "worst": None, "used": None, "verdict": "ok"}
    try:
        forward, backward = on_gpu(call, gpu, check.strided)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return row | {"verdict": f"{type(error).__name__}: {first_line[:90]}"}
    problem = call.problem()
    wrong = []
    for name, (exact, allowed) in expected(check, call).items():
        got = (forward | backward)[name]
        if got is None:
            wrong.append(f"{name} is missing")
            continue
        if name in ("lse", "dbias", "dsinks"):
            got = np.asarray(got).reshape(exact.shape)
        else:
            got = reference.problem_major(problem, np.asarray(got))
        got, finite = got.astype(exact.dtype), np.isfinite(exact)
        error = np.abs(np.where(finite, got - exact, 0)).max(initial=0.0)
        share = float(error) / allowed if allowed else float(error > 0)
        if not np.array_equal(got[~finite], exact[~finite]) or not share <= 1:
            wrong.append(f"{name} off by {float(error):.2g}, allowed {allowed:.2g}")
        if row["used"] is None or not share <= row["used"]:
            row |= {"worst": name, "used": share}
    return row | {"verdict": "; ".join(wrong) or "ok"}
