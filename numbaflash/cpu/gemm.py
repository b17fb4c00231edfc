"""The microkernel of every product: C (rows x panel) = A (numbers, broadcast) . B (vectors).

A tile of C stays in registers while the loop runs over the inner dimension. Block by block of rows, then the
rows that are left one at a time, each with several partial sums so that it is not bound by latency.
"""

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .compile import Static
from .simd import I64, Lanes, Value, typed

SET, ADD, RESCALE = "set", "add", "rescale"
_PARTIAL_SUMS = 4
UNROLL = 4
"""Terms to a round of the loop: cores with two threads share the decoder, and every other instruction counts.

Not in short vectors, where LLVM loads the numbers of two rounds in pairs and runs out of ARM's registers.
"""
SHORT = 16
CACHE_LINE = 64


def _product(
    x: Lanes, a: Value, a_row: Value, a_column: Value, b: Value, b_row: Value, inner: Value,
    rows: int, vectors: int, partial: int,
) -> list[list[Value]]:
    """Accumulators [row][vector] of one block, summed over the inner dimension."""
    a_rows = [x.at(a, x.times(a_row, i)) for i in range(rows)]
    # One row after the other, and LLVM makes the address of each from the last: an addition more for every row.
    order = sorted(range(rows), key=lambda i: i % 3)

    def step(k: Value, sums: list[Value]) -> list[Value]:
        sums = list(sums)
        at_b = x.at(b, x.times(k, b_row))
        bs = [x.load(x.at(at_b, j * x.bytes)) for j in range(vectors)]
        at_a = x.times(k, a_column)
        for i in order:
            number = x.broadcast(x.at(a_rows[i], at_a))
            for j in range(vectors):
                n = i * vectors + j
                sums[n] = x.fma(number, bs[j], sums[n])
        return sums

    size = rows * vectors
    zeros = [x.constant(0.0)] * size
    if partial == 1 and x.bytes <= SHORT:
        sums = x.loop(inner, zeros, step)
    elif partial == 1:

        def steps(k: Value, sums: list[Value]) -> list[Value]:
            for further in range(UNROLL):
                sums = step(x.plus(k, further), sums)
            return sums

        whole = x.builder.and_(inner, ir.Constant(I64, -UNROLL))
        sums = x.loop(whole, zeros, steps, step=UNROLL)
        sums = x.loop(inner, sums, step, start=whole)
    else:

        def steps(k: Value, sums: list[Value]) -> list[Value]:
            parts = [step(x.plus(k, p), sums[p * size : (p + 1) * size]) for p in range(partial)]
            return [value for part in parts for value in part]

        whole = x.builder.and_(inner, ir.Constant(I64, -partial))
        parts = x.loop(whole, zeros * partial, steps, step=partial)
        rest = x.loop(inner, parts[:size], step, start=whole)
        sums = rest
        for p in range(1, partial):
            sums = [x.builder.fadd(s, q) for s, q in zip(sums, parts[p * size : (p + 1) * size])]
    return [sums[i * vectors : (i + 1) * vectors] for i in range(rows)]


def _finish(x: Lanes, sums: list[list[Value]], c: Value, c_row: Value, mode: str, extra: Value, track: bool) -> None:
    """Write a block: over C, added to it, or added to C times a factor per lane; keep the running maximum."""
    vectors = len(sums[0])
    at_extra = [x.at(extra, j * x.bytes) for j in range(vectors)]
    factors = [x.load(p) for p in at_extra] if mode == RESCALE else None
    largest = [x.load(p) for p in at_extra] if track else None
    for i, row in enumerate(sums):
        at_row = x.at(c, x.times(c_row, i))
        for j, value in enumerate(row):
            at_c = x.at(at_row, j * x.bytes)
            # C joins after the loop: sums of blocks grow rounding like the square root of their number.
            if mode == ADD:
                value = x.builder.fadd(x.load(at_c), value)
            elif mode == RESCALE:
                value = x.fma(x.load(at_c), factors[j], value)
            x.store(value, at_c)
            if track:
                largest[j] = x.maximum(value, largest[j])
    if track:
        for p, value in zip(at_extra, largest):
            x.store(value, p)


def _ask(x: Lanes, ahead: Value, ahead_row: Value, ahead_bytes: Value, first: Value, rows: int) -> None:
    """Ask for what will be read next: a block of rows brings its share into the L2 cache."""

    def row(i: Value, _: list[Value]) -> list[Value]:
        start = x.at(ahead, x.times(i, ahead_row))

        def line(offset: Value, _: list[Value]) -> list[Value]:
            x.prefetch(x.at(start, offset), level=2)
            return []

        x.loop(ahead_bytes, [], line, step=CACHE_LINE)
        return []

    x.loop(x.plus(first, rows), [], row, start=first)


def _generate(static: Static, mode: str, track: bool):
    rows, vectors = static["rows"], static["vectors"]

    def generate(context, builder, signature, arguments):
        x = Lanes(context, builder, static)
        a, a_row, a_column, b, b_row, c, c_row, m, inner, extra, ahead, ahead_row, ahead_bytes = (
            arguments[1:]
        )
        a, b, c, extra, ahead = (x.pointer(address) for address in (a, b, c, extra, ahead))

        def block(count: int, partial: int):
            def body(i: Value, _: list[Value]) -> list[Value]:
                if count > 1:
                    _ask(x, ahead, ahead_row, ahead_bytes, i, count)
                block_a = x.at(a, x.times(i, a_row))
                sums = _product(x, block_a, a_row, a_column, b, b_row, inner, count, vectors, partial)
                _finish(x, sums, x.at(c, x.times(i, c_row)), c_row, mode, extra, track)
                return []

            return body

        whole = builder.sub(m, builder.srem(m, ir.Constant(I64, rows)))
        x.loop(whole, [], block(rows, 1), step=rows)
        x.loop(m, [], block(1, _PARTIAL_SUMS), start=whole)
        return context.get_dummy_value()

    return generate


def _gemm(mode: str, track: bool = False):
    @intrinsic
    def gemm(
        typing_context, static, a, a_row, a_column, b, b_row, c, c_row, m, inner, extra, ahead, ahead_row, ahead_bytes
    ):
        integers = (a, a_row, a_column, b, b_row, c, c_row, m, inner, extra, ahead, ahead_row, ahead_bytes)
        return typed(types.void, static, *integers), _generate(static, mode, track)

    return gemm


gemm_set = _gemm(SET)
"""``gemm_set(static, a, a_row, a_column, b, b_row, c, c_row, m, inner, 0, 0, 0, 0)``: C = A . B for one panel.

Addresses and strides are bytes. A(i, k) is the number at ``a + i * a_row + k * a_column``; B(k, .) the ``vectors``
vectors at ``b + k * b_row``; C(i, .) those at ``c + i * c_row``; ``m`` rows of C, ``inner`` terms. The last
three arguments ask for memory that will be read soon: with row i, ``ahead_bytes`` from ``ahead + i * ahead_row`` on.
"""
gemm_add = _gemm(ADD)
"""C += A . B."""
gemm_rescale = _gemm(RESCALE)
"""C = C * f + A . B, with a panel of factors f at ``extra``."""
gemm_max = _gemm(SET, track=True)
"""C = A . B, and the panel at ``extra`` becomes the maximum of itself and the rows of C."""
