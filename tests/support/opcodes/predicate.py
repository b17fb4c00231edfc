"""Comparison and Selection Instructions, Half Precision Comparison Instructions, copies of registers."""

import operator

import softfloat as sf
from ptx_programs import SIZES, Family, Instruction

from numbaflash.emulator.opcodes import titles

SECTION = titles.COMPARE + "{}"
HALF = titles.HALF_COMPARE + "setp"
SIGNED = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
UNSIGNED = SIGNED | {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
FLAG = "selp.b32 $d, 1, 0, %p1;"


def order(a, form):
    """A number that compares as the float does; the zeros are equal."""
    magnitude = a & (form.sign - 1)
    return -magnitude if sf.negative(a, form) else magnitude


def compare(name, kind, ftz=False):
    """``relation(a, b)`` of the table of comparison operators."""
    if kind not in sf.FORMATS:
        return UNSIGNED[name]
    form = sf.FORMATS[kind]

    def relation(a, b):
        unordered = sf.is_nan(a, form) or sf.is_nan(b, form)
        if name in ("num", "nan"):
            return unordered == (name == "nan")
        if unordered:
            return name.endswith("u")
        a, b = (order(sf.flush(x, form) if ftz else x, form) for x in (a, b))
        return SIGNED[name.removesuffix("u")](a, b)

    return relation


def comparisons(kind):
    if kind in sf.FORMATS:
        return [*SIGNED, *(f"{name}u" for name in SIGNED), "num", "nan"]
    return list({"b": ("eq", "ne"), "s": SIGNED, "u": UNSIGNED}[kind[0]])


def setp(kind):
    for name in comparisons(kind):
        for ftz in ("", ".ftz") if kind in ("f32", "f16") else ("",):
            relation = compare(name, kind, bool(ftz))
            opcode = f"setp.{name}{ftz}.{kind}"
            yield Instruction(
                opcode, lambda a, b, r=relation: int(r(a, b)), "b32", f"{opcode} %p1, $a, $b; " + FLAG
            )


def setp_pairs(kind):
    """p of the lower halves, q of the upper."""
    half = kind.removesuffix("x2")
    flags = "selp.b32 %r50, 1, 0, %p1; selp.b32 %r51, 2, 0, %p2; add.u32 $d, %r50, %r51;"
    for name in comparisons(half):
        for ftz in ("", ".ftz") if half == "f16" else ("",):
            relation = compare(name, half, bool(ftz))
            opcode = f"setp.{name}{ftz}.{kind}"
            yield Instruction(
                opcode,
                lambda a, b, r=relation: r(a & 0xFFFF, b & 0xFFFF) + 2 * r(a >> 16, b >> 16),
                "b32",
                f"{opcode} %p1|%p2, $a, $b; " + flags,
            )
    relation = compare("lt", half)
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        for negated in ("", "!"):

            def model(a, b, function=function, negated=negated):
                c = (a < b) != bool(negated)
                low, high = relation(a & 0xFFFF, b & 0xFFFF), relation(a >> 16, b >> 16)
                return int(function(low, c)) + 2 * int(function(high, c))

            opcode = f"setp.lt.{name}.{kind}"
            yield Instruction(
                f"{opcode} {negated}c",
                model,
                "b32",
                f"setp.lt.u32 %p3, $a, $b; {opcode} %p1|%p2, $a, $b, {negated}%p3; " + flags,
                covers=(opcode,),
            )


def combined(kind):
    """p = (a CmpOp b) BoolOp c; q = !(a CmpOp b) BoolOp c, with c = (b < a) or its negation."""
    comparison, back = ("lt", f"setp.gt.{kind} %p3, $a, $b; ")
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        for negated in ("", "!"):

            def model(a, b, function=function, negated=negated):
                relation, c = compare("lt", kind)(a, b), compare("gt", kind)(a, b) != bool(negated)
                return int(function(relation, c)) + 2 * int(function(not relation, c))

            yield Instruction(
                f"setp.{comparison}.{name}.{kind} {negated}c",
                model,
                "b32",
                f"{back}setp.{comparison}.{name}.{kind} %p1|%p2, $a, $b, {negated}%p3; "
                "selp.b32 %r50, 1, 0, %p1; selp.b32 %r51, 2, 0, %p2; add.u32 $d, %r50, %r51;",
                covers=(f"setp.{comparison}.{name}.{kind}",),
            )


def set_(kind, names):
    ones = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": 0x3F800000}
    for to, true in ones.items():
        for name in names:
            relation = compare(name, kind)
            yield Instruction(
                f"set.{name}.{to}.{kind}", lambda a, b, r=relation, t=true: t if r(a, b) else 0, "b32"
            )
    relation, other = compare(names[0], kind), compare("gt", kind)
    opcode = f"set.{names[0]}.xor.u32.{kind}"
    yield Instruction(
        opcode,
        lambda a, b: 0xFFFFFFFF if relation(a, b) != other(a, b) else 0,
        "b32",
        f"setp.gt.{kind} %p1, $a, $b; {opcode} $d, $a, $b, %p1;",
    )


def selections(kind):
    key = "s" if kind[0] == "s" else "u"
    condition = (
        f"setp.lt.{key}{8 * SIZES[kind]} %p1, $a, $b; " if kind[0] != "f" else f"setp.lt.{kind} %p1, $a, $b; "
    )
    relation = compare("lt", kind if kind[0] in "sf" else f"u{8 * SIZES[kind]}")
    return [
        Instruction(
            f"selp.{kind}",
            lambda a, b: b if relation(a, b) else a,
            code=condition + f"selp.{kind} $d, $b, $a, %p1;",
        ),
        Instruction(f"mov.{kind}", lambda a: a),
    ]


def slct(kind, key):
    def model(a, b, c):
        if key == "s32":
            return a if c >= 0 else b
        form = sf.FORMATS["f32"]
        return b if sf.is_nan(c, form) or order(c, form) < 0 else a

    yield Instruction(f"slct.{kind}.{key}", model, kind)
    if key == "f32":
        yield Instruction(
            f"slct.ftz.{kind}.f32", lambda a, b, c: model(a, b, sf.flush(c, sf.FORMATS["f32"])), kind
        )


def pieces():
    """mov packs and unpacks vectors of registers, the first at the low end."""
    return [
        Instruction(
            "mov.b32 pack",
            lambda a, b: (b & 0xFFFF) << 16 | a & 0xFFFF,
            "b32",
            "cvt.u16.u32 %h30, $a; cvt.u16.u32 %h31, $b; mov.b32 $d, {%h30, %h31};",
            ("mov.b32",),
        ),
        Instruction(
            "mov.b32 unpack",
            lambda a: a >> 16,
            "b32",
            "mov.b32 {%h30, %h31}, $a; cvt.u32.u16 $d, %h31;",
            ("mov.b32",),
        ),
        Instruction("mov.b64 pack", lambda a, b: b << 32 | a, "b64", "mov.b64 $d, {$a, $b};", ("mov.b64",)),
        Instruction(
            "mov.b64 unpack",
            lambda a, b: b,
            "b32",
            "mov.b64 %rd30, {$a, $b}; mov.b64 {%r50, $d}, %rd30;",
            ("mov.b64",),
        ),
        Instruction(
            "mov.b64 quarters",
            lambda a, b: b >> 16,
            "b32",
            "mov.b64 %rd30, {$a, $b}; mov.b64 {%h30, %h31, %h32, %h33}, %rd30; cvt.u32.u16 $d, %h33;",
            ("mov.b64",),
        ),
    ]


TYPES = ("b16", "s16", "u16", "b32", "s32", "u32", "b64", "s64", "u64", "f32", "f64")
FAMILIES = [
    *(Family(f"setp {kind}", SECTION.format("setp"), (kind, kind), list(setp(kind))) for kind in TYPES),
    Family("setp f16", HALF, ("f16", "f16"), list(setp("f16"))),
    Family("setp f16x2", HALF, ("f16x2", "f16x2"), list(setp_pairs("f16x2"))),
    Family("setp bf16x2", HALF, ("bf16x2", "bf16x2"), list(setp_pairs("bf16x2")), arch="sm_90"),
    Family("setp bf16", HALF, ("bf16", "bf16"), list(setp("bf16")), arch="sm_90"),
    *(
        Family(f"combined setp {kind}", SECTION.format("setp"), (kind, kind), list(combined(kind)))
        for kind in ("s32", "f32", "u64")
    ),
    *(
        Family(f"set {kind}", SECTION.format("set"), (kind, kind), list(set_(kind, names)))
        for kind, names in (
            ("s32", ("lt", "eq")),
            ("u32", ("ls", "ne")),
            ("f32", ("lt", "neu", "num")),
            ("f64", ("ge", "equ")),
        )
    ),
    *(
        Family(f"select {kind}", SECTION.format("selp") + "; mov", (kind, kind), selections(kind))
        for kind in TYPES
    ),
    *(
        Family(f"slct {kind} {key}", SECTION.format("slct"), (kind, kind, key), list(slct(kind, key)))
        for kind in ("b32", "s64", "u16", "f32")
        for key in ("s32", "f32")
    ),
    Family("vectors", titles.MOVE + "mov", ("b32", "b32"), pieces()),
]
