"""Vector code of the backward pass on tiles of scores, one row per query, with the keys in the lanes.

A tile's rows are ``row_stride`` bytes apart and padded to whole vectors; what lies in the padding is never
used. Numbers are handed over as float64 and rounded to the dtype computed in.
"""

from collections.abc import Callable

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .simd import I64, INFINITY, LOG2_E, Lanes, Value, typed
from .storage import ITEM_SIZES, store_as


def number(x: Lanes, value: Value) -> Value:
    """A float64 argument in the dtype computed in."""
    return value if x.bits == 64 else x.builder.fptrunc(value, x.scalar)


def each_vector(
    x: Lanes, rows: Value, columns: Value, row_stride: Value,
    per_row: Callable[[Value], object], change: Callable[[object, Value, Value], None],
) -> None:
    """``change(per_row(row), column, byte offset)`` for each vector of a tile."""

    def row_body(row: Value, _: list[Value]) -> list[Value]:
        state = per_row(row)
        start = x.times(row, row_stride)

        def body(column: Value, _: list[Value]) -> list[Value]:
            change(state, column, x.plus(start, x.times(column, x.size)))
            return []

        x.loop(columns, [], body, step=x.lanes)
        return []

    x.loop(rows, [], row_body)


def key_numbers(x: Lanes, column: Value) -> Value:
    """The columns of a vector's lanes, as integers as wide as the numbers."""
    first = x.builder.trunc(column, x.integer) if x.bits < 64 else column
    lanes = ir.Constant(x.integers, list(range(x.lanes)))
    return x.builder.add(x.splat(first), lanes)


def saturated(x: Lanes, value: Value) -> Value:
    """A 64-bit integer in all lanes, clamped to what fits."""
    if x.bits == 64:
        return x.splat(value)
    b = x.builder
    for bound, relation in ((-(1 << 30), "<"), (1 << 30, ">")):
        limit = ir.Constant(I64, bound)
        value = b.select(b.icmp_signed(relation, value, limit), limit, value)
    return x.splat(b.trunc(value, x.integer))


def inside_band(x: Lanes, column: Value, low: Value, high: Value) -> Value:
    """``low <= key < high`` lane by lane."""
    keys = key_numbers(x, column)
    return x.builder.and_(x.builder.icmp_signed(">=", keys, low), x.builder.icmp_signed("<", keys, high))


def row_number(x: Lanes, table: Value, row: Value) -> Value:
    """One number per row, in all lanes."""
    return x.broadcast(x.at(x.pointer(table), x.times(row, x.size)))


def _weights(edge: bool):
    @intrinsic
    def weights(
        typing_context, static, scores, products, row_stride, rows, columns, lse, delta, unit, low, high
    ):
        def generate(context, builder, signature, arguments):
            x = Lanes(context, builder, static)
            b = builder
            _, scores, products, row_stride, rows, columns, lse, delta, unit, low, high = arguments
            natural, log2_e = x.splat_number(unit), x.constant(LOG2_E)

            def per_row(row: Value) -> tuple:
                bounds = (saturated(x, x.plus(low, row)), saturated(x, x.plus(high, row))) if edge else ()
                return *(row_number(x, table, row) for table in (lse, delta)), *bounds

            def change(state: tuple, column: Value, offset: Value) -> None:
                at_score, at_product = x.at(x.pointer(scores), offset), x.at(x.pointer(products), offset)
                # Rounded like the lse of a row with one outstanding key: however large both are, their difference is 0.
                score = b.fmul(x.load(at_score), natural)
                p = x.exp2(b.fsub(score, state[0]), log2_e)
                ds = b.fmul(p, b.fsub(x.load(at_product), state[1]))
                if edge:
                    seen = inside_band(x, column, *state[2:])
                    p, ds = (b.select(seen, value, x.constant(0.0)) for value in (p, ds))
                x.store(p, at_score)
                x.store(ds, at_product)

            each_vector(x, rows, columns, row_stride, per_row, change)
            return context.get_dummy_value()

        before, after = (scores, products, row_stride, rows, columns, lse, delta), (low, high)
        return typed(types.void, static, *before, types.float64, *after), generate

    return weights


