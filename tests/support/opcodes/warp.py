"""Warp instructions: shuffles, votes, match, redux, activemask, elect, and barriers of a warp or block."""

import numpy as np
from ptx_programs import program

from numbaflash.emulator.opcodes import titles

SHFL = titles.MOVE + "shfl.sync"
SYNC = titles.SYNC + "{}"
LANES = np.arange(32)
RNG = np.random.default_rng(2)
WORDS = RNG.integers(0, 2**32, 32, dtype=np.uint32)
FEW = np.array([3, 7, 7, 9, 3, 3, 11, 7] * 4, np.uint32)
ALL = 0xFFFFFFFF
PARTIAL = 0x0F35A7C9  # lanes that take part, some runs and some gaps
SELECT = "shr.u32 %r40, {mask:#x}, %r0; and.b32 %r40, %r40, 1; setp.ne.b32 %p7, %r40, 0; @!%p7 bra skip;"
STORE = "mul.wide.u32 %rd20, %r0, 4; add.u64 %rd21, %rd1, %rd20; add.u64 %rd22, %rd2, %rd20;"


def members(mask):
    return (mask >> LANES) & 1 == 1


def on_members(mask, code):
    """``code`` between loading %r10 and storing %r5, for the lanes of the mask; the others end early."""
    return (
        f"{STORE} ld.global.u32 %r10, [%rd21]; {SELECT.format(mask=mask)}\n    {code}\n"
        "    st.global.u32 [%rd22], %r5;\n skip:"
    )


# --- shuffles -----------------------------------------------------------------------------------------


def shuffle(mode, b, c, lane):
    """The lane that a thread reads and whether it is in range, as the pseudocode of the section."""
    b_value, clamp, segment = b & 31, c & 31, c >> 8 & 31
    largest = (lane & segment) | (clamp & ~segment)
    smallest = lane & segment
    if mode == "up":
        j = lane - b_value
        valid = j >= largest
    elif mode == "down":
        j = lane + b_value
        valid = j <= largest
    elif mode == "bfly":
        j = lane ^ b_value
        valid = j <= largest
    else:
        j = smallest | (b_value & ~segment)
        valid = j <= largest
    return (j if valid else lane), valid


SHUFFLES = [
    ("up", (0, 1, 5, 16, 31)),
    ("down", (0, 1, 5, 16, 31)),
    ("bfly", (0, 1, 3, 16, 31)),
    ("idx", (0, 1, 7, 16, 31)),
]
WIDTHS = (32, 16, 8, 2)
CLAMPS = {mode: 0 if mode == "up" else 31 for mode, _ in SHUFFLES}


def shuffles():
    """All amounts and segment widths with immediate operands, and per-lane amounts with odd clamps."""
    for mode, amounts in SHUFFLES:
        for width in WIDTHS:
            c = (32 - width) << 8 | CLAMPS[mode]
            code, expected = [STORE, "ld.global.u32 %r10, [%rd21];"], []
            for n, b in enumerate(amounts):
                code.append(
                    f"shfl.sync.{mode}.b32 %r5|%p1, %r10, {b}, {c:#x}, -1; "
                    f"st.global.u32 [%rd22 + {256 * n}], "
                    f"%r5; selp.u32 %r6, 1, 0, %p1; st.global.u32 [%rd22 + {256 * n + 128}], %r6;"
                )
                where = [shuffle(mode, b, c, lane) for lane in LANES.tolist()]
                expected += [[WORDS[j] for j, _ in where], [int(valid) for _, valid in where]]
            yield program(
                f"shfl {mode} {width}",
                "\n    ".join(code),
                SHFL,
                f"shfl.sync.{mode}.b32",
                [WORDS],
                [np.array(expected, np.uint32)],
            )
        yield by_register(mode)


