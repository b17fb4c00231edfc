"""Exact floating point: fused multiply-add, directed rounding, subnormals and canonical NaN (PTX ISA,
Floating-Point Instructions).

The vectorised paths round once: products of two float32 are exact in float64, and the one case in which
rounding first to float64 and then to float32 differs (a tie made by the first rounding) is found and
repaired. Whatever they do not cover is computed with rational numbers, one element at a time.
"""
from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

PRECISION = {
    np.dtype("f2"): (11, -24, 16),
    np.dtype("f4"): (24, -149, 128),
    np.dtype("f8"): (53, -1074, 1024)
}
BFLOAT16 = (8, -133, 128)
CANONICAL_NAN = {np.dtype("f2"): np.uint16(0x7FFF), np.dtype("f4"): np.uint32(0x7FFFFFFF),
                 np.dtype("f8"): np.uint64(0x7FFFFFFFFFFFFFFF)}
UNSIGNED = {np.dtype("f2"): np.dtype("u2"), np.dtype("f4"): np.dtype("u4"), np.dtype("f8"): np.dtype("u8")}
TINY = {
    dtype: np.array(2.0**(low + precision - 1), dtype)[()]
    for dtype, (precision, low, _) in PRECISION.items()
}


def round_fraction(value: Fraction, form, mode: str):
    """``value`` rounded once to a format ``(precision, exponent of the last subnormal bit, overflow)``.

    ``mode``: "rn" nearest even, "rna" nearest away, "rz" toward zero, "rm" down, "rp" up.  Returns a Python
    float.
    """
    if value == 0:
        return 0.0
    precision, low, high = form
    negative, magnitude = value < 0, abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    ulp = Fraction(2) ** max(exponent - precision + 1, low)
    count, rest = divmod(magnitude, ulp)
    up = {"rn": rest > ulp / 2 or (rest == ulp / 2 and count & 1), "rna": rest >= ulp / 2, "rz": False,
          "rm": rest > 0 and negative, "rp": rest > 0 and not negative}[mode]
    result = (count + bool(up)) * ulp
    if result >= Fraction(2) ** high:
        if mode in ("rn", "rna") or (mode == "rp" and not negative) or (mode == "rm" and negative):
            return -math.inf if negative else math.inf
        result = (Fraction(2) ** precision - 1) * Fraction(2) ** (high - precision)
    return -float(result) if negative else float(result)


def exactly(formula, arrays, dtype, mode, form=None):
    """``formula`` on rational numbers, element by element, rounded once.

    Where an input is not finite, or where it divides by zero, signs and zeros decide: it is then evaluated on
    floats with numbers replaced by +-1.
    """
    arrays = np.broadcast_arrays(*arrays)
    out = np.empty(arrays[0].shape, dtype)
    form = form or PRECISION[np.dtype(dtype)]
    flat = out.reshape(-1)
    with np.errstate(all="ignore"):
        for i, values in enumerate(zip(*(a.reshape(-1).astype("f8").tolist() for a in arrays))):
            try:
                exact = formula(*map(Fraction, values))
            except (OverflowError, ValueError, ZeroDivisionError):  # infinity, NaN, division by zero
                flat[i] = formula(*(np.float64(_unit(v)) for v in values))
                continue
            flat[i] = round_fraction(exact, form, mode) if exact else _zero(formula, values, mode)
    return out


def _unit(v):
    return math.copysign(1.0 if v else 0.0, v) if math.isfinite(v) else v


def _zero(formula, values, mode):
    """The sign of an exact zero result (IEEE 754-2019 6.3)."""
    terms = {"add": lambda a, b: (a, b), "sub": lambda a, b: (a, -b),
             "fma": lambda a, b, c: (_unit(a) * _unit(b), c)}.get(formula.__name__)
    if terms is None:
        return float(formula(*(np.float64(_unit(v)) for v in values)))
    x, y = terms(*values)
    if x == 0 and y == 0 and math.copysign(1, x) == math.copysign(1, y):
        return x
    return -0.0 if mode == "rm" else 0.0


