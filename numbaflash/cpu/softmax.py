"""Online softmax of one panel (Milakov and Gimelshein, 2018), all of it vertical: queries lie in the lanes.

A panel's state is four panels of numbers, one per lane: the maximum before and after the present tile, the sum l
and the factor alpha = exp(old maximum - new maximum) for what was summed so far. A lane that has seen no key has
maximum -inf and sum 0; exponents are then taken from 0, so that nothing becomes NaN.

Scores come in a unit of the caller's choice: ``unit > 0`` times a score is a natural logarithm. The unit, times
log2(e), enters after the maximum is subtracted, where it costs nothing: so Q need not be scaled, which keeps the
products of half-precision numbers exact, and huge scores cannot overflow.
"""

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .simd import INFINITY, LN_2, LOG2_E, Lanes, Value, typed

OLD_MAX, NEW_MAX, SUM, ALPHA = range(4)
STATE_PANELS = 4


def reference_of(x: Lanes, maximum: Value) -> Value:
    """What is subtracted from scores: the maximum, or 0 where no key was seen."""
    unseen = x.builder.fcmp_ordered("==", maximum, x.constant(-INFINITY))
    return x.builder.select(unseen, x.constant(0.0), maximum)


def weight_of(x: Lanes, unit: Value, score: Value, reference: Value) -> Value:
    return x.exp2(x.builder.fsub(score, reference), unit)


def in_powers_of_two(x: Lanes, unit: Value) -> Value:
    return x.splat_number(x.builder.fmul(unit, ir.Constant(unit.type, LOG2_E)))


@intrinsic
def softmax(typing_context, static, scores, count, state, unit):
    """Turn ``count`` rows of scores into exp(score - maximum) in place; update sum and alpha of the state."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, scores, count, state, unit = arguments
        scores, state, unit = x.pointer(scores), x.pointer(state), in_powers_of_two(x, unit)
        width = static["panel"] * x.size
        vectors = range(static["vectors"])

        def slot(which: int, vector: int) -> Value:
            return x.at(state, which * width + vector * x.bytes)

        references, alphas = [], []
        for j in vectors:
            old, new = x.load(slot(OLD_MAX, j)), x.load(slot(NEW_MAX, j))
            references.append(reference_of(x, new))
            alphas.append(weight_of(x, unit, old, references[j]))
            x.store(alphas[j], slot(ALPHA, j))
            x.store(new, slot(OLD_MAX, j))

        def body(i: Value, sums: list[Value]) -> list[Value]:
            row = x.at(scores, x.times(i, width))
            result = []
            for j in vectors:
                at = x.at(row, j * x.bytes)
                weight = weight_of(x, unit, x.load(at), references[j])
                x.store(weight, at)
                result.append(b.fadd(sums[j], weight))
            return result

        sums = x.loop(count, [x.constant(0.0)] * len(vectors), body)
        for j in vectors:
            x.store(x.fma(x.load(slot(SUM, j)), alphas[j], sums[j]), slot(SUM, j))
        return context.get_dummy_value()

    return typed(types.void, static, scores, count, state, types.float64), generate


@intrinsic
def hide_outside(typing_context, static, scores, count, key, low, high, state):
    """Scores outside a lane's ``low <= key < high`` become -inf; the new maximum is taken anew.

    ``key`` is the number of the first row; ``low`` and ``high`` are panels of integers as wide as the scores.
    """

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, scores, count, key, low, high, state = arguments
        scores, low, high, state = (x.pointer(address) for address in (scores, low, high, state))
        width = static["panel"] * x.size
        vectors = range(static["vectors"])
        lows = [x.load(x.at(low, j * x.bytes), x.integers) for j in vectors]
        highs = [x.load(x.at(high, j * x.bytes), x.integers) for j in vectors]

        def body(i: Value, largest: list[Value]) -> list[Value]:
            row = x.at(scores, x.times(i, width))
            number = x.plus(key, i)
            here = x.splat(b.trunc(number, x.integer) if x.bits < 64 else number)
            result = []
            for j in vectors:
                at = x.at(row, j * x.bytes)
                seen = b.and_(b.icmp_signed(">=", here, lows[j]), b.icmp_signed("<", here, highs[j]))
                score = b.select(seen, x.load(at), x.constant(-INFINITY))
                x.store(score, at)
                result.append(x.maximum(score, largest[j]))
            return result

        largest = x.loop(count, [x.load(x.at(state, OLD_MAX * width + j * x.bytes)) for j in vectors], body)
        for j, value in enumerate(largest):
            x.store(value, x.at(state, NEW_MAX * width + j * x.bytes))
        return context.get_dummy_value()

    return typed(types.void, static, scores, count, key, low, high, state), generate


@intrinsic
def take_maximum(typing_context, static, scores, count, state):
    """The new maximum of scores that a stage has changed, where none lies outside a lane's keys."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        _, scores, count, state = arguments
        scores, state = x.pointer(scores), x.pointer(state)
        width = static["panel"] * x.size
        vectors = range(static["vectors"])

        def body(i: Value, largest: list[Value]) -> list[Value]:
            row = x.at(scores, x.times(i, width))
            return [x.maximum(x.load(x.at(row, j * x.bytes)), largest[j]) for j in vectors]

        largest = x.loop(count, [x.load(x.at(state, OLD_MAX * width + j * x.bytes)) for j in vectors], body)
        for j, value in enumerate(largest):
            x.store(value, x.at(state, NEW_MAX * width + j * x.bytes))
        return context.get_dummy_value()

    return typed(types.void, static, scores, count, state), generate


