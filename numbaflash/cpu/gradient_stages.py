"""The stages of a non-empty Score on a tile of the backward pass: one row per query, keys in the lanes.

Scores turn from raw products into natural units in place, -inf where hidden; the softcap leaves its
derivative.
"""

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .. import dropout
from .gradient_tile import each_vector, inside_band, key_numbers, number, saturated
from .scorepass import _philox
from .simd import I32, I64, INFINITY, Lanes, Value, typed
from .storage import BOOLEAN, ITEM_SIZES, load_as_computed


@intrinsic
def cap_scores(typing_context, static, scores, derivatives, row_stride, rows, columns, cap):
    """``s = cap * tanh(s / cap)``; its derivative ``1 - tanh**2`` into a second tile."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, scores, derivatives, row_stride, rows, columns, cap = arguments
        cap = x.splat(number(x, cap))
        one = x.constant(1.0)

        def change(_: object, column: Value, offset: Value) -> None:
            at = x.at(x.pointer(scores), offset)
            t = x.tanh(b.fdiv(x.load(at), cap))
            x.store(b.fmul(cap, t), at)
            x.store(b.fmul(b.fsub(one, t), b.fadd(one, t)), x.at(x.pointer(derivatives), offset))

        each_vector(x, rows, columns, row_stride, lambda row: None, change)
        return context.get_dummy_value()

    return typed(types.void, static, scores, derivatives, row_stride, rows, columns, types.float64), generate


@intrinsic(prefer_literal=True)
def combine_rows(
    typing_context, static, code, scores, row_stride, rows, columns, source, source_row, source_column
):
    """Add a tile of bias, where -inf hides, or hide where a boolean is False (code BOOLEAN)."""
    literal, code = code, code.literal_value
    size = ITEM_SIZES[code]

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, _, scores, row_stride, rows, columns, source, source_row, source_column = arguments
        adjacent = b.icmp_signed("==", source_column, ir.Constant(I64, size))
        whole = b.select(adjacent, b.and_(columns, ir.Constant(I64, -x.lanes)), ir.Constant(I64, 0))

        def combined(score: Value, value: Value, constant) -> Value:
            if code == BOOLEAN:
                return b.select(b.icmp_unsigned("!=", value, constant(value.type, 0)), score,
                                constant(score.type, -INFINITY))
            hides = b.fcmp_ordered("==", value, constant(value.type, -INFINITY))
            return b.select(hides, value, b.fadd(score, value))

        def constant(kind: ir.Type, value: float) -> ir.Constant:
            return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)

        def per_row(row: Value, _: list[Value]) -> list[Value]:
            at_row = x.at(x.pointer(scores), x.times(row, row_stride))
            read = x.at(x.pointer(source), x.times(row, source_row))

            def block(column: Value, _: list[Value]) -> list[Value]:
                at = x.at(at_row, x.times(column, x.size))
                value = load_as_computed(x, x.at(read, x.times(column, size)), code, x.lanes)
                x.store(combined(x.load(at), value, constant), at)
                return []

            def single(column: Value, _: list[Value]) -> list[Value]:
                at = x.at(at_row, x.times(column, x.size))
                value = load_as_computed(x, x.at(read, x.times(column, source_column)), code, 1)
                x.store(combined(x.load(at, x.scalar), value, constant), at)
                return []

            x.loop(whole, [], block, step=x.lanes)
            x.loop(columns, [], single, start=whole)
            return []

        x.loop(rows, [], per_row)
        return context.get_dummy_value()

    integers = (scores, row_stride, rows, columns, source, source_row, source_column)
    return typed(types.void, static, literal, *integers), generate


@intrinsic
def alibi_rows(typing_context, static, scores, row_stride, rows, columns, position, slope):
    """``s -= slope * |position + row - column|``."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, scores, row_stride, rows, columns, position, slope = arguments
        negative = x.splat(b.fneg(number(x, slope)))

        def change(place: Value, column: Value, offset: Value) -> None:
            at = x.at(x.pointer(scores), offset)
            distance = x.call("fabs", b.sitofp(b.sub(place, key_numbers(x, column)), x.vector))
            x.store(x.fma(negative, distance, x.load(at)), at)

        each_vector(x, rows, columns, row_stride, lambda row: saturated(x, x.plus(position, row)), change)
        return context.get_dummy_value()

    return typed(types.void, static, scores, row_stride, rows, columns, position, types.float64), generate


