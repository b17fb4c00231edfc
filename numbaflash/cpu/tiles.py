"""Tiles between memory and the kernels' scratch: packed, transposed and converted on the way.

Scratch is laid out for the microkernels: a *panel* has the query rows in its lanes, one column of the array per
row of the panel. Rows are named by an int64 table of addresses, one per lane, so that the rows of one panel may
come from several heads; lanes that have no row repeat the last one, which makes them harmless.
"""

from collections.abc import Callable

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .simd import I32, I64, Lanes, Value, typed
from .storage import ITEM_SIZES, load_as_computed, store_as


def each_column(
    x: Lanes, code: int, vectors: int, rows: Value, columns: Value, stride: Value,
    consume: Callable[[Value, Value, Value], None], shift: Value | None = None, ahead: Value | None = None,
) -> None:
    """Call ``consume(column, vector, value)`` for each column of the rows and each vector of lanes.

    ``value`` holds, lane by lane, the number at ``row address + shift + column * stride``. Rows of adjacent numbers are
    loaded as vectors and transposed, others number by number. What lies ``ahead`` bytes further on is asked for.
    """
    b = x.builder
    adjacent = b.icmp_signed("==", stride, ir.Constant(I64, ITEM_SIZES[code]))
    whole = b.select(adjacent, b.and_(columns, ir.Constant(I64, -x.lanes)), ir.Constant(I64, 0))

    def row_pointers(vector: Value) -> list[Value]:
        table = x.at(rows, x.times(vector, 8 * x.lanes))
        return [x.pointer(x.load(x.at(table, 8 * lane), I64)) for lane in range(x.lanes)]

    def per_vector(vector: Value, _: list[Value]) -> list[Value]:
        pointers = row_pointers(vector)

        def block(column: Value, _: list[Value]) -> list[Value]:
            offset = x.times(column, ITEM_SIZES[code])
            offset = offset if shift is None else x.plus(offset, shift)
            loaded = [load_as_computed(x, x.at(p, offset), code, x.lanes) for p in pointers]
            if ahead is not None:
                for p in pointers:
                    x.prefetch(x.at(p, offset, ahead))
            for c, value in enumerate(x.transpose(loaded)):
                consume(x.plus(column, c), vector, value)
            return []

        def single(column: Value, _: list[Value]) -> list[Value]:
            offset = x.times(column, stride)
            offset = offset if shift is None else x.plus(offset, shift)
            numbers = [load_as_computed(x, x.at(p, offset), code, 1) for p in pointers]
            value = ir.Constant(ir.VectorType(numbers[0].type, x.lanes), ir.Undefined)
            for lane, number in enumerate(numbers):
                value = b.insert_element(value, number, ir.Constant(I32, lane))
            consume(column, vector, value)
            return []

        x.loop(whole, [], block, step=x.lanes)
        x.loop(columns, [], single, start=whole)
        return []

    x.loop(ir.Constant(I64, vectors), [], per_vector)


@intrinsic(prefer_literal=True)
def pack_panel(typing_context, static, code, panel, rows, columns, stride, factor):
    """``panel[column, lane] = factor * number at (rows[lane] + column * stride)``.

    ``code`` is a literal of :mod:`storage`, ``rows`` the address of the lanes' row addresses.
    """
    literal, code = code, code.literal_value

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        _, _, panel, rows, columns, stride, factor = arguments
        scale = x.splat(factor)
        width = static["panel"] * x.size

        def consume(column: Value, vector: Value, value: Value) -> None:
            at = x.at(x.pointer(panel), x.times(column, width), x.times(vector, x.bytes))
            x.store(builder.fmul(value, scale), at)

        each_column(x, code, static["vectors"], x.pointer(rows), columns, stride, consume)
        return context.get_dummy_value()

    number = types.float32 if static["bits"] == 32 else types.float64
    return typed(types.void, static, literal, panel, rows, columns, stride, number), generate


