"""Integer arithmetic and extended precision with the carry bit."""
from __future__ import annotations

import numpy as np

from ..registry import opcode
from ..values import DTYPES
from .common import INTEGERS, PAIRS, SIGNED, computed, on_halves, ufunc, with_arrays
from .titles import EXTENDED, INTEGER


@opcode("add", section=INTEGER + "add", group="integer", types=INTEGERS)
def add(d, i):
    """d = a + b; add.sat.s32 clamps to the range of s32."""
    if "sat" in i.parts:
        return computed(d, i, lambda a, b: np.clip(a.astype("i8") + b, -2**31, 2**31 - 1), DTYPES["s32"])
    return ufunc(d, i, np.add)


EXTREMA = {"min": np.minimum, "max": np.maximum}


@opcode("add", "min", "max", section=INTEGER + "add, min, max", group="integer", types=PAIRS)
def pairs(d, i):
    """d = a + b, or the smaller or larger, in each half; .relu clamps below at 0."""
    function = EXTREMA.get(i.parts[0], np.add)
    if "relu" in i.parts:
        return on_halves(d, i, lambda a, b: np.maximum(function(a, b), a.dtype.type(0)))
    return on_halves(d, i, function)


@opcode("sub", section=INTEGER + "sub", group="integer", types=INTEGERS)
def sub(d, i):
    """d = a - b; sub.sat.s32 clamps to the range of s32."""
    if "sat" in i.parts:
        return computed(d, i, lambda a, b: np.clip(a.astype("i8") - b, -2**31, 2**31 - 1), DTYPES["s32"])
    return ufunc(d, i, np.subtract)


def wide_type(dtype):
    return np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")


def multiply_high(a, b, dtype):
    """The upper half of the product; 64-bit factors go through four 32-bit ones."""
    if dtype.itemsize < 8:
        wide = wide_type(dtype)
        product = np.multiply(a, b, dtype=wide)
        return (product >> wide.type(8 * dtype.itemsize)).astype(dtype)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = np.asarray(a).view("u8"), np.asarray(b).view("u8")
    xl, xh, yl, yh = x & low, x >> half, y & low, y >> half
    ll, lh, hl, hh = xl * yl, xl * yh, xh * yl, xh * yh
    middle = (ll >> half) + (lh & low) + (hl & low)
    high = hh + (lh >> half) + (hl >> half) + (middle >> half)
    if dtype.kind == "i":
        zero = np.uint64(0)
        high = high - np.where(x >> np.uint64(63), y, zero) - np.where(y >> np.uint64(63), x, zero)
    return high.view(dtype)


@opcode("mul", section=INTEGER + "mul", group="integer", types=INTEGERS)
def mul(d, i):
    """t = a * b; d = t (.wide), its upper half (.hi) or its lower half (.lo)."""
    dtype = DTYPES[i.parts[-1]]
    if "wide" in i.parts:
        wide = wide_type(dtype)
        out = d.target(i.operands[0], wide)
        a, b = (d.source(o, dtype) for o in i.operands[1:])
        return lambda active: np.multiply(a, b, out=out, where=active.where, dtype=wide)
    if "hi" in i.parts:
        return computed(d, i, lambda a, b: multiply_high(a, b, dtype), dtype)
    return ufunc(d, i, np.multiply)


@opcode("mad", section=INTEGER + "mad", group="integer", types=INTEGERS)
def mad(d, i):
    """t = a * b; d = t + c (.wide), hi(t) + c (.hi) or lo(t) + c (.lo); mad.cc sets the carry (see
    Extended-Precision Arithmetic Instructions: mad.cc)."""
    dtype = DTYPES[i.parts[-1]]
    if "cc" in i.parts:
        return madc(d, i)
    if "wide" in i.parts:
        wide = wide_type(dtype)
        return computed(d, i, lambda a, b, c: np.multiply(a, b, dtype=wide) + c, wide, [dtype, dtype, wide])
    if "hi" in i.parts:
        if "sat" in i.parts:
            return computed(
                d, i, lambda a, b, c: np.clip(multiply_high(a, b, dtype).astype("i8") + c, -2**31, 2**31 - 1),
                dtype)
        return computed(d, i, lambda a, b, c: multiply_high(a, b, dtype) + c, dtype)
    return computed(d, i, lambda a, b, c: a * b + c, dtype)


