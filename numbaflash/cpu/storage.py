"""How numbers are stored: conversion between the dtypes of arrays and the dtype that is computed in."""

import numpy as np
from llvmlite import ir

from ..arrays import bfloat16, float16, float32, float64
from .simd import I8, I16, I32, I64, Lanes, Value

FLOAT16, BFLOAT16, FLOAT32, FLOAT64, BOOLEAN = range(1, 6)
CODES = {float16: FLOAT16, bfloat16: BFLOAT16, float32: FLOAT32, float64: FLOAT64, np.dtype(np.bool_): BOOLEAN}
ITEM_SIZES = {FLOAT16: 2, BFLOAT16: 2, FLOAT32: 4, FLOAT64: 8, BOOLEAN: 1}
_ELEMENTS = {
    FLOAT16: ir.HalfType(), BFLOAT16: I16, FLOAT32: ir.FloatType(), FLOAT64: ir.DoubleType(), BOOLEAN: I8,
}


def _shaped(element: ir.Type, count: int) -> ir.Type:
    return element if count == 1 else ir.VectorType(element, count)


def _constant(kind: ir.Type, number: int) -> ir.Constant:
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _resize(x: Lanes, value: Value, element: ir.Type) -> Value:
    """Float to float of another size."""
    count = getattr(value.type, "count", 1)
    size = {ir.HalfType(): 2, ir.FloatType(): 4, ir.DoubleType(): 8}
    have, want = size[getattr(value.type, "element", value.type)], size[element]
    if have == want:
        return value
    convert = x.builder.fpext if have < want else x.builder.fptrunc
    return convert(value, _shaped(element, count))


def load_as_computed(x: Lanes, pointer: Value, code: int, count: int) -> Value:
    """``count`` adjacent numbers stored as ``code``, in the dtype computed in; booleans stay bytes."""
    raw = x.load(pointer, _shaped(_ELEMENTS[code], count))
    if code == BOOLEAN:
        return raw
    if code == BFLOAT16:
        wide = _shaped(I32, count)
        bits = x.builder.shl(x.builder.zext(raw, wide), _constant(wide, 16))
        raw = x.builder.bitcast(bits, _shaped(ir.FloatType(), count))
    return _resize(x, raw, x.scalar)


def load_pairs(x: Lanes, pointer: Value) -> tuple[Value, Value]:
    """Twice ``x.lanes`` adjacent numbers stored as bfloat16, as float32: those at even places and those at odd ones.

    One instruction each, where loading them in order takes two.
    """
    raw = x.load(pointer, x.integers)
    even = x.builder.shl(raw, x.integer_constant(16))
    odd = x.builder.and_(raw, x.integer_constant(-(1 << 16)))
    return x.builder.bitcast(even, x.vector), x.builder.bitcast(odd, x.vector)


def in_order(x: Lanes, even: Value, odd: Value) -> tuple[Value, Value]:
    """Two vectors of adjacent numbers from those at even and at odd places."""
    n = x.lanes
    places = [i // 2 + n * (i % 2) for i in range(2 * n)]
    low, high = (ir.Constant(ir.VectorType(I32, n), half) for half in (places[:n], places[n:]))
    return x.builder.shuffle_vector(even, odd, low), x.builder.shuffle_vector(even, odd, high)


def store_as(x: Lanes, value: Value, pointer: Value, code: int) -> None:
    """Round computed numbers once, to nearest even, and store them."""
    if code in (FLOAT32, FLOAT64):
        x.store(_resize(x, value, _ELEMENTS[code]), pointer)
        return
    if x.bits == 64:
        value = _to_odd_float(x, value)
    x.store(_resize(x, value, ir.HalfType()) if code == FLOAT16 else _to_bfloat16(x, value), pointer)


def _to_odd_float(x: Lanes, value: Value) -> Value:
    """float64 to float32, the lost bits kept as a sticky last bit, so that a second rounding is as good as one."""
    b = x.builder
    kind = _shaped(I64, getattr(value.type, "count", 1))
    bits = b.bitcast(value, kind)
    lost = _constant(kind, (1 << 29) - 1)
    inexact = b.icmp_unsigned("!=", b.and_(bits, lost), _constant(kind, 0))
    sticky = b.shl(b.zext(inexact, kind), _constant(kind, 29))
    kept = b.or_(b.and_(bits, b.not_(lost)), sticky)
    return _resize(x, b.bitcast(kept, value.type), ir.FloatType())


def _to_bfloat16(x: Lanes, value: Value) -> Value:
    b = x.builder
    kind = _shaped(I32, getattr(value.type, "count", 1))
    bits = b.bitcast(value, kind)
    odd = b.and_(b.lshr(bits, _constant(kind, 16)), _constant(kind, 1))
    rounded = b.add(bits, b.add(odd, _constant(kind, 0x7FFF)))
    quiet = b.or_(bits, _constant(kind, 0x400000))
    bits = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
    return b.trunc(b.lshr(bits, _constant(kind, 16)), _shaped(I16, getattr(value.type, "count", 1)))
