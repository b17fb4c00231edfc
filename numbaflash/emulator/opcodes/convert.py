"""cvt and its relatives."""
from __future__ import annotations

import numpy as np

from .. import rounding
from ..registry import opcode
from ..values import DTYPES
from .common import with_arrays
from .titles import MOVE

INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
FLOAT_ROUNDING = ("rn", "rz", "rm", "rp", "rna")
PACKED = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}
CONVERTED = (*DTYPES, "e4m3x2", "e5m2x2")


@opcode("cvt", section=MOVE + "cvt", group="convert")
def cvt(d, i):
    """d = a converted to another type, with rounding, saturation and flushing as the modifiers say."""
    to, source = [p for p in i.parts[1:] if p in CONVERTED][-2:]
    if source in ("e4m3x2", "e5m2x2"):
        return unpacked_fp8(d, i, to, source)
    if to in PACKED:
        return packed(d, i, to, source)
    convert = conversion(i, to, source)
    a, = with_arrays(d, [d.source(i.operands[1], DTYPES[source])])
    dtype = DTYPES[to]
    out = d.extending_target(i.operands[0], dtype)

    def step(active):
        np.copyto(out, convert(a), where=active.where, casting="unsafe")
    return step


def conversion(i, to, source):
    """The function from arrays of ``source`` to arrays of ``to``."""
    mode = next((m for m in FLOAT_ROUNDING if m in i.parts), "rn")
    integral = next((m for m in INTEGER_ROUNDING if m in i.parts), None)
    ftz, saturate, relu = "ftz" in i.parts, "sat" in i.parts, "relu" in i.parts
    if "bf16" in (to, source) and {"s8", "u8"} & {to, source}:
        raise ValueError(f"{source} to {to}")
    from_float, to_float = source[0] in "ft" or source == "bf16", to[0] in "ft" or to == "bf16"
    if from_float and to_float:
        return float_to_float(to, source, mode, integral, ftz, saturate, relu, "satfinite" in i.parts)
    if from_float:
        return float_to_integer(to, source, integral or "rzi", ftz)
    if to_float:
        return integer_to_float(to, mode, saturate)
    return integer_to_integer(to, saturate)


def integer_to_integer(to, saturate):
    dtype = DTYPES[to]

    def convert(a):
        if saturate:
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            a = np.clip(a, max(low, np.iinfo(a.dtype).min), min(high, np.iinfo(a.dtype).max))
        return a.astype(dtype)
    return convert


def as_float(a, source, ftz):
    if source == "bf16":
        a = rounding.from_bfloat16(a)
    return rounding.flushed(a) if ftz and a.dtype == np.float32 else a


def float_to_integer(to, source, integral, ftz):
    dtype = DTYPES[to]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    bits = 8 * dtype.itemsize
    nan = 0 if source != "f64" and bits < 64 else 1 << (bits - 1)
    nan = np.array(nan, "u8").astype(dtype)

    def convert(a):
        """Out of range values clamp; NaN is 0, or the top bit alone if one of the types has 64 bits."""
        x = INTEGER_ROUNDING[integral](as_float(a, source, ftz)).astype(np.float64)
        result = np.where((x > low) & (x < float(high)), x, 0).astype(dtype)
        result = np.where(x >= float(high), dtype.type(high), result)
        result = np.where(x <= low, dtype.type(low), result)
        return np.where(np.isnan(x), nan, result)
    return convert


def integer_to_float(to, mode, saturate):
    dtype = np.dtype("f4") if to == "bf16" else DTYPES[to]

    def convert(a):
        if to == "bf16":
            x = exact_integers(a, rounding.BFLOAT16, mode, dtype)
            return rounding.bfloat16(x)
        if mode == "rn" and dtype != np.float16:
            x = a.astype(dtype)
        else:
            x = exact_integers(a, rounding.PRECISION[dtype], mode, dtype)
        return np.clip(x, 0, 1) if saturate else x
    return convert


def exact_integers(a, form, mode, dtype):
    from fractions import Fraction
    return np.array([rounding.round_fraction(Fraction(v), form, mode) for v in a.tolist()], dtype)


def not_negative(x):
    """.relu: negative numbers and -0 become +0, NaN stays."""
    return np.where(np.isnan(x) | (x > 0), x, x.dtype.type(0))


LARGEST = {"f16": np.uint16(0x7BFF), "bf16": np.uint16(0x7F7F), "tf32": np.uint32(0x7F7FE000)}
INFINITY = {"f16": np.uint16(0x7C00), "bf16": np.uint16(0x7F80), "tf32": np.uint32(0x7F800000)}


def finite(bits, kind):
    """.satfinite: infinities become the largest number of their sign."""
    sign = bits & ~bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
    return np.where(bits ^ sign == INFINITY[kind], sign | LARGEST[kind], bits)


