"""Half Precision Floating-Point Instructions: f16, bf16 and pairs of them."""

import functools

import mpmath
import softfloat as sf
from opcodes.floating import approximate, extremum, special, xorsign
from ptx_programs import ANY_NAN, Family, Instruction

from numbaflash.emulator.opcodes import titles

SECTION = titles.HALF + "{}"
SINGLE, PAIR = ("f16", "bf16"), ("f16x2", "bf16x2")
OPERATIONS = {"add": (2, sf.add), "sub": (2, sf.sub), "mul": (2, sf.mul), "fma": (3, sf.fma)}


def on_halves(model):
    """The model of a pair from that of one half."""
    count = model.__code__.co_argcount
    halves = {
        1: lambda a: (model(a & 0xFFFF), model(a >> 16)),
        2: lambda a, b: (model(a & 0xFFFF, b & 0xFFFF), model(a >> 16, b >> 16)),
        3: lambda a, b, c: (model(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF), model(a >> 16, b >> 16, c >> 16)),
    }
    return halves[count]


def instruction(name, kind, count, function):
    """``function`` takes bit patterns of one half."""
    model = {1: lambda a: function(a), 2: lambda a, b: function(a, b), 3: lambda a, b, c: function(a, b, c)}[
        count
    ]
    return Instruction(f"{name}.{kind}", on_halves(model) if kind.endswith("x2") else model)


def modified(function, form, suffix):
    def result(*operands):
        if "ftz" in suffix:
            operands = [sf.flush(x, form) for x in operands]
        bits = function(*operands)
        if "ftz" in suffix:
            bits = sf.flush(bits, form)
        if "sat" in suffix:
            bits = sf.saturate(bits, form)
        return sf.relu(bits, form) if "relu" in suffix else bits

    return result


def arithmetic(kind, names, suffixes):
    form = sf.FORMATS[kind.removesuffix("x2")]
    for name in names:
        count, function = OPERATIONS[name]
        for suffix in suffixes:
            if "relu" in suffix and name != "fma":
                continue
            yield instruction(
                f"{name}.rn{suffix}",
                kind,
                count,
                modified(functools.partial(function, form=form), form, suffix),
            )


def signs(kind):
    form = sf.FORMATS[kind.removesuffix("x2")]
    for suffix in ("", ".ftz") if kind.startswith("f16") else ("",):

        def flushed(a, suffix=suffix):
            return sf.flush(a, form) if suffix else a

        yield instruction(
            f"neg{suffix}", kind, 1, lambda a, f=flushed: ANY_NAN if sf.is_nan(a, form) else f(a) ^ form.sign
        )
        yield instruction(
            f"abs{suffix}", kind, 1, lambda a, f=flushed: ANY_NAN if sf.is_nan(a, form) else f(a) & ~form.sign
        )
        for name in ("min", "max"):
            for wins in ("", ".NaN"):
                function = functools.partial(extremum, form=form, smaller=name == "min", wins=bool(wins))
                yield instruction(f"{name}{suffix}{wins}", kind, 2, modified(function, form, suffix))


def xorsigns(kind):
    form = sf.FORMATS[kind.removesuffix("x2")]
    for name in ("min", "max"):
        for wins in ("", ".NaN"):
            function = functools.partial(xorsign, form=form, smaller=name == "min", wins=bool(wins))
            yield instruction(f"{name}{wins}.xorsign.abs", kind, 2, function)


def functions(kind):
    form = sf.FORMATS[kind.removesuffix("x2")]
    one = sf.rounded(1, form)
    half = kind.startswith("f16")
    ftz = "" if half else ".ftz"
    ex2 = approximate(
        lambda x: mpmath.mpf(2) ** x,
        form,
        relative=2.0**-9.9 if half else 2.0**-7,
        ftz=bool(ftz),
        closed=special(one, one, form.inf, 0, form=form),
    )
    bound = {"absolute": 2.0**-10.987} if half else {"relative": 2.0**-8}
    tanh = approximate(
        mpmath.tanh, form, closed=special(0, form.sign, one, one | form.sign, form=form), **bound
    )
    yield instruction(f"ex2.approx{ftz}", kind, 1, ex2)
    yield instruction("tanh.approx", kind, 1, tanh)


F16 = ("", ".ftz", ".sat", ".ftz.sat", ".relu", ".ftz.relu")
FAMILIES = [
    *(
        Family(
            f"arithmetic {kind}",
            SECTION.format("add, sub, mul, fma"),
            (kind,) * 3,
            list(arithmetic(kind, OPERATIONS, F16)),
        )
        for kind in ("f16", "f16x2")
    ),
    *(
        Family(
            f"arithmetic {kind}",
            SECTION.format("add, sub, mul, fma"),
            (kind,) * 3,
            list(arithmetic(kind, OPERATIONS, ("", ".relu"))),
            arch="sm_90",
        )
        for kind in ("bf16", "bf16x2")
    ),
    *(
        Family(f"signs {kind}", SECTION.format("neg, abs, min, max"), (kind,) * 2, list(signs(kind)))
        for kind in SINGLE + PAIR
    ),
    *(
        Family(f"xorsign {kind}", SECTION.format("min, max"), (kind,) * 2, list(xorsigns(kind)), arch="sm_86")
        for kind in SINGLE + PAIR
    ),
    *(
        Family(
            f"approximate {kind}",
            SECTION.format("ex2, tanh"),
            (kind,),
            list(functions(kind)),
            arch="sm_80" if kind.startswith("f") else "sm_90",
        )
        for kind in SINGLE + PAIR
    ),
]