@opcode("mul24", "mad24", section=INTEGER + "mul24, mad24", group="integer", types=("u32", "s32"))
def mul24(d, i):
    """t = product of the low 24 bits; d = bits 47..16 (.hi) or 31..0 (.lo), plus c for mad24;
    mad24.hi.sat.s32 clamps to the range of s32."""
    dtype = DTYPES[i.parts[-1]]
    shift = np.int64(16 if "hi" in i.parts else 0)

    def low24(x):
        x = np.asarray(x).astype("i8")
        return (x << 40) >> 40 if dtype.kind == "i" else x & 0xFFFFFF

    def multiply_add(a, b, c=0):
        total = ((low24(a) * low24(b)) >> shift) + c
        return np.clip(total, -2**31, 2**31 - 1) if "sat" in i.parts else total

    return computed(d, i, multiply_add, dtype)


@opcode("sad", section=INTEGER + "sad", group="integer", types=INTEGERS)
def sad(d, i):
    """d = c + (a < b ? b - a : a - b)."""
    return computed(d, i, lambda a, b, c: c + np.where(a < b, b - a, a - b), DTYPES[i.parts[-1]])


@opcode("div", section=INTEGER + "div", group="integer", types=INTEGERS)
def div(d, i):
    """d = a / b, rounded toward zero. Division by zero is machine-specific: all ones, as NVIDIA's code
    gives."""
    dtype = DTYPES[i.parts[-1]]

    def divide(a, b):
        zero = b == 0
        safe = np.where(zero, dtype.type(1), b)
        quotient = np.floor_divide(a, safe)
        if dtype.kind == "i":
            quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0))).astype(dtype)
        return np.where(zero, dtype.type(-1) if dtype.kind == "i" else np.iinfo(dtype).max, quotient)

    return computed(d, i, divide, dtype)


@opcode("rem", section=INTEGER + "rem", group="integer", types=INTEGERS)
def rem(d, i):
    """d = a % b with the sign of a. By zero it is machine-specific: a."""
    dtype = DTYPES[i.parts[-1]]

    def remainder(a, b):
        zero = b == 0
        overflow = (b == -1) if dtype.kind == "i" else False
        safe = np.where(zero | overflow, dtype.type(1), b)
        return np.where(zero, a, np.fmod(a, safe))

    return computed(d, i, remainder, dtype)


@opcode("abs", section=INTEGER + "abs", group="integer", types=SIGNED)
def absolute(d, i):
    """d = |a|."""
    return ufunc(d, i, np.abs)


@opcode("neg", section=INTEGER + "neg", group="integer", types=SIGNED)
def negate(d, i):
    """d = -a."""
    return ufunc(d, i, np.negative)


@opcode("min", section=INTEGER + "min", group="integer", types=INTEGERS)
def minimum(d, i):
    """d = a < b ? a : b; .relu clamps below at 0."""
    if "relu" in i.parts:
        return computed(d, i, lambda a, b: np.maximum(np.minimum(a, b), 0), DTYPES[i.parts[-1]])
    return ufunc(d, i, np.minimum)


@opcode("max", section=INTEGER + "max", group="integer", types=INTEGERS)
def maximum(d, i):
    """d = a > b ? a : b; .relu clamps below at 0."""
    if "relu" in i.parts:
        return computed(d, i, lambda a, b: np.maximum(np.maximum(a, b), 0), DTYPES[i.parts[-1]])
    return ufunc(d, i, np.maximum)


