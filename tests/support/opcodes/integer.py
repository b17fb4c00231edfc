"""Integer Arithmetic Instructions, Extended-Precision Integer Arithmetic Instructions."""

from ptx_programs import SIZES, Family, Instruction

from numbaflash.emulator.opcodes import titles

ARITHMETIC = titles.INTEGER + "{}"
EXTENDED = titles.EXTENDED + "{}"
TYPES = ("s16", "u16", "s32", "u32", "s64", "u64")


def quotient(a, b):
    """Toward zero; by zero the result is machine-specific."""
    if not b:
        return None
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def remainder(a, b):
    q = quotient(a, b)
    return None if q is None else a - q * b


def basic(kind):
    bits = 8 * SIZES[kind]
    yield Instruction(f"add.{kind}", lambda a, b: a + b)
    yield Instruction(f"sub.{kind}", lambda a, b: a - b)
    yield Instruction(f"mul.lo.{kind}", lambda a, b: a * b)
    yield Instruction(f"mul.hi.{kind}", lambda a, b: (a * b) >> bits)
    yield Instruction(f"mad.lo.{kind}", lambda a, b, c: a * b + c)
    yield Instruction(f"mad.hi.{kind}", lambda a, b, c: ((a * b) >> bits) + c)
    yield Instruction(f"sad.{kind}", lambda a, b, c: c + abs(a - b))
    yield Instruction(f"div.{kind}", quotient)
    yield Instruction(f"rem.{kind}", remainder)
    yield Instruction(f"min.{kind}", lambda a, b: min(a, b))
    yield Instruction(f"max.{kind}", lambda a, b: max(a, b))
    if kind[0] == "s":
        yield Instruction(f"abs.{kind}", lambda a: abs(a))
        yield Instruction(f"neg.{kind}", lambda a: -a)


def clamp(x):
    return max(-(2**31), min(2**31 - 1, x))


SATURATING = [
    Instruction("add.sat.s32", lambda a, b: clamp(a + b)),
    Instruction("sub.sat.s32", lambda a, b: clamp(a - b)),
    Instruction("mad.hi.sat.s32", lambda a, b, c: clamp((a * b >> 32) + c)),
]
RELU = [
    Instruction("min.relu.s32", lambda a, b: max(0, min(a, b))),
    Instruction("max.relu.s32", lambda a, b: max(0, max(a, b))),
]


def wide(kind):
    to = f"{kind[0]}{16 * SIZES[kind]}"
    return Family(
        f"wide {kind}",
        ARITHMETIC.format("mul, mad"),
        (kind, kind, to),
        [
            Instruction(f"mul.wide.{kind}", lambda a, b: a * b, to),
            Instruction(f"mad.wide.{kind}", lambda a, b, c: a * b + c, to),
        ],
    )


def of_24_bits(kind):
    """Operands are 24-bit values in 32-bit registers."""
    values = [0, 1, 2, 0x7FFFFF, 0x555555, 0x123456] + (
        [x & 0xFFFFFFFF for x in (-1, -2, -0x800000, -0x765432)] if kind == "s32" else [0xFFFFFF, 0x800000]
    )
    return Family(
        f"24 bits {kind}",
        ARITHMETIC.format("mul24, mad24"),
        (kind, kind, kind),
        [
            Instruction(f"mul24.lo.{kind}", lambda a, b: a * b),
            Instruction(f"mul24.hi.{kind}", lambda a, b: a * b >> 16),
            Instruction(f"mad24.lo.{kind}", lambda a, b, c: a * b + c),
            Instruction(f"mad24.hi.{kind}", lambda a, b, c: (a * b >> 16) + c),
            *(
                [Instruction("mad24.hi.sat.s32", lambda a, b, c: clamp((a * b >> 16) + c))]
                if kind == "s32"
                else []
            ),
        ],
        samples={0: values, 1: values},
    )


