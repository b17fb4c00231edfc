"""Hypothesis strategies for whole attention calls: shapes, memory, dtypes and any mix of options.

Hypothesis draws the structure of a call and a seed; the numbers in the arrays come from that seed.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import numbaflash
from numbaflash.options import Options
from numbaflash.problem import Problem, make_problem

bfloat16 = np.dtype(ml_dtypes.bfloat16)
f16, f32, f64 = (np.dtype(x) for x in ("float16", "float32", "float64"))
DTYPES = (f16, bfloat16, f32, f64)


@dataclass(frozen=True)
class Variant:
    """What kernels are compiled for. Tests draw from VARIANTS alone, or compiling would eat the suite."""

    dtype: np.dtype
    stages: frozenset[str] = frozenset()
    out_dtype: np.dtype | None = None
    bias_dtype: np.dtype | None = None


ALL_STAGES = frozenset({"softcap", "bias", "alibi", "mask", "dropout"})
VARIANTS = [
    Variant(f32),
    Variant(f32, frozenset({"softcap"})),
    Variant(f32, frozenset({"bias"})),
    Variant(f32, frozenset({"alibi"})),
    Variant(f32, frozenset({"mask"})),
    Variant(f32, frozenset({"dropout"})),
    Variant(f32, ALL_STAGES),
    Variant(f32, frozenset({"mask", "alibi"}), out_dtype=f16),
    Variant(f64),
    Variant(f64, ALL_STAGES),
    Variant(f64, frozenset({"softcap", "bias"}), out_dtype=f32, bias_dtype=bfloat16),
    Variant(f16),
    Variant(f16, ALL_STAGES, bias_dtype=f32),
    Variant(f16, frozenset({"alibi", "dropout"}), out_dtype=f32),
    Variant(bfloat16),
    Variant(bfloat16, frozenset({"bias", "mask"})),
    Variant(bfloat16, ALL_STAGES, out_dtype=f64, bias_dtype=f64),
]
variants = st.sampled_from(VARIANTS)
HALVES = (f16, bfloat16)
EVERY_VARIANT = [
    pytest.param(
        variant,
        id=f"{variant.dtype}-{'+'.join(sorted(variant.stages)) or 'plain'}",
        marks=[pytest.mark.slow] if variant.dtype in HALVES else [],
    )
    for variant in VARIANTS
]
"""For parametrize; half precision is slow, because its kernels must be compiled."""
EVERY_DTYPE = [pytest.param(dtype, marks=[pytest.mark.slow] if dtype in HALVES else []) for dtype in DTYPES]

MEMORY = ("contiguous", "transposed", "sliced", "negative", "broadcast", "offset")


@dataclass(frozen=True, repr=False)
class Call:
    """One call of attention and, for its gradients, the gradients of its results."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]
    packed: dict[str, np.ndarray]
    dout: np.ndarray
    dlse: np.ndarray | None

    @property
    def problem(self) -> Problem:
        """The call as the oracle reads it."""
        return make_problem(self.q, self.k, self.v, Options(**self.options), *self.packed.values())

    def forward(self, backend: str, **keywords: Any) -> tuple[np.ndarray, np.ndarray]:
        """Run it; out and lse."""
        options = self.options | keywords | {"backend": backend, "return_lse": True}
        if self.packed:
            return numbaflash.attention_varlen(self.q, self.k, self.v, *self.packed.values(), **options)
        return numbaflash.attention(self.q, self.k, self.v, **options)

    def backward(self, backend: str, out: np.ndarray, lse: np.ndarray) -> numbaflash.Gradients:
        """Run its backward pass."""
        return numbaflash.attention_backward(
            self.dout,
            self.q,
            self.k,
            self.v,
            out,
            lse,
            dlse=self.dlse,
            backend=backend,
            **self.packed,
            **self.options,
        )

    def vjp(self, backend: str) -> tuple[tuple[np.ndarray, np.ndarray], Any]:
        """Run it for out, lse and the function of gradients."""
        return numbaflash.attention_vjp(
            self.q, self.k, self.v, backend=backend, return_lse=True, **self.packed, **self.options
        )

    def arrays(self) -> list[np.ndarray]:
        """Every array that goes in."""
        given = [self.q, self.k, self.v, self.dout, self.dlse, *self.options.values(), *self.packed.values()]
        return [array for array in given if isinstance(array, np.ndarray)]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        lines = [f"{name}={_describe(value)}" for name, value in self.options.items()]
        lines += [f"{name}={value.tolist()}" for name, value in self.packed.items()]
        shapes = ", ".join(f"{name}{getattr(self, name).shape}" for name in "qkv")
        return f"Call({shapes} {self.q.dtype}, {', '.join(lines)}, dlse={self.dlse is not None})"


def _describe(value: Any) -> str:
    return f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) and value.size > 8 else repr(value)


# ----------------------------------------------------------------------------------------------------- arrays


