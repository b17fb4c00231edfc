"""Floating point arithmetic in f32 and f64 (PTX ISA, Floating-Point Instructions)."""
from __future__ import annotations

import numpy as np

from .. import rounding
from ..registry import opcode
from ..values import DTYPES
from .common import with_arrays
from .titles import FLOAT

FLOATS = ("f32", "f64")
DIRECTED = ("rz", "rm", "rp")


def arithmetic(d, i, function, exact=None, settled=False):
    """``d = function(sources)`` with .ftz, .sat and canonical NaN; ``exact``: the formula for rz, rm and rp.

    ``settled``: the function does .ftz and canonical NaN by itself.
    """
    dtype = DTYPES[i.parts[-1]]
    out = d.target(i.operands[0], dtype)
    sources = with_arrays(d, [d.source(o, dtype) for o in i.operands[1:]])
    ftz, saturate = "ftz" in i.parts and dtype == np.float32, "sat" in i.parts
    mode = next((m for m in DIRECTED if m in i.parts), None)
    if mode is not None and exact is not None:
        settled = False

        def function(*values):
            return rounding.exactly(exact, values, dtype, mode)
    suspects = [(n, d.subnormals.doubt(o)) for n, o in enumerate(i.operands[1:])] if ftz else []
    suspects = [(n, doubt) for n, doubt in suspects if doubt is not None]
    settle, flushed = rounding.settle, rounding.flushed

    def step(active):
        values = sources
        for n, doubt in suspects:
            if doubt.raised:
                values = list(values)
                values[n] = flushed(values[n])
        result = function(*values)
        if not settled:
            settle(result, True, ftz)
        if saturate:
            result = np.where(result > 0, np.minimum(result, dtype.type(1)), dtype.type(0))
        np.copyto(out, result, where=active.where)
    return step


@opcode("add", section=FLOAT + "add", group="float", types=FLOATS)
def add(d, i):
    """d = a + b."""
    return arithmetic(d, i, np.add, rounding.add)


@opcode("sub", section=FLOAT + "sub", group="float", types=FLOATS)
def sub(d, i):
    """d = a - b."""
    return arithmetic(d, i, np.subtract, rounding.sub)


@opcode("mul", section=FLOAT + "mul", group="float", types=FLOATS)
def mul(d, i):
    """d = a * b."""
    return arithmetic(d, i, np.multiply, rounding.mul)


@opcode("fma", "mad", section=FLOAT + "fma, mad", group="float", types=FLOATS)
def fma(d, i):
    """d = a * b + c with one rounding."""
    if i.parts[-1] == "f64":
        return arithmetic(d, i, rounding.fma_f64, rounding.fma)
    ftz = "ftz" in i.parts
    return arithmetic(d, i, lambda a, b, c: rounding.fma_f32(a, b, c, ftz), rounding.fma, settled=True)


@opcode("div", section=FLOAT + "div", group="float", types=FLOATS)
def div(d, i):
    """d = a / b; .approx is a * (1 / b), which is 0 where 2^126 < |b| < 2^128 (NaN for infinite a)."""
    if "approx" not in i.parts:
        return arithmetic(d, i, np.divide, rounding.div)

    def approximate(a, b):
        result = np.divide(a, b)
        magnitude = np.abs(b)
        large = (magnitude > np.float32(2.0**126)) & (magnitude < np.float32(np.inf))
        if np.any(large):
            replacement = np.where(np.isinf(a), np.float32(np.nan), np.copysign(np.float32(0), result))
            result = np.where(large & ~np.isnan(a), replacement, result)
        return result

    return arithmetic(d, i, approximate)


@opcode("abs", section=FLOAT + "abs", group="float", types=FLOATS)
def absolute(d, i):
    """d = |a|."""
    return arithmetic(d, i, np.abs)


@opcode("neg", section=FLOAT + "neg", group="float", types=FLOATS)
def negate(d, i):
    """d = -a."""
    return arithmetic(d, i, np.negative)


def extremum(d, i, function, zeros):
    """Min and max: a NaN loses against a number (.NaN: it wins), and -0 is less than +0."""
    wins, flip = "NaN" in i.parts, "xorsign" in i.parts
    unsigned = np.dtype(f"u{DTYPES[i.parts[-1]].itemsize}")

    def choose(*values):
        arrays = np.broadcast_arrays(*values)
        signs = [
            a.view(unsigned) if a.flags.c_contiguous else np.ascontiguousarray(a).view(unsigned)
            for a in arrays
        ]
        if flip:
            values = [np.abs(v) for v in values]
        result = values[0]
        for other in values[1:]:
            picked = function(result, other)
            equal = result == other
            if equal.any():
                both = zeros(np.ascontiguousarray(np.broadcast_to(result, picked.shape)).view(unsigned),
                             np.ascontiguousarray(np.broadcast_to(other, picked.shape)).view(unsigned))
                picked = np.where(equal, both.view(picked.dtype), picked)
            if wins:
                picked = np.where(np.isnan(result) | np.isnan(other), picked.dtype.type(np.nan), picked)
            result = picked
        if flip:
            top = unsigned.type(1 << (8 * unsigned.itemsize - 1))
            result = (result.view(unsigned) | ((signs[0] ^ signs[1]) & top)).view(result.dtype)
        return result

    return arithmetic(d, i, choose)