def by_register(mode):
    """The amount comes from a register that differs between lanes, and the clamp is in the middle."""
    c = 0x0505 if mode != "up" else 0x1C02
    code = (
        f"{STORE} ld.global.u32 %r10, [%rd21]; mad.lo.u32 %r11, %r0, 7, 3; "
        f"mov.u32 %r12, {c:#x}; mov.u32 %r13, -1;"
        f"shfl.sync.{mode}.b32 %r5, %r10, %r11, %r12, %r13; st.global.u32 [%rd22], %r5;"
    )
    picked = [shuffle(mode, 7 * lane + 3, c, lane)[0] for lane in LANES.tolist()]
    return program(f"shfl {mode} register", code, SHFL, f"shfl.sync.{mode}.b32", [WORDS], [WORDS[picked]])


def partial_shuffles():
    """Lanes that are no members end; the others read from members only."""
    mask = 0x00FF00FF
    for mode, b in (("bfly", 5), ("idx", 3), ("down", 2), ("up", 1)):
        c = 24 << 8 | CLAMPS[mode]
        expected = np.zeros(32, np.uint32)
        for lane in LANES[members(mask)].tolist():
            expected[lane] = WORDS[shuffle(mode, b, c, lane)[0]]
        yield program(
            f"partial shfl {mode}",
            on_members(mask, f"shfl.sync.{mode}.b32 %r5, %r10, {b}, {c:#x}, {mask:#x};"),
            SHFL,
            f"shfl.sync.{mode}.b32",
            [WORDS],
            [expected],
        )


# --- votes, match, redux ------------------------------------------------------------------------------


def bit_mask(flags):
    return int(sum(1 << lane for lane in np.flatnonzero(flags)))


PREDICATES = {"none": (0, 0), "every": (ALL, 0), "some": (0x00A00F01, 0), "first": (1, 0)}


def votes():
    """The predicate is a bit of a mask; each vote also of its negation, over all lanes and some."""
    for mask in (ALL, PARTIAL):
        here = members(mask)
        for case, (bits, _) in PREDICATES.items():
            flags = members(bits)
            code = [
                f"shr.u32 %r30, {bits:#x}, %r0; and.b32 %r30, %r30, 1; "
                "setp.ne.b32 %p1, %r30, 0; mov.u32 %r5, 0;"
            ]
            expected = 0
            for n, (kind, negation) in enumerate((k, s) for k in ("all", "any", "uni") for s in ("", "!")):
                code.append(
                    f"vote.sync.{kind}.pred %p2, {negation}%p1, {mask:#x}; selp.u32 %r31, {1 << n}, 0, %p2; "
                    "or.b32 %r5, %r5, %r31;"
                )
                chosen = flags[here] ^ bool(negation)
                result = {"all": chosen.all(), "any": chosen.any(), "uni": chosen.all() or not chosen.any()}[
                    kind
                ]
                expected |= int(result) << n
            yield program(
                f"vote {case} {mask:x}",
                on_members(mask, "\n    ".join(code)),
                SYNC.format("vote.sync"),
                ("vote.sync.all.pred", "vote.sync.any.pred", "vote.sync.uni.pred"),
                [WORDS],
                [np.where(here, expected, 0).astype(np.uint32)],
            )
            ballot = f"{code[0]} vote.sync.ballot.b32 %r5, %p1, {mask:#x};"
            yield program(
                f"ballot {case} {mask:x}",
                on_members(mask, ballot),
                SYNC.format("vote.sync"),
                "vote.sync.ballot.b32",
                [WORDS],
                [np.where(here, bit_mask(flags & here), 0).astype(np.uint32)],
            )