@intrinsic
def hide_outside_band(typing_context, static, scores, row_stride, rows, columns, low, high):
    """``s = -inf`` unless ``low + row <= column < high + row``."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        _, scores, row_stride, rows, columns, low, high = arguments

        def per_row(row: Value) -> tuple[Value, Value]:
            return saturated(x, x.plus(low, row)), saturated(x, x.plus(high, row))

        def change(bounds: tuple[Value, Value], column: Value, offset: Value) -> None:
            at = x.at(x.pointer(scores), offset)
            x.store(builder.select(inside_band(x, column, *bounds), x.load(at), x.constant(-INFINITY)), at)

        each_vector(x, rows, columns, row_stride, per_row, change)
        return context.get_dummy_value()

    return typed(types.void, static, scores, row_stride, rows, columns, low, high), generate


@intrinsic
def keep_factors(
    typing_context, static, keep, row_stride, rows, columns, query, key, head, sequence, seed, threshold,
    factor,
):
    """Fill a tile with 0 where dropout drops a pair and ``factor`` where it keeps it.

    ``query`` and ``key`` number the first row and column within their sequence. One block of words decides
    two adjacent keys, so keys are drawn in pairs, whole vectors of pairs at a time. The first pair may begin
    one number before its row, the last ones may end in the next row: rows are written in rising order, have a
    spare vector between them, and need room before the first and behind the last.
    """

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, keep, row_stride, rows, columns, query, key, head, sequence, seed, threshold, factor = arguments
        wide = ir.VectorType(I64, x.lanes)

        def every(value: Value | int) -> Value:
            return ir.Constant(wide, [value] * x.lanes) if isinstance(value, int) else x.splat(value)

        low = int(dropout._LOW)
        seeds = (every(b.and_(seed, ir.Constant(I64, low))), every(b.lshr(seed, ir.Constant(I64, 32))))
        sequences, heads, limit = every(sequence), every(head), every(threshold)
        factors, zero = x.splat(number(x, factor)), x.constant(0.0)
        first_pair = b.ashr(key, ir.Constant(I64, 1))
        odd_start = b.and_(key, ir.Constant(I64, 1))
        pairs = b.ashr(x.plus(x.plus(columns, odd_start), 1), ir.Constant(I64, 1))
        lanes = ir.Constant(wide, list(range(x.lanes)))
        orders = [
            ir.Constant(ir.VectorType(I32, n), [lane // 2 + start + n * (lane % 2) for lane in range(n)])
            for n in (x.lanes,)
            for start in (0, n // 2)
        ]

        def per_row(row: Value, _: list[Value]) -> list[Value]:
            number_of_row = x.plus(query, row)
            queries = every(b.and_(number_of_row, ir.Constant(I64, low & ~8)))
            upper = b.icmp_unsigned("!=", b.and_(number_of_row, ir.Constant(I64, 8)), ir.Constant(I64, 0))
            start = b.sub(x.times(row, row_stride), x.times(odd_start, x.size))

            def body(pair: Value, _: list[Value]) -> list[Value]:
                pair_numbers = b.add(every(x.plus(first_pair, pair)), lanes)
                words = _philox(x, [queries, pair_numbers, heads, sequences], seeds)
                chosen = [b.select(upper, words[2 + odd], words[odd]) for odd in range(2)]
                kept = [b.select(b.icmp_unsigned(">=", word, limit), factors, zero) for word in chosen]
                at = x.at(x.pointer(keep), x.plus(start, x.times(pair, 2 * x.size)))
                for half, order in enumerate(orders):
                    x.store(b.shuffle_vector(*kept, order), x.at(at, half * x.bytes))
                return []

            x.loop(pairs, [], body, step=x.lanes)
            return []

        x.loop(rows, [], per_row)
        return context.get_dummy_value()

    integers = (keep, row_stride, rows, columns, query, key, head, sequence, seed, threshold)
    return typed(types.void, static, *integers, types.float64), generate
