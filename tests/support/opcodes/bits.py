"""Logic and Shift Instructions; bit fields and counts of Integer Arithmetic Instructions; prmt."""

from ptx_programs import SIZES, Family, Instruction

from numbaflash.emulator.opcodes import titles

LOGIC = titles.LOGIC + "{}"
INTEGER = titles.INTEGER + "{}"
MOVEMENT = titles.MOVE + "prmt"
AMOUNTS = [0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 254, 255, 256, 0xFFFFFFFF, 0x80000000]
M32 = 0xFFFFFFFF


def predicates(opcode):
    """Logic of predicates: operands are the lowest bits."""
    name = opcode.split(".")[0]
    code = "and.b32 %r50, $a, 1; setp.ne.b32 %p1, %r50, 0; and.b32 %r50, $b, 1; setp.ne.b32 %p2, %r50, 0; "
    operands = "%p1" if name == "not" else "%p1, %p2"
    return code + f"{opcode} %p3, {operands}; selp.b32 $d, 1, 0, %p3;"


def logic(kind):
    return [
        Instruction(f"and.{kind}", lambda a, b: a & b),
        Instruction(f"or.{kind}", lambda a, b: a | b),
        Instruction(f"xor.{kind}", lambda a, b: a ^ b),
        Instruction(f"not.{kind}", lambda a: ~a),
        Instruction(f"cnot.{kind}", lambda a: int(a == 0)),
    ]


def lookup(table):
    def model(a, b, c):
        return sum(
            (table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1)) & 1) << n for n in range(32)
        )

    return model


LUTS = (0x00, 0x01, 0x1A, 0x80, 0x96, 0xCA, 0xE8, 0xFE, 0xFF)
LOP3 = [
    Instruction(
        f"lop3.b32 {lut:#04x}",
        lookup(lut),
        "b32",
        f"lop3.b32 $d, $a, $b, $c, {lut:#04x};",
        covers=("lop3.b32",),
    )
    for lut in LUTS
]
LOP3 += [
    Instruction(
        "lop3.or.b32",
        lambda a, b, c: int((a & b & c) != 0 or a < b),
        "b32",
        "setp.lt.u32 %p1, $a, $b; lop3.or.b32 %r50|%p2, $a, $b, $c, 0x80, %p1; selp.b32 $d, 1, 0, %p2;",
    ),
    Instruction(
        "lop3.and.b32",
        lambda a, b, c: int((a ^ b ^ c) != 0 and a < b),
        "b32",
        "setp.lt.u32 %p1, $a, $b; lop3.and.b32 %r50|%p2, $a, $b, $c, 0x96, %p1; selp.b32 $d, 1, 0, %p2;",
    ),
]


def shifts(kind):
    bits = 8 * SIZES[kind]
    if kind[0] == "b":
        yield Instruction(f"shl.{kind}", lambda a, b: a << b if b < bits else 0)
    yield Instruction(f"shr.{kind}", lambda a, b: a >> min(b, bits))


def funnel(direction, mode):
    def model(a, b, c):
        n = min(c, 32) if mode == "clamp" else c & 31
        return (b << n | a >> (32 - n)) if direction == "l" else (b << (32 - n) | a >> n)

    return Instruction(f"shf.{direction}.{mode}.b32", model)


def most_significant(a, bits):
    """bfind: the highest bit that is not the sign."""
    length = (~a if a < 0 else a).bit_length()
    return length - 1 if length else M32