def matches():
    for mask in (ALL, PARTIAL):
        here = members(mask)
        same = np.array([bit_mask((FEW == x) & here) for x in FEW], np.uint32)
        for kind, widen in (("b32", ""), ("b64", "mov.b64 %rd30, {%r10, %r10};")):
            a = "%rd30" if widen else "%r10"
            yield program(
                f"match any {kind} {mask:x}",
                on_members(mask, f"{widen} match.any.sync.{kind} %r5, {a}, {mask:#x};"),
                SYNC.format("match.sync"),
                f"match.any.sync.{kind}",
                [FEW],
                [np.where(here, same, 0)],
            )
            for values, equal in ((FEW, False), (np.full(32, 9, np.uint32), True)):
                code = (
                    f"{widen} match.all.sync.{kind} %r5|%p1, {a}, {mask:#x}; @%p1 xor.b32 %r5, %r5, 0x10000;"
                )
                want = mask ^ 0x10000 if equal else 0
                yield program(
                    f"match all {kind} {mask:x} {equal}",
                    on_members(mask, code),
                    SYNC.format("match.sync"),
                    f"match.all.sync.{kind}",
                    [values],
                    [np.where(here, want, 0).astype(np.uint32)],
                )


REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reductions():
    for mask in (ALL, PARTIAL):
        here = members(mask)
        for name, function in REDUCE.items():
            for kind in ("u32", "s32") if name in ("add", "min", "max") else ("b32",):
                values = WORDS.view(np.int32) if kind == "s32" else WORDS
                total = np.uint32(int(function.reduce(values[here], dtype=values.dtype)) & ALL)
                yield program(
                    f"redux {name} {kind} {mask:x}",
                    on_members(mask, f"redux.sync.{name}.{kind} %r5, %r10, {mask:#x};"),
                    SYNC.format("redux.sync"),
                    f"redux.sync.{name}.{kind}",
                    [WORDS],
                    [np.where(here, total, 0).astype(np.uint32)],
                )


def float_reductions():
    """NaN loses against numbers, or wins with .NaN; .abs compares magnitudes."""
    base = RNG.normal(size=32).astype("f4")
    with_nan = base.copy()
    with_nan[5] = np.nan
    zeros = np.where(LANES % 5, 0.0, -0.0).astype("f4")
    cases = (
        ("numbers", base),
        ("with NaN", with_nan),
        ("only NaN", np.full(32, np.nan, "f4")),
        ("zeros", zeros),
    )
    for name, function in (("min", np.fmin), ("max", np.fmax)):
        for suffix in ("", ".abs", ".NaN", ".abs.NaN"):
            for case, values in cases:
                given = np.abs(values) if "abs" in suffix else values
                total = np.float32(function.reduce(given)).view(np.uint32)
                if np.isnan(values).all() or ("NaN" in suffix and np.isnan(values).any()):
                    total = np.uint32(0x7FFFFFFF)
                if case == "zeros":
                    total = np.uint32(0x80000000 if name == "min" and "abs" not in suffix else 0)
                opcode = f"redux.sync.{name}{suffix}.f32"
                yield program(
                    f"{opcode} {case}",
                    on_members(ALL, f"{opcode} %r5, %r10, -1;"),
                    SYNC.format("redux.sync"),
                    opcode,
                    [values.view(np.uint32)],
                    [np.full(32, total, np.uint32)],
                    arch="sm_100a",
                )


def active():
    """activemask tells who runs together: everybody, and the members of a branch."""
    code = on_members(PARTIAL, "activemask.b32 %r5;")
    made = program(
        "activemask",
        code,
        SYNC.format("activemask"),
        "activemask.b32",
        [WORDS],
        [np.where(members(PARTIAL), PARTIAL, 0).astype(np.uint32)],
    )
    return made


def elections():
    """One leader, the same for all; the ISA does not say which."""
    for mask in (ALL, PARTIAL):
        code = f"elect.sync %r5|%p1, {mask:#x}; @%p1 or.b32 %r5, %r5, 0x100;"
        made = program(
            f"elect {mask:x}",
            on_members(mask, code),
            SYNC.format("elect.sync"),
            "elect.sync",
            [WORDS],
            [WORDS],
            arch="sm_90",
            exact=False,
        )

        def check(arrays, here=members(mask)):
            leaders = np.flatnonzero(arrays[1] & 0x100)
            assert len(leaders) == 1 and here[leaders[0]]
            assert (arrays[1][here] & 0xFF == leaders[0]).all() and (arrays[1][~here] == 0).all()

        made.check = check
        yield made


