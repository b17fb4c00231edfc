"""Floating-Point Instructions in f32 and f64.

Bounds of the approximate forms are those that their sections state.
"""

import functools

import mpmath
import numpy as np
import softfloat as sf
from ptx_programs import ANY_NAN, Family, Instruction, Near

from numbaflash.emulator.opcodes import titles

SECTION = titles.FLOAT + "{}"
MODES = ("rn", "rz", "rm", "rp")
F32, F64 = sf.FORMATS["f32"], sf.FORMATS["f64"]


def dressed(function, form, ftz=False, sat=False):
    """``function`` of bit patterns with .ftz and .sat; NaN results of f64 may carry any payload."""

    def result(*operands):
        if ftz:
            operands = [sf.flush(x, form) for x in operands]
        bits = function(*operands)
        if ftz:
            bits = sf.flush(bits, form)
        if sat:
            bits = sf.saturate(bits, form)
        return ANY_NAN if form is F64 and sf.is_nan(bits, form) else bits

    return result


def of_arity(count, function):
    return {1: lambda a: function(a), 2: lambda a, b: function(a, b), 3: lambda a, b, c: function(a, b, c)}[
        count
    ]


BASIC = {"add": (2, sf.add), "sub": (2, sf.sub), "mul": (2, sf.mul), "fma": (3, sf.fma)}
QUOTIENTS = {
    "div": (2, sf.div),
    "rcp": (1, lambda a, form, mode: sf.div(sf.rounded(1, form), a, form, mode)),
    "sqrt": (1, sf.sqrt),
}


def rounding_forms(table, kind):
    """Each operation in each rounding mode, and for f32 with .ftz and, where it exists, .sat."""
    form = sf.FORMATS[kind]
    for name, (count, operation) in table.items():
        for mode in MODES:
            plain = functools.partial(operation, form=form, mode=mode)
            suffixes = [""]
            if kind == "f32":
                suffixes += [".ftz", ".sat", ".ftz.sat"] if table is BASIC else [".ftz"]
            for suffix in suffixes:
                model = dressed(plain, form, "ftz" in suffix, "sat" in suffix)
                yield Instruction(f"{name}.{mode}{suffix}.{kind}", of_arity(count, model))


def extremum(a, b, form, smaller, wins=False):
    if sf.is_nan(a, form) or sf.is_nan(b, form):
        both = sf.is_nan(a, form) and sf.is_nan(b, form)
        return form.nan if both or wins else (b if sf.is_nan(a, form) else a)
    return a if sf.less(a, b, form) == smaller else b


def xorsign(a, b, form, smaller, wins=False):
    magnitude = extremum(a & ~form.sign, b & ~form.sign, form, smaller, wins)
    return magnitude if sf.is_nan(magnitude, form) else magnitude | ((a ^ b) & form.sign)


def signs(kind):
    form = sf.FORMATS[kind]
    suffixes = ("", ".ftz") if kind == "f32" else ("",)
    for suffix in suffixes:

        def sign_model(function, ftz=suffix):
            def model(a):
                if sf.is_nan(a, form):
                    return ANY_NAN
                return function(sf.flush(a, form) if ftz else a)

            return model

        yield Instruction(f"abs{suffix}.{kind}", sign_model(lambda a: a & ~form.sign))
        yield Instruction(f"neg{suffix}.{kind}", sign_model(lambda a: a ^ form.sign))
        for name in ("min", "max"):
            function = functools.partial(extremum, form=form, smaller=name == "min")
            yield Instruction(f"{name}{suffix}.{kind}", of_arity(2, dressed(function, form, bool(suffix))))
    yield Instruction(
        f"copysign.{kind}", lambda a, b: ANY_NAN if sf.is_nan(b, form) else a & form.sign | b & ~form.sign
    )
    if kind == "f32":
        for name in ("min", "max"):
            function = functools.partial(extremum, form=form, smaller=name == "min", wins=True)
            yield Instruction(f"{name}.NaN.f32", of_arity(2, function))


XORSIGN = [
    Instruction(
        f"{name}{nan}.xorsign.abs.f32",
        of_arity(2, functools.partial(xorsign, form=F32, smaller=name == "min", wins=bool(nan))),
    )
    for name in ("min", "max")
    for nan in ("", ".NaN")
]