weights = _weights(edge=False)
"""``P = exp(unit * S - lse)`` over the products S = Q K^T, ``dS = P * (dP - delta)`` over the products dP.

lse and delta are tables of one number per row; low and high are ignored.
"""
edge_weights = _weights(edge=True)
"""The same where row r sees only the columns ``low + r <= column < high + r``; P and dS are 0 elsewhere."""


def _staged_weights(dropout: bool):
    @intrinsic
    def weights(typing_context, static, scores, products, keep, row_stride, rows, columns, lse, delta):
        def generate(context, builder, signature, arguments):
            x = Lanes(context, builder, static)
            b = builder
            _, scores, products, keep, row_stride, rows, columns, lse, delta = arguments

            def per_row(row: Value) -> tuple[Value, Value]:
                return row_number(x, lse, row), row_number(x, delta, row)

            def change(state: tuple[Value, Value], column: Value, offset: Value) -> None:
                at_score, at_product = x.at(x.pointer(scores), offset), x.at(x.pointer(products), offset)
                score, product = x.load(at_score), x.load(at_product)
                hidden = b.fcmp_ordered("==", score, x.constant(-INFINITY))
                p = x.exp2(b.fmul(b.fsub(score, state[0]), x.constant(LOG2_E)))
                kept = p
                if dropout:
                    factor = x.load(x.at(x.pointer(keep), offset))
                    product, kept = b.fmul(product, factor), b.fmul(p, factor)
                ds = b.fmul(p, b.fsub(product, state[1]))
                kept, ds = (b.select(hidden, x.constant(0.0), value) for value in (kept, ds))
                x.store(kept, at_score)
                x.store(ds, at_product)

            each_vector(x, rows, columns, row_stride, per_row, change)
            return context.get_dummy_value()

        integers = (scores, products, keep, row_stride, rows, columns, lse, delta)
        return typed(types.void, static, *integers), generate

    return weights


staged_weights = _staged_weights(dropout=False)
"""P over finished scores in natural units, -inf where hidden; dS over dP. ``keep`` is ignored."""
dropped_weights = _staged_weights(dropout=True)
"""The same with a tile Z of dropout factors: ``Z * P`` over the scores, ``P * (Z * dP - delta)`` over dP."""


@intrinsic
def scale_tile(typing_context, static, tile, row_stride, rows, columns, factor):
    """``tile *= factor``."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        _, tile, row_stride, rows, columns, factor = arguments
        factors = x.splat(number(x, factor))

        def change(_: object, column: Value, offset: Value) -> None:
            at = x.at(x.pointer(tile), offset)
            x.store(builder.fmul(x.load(at), factors), at)

        each_vector(x, rows, columns, row_stride, lambda row: None, change)
        return context.get_dummy_value()

    return typed(types.void, static, tile, row_stride, rows, columns, types.float64), generate


@intrinsic
def multiply_tile(typing_context, static, tile, factors, row_stride, rows, columns):
    """``tile *= factors``, except that 0 stays 0: a hidden pair may have NaN for a factor."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        _, tile, factors, row_stride, rows, columns = arguments

        def change(_: object, column: Value, offset: Value) -> None:
            at = x.at(x.pointer(tile), offset)
            value = x.load(at)
            product = builder.fmul(value, x.load(x.at(x.pointer(factors), offset)))
            zero = builder.fcmp_ordered("==", value, x.constant(0.0))
            x.store(builder.select(zero, value, product), at)

        each_vector(x, rows, columns, row_stride, lambda row: None, change)
        return context.get_dummy_value()

    return typed(types.void, static, tile, factors, row_stride, rows, columns), generate


def _sum_of_lanes(x: Lanes, vector: Value) -> Value:
    """Horizontal sum of a vector of float64, pairwise."""
    b = x.builder
    count = vector.type.count
    while count > 1:
        half = count // 2
        low, high = (
            b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), half), list(order)))
            for order in (range(half), range(half, count))
        )
        vector = b.fadd(low, high)
        count = half
    return b.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _widened(x: Lanes, pointer: Value) -> Value:
    value = x.load(pointer)
    return value if x.bits == 64 else x.builder.fpext(value, ir.VectorType(ir.DoubleType(), x.lanes))


