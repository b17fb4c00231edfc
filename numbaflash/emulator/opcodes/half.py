"""Half precision: f16, bf16 and their pairs, computed exactly and rounded once."""
from __future__ import annotations

import numpy as np

from .. import rounding
from ..registry import opcode
from ..values import DTYPES
from .convert import sticky
from .titles import HALF

HALVES = ("f16", "bf16", "f16x2", "bf16x2")


def decoded(bits, kind):
    """16-bit patterns as float32."""
    return bits.view("f2").astype("f4") if kind.startswith("f16") else rounding.from_bfloat16(bits)


def encoded(x, kind):
    """float32 or float64 (to be rounded once) as 16-bit patterns."""
    if kind.startswith("bf16"):
        return rounding.bfloat16(sticky(x) if x.dtype == np.float64 else x)
    half = x.astype("f2")
    rounding.settle(half, True)
    return half.view("u2")


def elementwise(d, i, function):
    """``d = function(a, b, ...)`` on each half, computed in float64."""
    kind = i.parts[-1]
    pair = kind.endswith("x2")
    size = 4 if pair else 2
    out = d.target(i.operands[0], np.dtype(f"u{size}"))
    sources = [d.source(o, f"u{size}") for o in i.operands[1:]]
    lanes = d.machine.lanes
    ftz, saturate, relu = "ftz" in i.parts, "sat" in i.parts, "relu" in i.parts

    def step(active):
        values = []
        for source in sources:
            full = np.ascontiguousarray(np.broadcast_to(source, lanes)).view("u2")
            x = decoded(full, kind)
            if ftz and kind.startswith("f16"):
                x = np.where(np.abs(x) < np.float32(2.0**-14), np.copysign(np.float32(0), x), x)
            values.append(x.astype("f8"))
        result = function(*values)
        if saturate:
            result = np.where(result > 0, np.minimum(result, 1.0), 0.0)
        if relu:
            result = np.where(np.isnan(result) | (result > 0), result, 0.0)
        bits = encoded(result, kind)
        if ftz and kind.startswith("f16"):
            small = (bits & np.uint16(0x7C00)) == 0
            bits = np.where(small, bits & np.uint16(0x8000), bits)
        np.copyto(out, bits.view(f"u{size}"), where=active.where)
    return step


def odd_fma(a, b, c):
    """a * b + c rounded to odd in float64: 11-bit factors have an exact product."""
    s, e = rounding.two_sum(a * b, c)
    finite = np.isfinite(s)
    return np.where(finite & (s != 0), rounding._to_odd(s, np.where(finite, e, 0.0)), s)


ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": odd_fma}


@opcode(*ARITHMETIC, section=HALF + "add, sub, mul, fma", group="float", types=HALVES)
def arithmetic(d, i):
    """d = a + b, a - b, a * b or a * b + c; .relu clamps below at 0, .sat to [0, 1]."""
    function = ARITHMETIC[i.parts[0]]
    if i.parts[0] in ("add", "sub") and i.parts[-1].startswith("bf16"):
        sign = 1.0 if i.parts[0] == "add" else -1.0
        return elementwise(d, i, lambda a, b: odd_fma(b, np.full_like(a, sign), a))
    return elementwise(d, i, function)


@opcode("neg", "abs", section=HALF + "neg, abs", group="float", types=HALVES)
def sign(d, i):
    """d = -a or |a|: the sign bit flips or goes, NaN stays a NaN; .ftz flushes subnormal halves."""
    size = 4 if i.parts[-1].endswith("x2") else 2
    mask = np.array(0x80008000 & (1 << 8 * size) - 1, f"u{size}")[()]
    out = d.target(i.operands[0], np.dtype(f"u{size}"))
    a = d.source(i.operands[1], f"u{size}")
    if "ftz" in i.parts:
        def flushing(active):
            halves = np.ascontiguousarray(np.broadcast_to(a, d.machine.lanes)).view("u2")
            kept = np.where(halves & np.uint16(0x7C00), halves, halves & np.uint16(0x8000)).view(f"u{size}")
            np.copyto(out, kept ^ mask if i.parts[0] == "neg" else kept & ~mask, where=active.where)
        return flushing
    if i.parts[0] == "neg":
        return lambda active: np.bitwise_xor(a, mask, out=out, where=active.where)
    return lambda active: np.bitwise_and(a, ~mask, out=out, where=active.where)


def extremum(function, wins):
    def choose(a, b):
        picked = function(a, b)
        equal = (a == b) & (np.signbit(a) != np.signbit(b))
        zero = -0.0 if function is np.fmin else 0.0
        picked = np.where(equal, zero, picked)
        return np.where(np.isnan(a) | np.isnan(b), np.nan, picked) if wins else picked
    return choose


@opcode("min", "max", section=HALF + "min, max", group="float", types=HALVES)
def minmax(d, i):
    """d = the smaller or larger of a and b; a NaN loses, with .NaN it wins; .xorsign.abs: of |a| and |b|."""
    choose = extremum(np.fmin if i.parts[0] == "min" else np.fmax, "NaN" in i.parts)
    if "xorsign" in i.parts:
        return elementwise(d, i, lambda a, b: signed(choose(np.abs(a), np.abs(b)), a, b))
    return elementwise(d, i, choose)


def signed(x, a, b):
    """.xorsign: x is negative where one of a and b is."""
    return np.where(np.signbit(a) != np.signbit(b), -x, x)


@opcode("tanh", "ex2", section=HALF + "tanh, ex2", group="special function", types=HALVES)
def transcendental(d, i):
    """d = tanh(a) or 2^a, approximately."""
    return elementwise(d, i, np.tanh if i.parts[0] == "tanh" else np.exp2)


assert set(HALVES) <= set(DTYPES)
