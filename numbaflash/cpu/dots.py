"""Products for few queries: head_dim lies in the lanes, and each row of K and V is read once, as stored.

A panel holds ``lanes`` queries, a few; vectors of ``wide`` numbers run along head_dim. Scores come out as
S^T (one row of ``lanes`` numbers per key), which is what the softmax and the stages of a score expect, and the output
as rows. A row is cut into vectors at columns 0, wide, 2 wide ...; the last one is moved back so as to end with the
row, where it overlaps its neighbour. So rows must be at least one vector long, and nothing behind them is read.

bfloat16 becomes float32 fastest two vectors at a time, numbers at even and at odd places apart: whole cache lines
are read so, and :func:`place_of` tells where their columns lie in a query row.
"""

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .compile import Static, helper
from .simd import I32, I64, INFINITY, Lanes, Value, typed
from .softmax import ALPHA, NEW_MAX, OLD_MAX, SUM, in_powers_of_two, reference_of, weight_of
from .storage import BFLOAT16, ITEM_SIZES, in_order, load_as_computed, load_pairs


def _wide(context, builder, static: Static) -> Lanes:
    return Lanes(context, builder, static.replace(lanes=static["wide"]))


_LINE = 64
"""Bytes of a cache line: each is asked for once."""


@helper
def place_of(static, column, columns):
    """Where a column of a query row of ``columns`` lies, for the products with K as stored."""
    line = 32  # numbers of a cache line
    if static.storage != BFLOAT16 or column >= columns // line * line:
        return column
    pair = 2 * static.wide
    within = column % pair
    return column - within + within // 2 + within % 2 * static.wide


