"""The stages of a non-empty Score on a tile of scores in L1, and dropout on the weights: vectors of queries.

The shared scalar functions of :mod:`numbaflash.score` and :mod:`numbaflash.dropout` say what is computed; here it
is computed for all lanes at once.
"""

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .. import dropout
from .compile import Static
from .simd import I64, INFINITY, Lanes, Value, typed
from .storage import BOOLEAN, ITEM_SIZES
from .tiles import each_column


def _number(static: Static) -> types.Type:
    return types.float32 if static["bits"] == 32 else types.float64


def _each_score(x: Lanes, static: Static, scores: Value, count: Value, change) -> None:
    """``score = change(row, vector, score)`` over a tile."""
    width = static["panel"] * x.size

    def body(i: Value, _: list[Value]) -> list[Value]:
        row = x.at(x.pointer(scores), x.times(i, width))
        for j in range(static["vectors"]):
            at = x.at(row, j * x.bytes)
            x.store(change(i, j, x.load(at)), at)
        return []

    x.loop(count, [], body)


@intrinsic
def softcap_scores(typing_context, static, scores, count, cap):
    """``s = cap * tanh(s / cap)``."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        _, scores, count, cap = arguments
        cap = x.splat(cap)

        def change(row: Value, vector: int, score: Value) -> Value:
            return builder.fmul(cap, x.tanh(builder.fdiv(score, cap)))

        _each_score(x, static, scores, count, change)
        return context.get_dummy_value()

    return typed(types.void, static, scores, count, _number(static)), generate


@intrinsic(prefer_literal=True)
def combine_columns(typing_context, static, code, scores, rows, shift, count, stride):
    """Add a tile of bias, where -inf hides, or hide where a boolean is False (code BOOLEAN).

    Entry (key, lane) is the number at ``rows[lane] + shift + key * stride``.
    """
    literal, code = code, code.literal_value

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, _, scores, rows, shift, count, stride = arguments
        width = static["panel"] * x.size
        hidden = x.constant(-INFINITY)

        def consume(key: Value, vector: Value, value: Value) -> None:
            at = x.at(x.pointer(scores), x.times(key, width), x.times(vector, x.bytes))
            score = x.load(at)
            if code == BOOLEAN:
                shown = b.icmp_unsigned("!=", value, ir.Constant(value.type, [0] * x.lanes))
                x.store(b.select(shown, score, hidden), at)
            else:
                hides = b.fcmp_ordered("==", value, hidden)
                x.store(b.select(hides, hidden, b.fadd(score, value)), at)

        # Rows lie far apart, and the hardware does not see that the next tile continues them.
        next_tile = x.times(count, ITEM_SIZES[code])
        each_column(x, code, static["vectors"], x.pointer(rows), count, stride, consume, shift, next_tile)
        return context.get_dummy_value()

    return typed(types.void, static, literal, scores, rows, shift, count, stride), generate


@intrinsic
def alibi_scores(typing_context, static, scores, count, key, positions, slopes):
    """``s -= slope * |position - key|``, with panels of positions (integers) and slopes, one per lane."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, scores, count, key, positions, slopes = arguments
        vectors = range(static["vectors"])
        at = [x.load(x.at(x.pointer(positions), j * x.bytes), x.integers) for j in vectors]
        slope = [x.load(x.at(x.pointer(slopes), j * x.bytes)) for j in vectors]

        def change(row: Value, vector: int, score: Value) -> Value:
            number = x.plus(key, row)
            here = x.splat(b.trunc(number, x.integer) if x.bits < 64 else number)
            distance = x.call("fabs", b.sitofp(b.sub(at[vector], here), x.vector))
            return x.fma(b.fneg(slope[vector]), distance, score)

        _each_score(x, static, scores, count, change)
        return context.get_dummy_value()

    return typed(types.void, static, scores, count, key, positions, slopes), generate


def _philox(x: Lanes, counter: list[Value], key: tuple[Value, Value]) -> list[Value]:
    """Philox-4x32 as in :func:`numbaflash.dropout.philox`, on vectors of 64-bit integers."""
    b = x.builder
    kind = counter[0].type

    def constant(number: int) -> Value:
        return ir.Constant(kind, [int(number)] * kind.count)

    low, shift = constant(dropout._LOW), constant(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(dropout.ROUNDS):
        p = b.mul(constant(dropout._M0), c0)
        q = b.mul(constant(dropout._M1), c2)
        c0, c1, c2, c3 = (
            b.xor(b.xor(b.lshr(q, shift), c1), k0), b.and_(q, low),
            b.xor(b.xor(b.lshr(p, shift), c3), k1), b.and_(p, low),
        )
        k0 = b.and_(b.add(k0, constant(dropout._W0)), low)
        k1 = b.and_(b.add(k1, constant(dropout._W1)), low)
    return [c0, c1, c2, c3]


@intrinsic
def drop_weights(typing_context, static, weights, count, key, queries, heads, sequence, seed, threshold, factor):
    """Zero the dropped weights and multiply the kept ones by ``factor``.

    ``key`` numbers the first row within its sequence; ``queries`` and ``heads`` are int64 tables, one entry per
    lane. A word of the generator decides two adjacent keys, so rows go in pairs (even, odd).
    """

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, weights, count, key, queries, heads, sequence, seed, threshold, factor = arguments
        width = static["panel"] * x.size
        wide = ir.VectorType(I64, x.lanes)

        def all_lanes(number: Value | int) -> Value:
            if isinstance(number, int):
                return ir.Constant(wide, [number] * x.lanes)
            return x.splat(number)

        low = int(dropout._LOW)
        seeds = (all_lanes(b.and_(seed, ir.Constant(I64, low))), all_lanes(b.lshr(seed, ir.Constant(I64, 32))))
        sequences, limit, scale = all_lanes(sequence), all_lanes(threshold), x.splat(factor)
        first = b.ashr(key, ir.Constant(I64, 1))
        last = b.ashr(x.plus(x.plus(key, count), 1), ir.Constant(I64, 1))

        def per_pair(pair: Value, _: list[Value]) -> list[Value]:
            def per_vector(vector: Value, _: list[Value]) -> list[Value]:
                at = x.times(vector, 8 * x.lanes)
                query = x.load(x.at(x.pointer(queries), at), wide)
                head = x.load(x.at(x.pointer(heads), at), wide)
                counter = [b.and_(query, all_lanes(low & ~8)), all_lanes(pair), head, sequences]
                words = _philox(x, counter, seeds)
                upper = b.icmp_unsigned("!=", b.and_(query, all_lanes(8)), all_lanes(0))
                for odd in range(2):
                    row = b.sub(x.plus(x.times(pair, 2), odd), key)
                    inside = b.and_(b.icmp_signed(">=", row, ir.Constant(I64, 0)), b.icmp_signed("<", row, count))
                    with b.if_then(inside):
                        word = b.select(upper, words[2 + odd], words[odd])
                        kept = b.icmp_unsigned(">=", word, limit)
                        place = x.at(x.pointer(weights), x.times(row, width), x.times(vector, x.bytes))
                        weight = b.fmul(x.load(place), scale)
                        x.store(b.select(kept, weight, x.constant(0.0)), place)
                return []

            x.loop(ir.Constant(I64, static["vectors"]), [], per_vector)
            return []

        x.loop(last, [], per_pair, start=first)
        return context.get_dummy_value()

    signature = typed(types.void, static, weights, count, key, queries, heads, sequence, seed, threshold,
                      _number(static))
    return signature, generate


