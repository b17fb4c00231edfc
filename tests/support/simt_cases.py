"""Calls that between them reach every line of the SIMT kernels, small enough for the emulator."""

from inspect import isfunction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

bfloat16 = np.dtype(ml_dtypes.bfloat16)


class Case(NamedTuple):
    """Arrays and options of one call.

    Attributes
    ----------
    shape : tuple of int
        batch, heads, heads of k, queries, keys, D, Dv.
    options : dict
        A function is given a random generator and the shape.
    strided : bool
        Every second column of a wider array: no 16-byte accesses.
    """

    shape: tuple[int, ...]
    dtype: Any = np.float32
    options: dict[str, Any] = {}
    strided: bool = False

    def make(self, seed: int = 0) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
        """q, k, v and the options."""
        rng = np.random.default_rng(seed)
        batch, heads, kv_heads, n, m, d, dv = self.shape
        arrays = []
        for shape in ((batch, heads, n, d), (batch, kv_heads, m, d), (batch, kv_heads, m, dv)):
            if self.strided:
                arrays.append(rng.standard_normal((*shape[:3], 2 * shape[3])).astype(self.dtype)[..., ::2])
            else:
                arrays.append(rng.standard_normal(shape).astype(self.dtype))
        options = {
            name: value(rng,
                        self.shape) if isfunction(value) else value for name, value in self.options.items()
        }
        return tuple(arrays), options


def bias(*broadcast: bool):
    """A bias with the given axes broadcast, and some pairs hidden by it."""
    def make(rng, shape):
        batch, heads, _, n, m, _, _ = shape
        sizes = [1 if one else size for one, size in zip(broadcast, (batch, heads, n, m))]
        values = rng.standard_normal(sizes).astype(np.float32)
        if values.size > 10:
            values[rng.random(sizes) < 0.1] = -np.inf
        return values
    return make


def mask(rng, shape):
    """Visible pairs, with one row that sees nothing."""
    visible = rng.random((shape[3], shape[4])) < 0.7
    visible[shape[3] // 2] = False
    return visible


def slopes(rng, shape):
    return rng.random(shape[1])


def sinks(rng, shape):
    return rng.standard_normal(shape[1]).astype(np.float32)


EVERYTHING = {
    "causal": True, "softcap": 2.0, "bias": bias(False, True, False,
                                                 False), "mask": mask, "alibi_slopes": slopes,
    "dropout_p": 0.3, "seed": 11, "sinks": sinks,
}

CASES = {
    "plain": Case((1, 2, 2, 70, 130, 64, 64)),
    "causal": Case((1, 1, 1, 100, 100, 64, 64), options={"causal": True}),
    "more_queries_than_keys": Case((1, 1, 1, 90, 40, 64, 64), options={"causal": True}),
    "window": Case((1, 1, 1, 140, 140, 64, 64), options={"window": (20, 5), "sinks": sinks}),
    "grouped": Case((2, 4, 2, 40, 70, 64, 64), options={"causal": True, "q_offset": 3}),
    "lengths": Case((3, 1, 1, 70, 80, 64, 64),
                    options={"q_lengths": [70, 0, 5], "kv_lengths": [80, 3, 0], "causal": True}),
    "everything": Case((2, 4, 2, 70, 90, 48, 20), options=EVERYTHING),
    "everything_strided": Case((2, 2, 1, 40, 50, 9, 5), options=EVERYTHING, strided=True),
    "negative_scale": Case((1, 1, 1, 40, 70, 64, 64), options={"scale": -0.2, "causal": True}),
    "zero_scale": Case((1, 1, 1, 40, 70, 64, 64), options={"scale": 0.0, "causal": True}),
    "one_number": Case((1, 1, 1, 1, 1, 1, 1)),
    "no_head_dim": Case((1, 1, 1, 20, 30, 0, 8)),
    "no_value_dim": Case((1, 1, 1, 20, 30, 8, 0)),
    "wide_value": Case((1, 1, 1, 20, 30, 24, 100)),
    "dim_128": Case((1, 1, 1, 70, 50, 128, 128), options={"causal": True}),
    "dim_256": Case((1, 1, 1, 40, 40, 256, 200)),
    "past_256": Case((1, 2, 1, 40, 45, 300, 270), options={"causal": True}),
    "float64": Case((1, 2, 2, 40, 70, 64, 64), np.float64, {"causal": True}),
    "float64_everything": Case((1, 2, 1, 40, 50, 33, 20), np.float64, EVERYTHING),
    "float64_dim_128": Case((1, 1, 1, 35, 35, 128, 128), np.float64),
    "float16": Case((1, 1, 1, 70, 70, 64, 64), np.float16, {"causal": True}),
    "bfloat16": Case((1, 1, 1, 70, 70, 64, 64), bfloat16, {"causal": True}),
    "bfloat16_strided": Case((1, 1, 1, 40, 40, 20, 20), bfloat16, strided=True),
    "float16_to_float32": Case((1, 1, 1, 40, 40, 64, 64), np.float16, {"out_dtype": np.float32}),
    "float32_to_float64": Case((1, 1, 1, 40, 40, 64, 64), np.float32, {"out_dtype": np.float64}),
    "float64_to_bfloat16": Case((1, 1, 1, 40, 40, 64, 64), np.float64, {"out_dtype": bfloat16}),
}

FEW_VARIANTS = ("plain", "lengths", "window", "grouped", "everything", "past_256", "bfloat16")
"""Cases of the default run: compiling, not computing, is what takes the time.  The contract tests have float64."""


def cases() -> list:
    """Names for parametrize; those outside `FEW_VARIANTS` are exhaustive."""
    return [
        pytest.param(name, marks=() if name in FEW_VARIANTS else pytest.mark.exhaustive) for name in CASES
    ]