@opcode("min", section=FLOAT + "min", group="float", types=FLOATS)
def minimum(d, i):
    """d = the smaller of a and b."""
    return extremum(d, i, np.fmin, np.bitwise_or)


@opcode("max", section=FLOAT + "max", group="float", types=FLOATS)
def maximum(d, i):
    """d = the larger of a and b."""
    return extremum(d, i, np.fmax, np.bitwise_and)


def in_double(function):
    """A float32 function computed in float64 and rounded: within every error bound of the .approx forms."""
    def compute(a):
        return function(a.astype(np.float64)).astype(a.dtype)
    return compute


def upper_half(function):
    """The .approx.ftz.f64 forms: only the upper 32 bits of operand and result count."""
    mask = np.uint64(0xFFFFFFFF00000000)

    def compute(a):
        top = (np.ascontiguousarray(a).view("u8") & mask).view("f8")
        top = np.where(np.abs(top) < rounding.TINY[np.dtype("f8")], np.copysign(0.0, top), top)
        result = function(top)
        result = np.where(np.abs(result) < rounding.TINY[np.dtype("f8")], np.copysign(0.0, result), result)
        return (result.view("u8") & mask).view("f8")
    return compute


@opcode("rcp", section=FLOAT + "rcp, rcp.approx.ftz.f64", group="special function", types=FLOATS)
def rcp(d, i):
    """d = 1 / a."""
    if i.parts[-1] == "f64" and "approx" in i.parts:
        return arithmetic(d, i, upper_half(np.reciprocal))
    return arithmetic(d, i, np.reciprocal, reciprocal)


def reciprocal(a):
    return 1 / a


@opcode("sqrt", section=FLOAT + "sqrt", group="special function", types=FLOATS)
def sqrt(d, i):
    """d = sqrt(a); directed roundings move to the neighbour on the right side of the exact root."""
    mode = next((m for m in DIRECTED if m in i.parts), None)
    return arithmetic(d, i, np.sqrt if mode is None else lambda a: directed_sqrt(a, mode))


def directed_sqrt(a, mode):
    from fractions import Fraction
    root = np.sqrt(a)
    for n, (value, near) in enumerate(zip(a.tolist(), root.tolist())):
        if value > 0 and near != np.inf and near == near:
            excess = Fraction(near) ** 2 - Fraction(value)
            if excess > 0 and mode in ("rz", "rm"):
                root[n] = np.nextafter(root[n], root.dtype.type(0))
            elif excess < 0 and mode == "rp":
                root[n] = np.nextafter(root[n], root.dtype.type(np.inf))
    return root


@opcode("rsqrt", section=FLOAT + "rsqrt, rsqrt.approx.ftz.f64", group="special function", types=FLOATS)
def rsqrt(d, i):
    """d = 1 / sqrt(a)."""
    if i.parts[-1] == "f64":
        function = upper_half(lambda a: 1 / np.sqrt(a)) if "ftz" in i.parts else lambda a: 1 / np.sqrt(a)
        return arithmetic(d, i, function)
    return arithmetic(d, i, in_double(lambda a: 1 / np.sqrt(a)))


FUNCTIONS = {"sin": (FLOAT + "sin", np.sin), "cos": (FLOAT + "cos", np.cos), "lg2": (FLOAT + "lg2", np.log2),
             "ex2": (FLOAT + "ex2", np.exp2), "tanh": (FLOAT + "tanh", np.tanh)}


@opcode(*FUNCTIONS, section=FLOAT + "sin, cos, lg2, ex2, tanh", group="special function", types=("f32",))
def transcendental(d, i):
    """d = sin(a), cos(a), log2(a), 2^a or tanh(a), approximately."""
    return arithmetic(d, i, in_double(FUNCTIONS[i.parts[0]][1]))


@opcode("copysign", section=FLOAT + "copysign", group="float", types=FLOATS)
def copysign(d, i):
    """d = b with the sign of a."""
    dtype = DTYPES[i.parts[-1]]
    out = d.target(i.operands[0], dtype)
    a, b = (d.source(o, dtype) for o in i.operands[1:])
    return lambda active: np.copysign(b, a, out=out, where=active.where)


PROPERTIES = {
    "finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan, "number": lambda a: ~np.isnan(a),
    "normal": lambda a: np.isfinite(a) & (np.abs(a) >= rounding.TINY[a.dtype]),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < rounding.TINY[a.dtype]),
}


@opcode("testp", section=FLOAT + "testp", group="compare")
def testp(d, i):
    """p = a has the property: finite, infinite, number, notanumber, normal or subnormal."""
    test = PROPERTIES[i.parts[1]]
    out = d.target(i.operands[0], np.dtype(bool))
    a, = with_arrays(d, [d.source(i.operands[1], DTYPES[i.parts[-1]])])
    return lambda active: np.copyto(out, test(a), where=active.where)
