"""Comparison and selection (PTX ISA, Comparison and Selection Instructions, Half Precision
Comparison Instructions)."""
from __future__ import annotations

import numpy as np

from .. import rounding
from ..registry import opcode
from ..values import DTYPES, type_names
from .common import with_arrays
from .titles import COMPARE

ORDERED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal
}
UNORDERED = {
    "equ": np.not_equal, "neu": np.equal, "ltu": np.greater_equal, "leu": np.greater, "gtu": np.less_equal,
    "geu": np.less
}
BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name, is_float):
    """``compare(a, b)``; comparisons with NaN are false, those ending in u are true (Floating Point
    Comparisons)."""
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name in UNORDERED:
        opposite = UNORDERED[name]
        if name == "equ":
            return lambda a, b: np.equal(a, b) | np.isnan(a) | np.isnan(b)
        if name == "neu":
            return np.not_equal
        return lambda a, b: ~opposite(a, b)
    if name == "ne" and is_float:
        return lambda a, b: np.not_equal(a, b) & ~(np.isnan(a) | np.isnan(b))
    return ORDERED[name]


def compared(d, i, name, kind, operands):
    """``flags()`` of ``a name b`` for type ``kind``."""
    if kind == "bf16":
        a, b = (d.source(o, "u2") for o in operands)
        compare = comparison(name, True)
        return lambda: compare(rounding.from_bfloat16(a), rounding.from_bfloat16(b))
    dtype = DTYPES[kind]
    a, b = with_arrays(d, [d.source(o, dtype) for o in operands])
    compare = comparison(name, dtype.kind == "f")
    if "ftz" in i.parts and dtype == np.float32:
        return lambda: compare(rounding.flushed(a), rounding.flushed(b))
    if "ftz" in i.parts and dtype == np.float16:
        tiny = rounding.TINY[dtype]
        return lambda: compare(*(np.where(np.abs(x) < tiny, dtype.type(0), x) for x in (a, b)))
    return lambda: compare(a, b)


def compared_pairs(d, i, name, kind, operands):
    """``flags()`` of the lower and of the upper halves."""
    compare, lanes = comparison(name, True), d.machine.lanes
    sources = [d.source(o, "u4") for o in operands]

    def values():
        for source in sources:
            halves = np.ascontiguousarray(np.broadcast_to(source, lanes)).view("u2")
            if kind == "bf16x2":
                yield rounding.from_bfloat16(halves)
            else:
                x = halves.view("f2")
                tiny = rounding.TINY[x.dtype]
                yield np.where(np.abs(x) < tiny, x.dtype.type(0), x) if "ftz" in i.parts else x

    def flags():
        both = compare(*values()).reshape(lanes, 2)
        return both[:, 0], both[:, 1]
    return flags


@opcode("setp", section=COMPARE + "setp", group="compare")
def setp(d, i):
    """p = (a CmpOp b) BoolOp c; q = !(a CmpOp b) BoolOp c, or of pairs: p of the lower halves, q of the
    upper."""
    name, kind = i.parts[1], type_names(i)[-1]
    boolean = next((BOOLEAN[p] for p in i.parts[2:] if p in BOOLEAN), None)
    pair = i.operands[0].split("|")
    halves = kind in ("f16x2", "bf16x2")
    if halves and len(pair) != 2:
        raise ValueError(f"{kind} needs two predicates")
    p = d.target(pair[0], np.dtype(bool))
    q = d.target(pair[1], np.dtype(bool)) if len(pair) > 1 else None
    if not halves and q is None and boolean is None and kind not in ("bf16",) and "ftz" not in i.parts:
        dtype = DTYPES[kind]
        compare = comparison(name, dtype.kind == "f")
        a, b = (d.source(o, dtype) for o in i.operands[1:3])
        if isinstance(compare, np.ufunc):
            return lambda active: compare(a, b, out=p, where=active.where)
    flags = (compared_pairs if halves else compared)(d, i, name, kind, i.operands[1:3])
    c = None
    if boolean is not None:
        text = i.operands[3]
        c = d.source(text.lstrip("!"), bool)
        inverted = text.startswith("!")

    def step(active):
        first = flags()
        first, second = first if halves else (first, ~first)
        if boolean is not None:
            other = ~c if inverted else c
            first, second = boolean(first, other), boolean(second, other)
        np.copyto(p, first, where=active.where)
        if q is not None:
            np.copyto(q, second, where=active.where)
    return step


@opcode("set", section=COMPARE + "set", group="compare")
def set_(d, i):
    """d = (a CmpOp b) BoolOp c as 0xFFFFFFFF or 1.0f, else 0."""
    to, kind = type_names(i)[-2:]
    boolean = next((BOOLEAN[p] for p in i.parts[2:] if p in BOOLEAN), None)
    out = d.target(i.operands[0], DTYPES[to])
    flags = compared(d, i, i.parts[1], kind, i.operands[1:3])
    c = d.source(i.operands[3].lstrip("!"), bool) if boolean is not None else None
    inverted = boolean is not None and i.operands[3].startswith("!")
    true = np.float32(1) if to == "f32" else np.array(-1, "i4").astype(DTYPES[to])

    def step(active):
        value = flags()
        if boolean is not None:
            value = boolean(value, ~c if inverted else c)
        np.copyto(out, np.where(value, true, DTYPES[to].type(0)), where=active.where)
    return step


@opcode("selp", section=COMPARE + "selp", group="select")
def selp(d, i):
    """d = c ? a : b."""
    dtype = DTYPES[i.parts[-1]]
    out = d.target(i.operands[0], dtype)
    a, b = (d.source(o, dtype) for o in i.operands[1:3])
    c = d.source(i.operands[3], bool)
    return lambda active: np.copyto(out, np.where(c, a, b), where=active.where)


@opcode("slct", section=COMPARE + "slct", group="select")
def slct(d, i):
    """d = c >= 0 ? a : b; -0 counts as 0 and NaN selects b."""
    to, kind = type_names(i)[-2:]
    out = d.target(i.operands[0], DTYPES[to])
    a, b = (d.source(o, DTYPES[to]) for o in i.operands[1:3])
    c = d.source(i.operands[3], DTYPES[kind])

    def step(active):
        key = rounding.flushed(c) if "ftz" in i.parts else c
        np.copyto(out, np.where(key >= 0, a, b), where=active.where)
    return step