def _sum_lanes(x: Lanes, vectors: list[Value]) -> Value:
    """One vector whose lane i is the sum of vector i's lanes: halves are interleaved and added, again and again."""
    n = x.lanes
    low = ir.Constant(ir.VectorType(I32, n), [v for i in range(n // 2) for v in (i, n + i)])
    high = ir.Constant(ir.VectorType(I32, n), [v for i in range(n // 2, n) for v in (i, n + i)])
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [
            x.builder.fadd(x.builder.shuffle_vector(a, b, low), x.builder.shuffle_vector(a, b, high))
            for a, b in pairs
        ]
    return vectors[0]


@intrinsic(prefer_literal=True)
def dot_keys(typing_context, static, code, queries, q_row, keys, k_row, count, columns, scores, ahead, ahead_row):
    """``scores[key, lane] = query row lane . key row`` for ``count`` keys, stored as ``code``.

    Query rows lie ``q_row`` bytes apart, cut into vectors with zeros in place of what overlaps. ``scores`` has room
    for ``wide / lanes - 1`` more rows. Rows at ``ahead``, which are read next, are asked for in passing.
    """
    literal, code = code, code.literal_value
    size, rows = ITEM_SIZES[code], static["lanes"]
    keys_at_once = static["wide"] // rows
    vectors_of_line = max(1, _LINE // (static["wide"] * size))

    def generate(context, builder, signature, arguments):
        x = _wide(context, builder, static)
        b = builder
        _, _, queries, q_row, keys, k_row, count, columns, scores, ahead, ahead_row = arguments
        queries, keys, scores, ahead = (x.pointer(a) for a in (queries, keys, scores, ahead))
        q_rows = [x.at(queries, x.times(q_row, i)) for i in range(rows)]
        whole = b.and_(columns, ir.Constant(I64, -x.lanes))
        lines = b.and_(columns, ir.Constant(I64, -x.lanes * vectors_of_line))
        rest = b.sub(columns, whole)
        overlap = x.splat(b.trunc(b.sub(ir.Constant(I64, x.lanes), rest), I32))
        lanes = ir.Constant(ir.VectorType(I32, x.lanes), list(range(x.lanes)))
        new = b.icmp_signed(">=", lanes, overlap)
        last = x.plus(count, -1)

        def per_block(first: Value, _: list[Value]) -> list[Value]:
            here, soon = [], []
            for i in range(keys_at_once):
                key = x.plus(first, i)
                key = b.select(b.icmp_signed("<", key, last), key, last)
                here.append(x.at(keys, x.times(key, k_row)))
                soon.append(x.at(ahead, x.times(key, ahead_row)))

            def ask(column: Value) -> None:
                for pointer in soon:
                    x.prefetch(x.at(pointer, x.times(column, size)))

            def add(slot: Value, column: Value, sums: list[Value], partial: bool = False) -> list[Value]:
                sums = list(sums)
                offset, at_q = x.times(column, size), x.times(slot, x.size)
                vectors = [load_as_computed(x, x.at(key, offset), code, x.lanes) for key in here]
                if partial:  # by selection: what overlaps was counted, and 0 times infinity is NaN
                    vectors = [b.select(new, vector, x.constant(0.0)) for vector in vectors]
                for lane in range(rows):
                    query = x.load(x.at(q_rows[lane], at_q))
                    for i, vector in enumerate(vectors):
                        n = i * rows + lane
                        sums[n] = x.fma(vector, query, sums[n])
                return sums

            def add_pair(column: Value, sums: list[Value]) -> list[Value]:
                sums = list(sums)
                pairs = [load_pairs(x, x.at(key, x.times(column, size))) for key in here]
                for lane in range(rows):
                    for part in range(2):
                        query = x.load(x.at(q_rows[lane], x.times(x.plus(column, part * x.lanes), x.size)))
                        for i, pair in enumerate(pairs):
                            n = i * rows + lane
                            sums[n] = x.fma(pair[part], query, sums[n])
                return sums

            def add_line(column: Value, sums: list[Value]) -> list[Value]:
                ask(column)
                if code == BFLOAT16:
                    for i in range(0, vectors_of_line, 2):
                        sums = add_pair(x.plus(column, i * x.lanes), sums)
                    return sums
                for i in range(vectors_of_line):
                    here_too = x.plus(column, i * x.lanes)
                    sums = add(here_too, here_too, sums)
                return sums

            def add_vector(column: Value, sums: list[Value]) -> list[Value]:
                ask(column)
                return add(column, column, sums)

            start = x.plus(columns, -x.lanes)
            sums = [x.constant(0.0)] * (keys_at_once * rows)
            sums = x.loop(lines, sums, add_line, step=vectors_of_line * x.lanes)
            if vectors_of_line > 1:
                sums = x.loop(whole, sums, add_vector, step=x.lanes, start=lines)
            sums = x.loop(columns, sums, lambda c, sums: add(c, start, sums, True), step=x.lanes, start=whole)
            x.store(_sum_lanes(x, sums), x.at(scores, x.times(first, rows * x.size)))
            return []

        x.loop(count, [], per_block, step=keys_at_once)
        return context.get_dummy_value()

    return typed(types.void, static, literal, queries, q_row, keys, k_row, count, columns, scores, ahead,
                 ahead_row), generate


def _repeat(x: Lanes, numbers: Value, rows: int) -> Value:
    """``rows`` numbers again and again until a wide vector is full."""
    order = ir.Constant(ir.VectorType(I32, x.lanes), [i % rows for i in range(x.lanes)])
    return x.builder.shuffle_vector(numbers, ir.Constant(numbers.type, ir.Undefined), order)


def _fold(x: Lanes, vector: Value, rows: int, combine) -> Value:
    """A wide vector reduced to ``rows`` numbers, lane by lane modulo ``rows``."""
    while vector.type.count > rows:
        half = vector.type.count // 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        low, high = (
            x.builder.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(I32, half), list(order)))
            for order in (range(half), range(half, 2 * half))
        )
        vector = combine(low, high)
    return vector


@intrinsic
def softmax_few(typing_context, static, scores, count, hidden, state, unit):
    """:func:`softmax` for a panel of few lanes, several keys to a vector.

    ``count`` is rounded up to whole vectors: what follows the last key counts as hidden. NEW_MAX is taken here unless
    ``hidden``, where :func:`hide_outside` has taken it.
    """

    def generate(context, builder, signature, arguments):
        x, narrow = _wide(context, builder, static), Lanes(context, builder, static)
        b, rows = builder, static["lanes"]
        _, scores, count, hidden, state, unit = arguments
        scores, state = x.pointer(scores), x.pointer(state)
        bytes_of_row = rows * x.size
        end = x.times(count, bytes_of_row)
        padding = ir.Constant(narrow.vector, [-INFINITY] * rows)
        rounded = b.and_(x.plus(end, x.bytes - 1), ir.Constant(I64, -x.bytes))

        def pad(offset: Value, _: list[Value]) -> list[Value]:
            narrow.store(padding, x.at(scores, offset))
            return []

        x.loop(rounded, [], pad, step=bytes_of_row, start=end)
        places = [x.at(state, which * bytes_of_row) for which in range(4)]
        old = narrow.load(places[OLD_MAX])

        def largest(offset: Value, so_far: list[Value]) -> list[Value]:
            return [x.maximum(x.load(x.at(scores, offset)), so_far[0])]

        searched = b.select(hidden, ir.Constant(I64, 0), rounded)
        begin = _repeat(x, b.select(hidden, narrow.load(places[NEW_MAX]), old), rows)
        new = _fold(x, x.loop(searched, [begin], largest, step=x.bytes)[0], rows, narrow.maximum)
        reference = reference_of(narrow, new)
        alpha = weight_of(narrow, in_powers_of_two(narrow, unit), old, reference)
        for which, value in ((OLD_MAX, new), (NEW_MAX, new), (ALPHA, alpha)):
            narrow.store(value, places[which])
        wide_reference, wide_unit = _repeat(x, reference, rows), in_powers_of_two(x, unit)

        def weigh(offset: Value, sums: list[Value]) -> list[Value]:
            at = x.at(scores, offset)
            weight = weight_of(x, wide_unit, x.load(at), wide_reference)
            x.store(weight, at)
            return [b.fadd(sums[0], weight)]

        total = _fold(x, x.loop(rounded, [x.constant(0.0)], weigh, step=x.bytes)[0], rows, b.fadd)
        narrow.store(narrow.fma(narrow.load(places[SUM]), alpha, total), places[SUM])
        return context.get_dummy_value()

    return typed(types.void, static, scores, count, types.boolean, state, types.float64), generate


@intrinsic(prefer_literal=True)
def weigh_values(
    typing_context, static, code, weights, values, v_row, count, columns, output, out_row, factors, ahead, ahead_row,
    ahead_columns,
):
    """``output[lane] = output[lane] * factors[lane] + sum over keys of weights[key, lane] * value row``.

    ``ahead_columns`` columns of as many rows at ``ahead``, which are read next, are asked for in passing.
    """
    literal, code = code, code.literal_value
    size, rows = ITEM_SIZES[code], static["lanes"]
    vectors_at_once = static["wide"] // rows
    paired = code == BFLOAT16 and vectors_at_once > 1

    def generate(context, builder, signature, arguments):
        x = _wide(context, builder, static)
        b = builder
        (_, _, weights, values, v_row, count, columns, output, out_row, factors, ahead, ahead_row,
         ahead_columns) = arguments
        weights, values, output, factors, ahead = (
            x.pointer(a) for a in (weights, values, output, factors, ahead)
        )
        last_ahead = x.times(x.plus(ahead_columns, -1), size)
        last = x.plus(columns, -x.lanes)

        def block(vectors: int):
            def body(slot: Value, _: list[Value]) -> list[Value]:
                places = []
                for j in range(vectors):
                    column = x.plus(slot, j * x.lanes)
                    column = b.select(b.icmp_signed("<", column, last), column, last)
                    places.append(x.at(values, x.times(column, size)))

                # Lines of a row ahead are shared out among the slots; a row that has fewer is asked for again.
                soon = []
                for line in range(0, vectors * x.lanes * size, _LINE):
                    at = x.plus(x.times(slot, size), line)
                    soon.append(x.at(ahead, b.select(b.icmp_signed("<", at, last_ahead), at, last_ahead)))

                def per_key(key: Value, sums: list[Value]) -> list[Value]:
                    sums = list(sums)
                    for pointer in soon:
                        x.prefetch(x.at(pointer, x.times(key, ahead_row)))
                    offset, at_weights = x.times(key, v_row), x.at(weights, x.times(key, rows * x.size))
                    if paired and vectors > 1:
                        pairs = [load_pairs(x, x.at(place, offset)) for place in places[::2]]
                        loaded = [vector for pair in pairs for vector in pair]
                    else:
                        loaded = [load_as_computed(x, x.at(place, offset), code, x.lanes) for place in places]
                    for lane in range(rows):
                        weight = x.broadcast(x.at(at_weights, lane * x.size))
                        for j, vector in enumerate(loaded):
                            n = lane * vectors + j
                            sums[n] = x.fma(weight, vector, sums[n])
                    return sums

                sums = x.loop(count, [x.constant(0.0)] * (rows * vectors), per_key)
                if paired and vectors > 1:
                    pairs = (in_order(x, even, odd) for even, odd in zip(sums[::2], sums[1::2]))
                    sums = [vector for pair in pairs for vector in pair]
                for lane in range(rows):
                    factor = x.broadcast(x.at(factors, lane * x.size))
                    row = x.at(output, x.times(out_row, lane))
                    for j in range(vectors):
                        at = x.at(row, x.times(x.plus(slot, j * x.lanes), x.size))
                        x.store(x.fma(x.load(at), factor, sums[lane * vectors + j]), at)
                return []

            return body

        slots = b.and_(x.plus(columns, x.lanes - 1), ir.Constant(I64, -x.lanes))
        # Pairs are of neighbours: none may be moved back to end with the row.
        grouped = b.and_(columns if paired else slots, ir.Constant(I64, -x.lanes * vectors_at_once))
        x.loop(grouped, [], block(vectors_at_once), step=x.lanes * vectors_at_once)
        x.loop(slots, [], block(1), start=grouped, step=x.lanes)
        return context.get_dummy_value()

    return typed(types.void, static, literal, weights, values, v_row, count, columns, output, out_row,
                 factors, ahead, ahead_row, ahead_columns), generate


@intrinsic
def combine_rows(typing_context, static, target, source, old_factor, new_factor, count):
    """``target = target * old_factor + source * new_factor`` for ``count`` adjacent numbers, whole vectors."""

    def generate(context, builder, signature, arguments):
        x = _wide(context, builder, static)
        _, target, source, old_factor, new_factor, count = arguments
        old, new = x.splat(old_factor), x.splat(new_factor)

        def body(i: Value, _: list[Value]) -> list[Value]:
            at, read = (x.at(x.pointer(address), x.times(i, x.size)) for address in (target, source))
            x.store(x.fma(x.load(at), old, builder.fmul(x.load(read), new)), at)
            return []

        x.loop(count, [], body, step=x.lanes)
        return context.get_dummy_value()

    number = types.float32 if static["bits"] == 32 else types.float64
    return typed(types.void, static, target, source, number, number, count), generate
