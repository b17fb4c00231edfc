"""Shapes of instruction that many opcodes share."""
from __future__ import annotations

import numpy as np

from ..values import DTYPES

SIGNED = ("s16", "s32", "s64")  # the 8-bit types exist for memory and cvt only
UNSIGNED = ("u16", "u32", "u64")
BITWISE = ("b16", "b32", "b64")
INTEGERS = SIGNED + UNSIGNED
PAIRS = ("s16x2", "u16x2")


def with_arrays(d, sources):
    """At least one operand is an array, so that results are arrays too."""
    if not any(isinstance(s, np.ndarray) for s in sources):
        sources = [np.full(d.machine.lanes, sources[0]), *sources[1:]]
    return sources


def ufunc(d, instruction, function, dtype=None):
    """``d = function(a, b, ...)`` where ``function`` is a NumPy ufunc of the instruction's type."""
    dtype = dtype or DTYPES[instruction.parts[-1]]
    out = d.target(instruction.operands[0], dtype)
    sources = [d.source(operand, dtype) for operand in instruction.operands[1:]]
    if len(sources) == 1:
        a, = sources
        return lambda active: function(a, out=out, where=active.where)
    a, b = sources
    return lambda active: function(a, b, out=out, where=active.where)


def on_halves(d, instruction, function):
    """``d = function(a, b)`` of each half of a pair of 16-bit integers."""
    kind, lanes = np.dtype({"s": "i2", "u": "u2"}[instruction.parts[-1][0]]), d.machine.lanes
    out = d.target(instruction.operands[0], np.dtype("u4"))
    sources = [d.source(operand, "u4") for operand in instruction.operands[1:]]

    def step(active):
        halves = (np.ascontiguousarray(np.broadcast_to(source, lanes)).view(kind) for source in sources)
        np.copyto(out, function(*halves).view("u4"), where=active.where)
    return step


def computed(d, instruction, function, dtype, source_types=None):
    """``d = function(a, b, ...)`` for a Python function of arrays that returns a new array."""
    out = d.target(instruction.operands[0], dtype)
    operands = instruction.operands[1:]
    source_types = source_types or [dtype] * len(operands)
    sources = with_arrays(d, [d.source(o, t) for o, t in zip(operands, source_types)])

    def step(active):
        np.copyto(out, function(*sources), where=active.where, casting="unsafe")
    return step