def in_memory(values: np.ndarray, form: str, axis: int = 0) -> np.ndarray:
    """The same numbers (for "broadcast": those of index 0 of an axis) lying otherwise, NaN all around."""
    ndim = values.ndim
    if ndim == 0 or values.size == 0:
        return values
    axis %= ndim
    poison = True if values.dtype == np.bool_ else np.nan
    if form == "broadcast":
        first = np.ascontiguousarray(values[(slice(None),) * axis + (slice(1),)])
        return np.broadcast_to(first, values.shape)
    if form == "transposed":
        order = np.roll(np.arange(ndim), axis + 1)
        return np.ascontiguousarray(values.transpose(order)).transpose(np.argsort(order))
    if form == "sliced":
        whole = np.full([2 * size + 3 for size in values.shape], poison, values.dtype)
        view = whole[tuple(slice(2, 2 * size + 2, 2) for size in values.shape)]
    elif form == "negative":
        whole = np.full(values.shape, poison, values.dtype)
        view = whole[(slice(None),) * axis + (slice(None, None, -1),)]
    else:
        lead = 1 if form == "offset" else 16
        whole = np.full(values.size + lead + 16, poison, values.dtype)
        view = whole[lead : lead + values.size].reshape(values.shape)
    view[...] = values
    return view


@st.composite
def memory(draw: st.DrawFn, axes: int = 4) -> functools.partial:
    """How an array lies in memory; only the first ``axes`` may be broadcast or reversed."""
    form = draw(st.sampled_from(MEMORY))
    return functools.partial(in_memory, form=form, axis=draw(st.integers(0, axes - 1)))


# ------------------------------------------------------------------------------------------------------ calls


def sizes(largest: int) -> st.SearchStrategy[int]:
    """A number of rows or keys: none, few, many, and around the edges of tiles."""
    edges = [n for t in (16, 32, 48, 64, 96, 128, 192, 256) for n in (t - 1, t, t + 1) if n <= largest]
    choices = [st.integers(0, min(5, largest)), st.integers(1, largest), st.sampled_from(edges or [1])]
    return st.one_of(choices)


def head_dims(dims: tuple[int, ...] = ()) -> st.SearchStrategy[int]:
    """D or Dv: those of a backend, or what models use, odd ones, 0 and beyond 256."""
    if dims:
        return st.sampled_from(dims)
    usual = st.sampled_from([16, 32, 64, 80, 96, 128, 256])
    return st.one_of(usual, usual, st.integers(1, 80), st.integers(1, 256), st.sampled_from([0, 257, 300]))