@intrinsic
def add_sink(typing_context, static, state, sinks, unit):
    """One more logit per lane (natural units) joins the sum; alpha becomes the factor of what was summed."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, state, sinks, unit = arguments
        state, sinks = x.pointer(state), x.pointer(sinks)
        width = static["panel"] * x.size
        natural, unit = x.splat_number(unit), in_powers_of_two(x, unit)

        for j in range(static["vectors"]):
            at = [x.at(state, which * width + j * x.bytes) for which in range(STATE_PANELS)]
            sink = b.fdiv(x.load(x.at(sinks, j * x.bytes)), natural)
            old = x.load(at[OLD_MAX])
            new = x.maximum(sink, old)
            reference = reference_of(x, new)
            alpha = weight_of(x, unit, old, reference)
            total = x.fma(x.load(at[SUM]), alpha, weight_of(x, unit, sink, reference))
            for which, value in ((OLD_MAX, new), (SUM, total), (ALPHA, alpha)):
                x.store(value, at[which])
        return context.get_dummy_value()

    return typed(types.void, static, state, sinks, types.float64), generate


@intrinsic
def finish_lse(typing_context, static, state, factors, lse, unit):
    """Factors ``alpha / l`` of the output and ``lse = m + log(l)``; 0 and -inf where no key was seen."""

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        b = builder
        _, state, factors, lse, unit = arguments
        state, factors, lse = (x.pointer(address) for address in (state, factors, lse))
        natural = x.splat_number(unit)
        width = static["panel"] * x.size
        for j in range(static["vectors"]):
            at = [x.at(state, which * width + j * x.bytes) for which in range(STATE_PANELS)]
            total = x.load(at[SUM])
            empty = b.fcmp_ordered("==", total, x.constant(0.0))
            factor = b.select(empty, x.constant(0.0), b.fdiv(x.load(at[ALPHA]), total))
            x.store(factor, x.at(factors, j * x.bytes))
            log = b.fmul(x.log2(total), x.constant(LN_2))
            log = x.fma(reference_of(x, x.load(at[OLD_MAX])), natural, log)
            x.store(b.select(empty, x.constant(-INFINITY), log), x.at(lse, j * x.bytes))
        return context.get_dummy_value()

    return typed(types.void, static, state, factors, lse, types.float64), generate