def add(a, b):
    return a + b


def sub(a, b):
    return a - b


def mul(a, b):
    return a * b


def div(a, b):
    return a / b


def fma(a, b, c):
    return a * b + c


_LOW29 = np.uint64((1 << 29) - 1)
_TIE29 = np.uint64(1 << 28)
_SMALL = np.float32(2.0 ** -125)
# Twice the bits of a float32 less this: at most _INFINITE for infinities and all normals but the smallest.
_ABOVE_SMALLEST, _INFINITE = np.uint32(0x01000002), np.uint32(0xFDFFFFFE)


def fma_f32(a, b, c, ftz=False):
    """``a * b + c`` in float32, rounded once; NaNs canonical and, with ``ftz``, subnormals zero."""
    product = np.multiply(a, b, dtype=np.float64)
    wide = product + c
    out = wide.astype(np.float32)
    tie = (wide.view(np.uint64) & _LOW29) == _TIE29
    if np.count_nonzero(tie):
        _repair_ties(product, c, wide, tie, out)
    bits = out.view(np.uint32)
    key = bits + bits
    key -= _ABOVE_SMALLEST
    if np.maximum.reduce(key) > _INFINITE:
        if not ftz:
            _repair_small(a, b, c, wide, out)
        settle(out, True, ftz)
    return out


def _repair_small(a, b, c, wide, out):
    """Below the normal numbers float32 has fewer bits, and ties lie elsewhere."""
    small = np.abs(out) < _SMALL
    small &= (wide != 0) & (wide != out)
    if np.count_nonzero(small):
        a, b, c = np.broadcast_arrays(a, b, c)
        out[small] = exactly(fma, (a[small], b[small], c[small]), "f4", "rn")


def _repair_ties(product, addend, wide, tie, out):
    which = np.flatnonzero(tie)
    s, p = wide[which], product[which] if isinstance(product, np.ndarray) else product
    c = (addend[which] if isinstance(addend, np.ndarray) else addend).astype("f8")
    t = s - p
    error = (p - (s - t)) + (c - t)
    if not np.count_nonzero(error):
        return
    bits = s.view("u8").copy()
    away = (error > 0) == (s > 0)
    bits[(error != 0) & away] += np.uint64(1)
    bits[(error != 0) & ~away] -= np.uint64(1)
    out[which] = bits.view("f8").astype("f4")