def counts(bits):
    kind = f"b{bits}"
    yield Instruction(f"popc.{kind}", lambda a: a.bit_count(), "u32")
    yield Instruction(f"clz.{kind}", lambda a: bits - a.bit_length(), "u32")
    yield Instruction(f"brev.{kind}", lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    yield Instruction(f"bfind.u{bits}", lambda a: most_significant(a, bits), "u32")
    yield Instruction(
        f"bfind.shiftamt.u{bits}", lambda a: bits - 1 - most_significant(a, bits) if a else M32, "u32"
    )


def signed_find(bits):
    yield Instruction(f"bfind.s{bits}", lambda a: most_significant(a, bits), "u32")
    yield Instruction(
        f"bfind.shiftamt.s{bits}",
        lambda a: M32 if a in (0, -1) else bits - 1 - most_significant(a, bits),
        "u32",
    )


def nth_set(mask, base, offset):
    """fns, as the pseudocode of its section."""
    if offset == 0:
        return base if mask >> base & 1 else M32
    count, step, position = abs(offset) - 1, 1 if offset > 0 else -1, base
    while 0 <= position < 32:
        if mask >> position & 1:
            if count == 0:
                return position
            count -= 1
        position += step
    return M32


def extract(kind):
    top = 8 * SIZES[kind] - 1

    def model(a, b, c):
        position, length = b & 0xFF, c & 0xFF
        sign = 0 if kind[0] == "u" or not length else a >> min(position + length - 1, top) & 1
        return sum(
            (a >> position + i & 1 if i < length and position + i <= top else sign) << i
            for i in range(top + 1)
        )

    return Instruction(f"bfe.{kind}", model)


def insert(kind):
    top = 8 * SIZES[kind] - 1

    def model(a, b, c, d):
        position, length, result = c & 0xFF, d & 0xFF, b
        for i in range(length):
            if position + i <= top:
                result = result & ~(1 << position + i) | (a >> i & 1) << position + i
        return result

    return Instruction(f"bfi.{kind}", model)


def extend(kind, mode):
    def model(a, b):
        if b >= 32 and mode == "clamp":
            return a
        n = b & 31
        field = a & ((1 << n) - 1)
        return field - (1 << n) if kind == "s32" and n and field >> (n - 1) else field

    return Instruction(f"szext.{mode}.{kind}", model)


def mask(mode):
    def model(a, b):
        if mode == "clamp" and a >= 32:
            return 0
        width = 32 if mode == "clamp" and b >= 32 else b & 31
        return ((1 << width) - 1) << (a & 31)

    return Instruction(f"bmsk.{mode}.b32", model)


def byte(a, b, n):
    return (b << 32 | a) >> 8 * n & 0xFF


def permute(a, b, c):
    result = 0
    for place in range(4):
        nibble = c >> 4 * place & 15
        picked = byte(a, b, nibble & 7)
        result |= (picked if nibble < 8 else 0xFF * (picked >> 7)) << 8 * place
    return result


# the selected source byte of d.b3, d.b2, d.b1, d.b0 for c = 0, 1, 2, 3
PERMUTATIONS = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def permutation(mode):
    def model(a, b, c):
        return sum(byte(a, b, int(n)) << 8 * place for place, n in enumerate(PERMUTATIONS[mode][c & 3][::-1]))

    return Instruction(f"prmt.b32.{mode}", model, "b32")


SMALL = {1: AMOUNTS, 2: AMOUNTS}
FAMILIES = [
    *(
        Family(f"logic {kind}", LOGIC.format("and, or, xor, not, cnot"), (kind, kind), logic(kind))
        for kind in ("b16", "b32", "b64")
    ),
    Family(
        "logic of predicates",
        LOGIC.format("and, or, xor, not"),
        ("b32", "b32"),
        [
            Instruction("and.pred", lambda a, b: a & b & 1, "b32", predicates("and.pred")),
            Instruction("or.pred", lambda a, b: (a | b) & 1, "b32", predicates("or.pred")),
            Instruction("xor.pred", lambda a, b: (a ^ b) & 1, "b32", predicates("xor.pred")),
            Instruction("not.pred", lambda a: ~a & 1, "b32", predicates("not.pred")),
        ],
    ),
    Family("lop3", LOGIC.format("lop3"), ("b32",) * 3, LOP3),
    *(
        Family(
            f"shift {kind}", LOGIC.format("shl, shr"), (kind, "u32"), list(shifts(kind)), samples={1: AMOUNTS}
        )
        for kind in ("b16", "b32", "b64", "u16", "s16", "u32", "s32", "u64", "s64")
    ),
    Family(
        "funnel shift",
        LOGIC.format("shf"),
        ("b32", "b32", "u32"),
        [funnel(d, m) for d in "lr" for m in ("clamp", "wrap")],
        samples={2: AMOUNTS},
    ),
    *(
        Family(f"counts {bits}", INTEGER.format("popc, clz, bfind, brev"), (f"u{bits}",), list(counts(bits)))
        for bits in (32, 64)
    ),
    *(
        Family(f"bfind s{bits}", INTEGER.format("bfind"), (f"s{bits}",), list(signed_find(bits)))
        for bits in (32, 64)
    ),
    Family(
        "fns",
        INTEGER.format("fns"),
        ("b32", "u32", "s32"),
        [Instruction("fns.b32", nth_set)],
        samples={1: list(range(32)), 2: [0, 1, 2, 5, 31, 33, M32, M32 - 1, M32 - 7]},
    ),
    *(
        Family(f"bfe {kind}", INTEGER.format("bfe"), (kind, "u32", "u32"), [extract(kind)], samples=SMALL)
        for kind in ("u32", "s32", "u64", "s64")
    ),
    *(
        Family(
            f"bfi {kind}",
            INTEGER.format("bfi"),
            (kind, kind, "u32", "u32"),
            [insert(kind)],
            samples={2: AMOUNTS, 3: AMOUNTS},
        )
        for kind in ("b32", "b64")
    ),
    *(
        Family(
            f"szext {kind}",
            INTEGER.format("szext"),
            (kind, "u32"),
            [extend(kind, m) for m in ("clamp", "wrap")],
            samples={1: AMOUNTS},
        )
        for kind in ("u32", "s32")
    ),
    Family(
        "bmsk",
        INTEGER.format("bmsk"),
        ("u32", "u32"),
        [mask(m) for m in ("clamp", "wrap")],
        samples={0: AMOUNTS, 1: AMOUNTS},
    ),
    Family(
        "prmt",
        MOVEMENT,
        ("b32", "b32", "b32"),
        [Instruction("prmt.b32", permute), *map(permutation, PERMUTATIONS)],
    ),
]