def properties(kind):
    form = sf.FORMATS[kind]
    smallest = 1 << form.fraction_bits
    tests = {
        "finite": lambda x: x < form.inf,
        "infinite": lambda x: x == form.inf,
        "number": lambda x: x <= form.inf,
        "notanumber": lambda x: x > form.inf,
        "normal": lambda x: smallest <= x < form.inf,
        "subnormal": lambda x: 0 < x < smallest,
    }
    for name, test in tests.items():
        yield Instruction(
            f"testp.{name}.{kind}",
            lambda a, test=test: int(test(a & ~form.sign)),
            "b32",
            f"testp.{name}.{kind} %p1, $a; selp.b32 $d, 1, 0, %p1;",
        )


# --- approximate --------------------------------------------------------------------------------------


def number(bits, form):
    """The operand as a float, NaN and infinities included."""
    if sf.is_nan(bits, form):
        return np.nan
    if sf.is_inf(bits, form):
        return -np.inf if sf.negative(bits, form) else np.inf
    result = float(sf.value(bits, form))
    return -0.0 if result == 0 and sf.negative(bits, form) else result


def approximate(function, form, relative=0.0, absolute=0.0, ftz=False, limit=np.inf, closed=None):
    """A model with an error bound: special results as bits, subnormal results loosely.

    ``closed``: what the section's table says of special operands, bits or None for the general case.
    """
    tiny = float(sf.value(1 << form.fraction_bits, form))
    largest = float(sf.value(form.inf - 1, form))

    def model(a):
        a = sf.flush(a, form) if ftz else a
        if sf.is_nan(a, form):
            return ANY_NAN if form is F64 else form.nan
        special = closed(a) if closed else None
        if special is not None:
            return special
        x = number(a, form)
        if abs(x) > limit:
            return None
        with mpmath.workprec(120):
            exact = function(mpmath.mpf(x))
        exact = float(exact)
        if abs(exact) > largest:
            return form.inf | (form.sign if exact < 0 else 0)
        flushed = tiny if abs(exact) < 2 * tiny else 0.0  # a flushed or a rounded subnormal
        return Near(exact, relative, absolute + flushed)

    return model


def special(zero, minus_zero, infinity, minus_infinity, negatives=None, form=F32):
    """The table of an approximate function's results for special operands."""
    table = {0: zero, form.sign: minus_zero, form.inf: infinity, form.inf | form.sign: minus_infinity}

    def closed(a):
        if a in table:
            return table[a]
        return negatives if negatives is not None and sf.negative(a, form) else None

    return closed


ONE, NAN, INF, MINUS = 0x3F800000, F32.nan, F32.inf, F32.sign
APPROXIMATE = {
    # name: function, bound, special results: +0, -0, +inf, -inf, negative numbers
    "ex2": (lambda x: mpmath.mpf(2) ** x, dict(relative=2.0**-22), special(ONE, ONE, INF, 0)),
    "lg2": (
        lambda x: mpmath.log(x, 2),
        dict(relative=2.0**-22, absolute=2.0**-22),
        special(INF | MINUS, INF | MINUS, INF, NAN, NAN),
    ),
    "sin": (mpmath.sin, dict(absolute=2.0**-20.5, limit=2 * np.pi), special(0, MINUS, NAN, NAN)),
    "cos": (mpmath.cos, dict(absolute=2.0**-20.5, limit=2 * np.pi), special(ONE, ONE, NAN, NAN)),
    "rcp": (lambda x: 1 / x, dict(relative=2.0**-23), special(INF, INF | MINUS, 0, MINUS)),
    "sqrt": (mpmath.sqrt, dict(relative=2.0**-23), special(0, MINUS, INF, NAN, NAN)),
    "rsqrt": (
        lambda x: 1 / mpmath.sqrt(x),
        dict(relative=2.0**-22.9),
        special(INF, INF | MINUS, 0, NAN, NAN),
    ),
    "tanh": (mpmath.tanh, dict(relative=2.0**-11), special(0, MINUS, ONE, ONE | MINUS)),
}


def approximations():
    for name, (function, bound, closed) in APPROXIMATE.items():
        for ftz in ("", ".ftz") if name != "tanh" else ("",):
            yield Instruction(
                f"{name}.approx{ftz}.f32", approximate(function, F32, ftz=bool(ftz), closed=closed, **bound)
            )