def two_sum(a, b):
    """``s + e == a + b`` exactly (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a, b):
    """``p + e == a * b`` exactly, away from overflow and underflow (Dekker, Veltkamp)."""
    p = a * b
    split = 134217729.0
    x = split * a
    ah = x - (x - a)
    al = a - ah
    y = split * b
    bh = y - (y - b)
    bl = b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _to_odd(s, e):
    """``s`` moved to the odd neighbour on the side of ``e`` unless exact: rounding again then rounds once."""
    bits = s.view("i8").copy()
    move = (e != 0) & ((bits & 1) == 0)
    away = (e > 0) == (s > 0)
    bits[move & away] += 1
    bits[move & ~away] -= 1
    return bits.view("f8")


def fma_f64(a, b, c):
    """``a * b + c`` in float64, rounded once (Boldo and Melquiond, 2008: the low parts are added rounding to
    odd)."""
    a, b, c = (np.ascontiguousarray(x, "f8") for x in np.broadcast_arrays(a, b, c))
    p, e = two_product(a, b)
    high, low = two_sum(c, e)
    sum_high, sum_low = two_sum(p, high)
    v, ve = two_sum(low, sum_low)
    out = sum_high + _to_odd(v, ve)
    odd = ~((_moderate(a) & _moderate(b) & _moderate(p) & (np.abs(c) < 2.0 ** 1000)
             & ((c == 0) | (np.abs(c) > 2.0 ** -900))) & (np.abs(out) > 2.0 ** -900))
    if odd.any():
        plain = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
        simple = odd & (~plain | (a == 0) | (b == 0))
        infinite = np.isinf(c) & np.isfinite(a) & np.isfinite(b)  # whatever a * b overflows to
        out[simple] = np.where(infinite, c, a * b + c)[simple]
        hard = odd & ~simple
        if hard.any():
            out[hard] = exactly(fma, (a[hard], b[hard], c[hard]), "f8", "rn")
    return out


def _moderate(x):
    magnitude = np.abs(x)
    return (magnitude > 2.0 ** -400) & (magnitude < 2.0 ** 490)


def narrow(x, dtype, mode):
    """Float ``x`` converted to a narrower float, rounding ``mode``."""
    dtype = np.dtype(dtype)
    near = x.astype(dtype)
    if mode == "rn":
        return near
    back = near.astype(x.dtype)
    infinite = np.isinf(near) & np.isfinite(x)
    if mode == "rna":
        return _narrow_away(x, near, dtype)
    above, below = back > x, back < x
    down, up = _neighbours(near)
    if mode == "rz":
        above, below = above & (x > 0), below & (x < 0)
        near = np.where(above, down, np.where(below, up, near))
    elif mode == "rm":
        near = np.where(above, down, near)
    else:
        near = np.where(below, up, near)
    del infinite
    return near.astype(dtype)


def _narrow_away(x, near, dtype):
    return exactly(lambda v: v, (x,), dtype, "rna")


def _neighbours(x):
    info = x.dtype.type
    return np.nextafter(x, info(-np.inf)), np.nextafter(x, info(np.inf))


def bfloat16(x, mode="rn"):
    """float32 -> the 16 bits of a bfloat16; NaN is 0x7FFF."""
    x = np.ascontiguousarray(x, "f4")
    u = x.view("u4")
    if mode == "rn":
        bits = (u + (np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    elif mode == "rna":
        bits = (u + np.uint32(0x8000)) >> np.uint32(16)
    else:
        bits = u >> np.uint32(16)
        inexact = (u & np.uint32(0xFFFF)) != 0
        negative = (u >> np.uint32(31)) != 0
        if mode in ("rm", "rp"):
            bits = bits + (inexact & (negative == (mode == "rm")) & np.isfinite(x)).astype("u4")
    bits = np.where(np.isinf(x), u >> np.uint32(16), bits)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits.astype("u2"))


def from_bfloat16(bits):
    """The 16 bits of a bfloat16 -> float32."""
    return (np.asarray(bits).astype("u4") << np.uint32(16)).view("f4")


def flushed(x):
    """``x`` with subnormals replaced by zeros of their sign; ``x`` itself if it has none (``.ftz``)."""
    if not isinstance(x, np.ndarray):
        return x if x == 0 or not np.isfinite(x) or abs(x) >= TINY[x.dtype] else x * x.dtype.type(0)
    bits = x.view(np.uint32)
    shifted = bits + bits
    shifted -= np.uint32(1)
    if np.minimum.reduce(shifted, axis=None) >= 0x00FFFFFF:
        return x
    return np.where(shifted < 0x00FFFFFF, np.copysign(np.float32(0), x), x)


def settle(x, where, ftz=False):
    """Make NaNs of ``x`` canonical and, with ``ftz``, subnormals zero; in place, where ``where``."""
    bits = x.view(UNSIGNED[x.dtype])
    if ftz:
        key = bits + bits
        key -= np.uint32(0x01000000)
        if np.maximum.reduce(key, axis=None) <= 0xFE000000:
            return
        subnormal = key > np.uint32(0xFF000000)
        if subnormal.any():
            np.copyto(x,
                      np.copysign(x.dtype.type(0), x),
                      where=subnormal if where is True else subnormal & where)
    else:
        biggest = np.maximum.reduce(x, axis=None)
        if biggest == biggest:
            return
    nan = x != x
    if nan.any():
        np.copyto(bits, CANONICAL_NAN[x.dtype], where=nan if where is True else nan & where)
