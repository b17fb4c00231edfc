"""cp.async with its groups, and mbarrier objects."""

import numpy as np
import ptx_programs

from numbaflash.emulator.opcodes import titles

COPIES = titles.MOVE + "{}"
MBARRIER = titles.SYNC + "{}"
LANES = np.arange(32)
BYTES = np.random.default_rng(6).integers(1, 256, 32 * 16, dtype=np.uint8)
SHARED = ".shared .align 16 .b8 s[2048];\n.shared .align 8 .b64 m[4];\n"


def program(*arguments, **options):
    return ptx_programs.program(*arguments, before=SHARED, **options)


OWN = """shl.b32 %r20, %r0, 4; mul.wide.u32 %rd20, %r0, 16; add.u64 %rd21, %rd1, %rd20;
    add.u64 %rd22, %rd2, %rd20;
    mov.u32 %r21, s; add.u32 %r22, %r21, %r20; mov.u32 %r50, m; mov.u32 %r10, 0xEEEEEEEE;
    st.shared.v4.u32 [%r22], {%r10, %r10, %r10, %r10};
    """
OUT = """
    ld.shared.v4.u32 {%r30, %r31, %r32, %r33}, [%r22]; st.global.v4.u32 [%rd22], {%r30, %r31, %r32, %r33};"""


def filled(amounts, size):
    """16 bytes per lane: ``amounts`` copied, zeros to ``size``, what was there before behind that."""
    rows = np.full((32, 16), 0xEE, np.uint8)
    rows[:, :size] = 0
    for lane, amount in enumerate(amounts):
        rows[lane, :amount] = BYTES.reshape(32, 16)[lane, :amount]
    return rows


def copies():
    """Every cp-size, with all bytes, with a src-size per lane, and with ignore-src for odd lanes."""
    wait = "cp.async.commit_group; cp.async.wait_group 0;"
    for operator, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        opcode = f"cp.async.{operator}.shared.global"
        covers = (opcode, "cp.async.commit_group", "cp.async.wait_group")
        yield program(
            f"{opcode} {size}",
            f"{OWN}{opcode} [%r22], [%rd21], {size}; {wait}{OUT}",
            COPIES.format("cp.async"),
            covers,
            [BYTES],
            [filled([size] * 32, size)],
        )
        src = f"mul.lo.u32 %r40, %r0, 5; rem.u32 %r40, %r40, {size + 1};"
        yield program(
            f"{opcode} {size} src-size",
            f"{OWN}{src} {opcode} [%r22], [%rd21], {size}, %r40; {wait}{OUT}",
            COPIES.format("cp.async"),
            covers,
            [BYTES],
            [filled(5 * LANES % (size + 1), size)],
        )
        odd = "and.b32 %r40, %r0, 1; setp.ne.u32 %p1, %r40, 0;"
        yield program(
            f"{opcode} {size} ignore-src",
            f"{OWN}{odd} {opcode} [%r22], [%rd21], {size}, %p1; {wait}{OUT}",
            COPIES.format("cp.async"),
            covers,
            [BYTES],
            [filled(np.where(LANES % 2, 0, size), size)],
        )
    hinted = "cp.async.cg.shared.global.L2::128B"
    yield program(
        hinted,
        f"{OWN}{hinted} [%r22], [%rd21], 16; cp.async.wait_all;{OUT}",
        COPIES.format("cp.async"),
        (hinted, "cp.async.wait_all"),
        [BYTES],
        [filled([16] * 32, 16)],
    )


def groups():
    """wait_group N leaves the N latest groups under way: earlier ones can be read."""
    code, out = [OWN], []
    for n in range(4):
        code.append(
            f"cp.async.ca.shared.global [%r22 + {4 * n}], [%rd21 + {4 * n}], 4; cp.async.commit_group;"
        )
    for pending, ready in ((3, 1), (1, 3), (0, 4)):
        code.append(f"cp.async.wait_group {pending};")
        for n in range(len(out), ready):
            code.append(f"ld.shared.u32 %r{30 + n}, [%r22 + {4 * n}];")
            out.append(n)
    code.append("st.global.v4.u32 [%rd22], {%r30, %r31, %r32, %r33};")
    return program(
        "groups",
        "\n    ".join(code),
        COPIES.format("cp.async.commit_group, cp.async.wait_group / cp.async.wait_all"),
        ("cp.async.commit_group", "cp.async.wait_group"),
        [BYTES],
        [filled([16] * 32, 16)],
    )


# --- mbarriers ----------------------------------------------------------------------------------------


def flag(n, predicate="%p1"):
    """Bit n of %r5 tells the predicate."""
    return f"selp.u32 %r6, {1 << n}, 0, {predicate}; or.b32 %r5, %r5, %r6;"


MADE = """mov.u32 %r50, m; mov.u32 %r5, 0; setp.eq.u32 %p5, %r0, 0; setp.eq.u32 %p6, %r0, 1;
    mul.wide.u32 %rd20, %r0, 4; add.u64 %rd21, %rd1, %rd20;
    @%p5 mbarrier.init.shared.b64 [%r50], {count}; @%p5 mbarrier.init.shared.b64 [%r50 + 8], 1;
    bar.warp.sync -1;
    """
TELL = "\n    st.global.u32 [%rd21], %r5;"
SPIN = """
 {label}: mbarrier.try_wait.parity.shared.b64 %p1, [%r50{offset}], {parity};
    @!%p1 bra {label};"""