def pieces(x, size, sign):
    """The bytes or halves of a 32-bit pattern."""
    width, top = 8 * size, 1 << (8 * size - 1)
    fields = [x >> (width * n) & (2 * top - 1) for n in range(4 // size)]
    return [f - 2 * top if sign and f >= top else f for f in fields]


def dot(a_kind, b_kind, a_size, first=0):
    def model(a, b, c):
        x, y = pieces(a, a_size, a_kind == "s32"), pieces(b, 1, b_kind == "s32")[first:]
        return c + sum(p * q for p, q in zip(x, y))

    return model


KINDS = [(a, b) for a in ("s32", "u32") for b in ("s32", "u32")]
DOTS = Family(
    "dot products",
    ARITHMETIC.format("dp4a, dp2a"),
    ("b32", "b32", "b32"),
    [
        *(Instruction(f"dp4a.{a}.{b}", dot(a, b, 1), "b32") for a, b in KINDS),
        *(Instruction(f"dp2a.lo.{a}.{b}", dot(a, b, 2), "b32") for a, b in KINDS),
        *(Instruction(f"dp2a.hi.{a}.{b}", dot(a, b, 2, 2), "b32") for a, b in KINDS),
    ],
)


def carrying(kind):
    """The carry of the first instruction shows in the second."""
    bits = 8 * SIZES[kind]
    mask = (1 << bits) - 1
    t = "%r50" if bits == 32 else "%rd25"

    def unsigned(x):
        return x & mask

    def carry(a, b):
        return unsigned(a) + unsigned(b) >> bits

    def borrow(a, b):
        return int(unsigned(a) < unsigned(b))

    def low(a, b, c):
        return (unsigned(a * b) + unsigned(c)) >> bits

    add, sub = f"add.cc.{kind} {t}, $a, $b; ", f"sub.cc.{kind} {t}, $a, $b; "
    more = f"mad.lo.cc.{kind} {t}, $a, $b, $c; "
    again = f"addc.{kind} $d, 0, 0;"
    return Family(
        f"carry {kind}",
        EXTENDED.format("add.cc, addc, sub.cc, subc, mad.cc, madc"),
        (kind,) * 3,
        [
            Instruction(f"add.cc.{kind}", lambda a, b: a + b, code=f"add.cc.{kind} $d, $a, $b;"),
            Instruction(
                f"addc.{kind}", lambda a, b, c: c + carry(a, b), code=add + f"addc.{kind} $d, $c, 0;"
            ),
            Instruction(
                f"addc.cc.{kind}",
                lambda a, b, c: unsigned(c) + unsigned(b) + carry(a, b) >> bits,
                code=add + f"addc.cc.{kind} {t}, $c, $b; " + again,
            ),
            Instruction(f"sub.cc.{kind}", lambda a, b: a - b, code=f"sub.cc.{kind} $d, $a, $b;"),
            Instruction(
                f"subc.{kind}", lambda a, b, c: c - borrow(a, b), code=sub + f"subc.{kind} $d, $c, 0;"
            ),
            Instruction(
                f"subc.cc.{kind}",
                lambda a, b, c: -int(unsigned(c) - unsigned(b) - borrow(a, b) < 0),
                code=sub + f"subc.cc.{kind} {t}, $c, $b; subc.{kind} $d, 0, 0;",
            ),
            Instruction(f"mad.lo.cc.{kind}", low, code=more + again),
            Instruction(
                f"mad.hi.cc.{kind}",
                lambda a, b, c: unsigned(a * b >> bits) + unsigned(c) >> bits,
                code=f"mad.hi.cc.{kind} {t}, $a, $b, $c; " + again,
            ),
            Instruction(
                f"madc.hi.{kind}",
                lambda a, b, c: (a * b >> bits) + c + low(a, b, c),
                code=more + f"madc.hi.{kind} $d, $a, $b, $c;",
            ),
            Instruction(
                f"madc.lo.{kind}",
                lambda a, b, c: a * b + c + low(a, b, c),
                code=more + f"madc.lo.{kind} $d, $a, $b, $c;",
            ),
            Instruction(
                f"madc.lo.cc.{kind}",
                lambda a, b, c: unsigned(a * b) + unsigned(c) + low(a, b, c) >> bits,
                code=more + f"madc.lo.cc.{kind} {t}, $a, $b, $c; " + again,
            ),
        ],
    )


HALVES = (0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234)
PAIRS = [low | high << 16 for low in HALVES for high in HALVES]


def pairs(kind):
    """add, min and max of two 16-bit integers at once."""

    def half(x):
        return x - 0x10000 if kind == "s16x2" and x & 0x8000 else x

    def both(function):
        return lambda a, b: tuple(
            function(half(a >> at & 0xFFFF), half(b >> at & 0xFFFF)) & 0xFFFF for at in (0, 16)
        )

    yield Instruction(f"add.{kind}", both(lambda a, b: a + b))
    yield Instruction(f"min.{kind}", both(min))
    yield Instruction(f"max.{kind}", both(max))
    if kind == "s16x2":
        yield Instruction(f"min.relu.{kind}", both(lambda a, b: max(0, min(a, b))))
        yield Instruction(f"max.relu.{kind}", both(lambda a, b: max(0, a, b)))


FAMILIES = [
    *(
        Family(
            f"pairs {kind}",
            ARITHMETIC.format("add, min, max"),
            ("b32",) * 2,
            list(pairs(kind)),
            arch="sm_90",
            samples={0: PAIRS, 1: PAIRS},
        )
        for kind in ("s16x2", "u16x2")
    ),
    *(
        Family(
            f"integer {kind}",
            ARITHMETIC.format("add, sub, mul, mad, sad, div, rem, abs, neg, min, max"),
            (kind,) * 3,
            list(basic(kind)),
        )
        for kind in TYPES
    ),
    Family("saturating s32", ARITHMETIC.format("add, sub, mad"), ("s32",) * 3, SATURATING),
    Family("relu s32", ARITHMETIC.format("min, max"), ("s32",) * 2, RELU, arch="sm_90"),
    *(wide(kind) for kind in TYPES[:4]),
    of_24_bits("s32"),
    of_24_bits("u32"),
    DOTS,
    *(carrying(kind) for kind in ("u32", "s32", "u64")),
]