def float_to_float(to, source, mode, integral, ftz, saturate, relu, satfinite):
    dtype = np.dtype("f4") if to in ("bf16", "tf32") else DTYPES[to]

    def convert(a):
        x = as_float(a, source, ftz)
        if integral is not None:
            x = INTEGER_ROUNDING[integral](x)
        if relu:
            x = not_negative(x)
        if to == "tf32":
            bits = tf32(x, mode)
            return finite(bits, to) if satfinite else bits
        if to == "bf16":
            bits = rounding.bfloat16(sticky(x) if x.dtype == np.float64 else x, mode)
            return finite(bits, to) if satfinite else bits
        x = rounding.narrow(x, dtype, mode) if x.dtype.itemsize > dtype.itemsize else x.astype(dtype)
        x = np.array(x, dtype, copy=True)
        if saturate:
            x = np.where(x > 0, np.minimum(x, dtype.type(1)), dtype.type(0))
        if x.dtype == np.float32 or x.dtype == np.float64 or x.dtype == np.float16:
            rounding.settle(x, True, ftz and x.dtype == np.float32)
        return finite(x.view("u2"), to).view("f2") if satfinite else x
    return convert


def tf32(x, mode):
    """float32 -> the bits of a tf32 (10 bits of mantissa, in the upper 19 bits of the register)."""
    u = np.ascontiguousarray(x, "f4").view("u4")
    if mode == "rna":
        bits = u + np.uint32(0x1000)
    elif mode == "rn":
        bits = u + np.uint32(0xFFF) + ((u >> np.uint32(13)) & np.uint32(1))
    else:
        bits = u
    bits = np.where(np.isfinite(x), bits & np.uint32(0xFFFFE000), u & np.uint32(0xFFFFE000))
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits)


def sticky(x):
    """float64 -> float32 with the last bit set where inexact: rounding that again equals rounding once."""
    near = rounding.narrow(x, "f4", "rz")
    inexact = (near.astype("f8") != x) & np.isfinite(x)
    return (near.view("u4") | inexact.astype("u4")).view("f4")


def packed(d, i, to, source):
    """d = {a, b}: a in the upper half. From f32 pairs, or fp8 pairs from f16x2 (one operand)."""
    mode = next((m for m in FLOAT_ROUNDING if m in i.parts), "rn")
    relu, satfinite = "relu" in i.parts, "satfinite" in i.parts
    element = PACKED[to]
    if element in ("e4m3", "e5m2"):
        return packed_fp8(d, i, element, source, relu)
    out = d.target(i.operands[0], np.dtype("u4"))
    a, b = with_arrays(d, [d.source(o, "f4") for o in i.operands[1:3]])

    def half(x):
        x = not_negative(x) if relu else np.asarray(x, "f4")
        if element == "bf16":
            bits = rounding.bfloat16(x, mode)
        else:
            value = np.array(rounding.narrow(np.atleast_1d(x), "f2", mode))
            rounding.settle(value, True)
            bits = value.view("u2").reshape(x.shape)
        return finite(bits, element) if satfinite else bits

    def step(active):
        np.copyto(out, half(a).astype("u4") << np.uint32(16) | half(b), where=active.where)
    return step


FP8 = {"e4m3": (4, -9, 9, 448.0, 0x7F), "e5m2": (3, -16, 16, 57344.0, 0x7F)}


def fp8_bits(x, element):
    """Round to nearest even, clamping to the largest finite value (.satfinite is mandatory)."""
    import ml_dtypes
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[element]
    largest, nan = FP8[element][3:]
    x = np.asarray(x, "f4")
    bits = np.clip(x, -largest, largest).astype(dtype).view("u1")
    return np.where(np.isnan(x), np.uint8(nan), bits)


def packed_fp8(d, i, element, source, relu):
    out = d.target(i.operands[0], np.dtype("u2"))
    if source == "f16x2":
        both = d.source(i.operands[1], "u4")

        def values():
            high = (both >> np.uint32(16)).astype("u2").view("f2"), (
                both & np.uint32(0xFFFF)).astype("u2").view("f2")
            return high
    else:
        pair = with_arrays(d, [d.source(o, "f4") for o in i.operands[1:3]])

        def values():
            return pair

    def step(active):
        high, low = (not_negative(v) if relu else v for v in values())
        np.copyto(out, fp8_bits(high, element).astype("u2") << np.uint16(8) | fp8_bits(low, element),
                  where=active.where)
    return step


def unpacked_fp8(d, i, to, source):
    """f16x2 from a pair of fp8."""
    import ml_dtypes
    if to != "f16x2":
        raise ValueError(f"{source} to {to}")
    dtype = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}[source]
    out = d.target(i.operands[0], np.dtype("u4"))
    a = d.source(i.operands[1], "u2")

    def step(active):
        halves = [
            np.ascontiguousarray((a >> np.uint16(s)).astype("u1")).view(dtype).astype("f2") for s in (8, 0)
        ]
        if "relu" in i.parts:
            halves = [not_negative(half) for half in halves]
        for half in halves:
            rounding.settle(half, True)
        high, low = (half.view("u2").astype("u4") for half in halves)
        np.copyto(out, high << np.uint32(16) | low, where=active.where)
    return step