def near_quotient(relative, largest):
    """div.approx and div.full: a bound where |b| is in [2^-126, largest]."""

    def model(a, b):
        exact = sf.div(a, b, F32)
        magnitude = abs(number(b, F32))
        if sf.is_nan(exact, F32):
            return F32.nan
        if magnitude not in (0, np.inf) and not 2.0**-126 <= magnitude <= largest:
            zero = 2.0**126 < magnitude and not sf.is_inf(a, F32)
            return sf.mul(a, b, F32) & F32.sign if zero else None
        if magnitude in (0, np.inf) or sf.is_inf(exact, F32) or sf.is_inf(a, F32):
            return exact
        value = float(sf.value(a, F32) / sf.value(b, F32))
        return Near(value, relative, 2.0**-125 if abs(value) < 2.0**-125 else 0.0)

    return model


QUOTIENT = [
    Instruction("div.approx.f32", near_quotient(2.0**-22, 2.0**126)),
    Instruction("div.full.f32", near_quotient(2.0**-22, np.inf)),
]


def upper(function, closed):
    """The f64 forms that compute with the upper half of the operand, with an error of about 2^-20."""

    def model(a):
        top = sf.flush(a & ~0xFFFFFFFF, F64)
        if sf.is_nan(top, F64):
            return ANY_NAN
        special = closed(top)
        if special is not None:
            return special
        with mpmath.workprec(120):
            exact = float(function(mpmath.mpf(number(top, F64))))
        return Near(exact, 2.0**-19, 2.0**-1021 if abs(exact) < 2.0**-1021 else 0.0)

    return model


I64, M64 = F64.inf, F64.sign
DOUBLE = [
    Instruction("rcp.approx.ftz.f64", upper(lambda x: 1 / x, special(I64, I64 | M64, 0, M64, form=F64))),
    Instruction(
        "rsqrt.approx.ftz.f64",
        upper(lambda x: 1 / mpmath.sqrt(x), special(I64, I64 | M64, 0, ANY_NAN, ANY_NAN, F64)),
    ),
    Instruction(
        "rsqrt.approx.f64",
        approximate(
            lambda x: 1 / mpmath.sqrt(x),
            F64,
            relative=2.0**-51,
            closed=special(I64, I64 | M64, 0, ANY_NAN, ANY_NAN, F64),
        ),
    ),
]


def fused_cases(form):
    """Operands whose product nearly cancels the addend, where two roundings give something else."""
    rng = np.random.default_rng(3)
    for _ in range(64):
        a, b = (sf.rounded(1, form) + int(rng.integers(1 << form.fraction_bits)) for _ in range(2))
        c = (sf.mul(a, b, form) ^ form.sign) + int(rng.integers(-1, 2))
        yield a, b, c


def moderate():
    """Arguments of the functions: around 1, powers of two, and all special ones."""
    return [
        *sf.samples(F32),
        *(int(x) for x in np.linspace(-6, 6, 40, dtype=np.float32).view(np.uint32)),
        *(int(x) for x in np.float32([2.0**k for k in range(-149, 128, 16)]).view(np.uint32)),
        *(
            int(x)
            for x in np.float32([-130, -127, -126.5, -149, -150, 127.5, 128, 1.0001, 0.9999]).view("u4")
        ),
    ]


FAMILIES = [
    family
    for kind in ("f32", "f64")
    for family in (
        Family(
            f"arithmetic {kind}",
            SECTION.format("add, sub, mul, fma, mad"),
            (kind,) * 3,
            [
                *rounding_forms(BASIC, kind),
                Instruction(
                    f"mad.rn.{kind}",
                    of_arity(3, dressed(functools.partial(sf.fma, form=sf.FORMATS[kind]), sf.FORMATS[kind])),
                ),
            ],
            operands=list(fused_cases(sf.FORMATS[kind])),
        ),
        Family(
            f"quotients {kind}",
            SECTION.format("div, rcp, sqrt"),
            (kind,) * 2,
            list(rounding_forms(QUOTIENTS, kind)),
        ),
        Family(
            f"signs {kind}", SECTION.format("abs, neg, min, max, copysign"), (kind,) * 2, list(signs(kind))
        ),
        Family(f"testp {kind}", SECTION.format("testp"), (kind,), list(properties(kind))),
    )
]
FAMILIES += [
    Family("xorsign f32", SECTION.format("min, max"), ("f32",) * 2, XORSIGN, arch="sm_86"),
    Family(
        "approximate f32",
        SECTION.format(", ".join(APPROXIMATE)),
        ("f32",),
        list(approximations()),
        samples={0: moderate()},
    ),
    Family("approximate quotient f32", SECTION.format("div"), ("f32",) * 2, QUOTIENT),
    Family(
        "approximate f64", SECTION.format("rcp.approx.ftz.f64, rsqrt.approx.ftz.f64, rsqrt"), ("f64",), DOUBLE
    ),
]