def phases():
    """test_wait answers false before the arrivals and true after; so does its form with a state."""
    ask = "mbarrier.test_wait.shared.b64 %p1, [%r50], %rd30;"
    parity = "mbarrier.test_wait.parity.shared.b64 %p1, [%r50], {};"
    body = (
        MADE.format(count=32)
        + f"""
    {parity.format(0)} {flag(0)} {parity.format(1)} {flag(1)} bar.warp.sync -1;
    mbarrier.arrive.shared.b64 %rd30, [%r50]; bar.warp.sync -1;
    {ask} {flag(2)} {parity.format(0)} {flag(3)} {parity.format(1)} {flag(4)} bar.warp.sync -1;
    mbarrier.arrive.shared.b64 %rd31, [%r50]; bar.warp.sync -1;
    mbarrier.try_wait.shared.b64 %p1, [%r50], %rd31;
    {flag(5)} {parity.format(0)} {flag(6)} {parity.format(1)} {flag(7)}
    bar.warp.sync -1; @%p5 mbarrier.inval.shared.b64 [%r50];"""
        + TELL
    )
    # at first phase 0 is under way, the one before it (parity 1) complete; then phase 0 is complete
    expected = 2 + 4 + 8 + 0 + 32 + 0 + 128
    return program(
        "mbarrier phases",
        body,
        MBARRIER.format("mbarrier.test_wait / mbarrier.try_wait") + "; Phase of the mbarrier object",
        (
            "mbarrier.init.shared.b64",
            "mbarrier.arrive.shared.b64",
            "mbarrier.test_wait.shared.b64",
            "mbarrier.test_wait.parity.shared.b64",
            "mbarrier.try_wait.shared.b64",
            "mbarrier.inval.shared.b64",
        ),
        [],
        [np.full(32, expected, np.uint32)],
        arch="sm_90",
    )


def counts():
    """arrive with a count, arrive_drop (one arrival less in later phases), and noComplete."""
    wait = "mbarrier.test_wait.parity.shared.b64 %p1, [%r50], {};"
    body = (
        MADE.format(count=8)
        + f"""
    @%p5 mbarrier.arrive.noComplete.shared.b64 %rd30, [%r50], 5; bar.warp.sync -1;
    {wait.format(0)} {flag(0)} bar.warp.sync -1;
    @%p5 mbarrier.arrive.shared.b64 %rd30, [%r50], 2; bar.warp.sync -1;
    {wait.format(0)} {flag(1)} bar.warp.sync -1;
    @%p6 mbarrier.arrive_drop.shared.b64 %rd30, [%r50]; bar.warp.sync -1; {wait.format(0)} {flag(2)}
    bar.warp.sync -1;
    @%p5 mbarrier.arrive.shared.b64 _, [%r50], 7; bar.warp.sync -1; {wait.format(1)} {flag(3)}"""
        + TELL
    )
    return program(
        "mbarrier counts",
        body,
        MBARRIER.format("mbarrier.arrive, mbarrier.arrive_drop"),
        (
            "mbarrier.arrive.noComplete.shared.b64",
            "mbarrier.arrive.shared.b64",
            "mbarrier.arrive_drop.shared.b64",
        ),
        [],
        [np.full(32, 4 + 8, np.uint32)],
        arch="sm_90",
    )


def transactions():
    """A phase with pending bytes completes with the last of them."""
    wait = "mbarrier.test_wait.parity.shared.b64 %p1, [%r50 + 8], {};"
    body = (
        MADE.format(count=1)
        + f"""
    @%p5 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r50 + 8], 48; bar.warp.sync -1;
    @%p5 mbarrier.arrive.expect_tx.shared.b64 _, [%r50 + 8], 16; bar.warp.sync -1; {wait.format(0)} {flag(0)}
    bar.warp.sync -1;
    @%p6 mbarrier.complete_tx.relaxed.cta.shared.b64 [%r50 + 8], 40; bar.warp.sync -1;
    {wait.format(0)} {flag(1)}
    bar.warp.sync -1;
    @%p6 mbarrier.complete_tx.relaxed.cta.shared.b64 [%r50 + 8], 24; bar.warp.sync -1;
    {wait.format(0)} {flag(2)}
    {wait.format(1)} {flag(3)}"""
        + TELL
    )
    return program(
        "mbarrier transactions",
        body,
        MBARRIER.format("mbarrier.expect_tx, mbarrier.complete_tx, mbarrier.arrive"),
        (
            "mbarrier.expect_tx.relaxed.cta.shared.b64",
            "mbarrier.arrive.expect_tx.shared.b64",
            "mbarrier.complete_tx.relaxed.cta.shared.b64",
        ),
        [],
        [np.full(32, 4, np.uint32)],
        arch="sm_90",
    )


def pipeline():
    """Copies signal an mbarrier; whoever waits for it sees the bytes that other lanes copied."""
    for form, count in ((".noinc", 32), ("", 32)):
        opcode = f"cp.async.mbarrier.arrive{form}.shared.b64"
        arrive = "" if form else "mbarrier.arrive.shared.b64 %rd30, [%r50];"
        body = (
            OWN
            + f"""setp.eq.u32 %p5, %r0, 0; @%p5 mbarrier.init.shared.b64 [%r50], {count}; bar.warp.sync -1;
    cp.async.ca.shared.global [%r22], [%rd21], 16; {opcode} [%r50]; {arrive}"""
            + SPIN.format(label="again", offset="", parity=0)
            + """
    xor.b32 %r20, %r20, 496; add.u32 %r22, %r21, %r20;"""
            + OUT
        )
        yield program(
            f"{opcode} pipeline",
            body,
            MBARRIER.format("cp.async.mbarrier.arrive"),
            (opcode, "mbarrier.try_wait.parity.shared.b64"),
            [BYTES],
            [BYTES.reshape(32, 16)[::-1].copy()],
            arch="sm_90",
        )


PROGRAMS = [*copies(), groups(), phases(), counts(), transactions(), *pipeline()]