@intrinsic
def dot(typing_context, static, a, b, columns):
    """Scalar product of two rows, a multiple of the lanes long, in float64."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        wide = ir.VectorType(ir.DoubleType(), x.lanes)
        pointers = [x.pointer(address) for address in arguments[1:3]]

        def body(column: Value, sums: list[Value]) -> list[Value]:
            left, right = (_widened(x, x.at(p, x.times(column, x.size))) for p in pointers)
            return [x.fma(left, right, sums[0])]

        zero = ir.Constant(wide, [0.0] * x.lanes)
        return _sum_of_lanes(x, x.loop(arguments[3], [zero], body, step=x.lanes)[0])

    return typed(types.float64, static, a, b, columns), generate


@intrinsic
def row_sum(typing_context, static, row, columns):
    """Sum of ``columns`` adjacent numbers in float64."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        pointer = x.pointer(arguments[1])
        whole = b.and_(arguments[2], ir.Constant(I64, -x.lanes))
        zero = ir.Constant(ir.VectorType(ir.DoubleType(), x.lanes), [0.0] * x.lanes)

        def body(column: Value, sums: list[Value]) -> list[Value]:
            return [b.fadd(sums[0], _widened(x, x.at(pointer, x.times(column, x.size))))]

        def single(column: Value, sums: list[Value]) -> list[Value]:
            value = x.load(x.at(pointer, x.times(column, x.size)), x.scalar)
            return [b.fadd(sums[0], value if x.bits == 64 else b.fpext(value, ir.DoubleType()))]

        total = _sum_of_lanes(x, x.loop(whole, [zero], body, step=x.lanes)[0])
        return x.loop(arguments[2], [total], single, start=whole)[0]

    return typed(types.float64, static, row, columns), generate


@intrinsic
def add_tile(typing_context, static, target, target_stride, tile, row_stride, rows, columns):
    """``target[row, column] += tile[row, column]``, row by row; stride 0 of the target sums the rows up."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, target, target_stride, tile, row_stride, rows, columns = arguments
        whole = b.and_(columns, ir.Constant(I64, -x.lanes))

        def per_row(row: Value, _: list[Value]) -> list[Value]:
            write = x.at(x.pointer(target), x.times(row, target_stride))
            read = x.at(x.pointer(tile), x.times(row, row_stride))

            def add(kind: ir.Type) -> Callable:
                def body(column: Value, _: list[Value]) -> list[Value]:
                    at = x.at(write, x.times(column, x.size))
                    x.store(b.fadd(x.load(at, kind), x.load(x.at(read, x.times(column, x.size)), kind)), at)
                    return []

                return body

            x.loop(whole, [], add(x.vector), step=x.lanes)
            x.loop(columns, [], add(x.scalar), start=whole)
            return []

        x.loop(rows, [], per_row)
        return context.get_dummy_value()

    return typed(types.void, static, target, target_stride, tile, row_stride, rows, columns), generate


@intrinsic(prefer_literal=True)
def store_rows(
    typing_context, static, code, target, target_row, target_column, tile, row_stride, rows, columns, factor
):
    """Number at ``target + row * target_row + column * target_column`` = ``factor * tile[row, column]``."""
    literal, code = code, code.literal_value
    size = ITEM_SIZES[code]

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, _, target, target_row, target_column, tile, row_stride, rows, columns, factor = arguments
        adjacent = b.icmp_signed("==", target_column, ir.Constant(I64, size))
        whole = b.select(adjacent, b.and_(columns, ir.Constant(I64, -x.lanes)), ir.Constant(I64, 0))
        scalar = number(x, factor)
        vector = x.splat(scalar)

        def per_row(row: Value, _: list[Value]) -> list[Value]:
            write = x.at(x.pointer(target), x.times(row, target_row))
            read = x.at(x.pointer(tile), x.times(row, row_stride))

            def block(column: Value, _: list[Value]) -> list[Value]:
                value = b.fmul(x.load(x.at(read, x.times(column, x.size))), vector)
                store_as(x, value, x.at(write, x.times(column, size)), code)
                return []

            def single(column: Value, _: list[Value]) -> list[Value]:
                value = b.fmul(x.load(x.at(read, x.times(column, x.size)), x.scalar), scalar)
                store_as(x, value, x.at(write, x.times(column, target_column)), code)
                return []

            x.loop(whole, [], block, step=x.lanes)
            x.loop(columns, [], single, start=whole)
            return []

        x.loop(rows, [], per_row)
        return context.get_dummy_value()

    integers = (target, target_row, target_column, tile, row_stride, rows, columns)
    return typed(types.void, static, literal, *integers, types.float64), generate