@st.composite
def calls(
    draw: st.DrawFn,
    backend,
    *,
    variant: Variant | None = None,
    packed: bool | None = None,
    options: frozenset[str] | None = None,
) -> Call:
    """A whole call that fits a backend.

    ``options`` narrows the run-time options to draw from (causal, window, q_offset, scale, sinks, lengths);
    None means all.
    """
    variant = draw(variants) if variant is None else variant
    packed = draw(st.booleans()) if packed is None else packed
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dim = draw(head_dims(backend.dims))
    value_dim = dim if draw(st.booleans()) else draw(head_dims(backend.dims))
    budget = backend.work // (dim + value_dim + 1)
    largest = min(backend.rows, math.isqrt(budget))
    rows, keys = draw(sizes(largest)), draw(sizes(largest))
    room = max(1, min(12, budget // max(1, rows * keys)))
    ndim = 3 if packed else draw(st.sampled_from([2, 3, 4, 4, 4]))
    kv_heads = 1 if ndim == 2 else draw(st.integers(1, min(3, room)))
    heads = kv_heads * (1 if ndim == 2 else draw(st.integers(1, max(1, min(4, room // kv_heads)))))
    batch = draw(st.integers(1, max(1, room // heads))) if ndim == 4 else 1
    if ndim == 4 and draw(st.integers(0, 40)) == 0:
        batch = 0

    cu = {}
    sequences = batch
    if packed:
        sequences = draw(st.integers(0, 4))
        cu = {
            f"cu_seqlens_{side}": draw(cumulative(sequences, total))
            for side, total in (("q", rows), ("k", keys))
        }
        shapes = [(rows, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim)]
        q_sizes, k_sizes = (np.diff(x).astype(int) for x in cu.values())
        layout = "BHND"
    else:
        shapes = [(batch, heads, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim)]
        layout = draw(st.sampled_from(["BHND", "BNHD"]))
        if layout == "BNHD" and ndim > 2:
            shapes = [(b, n, h, d) for b, h, n, d in shapes]
        shapes = [shape[4 - ndim :] for shape in shapes]
        q_sizes, k_sizes = np.full(sequences, rows), np.full(sequences, keys)

    loud = draw(st.sampled_from([1.0, 1.0, 0.3, 3.0]))
    # Rows that are constant in q and in k at once would round alike in every term of q . k: no fair test.
    axes = (4, ndim - 1, 4)
    q, k, v = (
        draw(memory(axes[i]))((rng.standard_normal(shapes[i]) * (loud, loud, 1.0)[i]).astype(variant.dtype))
        for i in range(3)
    )
    longest = (int(q_sizes.max(initial=0)), int(k_sizes.max(initial=0))) if packed else (rows, keys)
    pairs = (sequences, heads, *longest)
    chosen = draw(run_time_options(sequences, heads, q_sizes, k_sizes, variant, options, rng))
    chosen |= draw(stage_options(pairs, variant, rng))
    if layout != "BHND":
        chosen["layout"] = layout
    if backend.precision != "ieee":
        chosen["precision"] = backend.precision
    if variant.out_dtype is not None:
        chosen["out_dtype"] = variant.out_dtype
    out_shape = shapes[0][:-1] + (value_dim,)
    dout = draw(memory())(rng.standard_normal(out_shape).astype(variant.out_dtype or variant.dtype))
    dlse = None
    if draw(st.booleans()):
        swap = packed or layout == "BNHD"
        rows_shape = (
            out_shape[:-1] if ndim == 2 or not swap else (*out_shape[:-3], out_shape[-2], out_shape[-3])
        )
        dlse = draw(memory())(rng.standard_normal(rows_shape).astype(f64 if variant.dtype == f64 else f32))
    return Call(q, k, v, chosen, cu, dout, dlse)


@st.composite
def cumulative(draw: st.DrawFn, sequences: int, total: int) -> np.ndarray:
    """Offsets of packed sequences: empty ones among them, and perhaps rows past the last."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=sequences, max_size=sequences)))
    if cuts and draw(st.booleans()):
        cuts[-1] = total
    return np.array([0, *cuts], draw(st.sampled_from([np.int32, np.int64])))


@st.composite
def run_time_options(
    draw: st.DrawFn,
    sequences: int,
    heads: int,
    q_sizes,
    k_sizes,
    variant: Variant,
    names: frozenset[str] | None,
    rng,
) -> dict[str, Any]:
    """Options that need no other kernel."""

    def wants(name: str, odds: int = 2) -> bool:
        return (names is None or name in names) and draw(st.integers(0, odds)) == 0

    options: dict[str, Any] = {}
    reach = int(max(q_sizes.max(initial=0), k_sizes.max(initial=0)))
    if wants("causal", 1):
        options["causal"] = True
    if wants("window"):
        side = st.none() | st.integers(0, 3) | st.integers(0, reach)
        options["window"] = (draw(side), draw(side))
    if wants("q_offset"):
        offset = st.integers(-reach - 2, reach + 2)
        options["q_offset"] = draw(offset | st.lists(offset, min_size=sequences, max_size=sequences))
    if wants("scale"):
        options["scale"] = draw(st.sampled_from([0.0, 0.05, -0.1, 0.25]))
    if wants("sinks"):
        options["sinks"] = rng.standard_normal(heads).astype(variant.dtype)
    if wants("lengths"):
        if draw(st.booleans()):
            options["q_lengths"] = _lengths(rng, q_sizes)
        if draw(st.booleans()):
            options["kv_lengths"] = _lengths(rng, k_sizes)
            if "q_lengths" not in options and "q_offset" not in options:
                options["q_offset"] = draw(st.integers(-2, reach))
    return options


def _lengths(rng, longest) -> np.ndarray:
    full = rng.random(len(longest)) < 0.3
    return np.where(full, longest, rng.integers(0, np.asarray(longest) + 1))


@st.composite
def stage_options(draw: st.DrawFn, pairs: tuple[int, ...], variant: Variant, rng) -> dict[str, Any]:
    """Options that a variant is compiled for."""
    options: dict[str, Any] = {}
    if "softcap" in variant.stages:
        options["softcap"] = draw(st.sampled_from([0.5, 5.0, 30.0]))
    if "bias" in variant.stages:
        bias = rng.standard_normal(draw(broadcastable(pairs)))
        if draw(st.booleans()):
            bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
        options["bias"] = draw(memory())(np.asarray(bias).astype(variant.bias_dtype or variant.dtype))
    if "alibi" in variant.stages:
        shape = pairs[1:2] if draw(st.booleans()) else pairs[:2]
        options["alibi_slopes"] = rng.uniform(-0.02, 0.3, shape)
    if "mask" in variant.stages:
        share = draw(st.sampled_from([0.02, 0.5, 0.9]))
        options["mask"] = draw(memory())(np.asarray(rng.random(draw(broadcastable(pairs))) < share))
    if "dropout" in variant.stages:
        options["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 0.9]))
        options["seed"] = draw(st.integers(0, 2**64 - 1))
    return options


@st.composite
def broadcastable(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to the given one."""
    ones = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    drop = draw(st.sampled_from([0, 0, 0, 1, 2, 3, 4]))
    return tuple(1 if one else size for one, size in zip(ones, shape))[drop:]