@opcode("dp4a", section=INTEGER + "dp4a", group="integer")
def dp4a(d, i):
    """d = c + the dot product of the four bytes of a and b."""
    return dot_product(d, i, i.parts[1], i.parts[2], lambda a, b: (a, b))


@opcode("dp2a", section=INTEGER + "dp2a", group="integer")
def dp2a(d, i):
    """d = c + the dot product of the two halves of a and two bytes of b (.lo or .hi)."""
    first = 0 if i.parts[1] == "lo" else 2
    return dot_product(d, i, i.parts[2], i.parts[3], lambda a, b: (a, b[:, first:first + 2]), halves=True)


def dot_product(d, i, a_type, b_type, choose, halves=False):
    out_type = ("s32" if "s32" in (a_type, b_type) else "u32")
    out = d.target(i.operands[0], DTYPES[out_type])
    a, b, c = (d.source(o, "u4") for o in i.operands[1:])
    lanes = d.machine.lanes

    def pieces(x, kind, size):
        full = np.ascontiguousarray(np.broadcast_to(x, lanes))
        return full.view(f"{'i' if kind == 's32' else 'u'}{size}").reshape(lanes, 4 // size).astype("i8")

    def step(active):
        x, y = choose(pieces(a, a_type, 2 if halves else 1), pieces(b, b_type, 1))
        np.copyto(out, ((x * y).sum(axis=1) + c), where=active.where, casting="unsafe")
    return step


# ---- extended precision: CC.CF is one carry bit per thread
def add_with_carry(a, b, carry_in, dtype):
    unsigned = np.dtype(f"u{dtype.itemsize}")
    x, y = np.asarray(a).view(unsigned), np.asarray(b).view(unsigned)
    partial = x + y
    total = partial + carry_in
    return total.view(dtype), (partial < x) | (total < partial)


def carrying(d, i, dtype, compute, carry_in, count):
    out = d.target(i.operands[0], dtype)
    sources = with_arrays(d, [d.source(o, dtype) for o in i.operands[1:1 + count]])
    carry, sets = d.carry, "cc" in i.parts
    unsigned = np.dtype(f"u{dtype.itemsize}")

    def step(active):
        value, flag = compute(*sources, carry.astype(unsigned) if carry_in else unsigned.type(0))
        np.copyto(out, value, where=active.where, casting="unsafe")
        if sets:
            np.copyto(carry, flag, where=active.where)
    return step


@opcode("add.cc", "addc", section=EXTENDED + "add.cc, addc", group="integer")
def addc(d, i):
    """d = a + b (+ CC.CF for addc); .cc writes the carry out to CC.CF."""
    dtype = DTYPES[i.parts[-1]]
    return carrying(d, i, dtype, lambda a, b, c: add_with_carry(a, b, c, dtype), i.parts[0] == "addc", 2)


@opcode("sub.cc", "subc", section=EXTENDED + "sub.cc, subc", group="integer")
def subc(d, i):
    """d = a - (b + CC.CF for subc); .cc writes the borrow out to CC.CF."""
    dtype = DTYPES[i.parts[-1]]
    unsigned = np.dtype(f"u{dtype.itemsize}")

    def compute(a, b, borrow):
        x, y = np.asarray(a).view(unsigned), np.asarray(b).view(unsigned)
        partial = x - y
        total = partial - borrow
        return total.view(dtype), (x < y) | (partial < borrow)

    return carrying(d, i, dtype, compute, i.parts[0] == "subc", 2)


@opcode("madc", section=EXTENDED + "madc", group="integer")
def madc(d, i):
    """d = hi or lo(a * b) + c (+ CC.CF for madc); .cc writes the carry out to CC.CF."""
    dtype = DTYPES[i.parts[-1]]

    def compute(a, b, c, carry):
        product = multiply_high(a, b, dtype) if "hi" in i.parts else a * b
        return add_with_carry(product, c, carry, dtype)

    return carrying(d, i, dtype, compute, i.parts[0] == "madc", 3)
