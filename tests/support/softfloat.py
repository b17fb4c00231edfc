"""IEEE 754 arithmetic on bit patterns, by rational numbers: slow, exact, and written without the emulator.

A format is ``(exponent bits, fraction bits)``. Operations take and give bit patterns as Python ints; NaN
results are the ``nan`` pattern of the format.
"""

from fractions import Fraction
from math import isqrt
from typing import NamedTuple


class Format(NamedTuple):
    exponent_bits: int
    fraction_bits: int

    @property
    def bits(self):
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def sign(self):
        return 1 << (self.bits - 1)

    @property
    def inf(self):
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def nan(self):
        """The canonical NaN of PTX: every bit but the sign."""
        return self.sign - 1

    @property
    def low(self):
        """Exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))


FORMATS = {"f16": Format(5, 10), "bf16": Format(8, 7), "f32": Format(8, 23), "f64": Format(11, 52)}


def is_nan(bits, form):
    return bits & (form.sign - 1) > form.inf


def is_inf(bits, form):
    return bits & (form.sign - 1) == form.inf


def negative(bits, form):
    return bool(bits & form.sign)


def value(bits, form):
    """The number a finite pattern stands for."""
    magnitude = bits & (form.sign - 1)
    exponent = magnitude >> form.fraction_bits
    fraction = magnitude & ((1 << form.fraction_bits) - 1)
    if exponent:
        fraction += 1 << form.fraction_bits
    number = Fraction(fraction) * Fraction(2) ** (max(exponent, 1) - 1 + form.low - form.fraction_bits)
    return -number if negative(bits, form) else number


def rounded(number, form, mode="rn", sign=False):
    """``number`` (a Fraction) in the format; ``sign``: of an exact zero."""
    if number == 0:
        return form.sign if sign else 0
    below, size = number < 0, abs(number)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    exponent = max(exponent, form.low)
    count, rest = divmod(size / Fraction(2) ** (exponent - form.fraction_bits), 1)
    away = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and count % 2),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": rest > 0 and below,
        "rp": rest > 0 and not below,
    }[mode]
    bits = ((exponent - form.low) << form.fraction_bits) + count + bool(away)
    if bits >= form.inf:
        outward = mode in ("rn", "rna") or (mode == "rm" and below) or (mode == "rp" and not below)
        bits = form.inf if outward else form.inf - 1
    return bits | (form.sign if below else 0)


def flush(bits, form):
    """Subnormals become zeros of their sign."""
    small = (bits & (form.sign - 1)) < (1 << form.fraction_bits)
    return bits & form.sign if small else bits


def add(a, b, form, mode="rn"):
    if is_nan(a, form) or is_nan(b, form):
        return form.nan
    if is_inf(a, form) or is_inf(b, form):
        if is_inf(a, form) and is_inf(b, form):
            return a if a == b else form.nan
        return a if is_inf(a, form) else b
    both = negative(a, form) and negative(b, form)
    either = negative(a, form) or negative(b, form)
    zeros = not (a | b) & (form.sign - 1)
    sign = (either if mode == "rm" else both) if zeros else mode == "rm"
    return rounded(value(a, form) + value(b, form), form, mode, sign)


def sub(a, b, form, mode="rn"):
    return add(a, b if is_nan(b, form) else b ^ form.sign, form, mode)


def mul(a, b, form, mode="rn"):
    sign = negative(a, form) != negative(b, form)
    if is_nan(a, form) or is_nan(b, form):
        return form.nan
    if is_inf(a, form) or is_inf(b, form):
        zero = not a & (form.sign - 1) or not b & (form.sign - 1)
        return form.nan if zero else form.inf | (form.sign if sign else 0)
    return rounded(value(a, form) * value(b, form), form, mode, sign)


def fma(a, b, c, form, mode="rn"):
    """One rounding of a * b + c."""
    product = mul(a, b, form)
    if is_nan(product, form) or is_nan(c, form):
        return form.nan
    if any(is_inf(x, form) for x in (a, b, c)):
        infinite = is_inf(a, form) or is_inf(b, form)
        return add(product if infinite else 0, c, form)
    exact = value(a, form) * value(b, form)
    minus, c_minus = negative(a, form) != negative(b, form), negative(c, form)
    zeros = exact == 0 and value(c, form) == 0
    sign = ((minus or c_minus) if mode == "rm" else (minus and c_minus)) if zeros else mode == "rm"
    return rounded(exact + value(c, form), form, mode, sign)


def div(a, b, form, mode="rn"):
    sign = form.sign if negative(a, form) != negative(b, form) else 0
    if is_nan(a, form) or is_nan(b, form):
        return form.nan
    a_zero, b_zero = not a & (form.sign - 1), not b & (form.sign - 1)
    if is_inf(a, form):
        return form.nan if is_inf(b, form) else form.inf | sign
    if is_inf(b, form):
        return sign
    if b_zero:
        return form.nan if a_zero else form.inf | sign
    return rounded(value(a, form) / value(b, form), form, mode, bool(sign))


def sqrt(a, form, mode="rn"):
    if is_nan(a, form) or not a & (form.sign - 1):
        return form.nan if is_nan(a, form) else a
    if negative(a, form):
        return form.nan
    if is_inf(a, form):
        return a
    shift = 2 * form.bits - form.low  # enough bits of the root below the last one of the result
    scaled = value(a, form) * 4**shift
    root = isqrt(scaled.numerator // scaled.denominator)
    inexact = root * root != scaled
    return rounded(Fraction(2 * root + inexact, 2 << shift), form, mode)


def saturate(bits, form):
    """[0, 1], and NaN to +0."""
    if is_nan(bits, form) or negative(bits, form):
        return 0
    return min(bits, rounded(Fraction(1), form))


def relu(bits, form):
    if is_nan(bits, form):
        return form.nan
    return 0 if negative(bits, form) else bits


def convert(bits, source, to, mode="rn"):
    if is_nan(bits, source):
        return to.nan
    sign = to.sign if negative(bits, source) else 0
    if is_inf(bits, source):
        return to.inf | sign
    return rounded(value(bits, source), to, mode, bool(sign))


def less(a, b, form):
    """a < b for numbers, with -0 below +0."""

    def key(x):
        magnitude = x & (form.sign - 1)
        return -magnitude - 1 if negative(x, form) else magnitude

    return key(a) < key(b)


def samples(form):
    """Bit patterns where arithmetic goes wrong, of both signs."""
    one = rounded(Fraction(1), form)
    smallest = 1 << form.fraction_bits
    positive = [
        0,
        1,
        smallest - 1,
        smallest,
        smallest + 1,
        one,
        one + 1,
        one - 1,
        one + smallest // 2,
        rounded(Fraction(1, 3), form),
        rounded(Fraction(5, 2), form),
        form.inf - 1,
        form.inf,
        one + (form.fraction_bits + 1) * smallest + 1,
    ]
    return positive + [x | form.sign for x in positive] + [form.inf + smallest // 2, form.inf + 1 | form.sign]