@intrinsic(prefer_literal=True)
def unpack_panel(typing_context, static, code, panel, rows, columns, stride, factors):
    """``number at (rows[lane] + column * stride) = factors[lane] * panel[column, lane]``, rounded to ``code``."""
    literal, code = code, code.literal_value
    size = ITEM_SIZES[code]

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, _, panel, rows, columns, stride, factors = arguments
        panel, rows, factors = (x.pointer(address) for address in (panel, rows, factors))
        width = static["panel"] * x.size
        adjacent = b.icmp_signed("==", stride, ir.Constant(I64, size))
        whole = b.select(adjacent, b.and_(columns, ir.Constant(I64, -x.lanes)), ir.Constant(I64, 0))

        def per_vector(vector: Value, _: list[Value]) -> list[Value]:
            table = x.at(rows, x.times(vector, 8 * x.lanes))
            pointers = [x.pointer(x.load(x.at(table, 8 * lane), I64)) for lane in range(x.lanes)]
            source = x.at(panel, x.times(vector, x.bytes))
            factor = x.load(x.at(factors, x.times(vector, x.bytes)))

            def scaled(column: Value) -> Value:
                return b.fmul(x.load(x.at(source, x.times(column, width))), factor)

            def block(column: Value, _: list[Value]) -> list[Value]:
                loaded = [scaled(x.plus(column, c)) for c in range(x.lanes)]
                for pointer, value in zip(pointers, x.transpose(loaded)):
                    store_as(x, value, x.at(pointer, x.times(column, size)), code)
                return []

            def single(column: Value, _: list[Value]) -> list[Value]:
                value = scaled(column)
                for lane, pointer in enumerate(pointers):
                    number = b.extract_element(value, ir.Constant(I32, lane))
                    store_as(x, number, x.at(pointer, x.times(column, stride)), code)
                return []

            x.loop(whole, [], block, step=x.lanes)
            x.loop(columns, [], single, start=whole)
            return []

        x.loop(ir.Constant(I64, static["vectors"]), [], per_vector)
        return context.get_dummy_value()

    return typed(types.void, static, literal, panel, rows, columns, stride, factors), generate


@intrinsic(prefer_literal=True)
def pack_rows(typing_context, static, code, tile, tile_row, source, row_stride, column_stride, rows, columns):
    """``tile[row, column] = number at (source + row * row_stride + column * column_stride)``, converted.

    The tile has adjacent columns and ``tile_row`` bytes from row to row.
    """
    literal, code = code, code.literal_value
    size = ITEM_SIZES[code]

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, _, tile, tile_row, source, row_stride, column_stride, rows, columns = arguments
        adjacent = b.icmp_signed("==", column_stride, ir.Constant(I64, size))
        whole = b.select(adjacent, b.and_(columns, ir.Constant(I64, -x.lanes)), ir.Constant(I64, 0))

        def per_row(row: Value, _: list[Value]) -> list[Value]:
            read = x.at(x.pointer(source), x.times(row, row_stride))
            write = x.at(x.pointer(tile), x.times(row, tile_row))

            def block(column: Value, _: list[Value]) -> list[Value]:
                value = load_as_computed(x, x.at(read, x.times(column, size)), code, x.lanes)
                x.store(value, x.at(write, x.times(column, x.size)))
                return []

            def single(column: Value, _: list[Value]) -> list[Value]:
                value = load_as_computed(x, x.at(read, x.times(column, column_stride)), code, 1)
                x.store(value, x.at(write, x.times(column, x.size)))
                return []

            x.loop(whole, [], block, step=x.lanes)
            x.loop(columns, [], single, start=whole)
            return []

        x.loop(rows, [], per_row)
        return context.get_dummy_value()

    return typed(types.void, static, literal, tile, tile_row, source, row_stride, column_stride, rows,
                 columns), generate


@intrinsic
def all_finite(typing_context, static, tile, row_stride, rows, columns):
    """True if a tile of adjacent columns, in the dtype computed in, holds neither NaN nor infinity."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, tile, row_stride, rows, columns = arguments
        whole = b.and_(columns, ir.Constant(I64, -x.lanes))
        zero = ir.Constant(x.scalar, 0.0)

        def per_row(row: Value, sums: list[Value]) -> list[Value]:
            read = x.at(x.pointer(tile), x.times(row, row_stride))

            # 0 * x is 0 for a finite x and NaN otherwise, and NaN survives in a sum.
            def block(column: Value, sums: list[Value]) -> list[Value]:
                value = x.load(x.at(read, x.times(column, x.size)))
                return [x.fma(value, x.constant(0.0), sums[0]), sums[1]]

            def single(column: Value, sums: list[Value]) -> list[Value]:
                value = x.load(x.at(read, x.times(column, x.size)), x.scalar)
                return [sums[0], b.fadd(b.fmul(value, zero), sums[1])]

            sums = x.loop(whole, sums, block, step=x.lanes)
            return x.loop(columns, sums, single, start=whole)

        vector, number = x.loop(rows, [x.constant(0.0), zero], per_row)
        for lane in range(x.lanes):
            number = b.fadd(number, b.extract_element(vector, ir.Constant(I32, lane)))
        return b.fcmp_ordered("==", number, zero)

    return typed(types.boolean, static, tile, row_stride, rows, columns), generate


@intrinsic
def fill(typing_context, static, address, count, value):
    """Set ``count`` adjacent numbers (a multiple of the lanes) to one value."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        _, address, count, value = arguments
        vector = x.splat(value)

        def body(i: Value, _: list[Value]) -> list[Value]:
            x.store(vector, x.at(x.pointer(address), x.times(i, x.size)))
            return []

        x.loop(count, [], body, step=x.lanes)
        return context.get_dummy_value()

    number = types.float32 if static["bits"] == 32 else types.float64
    return typed(types.void, static, address, count, number), generate
