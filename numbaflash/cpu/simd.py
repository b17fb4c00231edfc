"""Vector instructions for Numba kernels: LLVM vector IR built from plain Python.

:class:`Lanes` is what an ``@intrinsic`` writes its code with. Addresses are bytes: an ``i64`` becomes a pointer once,
then moves by byte offsets. Kernels see addresses as ``intp``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .compile import Static

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
POINTER = ir.PointerType()
FLOATS = {32: ir.FloatType(), 64: ir.DoubleType()}
INFINITY = float("inf")
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

# Near-minimax polynomials for 2**f, |f| <= 1/2, highest power first: relative error 9.1e-8 and 3.9e-17.
EXP2_COEFFICIENTS = {
    32: (0.0013264723820611835, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253,
         0.6931470036506653, 1.0),
    64: (4.07963683838536e-10, 7.072026162870802e-09, 1.018055811734535e-07, 1.3215445517964e-06,
         1.5252727822354072e-05, 0.00015403530436684305, 0.0013333558152707787, 0.009618129107610063,
         0.0555041086647949, 0.24022650695910092, 0.6931471805599456, 1.0),
}
# Adding this rounds to an integer and leaves it, plus the exponent bias, in the lowest bits.
EXP2_ROUND = {32: 1.5 * 2.0**23 + 127, 64: 1.5 * 2.0**52 + 1023}
EXP2_LOWEST = {32: -126.0, 64: -1022.0}
MANTISSA = {32: 23, 64: 52}

# tanh(x) = x + x**3 P(x**2) / Q(x**2) for |x| < 0.625 (Cephes, S. Moshier), highest power first.
TANH_P = {
    32: (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1),
    64: (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3),
}
TANH_Q = {
    32: (),
    64: (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3),
}
TANH_SMALL = 0.625

# log(1 + f) = f - f**2/2 + s (f**2/2 + z L(z)), s = f / (2 + f), z = s**2 (fdlibm), highest power first.
LOG_L = {
    32: (0.24279078841, 0.28498786688, 0.40000972152, 0.66666662693),
    64: (1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
         2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01),
}
HALF_ROOT = {32: 0x3F3504F3, 64: 0x3FE6A09E667F3BCD}  # the bits of sqrt(1/2)

Value = ir.Value


class Lanes:
    """Instructions on vectors of ``lanes`` floating numbers of ``bits`` bits.

    Parameters
    ----------
    context, builder
        As an intrinsic's code generator gets them.
    static : Static
        Holds ``bits`` and ``lanes``.
    """

    def __init__(self, context: Any, builder: ir.IRBuilder, static: Static) -> None:
        self.context, self.builder = context, builder
        self.bits, self.lanes = static["bits"], static["lanes"]
        self.size = self.bits // 8
        self.scalar = FLOATS[self.bits]
        self.vector = ir.VectorType(self.scalar, self.lanes)
        self.integer = ir.IntType(self.bits)
        self.integers = ir.VectorType(self.integer, self.lanes)
        self.bytes = self.lanes * self.size

    # ------------------------------------------------------------------------------------- constants, addresses

    def constant(self, number: float) -> Value:
        return ir.Constant(self.vector, [float(number)] * self.lanes)

    def integer_constant(self, number: int) -> Value:
        return ir.Constant(self.integers, [int(number)] * self.lanes)

    def at(self, pointer: Value, *offsets: Value | int) -> Value:
        """The pointer moved by byte offsets."""
        for offset in offsets:
            if isinstance(offset, int):
                if offset == 0:
                    continue
                offset = ir.Constant(I64, offset)
            pointer = self.builder.gep(pointer, [offset], source_etype=I8)
        return pointer

    def pointer(self, address: Value) -> Value:
        return self.builder.inttoptr(address, POINTER)

    def times(self, value: Value, factor: Value | int) -> Value:
        return self.builder.mul(value, ir.Constant(I64, factor) if isinstance(factor, int) else factor)

    def plus(self, value: Value, other: Value | int) -> Value:
        return self.builder.add(value, ir.Constant(I64, other) if isinstance(other, int) else other)

    # ---------------------------------------------------------------------------------------- memory and shape

    # Alignment is one byte: a caller's array may lie at any address, and x86 and ARM load it at no cost.

    def load(self, pointer: Value, kind: ir.Type | None = None) -> Value:
        return self.builder.load(pointer, align=1, typ=kind or self.vector)

    def store(self, value: Value, pointer: Value) -> None:
        self.builder.store(value, pointer, align=1)

    def prefetch(self, pointer: Value, level: int = 1) -> None:
        """Ask for a cache line that will be read soon, in a level of the cache; any address will do."""
        kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [pointer, *(ir.Constant(I32, number) for number in (0, 4 - level, 1))])

    def splat(self, number: Value) -> Value:
        kind = ir.VectorType(number.type, self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(undefined, number, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, undefined, zeros)

    def splat_number(self, number: Value) -> Value:
        """A float64 in all lanes, rounded to the dtype of the lanes."""
        return self.splat(number if self.bits == 64 else self.builder.fptrunc(number, self.scalar))

    def broadcast(self, pointer: Value) -> Value:
        """One number of memory in all lanes."""
        return self.splat(self.load(pointer, self.scalar))

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Transpose a lanes x lanes block held in vectors by log2(lanes) rounds of interleaving."""
        n, half = self.lanes, self.lanes // 2
        low = [x for i in range(half) for x in (i, n + i)]
        high = [x for i in range(half, n) for x in (i, n + i)]
        masks = [ir.Constant(ir.VectorType(I32, n), order) for order in (low, high)]
        rows = list(rows)
        step = 1
        while step < n:
            pairs = [(rows[i], rows[i + half]) for i in range(half)]
            rows = [self.builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in masks]
            step *= 2
        return rows

    # ---------------------------------------------------------------------------------------------- arithmetic

    def call(self, name: str, *arguments: Value) -> Value:
        """An LLVM intrinsic over vectors, e.g. ``call("fma", a, b, c)``."""
        kind = arguments[0].type
        element = {ir.FloatType(): "f32", ir.DoubleType(): "f64"}[kind.element]
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(kind, [a.type for a in arguments]),
            f"llvm.{name}.v{kind.count}{element}",
        )
        return self.builder.call(function, arguments)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.call("fma", a, b, c)

    def maximum(self, new: Value, old: Value) -> Value:
        """The larger one, and ``old`` where ``new`` is NaN: one instruction on x86."""
        return self.builder.select(self.builder.fcmp_ordered(">", new, old), new, old)

    def polynomial(self, coefficients: Sequence[float], x: Value) -> Value:
        """Horner's rule, highest power first."""
        total = self.constant(coefficients[0])
        for coefficient in coefficients[1:]:
            total = self.fma(total, x, self.constant(coefficient))
        return total

    def exp2(self, x: Value, unit: Value | None = None) -> Value:
        """2**(x * unit) for x <= 0 (up to 100, say): 0 below the normal numbers and at -inf, NaN at NaN.

        A unit costs nothing: it enters through two multiply-adds in place of an addition and a subtraction.
        """
        b, bits = self.builder, self.bits
        magic = self.constant(EXP2_ROUND[bits])
        rounded = b.fadd(x, magic) if unit is None else self.fma(x, unit, magic)
        whole = b.fsub(rounded, magic)
        fraction = b.fsub(x, whole) if unit is None else self.fma(x, unit, b.fneg(whole))
        power = self.polynomial(EXP2_COEFFICIENTS[bits], fraction)
        # A product with the power of two, not a sum of exponents: NaN stays NaN whatever its payload.
        shifted = b.shl(b.bitcast(rounded, self.integers), self.integer_constant(MANTISSA[bits]))
        result = b.fmul(power, b.bitcast(shifted, self.vector))
        normal = b.fcmp_unordered(">=", rounded, self.constant(EXP2_ROUND[bits] + EXP2_LOWEST[bits]))
        return b.select(normal, result, self.constant(0.0))

    def tanh(self, x: Value) -> Value:
        """Hyperbolic tangent, relative error about one unit in the last place or two."""
        b, bits = self.builder, self.bits
        square = b.fmul(x, x)
        ratio = self.polynomial(TANH_P[bits], square)
        if TANH_Q[bits]:
            ratio = b.fdiv(ratio, self.polynomial(TANH_Q[bits], square))
        small = self.fma(b.fmul(x, square), ratio, x)
        magnitude = self.call("fabs", x)
        e = self.exp2(b.fmul(magnitude, self.constant(-2 * LOG2_E)))
        one = self.constant(1.0)
        large = self.call("copysign", b.fdiv(b.fsub(one, e), b.fadd(one, e)), x)
        return b.select(b.fcmp_ordered("<", magnitude, self.constant(TANH_SMALL)), small, large)

    def log2(self, x: Value) -> Value:
        """Binary logarithm of a positive normal number; NaN at NaN and infinity."""
        b, bits = self.builder, self.bits
        raw = b.bitcast(x, self.integers)
        shift = self.integer_constant(MANTISSA[bits])
        exponent = b.ashr(b.sub(raw, self.integer_constant(HALF_ROOT[bits])), shift)
        mantissa = b.bitcast(b.sub(raw, b.shl(exponent, shift)), self.vector)  # in [sqrt(1/2), sqrt(2))
        f = b.fsub(mantissa, self.constant(1.0))
        s = b.fdiv(f, b.fadd(f, self.constant(2.0)))
        z = b.fmul(s, s)
        half = b.fmul(b.fmul(f, f), self.constant(0.5))
        series = b.fmul(s, self.fma(z, self.polynomial(LOG_L[bits], z), half))
        log = b.fsub(f, b.fsub(half, series))
        result = self.fma(log, self.constant(LOG2_E), b.sitofp(exponent, self.vector))
        return self.fma(x, self.constant(0.0), result)

    # -------------------------------------------------------------------------------------------- control flow

    def loop(
        self, count: Value, carried: Sequence[Value], body: Callable[[Value, list[Value]], Sequence[Value]],
        step: int = 1, start: Value | None = None,
    ) -> list[Value]:
        """``for i in range(start, count, step): carried = body(i, carried)``; returns the last ones."""
        b = self.builder
        before = b.block
        head, inside, after = (b.append_basic_block(name) for name in ("loop", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        index.add_incoming(start if start is not None else ir.Constant(I64, 0), before)
        values = [b.phi(value.type) for value in carried]
        for phi, value in zip(values, carried):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", index, count), inside, after)
        b.position_at_end(inside)
        updated = body(index, values)
        index.add_incoming(b.add(index, ir.Constant(I64, step), flags=["nsw"]), b.block)
        for phi, value in zip(values, updated):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return values


def typed(signature_result: types.Type, *arguments: types.Type) -> Any:
    """A signature whose integers are all ``intp``, so that addresses and strides meet as one type.

    Literals stay: Numba keeps one implementation of an intrinsic per signature, so what its code depends on must
    show there.
    """
    plain = (types.intp if type(a) is types.Integer else a for a in arguments)
    return signature_result(*plain)


@intrinsic
def fetch_add(typing_context, address, amount):
    """Atomic fetch-and-add on the int64 at an address: the queue of jobs."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], POINTER)
        return builder.atomic_rmw("add", pointer, arguments[1], "monotonic")

    return types.intp(types.intp, types.intp), generate


def _scalar_access(kind: types.Type) -> tuple[Any, Any]:
    """Load and store of one number at an address."""

    @intrinsic
    def load(typing_context, address):
        def generate(context, builder, signature, arguments):
            data = context.get_data_type(kind)
            return builder.load(builder.inttoptr(arguments[0], POINTER), align=1, typ=data)

        return kind(types.intp), generate

    @intrinsic
    def store(typing_context, address, value):
        def generate(context, builder, signature, arguments):
            builder.store(arguments[1], builder.inttoptr(arguments[0], POINTER), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, kind), generate

    return load, store


load_f32, store_f32 = _scalar_access(types.float32)
load_f64, store_f64 = _scalar_access(types.float64)
load_i64, store_i64 = _scalar_access(types.int64)
load_i32, store_i32 = _scalar_access(types.int32)
load_u8, store_u8 = _scalar_access(types.uint8)