# --- barriers -----------------------------------------------------------------------------------------


def exchange(name, barrier, covers, threads=64, arch="sm_80"):
    """What a thread wrote to shared memory before the barrier, its partner reads after it."""
    body = f"""
    shl.b32 %r20, %r0, 2; mov.u32 %r21, s; add.u32 %r22, %r21, %r20; mul.lo.u32 %r23, %r0, %r0;
    st.shared.u32 [%r22], %r23;
    {barrier}
    xor.b32 %r24, %r20, {4 * (threads - 1)}; add.u32 %r24, %r24, %r21; ld.shared.u32 %r25, [%r24];
    mul.wide.u32 %rd20, %r0, 4; add.u64 %rd21, %rd1, %rd20; st.global.u32 [%rd21], %r25;"""
    lane = np.arange(threads, dtype=np.uint32)[::-1]
    return program(
        name,
        body,
        SYNC.format("bar, barrier"),
        covers,
        [],
        [(lane * lane).astype(np.uint32)],
        before=".shared .align 16 .b8 s[512];\n",
        threads=threads,
        arch=arch,
    )


def voting_barriers():
    """bar.red counts and combines a predicate that holds for every third thread."""
    body = """
    rem.u32 %r20, %r0, 3; setp.eq.u32 %p1, %r20, 0;
    bar.red.popc.u32 %r21, 1, %p1; bar.red.and.pred %p2, 1, %p1; bar.red.or.pred %p3, 1, 64, %p1;
    barrier.red.popc.aligned.u32 %r22, 2, !%p1;
    selp.u32 %r23, 256, 0, %p2; selp.u32 %r24, 512, 0, %p3; add.u32 %r21, %r21, %r23;
    add.u32 %r21, %r21, %r24;
    shl.b32 %r22, %r22, 10; add.u32 %r21, %r21, %r22;
    mul.wide.u32 %rd20, %r0, 4; add.u64 %rd21, %rd1, %rd20; st.global.u32 [%rd21], %r21;"""
    return program(
        "bar.red",
        body,
        SYNC.format("bar, barrier"),
        ("bar.red.popc.u32", "bar.red.and.pred", "bar.red.or.pred", "barrier.red.popc.aligned.u32"),
        [],
        [np.full(64, 22 + 512 + (42 << 10), np.uint32)],
        threads=64,
    )


def producer():
    """bar.arrive does not wait: warp 0 produces, warp 1 waits for it at a named barrier."""
    body = """
    setp.ge.u32 %p1, %r0, 32; and.b32 %r30, %r0, 31; shl.b32 %r20, %r30, 2; mov.u32 %r21, s;
    add.u32 %r22, %r21, %r20;
    @%p1 bra wait;
    mad.lo.u32 %r23, %r0, 3, 1; st.shared.u32 [%r22], %r23; bar.arrive 3, 64; bra done;
 wait:
    bar.sync 3, 64; ld.shared.u32 %r24, [%r22]; mul.wide.u32 %rd20, %r30, 4; add.u64 %rd21, %rd1, %rd20;
    st.global.u32 [%rd21], %r24;
 done:"""
    return program(
        "bar.arrive",
        body,
        SYNC.format("bar, barrier"),
        ("bar.arrive", "bar.sync"),
        [],
        [(3 * LANES + 1).astype(np.uint32)],
        before=".shared .align 16 .b8 s[512];\n",
        threads=64,
    )


PROGRAMS = [
    *shuffles(),
    *partial_shuffles(),
    *votes(),
    *matches(),
    *reductions(),
    *float_reductions(),
    active(),
    *elections(),
    exchange("bar.sync", "bar.sync 0;", "bar.sync"),
    exchange("barrier.sync", "barrier.sync 1, 64;", "barrier.sync"),
    exchange("barrier.sync.aligned", "barrier.sync.aligned 2;", "barrier.sync.aligned"),
    exchange("bar.warp.sync", "bar.warp.sync -1;", "bar.warp.sync", threads=32),
    voting_barriers(),
    producer(),
]
