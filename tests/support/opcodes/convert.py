"""Data Movement and Conversion Instructions: cvt."""

from fractions import Fraction
from math import ceil, floor, trunc

import softfloat as sf
from ptx_programs import ANY_NAN, SIZES, Family, Instruction

from numbaflash.emulator.opcodes import titles

SECTION = titles.MOVE + "cvt"
INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
FLOATS = ("f16", "f32", "f64")
MODES = ("rn", "rz", "rm", "rp")
WHOLE = {"rni": round, "rzi": trunc, "rmi": floor, "rpi": ceil}  # round: ties to even
TF32, E4M3, E5M2 = sf.Format(8, 10), sf.Format(4, 3), sf.Format(5, 2)


def bounds(kind):
    bits = 8 * SIZES[kind]
    return (-1 << bits - 1, (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def clamp(x, kind):
    low, high = bounds(kind)
    return max(low, min(high, x))


def wrap(x, kind):
    bits = 8 * SIZES[kind]
    x &= (1 << bits) - 1
    return x - (1 << bits) if kind[0] == "s" and x >> bits - 1 else x


def register(kind):
    """8-bit results are looked at in a 32-bit register, to which they are sign- or zero-extended."""
    return f"{kind[0]}32" if SIZES[kind] == 1 else kind


def between_integers(source):
    for to in INTEGERS:
        if to != source:
            yield Instruction(f"cvt.{to}.{source}", lambda a, to=to: wrap(a, to), register(to))
        if (
            clamp(bounds(source)[0], to) != bounds(source)[0]
            or clamp(bounds(source)[1], to) != bounds(source)[1]
        ):
            yield Instruction(f"cvt.sat.{to}.{source}", lambda a, to=to: clamp(a, to), register(to))


def to_floats(source, floats=FLOATS):
    for to in floats:
        for mode in MODES:
            yield Instruction(
                f"cvt.{mode}.{to}.{source}",
                lambda a, to=to, mode=mode: sf.rounded(Fraction(a), sf.FORMATS[to], mode),
                to,
            )


def to_integers(source):
    """NaN is 0, except where one of the types has 64 bits: there GPUs differ from the text."""
    form = sf.FORMATS[source]
    for to in INTEGERS if source != "bf16" else INTEGERS[2:]:
        for mode, function in WHOLE.items():
            for ftz in ("", ".ftz") if source == "f32" and to in ("s32", "u64") else ("",):

                def model(a, to=to, function=function, ftz=ftz):
                    if sf.is_nan(a, form):
                        return None if "64" in to + source else 0
                    if sf.is_inf(a, form):
                        return bounds(to)[not sf.negative(a, form)]
                    return clamp(function(sf.value(sf.flush(a, form) if ftz else a, form)), to)

                yield Instruction(f"cvt.{mode}{ftz}.{to}.{source}", model, register(to))


def dressed(bits, form, suffix):
    if "satfinite" in suffix and sf.is_inf(bits, form):
        bits -= 1
    if "relu" in suffix:
        bits = sf.relu(bits, form)
    if "ftz" in suffix and form is sf.FORMATS["f32"]:
        bits = sf.flush(bits, form)
    return sf.saturate(bits, form) if suffix.endswith(".sat") else bits


def between(to, source, mode, suffix="", covers=()):
    """A conversion of floats; NaNs keep no payload but for f64."""
    source_form, form = sf.FORMATS[source], sf.FORMATS[to]

    def model(a):
        if "ftz" in suffix and source == "f32":
            a = sf.flush(a, source_form)
        bits = dressed(sf.convert(a, source_form, form, mode or "rn"), form, suffix)
        return ANY_NAN if sf.is_nan(bits, form) else bits

    dot = f".{mode}" if mode else ""
    return Instruction(f"cvt{dot}{suffix}.{to}.{source}", model, to, covers=covers)


def whole(kind, mode, suffix=""):
    form = sf.FORMATS[kind]

    def model(a):
        a = sf.flush(a, form) if "ftz" in suffix else a
        if sf.is_nan(a, form):
            return 0 if suffix.endswith(".sat") else ANY_NAN
        if not sf.is_inf(a, form):
            a = sf.rounded(Fraction(WHOLE[mode](sf.value(a, form))), form, sign=sf.negative(a, form))
        return dressed(a, form, suffix)

    return Instruction(f"cvt.{mode}{suffix}.{kind}.{kind}", model)


FROM_F32 = [
    *(between("f16", "f32", mode, suffix) for mode in MODES for suffix in ("", ".ftz", ".sat")),
    *(between("f16", "f32", mode, suffix) for mode in ("rn", "rz") for suffix in (".relu",)),
    *(between("bf16", "f32", mode, suffix) for mode in ("rn", "rz") for suffix in ("", ".relu")),
    *(between("f64", "f32", "", suffix) for suffix in ("", ".ftz", ".sat")),
    between("f32", "f32", "", ".sat"),
    between("f32", "f32", "", ".ftz"),
    between("f32", "f32", "", ".ftz.sat"),
    *(whole("f32", mode, suffix) for mode in WHOLE for suffix in ("", ".ftz", ".sat")),
]
FROM_F64 = [
    *(between(to, "f64", mode) for to in ("f16", "f32") for mode in MODES),
    *(between("f32", "f64", mode, suffix) for mode in ("rn", "rz") for suffix in (".ftz", ".sat")),
    *(whole("f64", mode) for mode in WHOLE),
]
FROM_F16 = [
    between("f32", "f16", ""),
    between("f64", "f16", ""),
    between("f32", "f16", "", ".sat"),
    *(whole("f16", mode) for mode in WHOLE),
]


def packed(to, mode, suffix=""):
    form = sf.FORMATS[to.removesuffix("x2")]

    def half(a):
        bits = dressed(sf.convert(a, sf.FORMATS["f32"], form, mode), form, suffix)
        return ANY_NAN if sf.is_nan(bits, form) else bits

    return Instruction(f"cvt.{mode}{suffix}.{to}.f32", lambda a, b: (half(b), half(a)), to)


def tf32(mode, suffix=""):
    """The lower 13 bits of the register do not count."""

    def model(a):
        bits = dressed(sf.convert(a, sf.FORMATS["f32"], TF32, mode), TF32, suffix)
        return bits << 13

    return Instruction(
        f"cvt.{mode}{suffix}.tf32.f32",
        model,
        "b32",
        f"cvt.{mode}{suffix}.tf32.f32 %r50, $a; and.b32 $d, %r50, 0xFFFFE000;",
    )


def fp8(bits, source, kind):
    """Rounded to nearest and clamped to the largest finite number; e4m3 has no infinities."""
    sign = 0x80 if sf.negative(bits, source) else 0
    if sf.is_nan(bits, source):
        return 0x7F
    form, largest = (E4M3, 0x7E) if kind == "e4m3" else (E5M2, 0x7B)
    if sf.is_inf(bits, source):
        return largest | sign
    number = abs(sf.value(bits, source))
    limit = Fraction(448) if kind == "e4m3" else Fraction(57344)
    if number >= limit:
        return largest | sign
    if kind == "e4m3" and number >= 248:  # e4m3 has numbers where other formats have infinity
        return 0x78 + max(0, round((number - 256) / 32)) | sign
    return sf.rounded(number, form) | sign


def to_fp8(kind, relu):
    suffix = ".relu" if relu else ""
    f32, f16 = sf.FORMATS["f32"], sf.FORMATS["f16"]

    def one(a, form):
        a = sf.relu(a, form) if relu else a
        return fp8(a, form, kind)

    return (
        Instruction(
            f"cvt.rn.satfinite{suffix}.{kind}x2.f32", lambda a, b: one(a, f32) << 8 | one(b, f32), "b16"
        ),
        Instruction(
            f"cvt.rn.satfinite{suffix}.{kind}x2.f16x2",
            lambda a: one(a >> 16, f16) << 8 | one(a & 0xFFFF, f16),
            "b16",
        ),
    )


def from_fp8(kind, relu):
    form = E4M3 if kind == "e4m3" else E5M2
    f16 = sf.FORMATS["f16"]

    def one(x):
        if x & 0x7F == 0x7F or (kind == "e5m2" and sf.is_nan(x, form)):
            return ANY_NAN
        if sf.is_inf(x, form) and kind == "e5m2":
            bits = f16.inf | (x & 0x80) << 8
        elif kind == "e4m3" and x & 0x78 == 0x78:  # not infinities but 256 to 448
            bits = sf.rounded(Fraction(256 + 32 * (x & 7)), f16) | (x & 0x80) << 8
        else:
            bits = sf.rounded(sf.value(x, form), f16, sign=bool(x & 0x80))
        return sf.relu(bits, f16) if relu else bits

    return Instruction(
        f"cvt.rn{'.relu' if relu else ''}.f16x2.{kind}x2", lambda a: (one(a & 0xFF), one(a >> 8)), "f16x2"
    )


NEAR_FP8 = sf.samples(sf.FORMATS["f32"]) + [
    sf.rounded(Fraction(n, d), sf.FORMATS["f32"])
    for n, d in (
        (448, 1),
        (464, 1),
        (465, 1),
        (432, 1),
        (240, 1),
        (248, 1),
        (249, 1),
        (264, 1),
        (57344, 1),
        (61440, 1),
        (1, 512),
        (1, 1024),
        (3, 1024),
        (17, 16),
        (19, 16),
        (1, 1 << 16),
        (1, 1 << 17),
        (3, 1 << 17),
        (-9, 1),
        (-33, 32),
    )
]
NEAR_FP8_PAIRS = [
    sf.convert(x, sf.FORMATS["f32"], sf.FORMATS["f16"]) << 16
    | sf.convert(y, sf.FORMATS["f32"], sf.FORMATS["f16"])
    for x, y in zip(NEAR_FP8, NEAR_FP8[7:])
]

FAMILIES = [
    *(
        Family(f"from {source}", SECTION, (source,), [*between_integers(source), *to_floats(source)])
        for source in INTEGERS
    ),
    *(
        Family(f"bf16 from {source}", SECTION, (source,), list(to_floats(source, ("bf16",))), arch="sm_90")
        for source in ("s32", "u64", "s16")
    ),
    *(
        Family(
            f"integers from {source}",
            SECTION,
            (source,),
            list(to_integers(source)),
            arch="sm_90" if source == "bf16" else "sm_80",
        )
        for source in (*FLOATS, "bf16")
    ),
    Family("floats from f32", SECTION, ("f32",), FROM_F32),
    Family("floats from f64", SECTION, ("f64",), FROM_F64),
    Family("floats from f16", SECTION, ("f16",), FROM_F16),
    Family(
        "floats from bf16",
        SECTION,
        ("bf16",),
        [between("f32", "bf16", ""), between("f64", "bf16", ""), between("f16", "bf16", "rn")],
        arch="sm_90",
    ),
    Family(
        "bf16 from f64", SECTION, ("f64",), [between("bf16", "f64", mode) for mode in MODES], arch="sm_90"
    ),
    Family(
        "pairs from f32",
        SECTION,
        ("f32", "f32"),
        [
            packed(to, mode, suffix)
            for to in ("f16x2", "bf16x2")
            for mode in ("rn", "rz")
            for suffix in ("", ".relu")
        ],
    ),
    Family(
        "finite from f32",
        SECTION,
        ("f32", "f32"),
        [
            *(
                packed(to, mode, suffix)
                for to in ("f16x2", "bf16x2")
                for mode in ("rn", "rz")
                for suffix in (".satfinite", ".relu.satfinite")
            ),
            *(
                between(to, "f32", mode, suffix)
                for to in ("f16", "bf16")
                for mode in ("rn", "rz")
                for suffix in (".satfinite", ".relu.satfinite")
            ),
        ],
        arch="sm_90",
    ),
    Family("tf32", SECTION, ("f32",), [tf32("rna")]),
    Family(
        "tf32 of sm_90",
        SECTION,
        ("f32",),
        [tf32(mode, suffix) for mode in ("rn", "rz") for suffix in ("", ".relu")],
        arch="sm_90",
    ),
    Family(
        "fp8 from f32",
        SECTION,
        ("f32", "f32"),
        [to_fp8(k, r)[0] for k in ("e4m3", "e5m2") for r in (0, 1)],
        arch="sm_89",
        samples={0: NEAR_FP8, 1: NEAR_FP8},
    ),
    Family(
        "fp8 from f16",
        SECTION,
        ("f16x2",),
        [to_fp8(k, r)[1] for k in ("e4m3", "e5m2") for r in (0, 1)],
        arch="sm_89",
        samples={0: NEAR_FP8_PAIRS},
    ),
    Family(
        "f16 from fp8",
        SECTION,
        ("b16",),
        [from_fp8(k, r) for k in ("e4m3", "e5m2") for r in (0, 1)],
        arch="sm_89",
        samples={0: [x | (255 - x) << 8 for x in range(256)]},
    ),
]
