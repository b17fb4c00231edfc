"""Control Flow Instructions, system calls, and Special Registers."""

import numpy as np
from ptx_programs import program

from numbaflash.emulator.opcodes import titles

CONTROL = titles.CONTROL + "{}"
LANES = np.arange(32)
STORE = """
    mul.wide.u32 %rd20, %r0, 4; add.u64 %rd21, %rd1, %rd20; st.global.u32 [%rd21], %r5;"""


def words(values):
    return np.asarray(values).astype(np.uint32)


def branches():
    """A loop with a trip count per lane, a forward branch by a predicate and one by its negation."""
    body = (
        """
    and.b32 %r10, %r0, 7; mov.u32 %r5, 0; mov.u32 %r11, 0;
 again: setp.ge.u32 %p1, %r11, %r10; @%p1 bra out;
    add.u32 %r5, %r5, %r11; add.u32 %r11, %r11, 1; bra.uni again;
 out: setp.lt.u32 %p2, %r0, 16; @!%p2 bra high; add.u32 %r5, %r5, 100; bra end;
 high: add.u32 %r5, %r5, 1000;
 end:"""
        + STORE
    )
    n = LANES & 7
    return program(
        "branches",
        body,
        CONTROL.format("bra, @"),
        ("bra", "bra.uni"),
        [],
        [words(n * (n - 1) // 2 + np.where(LANES < 16, 100, 1000))],
    )


def table():
    body = (
        """
    rem.u32 %r10, %r0, 3; mov.u32 %r5, 7;
 targets: .branchtargets one, two, three;
    setp.lt.u32 %p1, %r0, 30; @%p1 brx.idx %r10, targets; bra end;
 one: mov.u32 %r5, 10; bra end;
 two: mov.u32 %r5, 20; bra end;
 three: mov.u32 %r5, 30;
 end:"""
        + STORE
    )
    return program(
        "branch table",
        body,
        CONTROL.format("brx.idx"),
        "brx.idx",
        [],
        [words(np.where(LANES < 30, 10 * (LANES % 3 + 1), 7))],
    )


FUNCTIONS = """
.func (.param .b32 d) power(.param .b32 base, .param .b32 exponent)
{
    .reg .b32 %r<5>; .reg .pred %p;
    ld.param.b32 %r1, [base]; ld.param.b32 %r2, [exponent]; mov.u32 %r3, 1;
 again:
    setp.eq.u32 %p, %r2, 0; @%p bra done;
    mul.lo.u32 %r3, %r3, %r1; sub.u32 %r2, %r2, 1; bra again;
 done:
    st.param.b32 [d], %r3;
    ret;
}
.func nothing() { ret; }
"""


def calls():
    """Two calls of a function with a loop, the second for some lanes only; and one without parameters."""

    def call(base, exponent, result):
        return f"""{{ .param .b32 x; .param .b32 y; .param .b32 z;
    st.param.b32 [x], {base}; st.param.b32 [y], {exponent}; call (z), power, (x, y);
    ld.param.b32 {result}, [z]; }}"""

    body = (
        "and.b32 %r10, %r0, 3; mov.u32 %r11, 5; call.uni nothing;"
        + call("%r11", "%r10", "%r5")
        + """
    setp.gt.u32 %p1, %r0, 20; @%p1 bra end;"""
        + call("%r5", "%r10", "%r5")
        + """
 end:"""
        + STORE
    )
    first = 5 ** (LANES & 3)
    return program(
        "calls",
        body,
        CONTROL.format("call, ret"),
        ("call", "call.uni", "ret"),
        [],
        [words(np.where(LANES > 20, first, first ** (LANES & 3)))],
        before=FUNCTIONS,
    )


def exits():
    body = "mov.u32 %r5, 9; setp.gt.u32 %p1, %r0, 27; @%p1 exit; setp.lt.u32 %p2, %r0, 4; @%p2 ret;" + STORE
    return program(
        "exits",
        body,
        CONTROL.format("exit, ret"),
        ("exit", "ret"),
        [],
        [words(np.where((LANES > 27) | (LANES < 4), 0, 9))],
    )


PRINT = """.extern .func (.param .b32 status) vprintf(.param .b64 format, .param .b64 arguments);
.global .align 1 .b8 text[7] = {37, 100, 45, 37, 117, 10, 0};
"""


def printing():
    """vprintf: two ints from a buffer in local memory."""
    body = (
        """.local .align 8 .b8 buffer[8];
    setp.ne.u32 %p1, %r0, 5; @%p1 bra skip;
    neg.s32 %r10, %r0; st.local.u32 [buffer], %r10; st.local.u32 [buffer + 4], %r0;
    mov.u64 %rd10, text; cvta.global.u64 %rd10, %rd10; mov.u64 %rd11, buffer; cvta.local.u64 %rd11, %rd11;
    { .param .b64 f; .param .b64 a; .param .b32 r;
    st.param.b64 [f], %rd10; st.param.b64 [a], %rd11; call.uni (r), vprintf, (f, a); ld.param.b32 %r12, [r]; }
 skip: mov.u32 %r5, 1;"""
        + STORE
    )
    return program(
        "vprintf",
        body,
        "Formatted Output (CUDA C++ Programming Guide)",
        "system.vprintf",
        [],
        [words(np.ones(32))],
        before=PRINT,
    )


def aborts():
    """trap and brkpt end the grid, but not where their guard is false."""
    for name in ("trap", "brkpt"):
        body = f"setp.eq.u32 %p1, %r0, 99; mov.u32 %r5, 3; @%p1 {name};" + STORE
        yield program(
            f"{name} not taken",
            body,
            titles.MISC + "brkpt, trap",
            name,
            [],
            [words(np.full(32, 3))],
        )


# --- special registers --------------------------------------------------------------------------------

SPECIAL = {
    "%laneid": lambda t, b: t % 32,
    "%ntid.x": lambda t, b: 64 + 0 * t,
    "%ntid.y": lambda t, b: 1 + 0 * t,
    "%ctaid.x": lambda t, b: b,
    "%ctaid.z": lambda t, b: 0 * t,
    "%nctaid.x": lambda t, b: 3 + 0 * t,
    "%nctaid.y": lambda t, b: 1 + 0 * t,
    "%tid.x": lambda t, b: t,
    "%tid.z": lambda t, b: 0 * t,
    "%lanemask_eq": lambda t, b: 1 << t % 32,
    "%lanemask_lt": lambda t, b: (1 << t % 32) - 1,
    "%lanemask_le": lambda t, b: (2 << t % 32) - 1,
    "%lanemask_gt": lambda t, b: -(2 << t % 32) & 0xFFFFFFFF,
    "%lanemask_ge": lambda t, b: -(1 << t % 32) & 0xFFFFFFFF,
    "WARP_SZ": lambda t, b: 32 + 0 * t,
    "%dynamic_smem_size": lambda t, b: 512 + 0 * t,
}


def special_registers():
    """Three blocks of two warps."""
    lines = [
        "mov.u32 %r20, %ctaid.x; mad.lo.u32 %r21, %r20, 64, %r0; mul.wide.u32 %rd20, %r21, 4;",
        "add.u64 %rd21, %rd1, %rd20;",
    ]
    lines += [
        f"mov.u32 %r30, {name}; st.global.u32 [%rd21 + {4 * 192 * n}], %r30;"
        for n, name in enumerate(SPECIAL)
    ]
    thread, block = np.arange(192) % 64, np.arange(192) // 64
    return program(
        "special registers",
        "\n    ".join(lines),
        "Special Registers",
        "mov.u32",
        [],
        [np.array([function(thread, block) for function in SPECIAL.values()]).astype(np.uint32)],
        threads=64,
        blocks=3,
        shared_bytes=512,
        before=".extern .shared .align 16 .b8 dynamic[];\n",
    )


def clocks():
    """Counters grow; the number of a warp is one for its 32 lanes and the warps of a block have two."""
    body = (
        """
    mov.u32 %r10, %clock; mov.u64 %rd10, %clock64; mov.u64 %rd12, %globaltimer; bar.sync 0;
    mov.u64 %rd11, %clock64; mov.u64 %rd13, %globaltimer; setp.gt.u64 %p1, %rd11, %rd10;
    setp.ge.u64 %p2, %rd13, %rd12;
    mov.u32 %r11, %smid; mov.u32 %r12, %nsmid; setp.lt.u32 %p3, %r11, %r12;
    mov.u32 %r13, %warpid; mov.u32 %r14, %nwarpid; setp.lt.u32 %p4, %r13, %r14;
    selp.u32 %r5, 1, 0, %p1; selp.u32 %r6, 2, 0, %p2; or.b32 %r5, %r5, %r6; selp.u32 %r6, 4, 0, %p3;
    or.b32 %r5, %r5, %r6;
    selp.u32 %r6, 8, 0, %p4; or.b32 %r5, %r5, %r6;"""
        + STORE
    )
    return program(
        "clocks",
        body,
        "Special Registers: %clock, %clock64, %globaltimer, %smid, %warpid",
        "mov.u64",
        [],
        [words(np.full(64, 15))],
        threads=64,
    )


PROGRAMS = [branches(), table(), calls(), exits(), printing(), *aborts(), special_registers(), clocks()]
