"""ld, st, ldu, cvta, isspacep, atom, red, prefetch and other instructions that concern memory."""

import numpy as np
from ptx_programs import SIZES, Family, Instruction, program

from numbaflash.emulator.opcodes import titles

MOVEMENT = titles.MOVE + "{}"
ATOMIC = titles.SYNC + "{}"
LANES = np.arange(32)
RNG = np.random.default_rng(5)
BYTES = RNG.integers(0, 256, 32 * 64, dtype=np.uint8)
SHARED = ".shared .align 16 .b8 s[2048];\n"
OWN = "mul.wide.u32 %rd20, %r0, {0}; mul.lo.u32 %r20, %r0, {0};"


def loads():
    """Narrow loads extend to the width of the register."""
    for kind in ("s8", "u8", "b8", "s16", "u16", "s32", "u32"):
        size, to = SIZES[kind], "s8" if kind[0] == "s" else "u8"
        body = (
            OWN.format(8)
            + f"""
    add.u64 %rd21, %rd1, %rd20; add.u64 %rd22, %rd2, %rd20;
    ld.global.{kind} %rd23, [%rd21 + {8 - size}]; st.global.u64 [%rd22], %rd23;"""
        )
        values = (
            BYTES[:256].reshape(32, 8)[:, 8 - size :].copy().view(f"{to[0].replace('s', 'i')}{size}")[:, 0]
        )
        yield program(
            f"ld.global.{kind}",
            body,
            MOVEMENT.format("ld"),
            f"ld.global.{kind}",
            [BYTES[:256]],
            [values.astype("i8" if kind[0] == "s" else "u8")],
        )


VECTORS = {
    "v2.u8": "b16",
    "v4.u8": "b16",
    "v2.b16": "b16",
    "v4.u16": "b16",
    "v2.f32": "f32",
    "v4.u32": "b32",
    "v2.u64": "b64",
    "v2.f64": "b64",
}
PREFIX = {"b16": "%h", "b32": "%r", "b64": "%rd", "f32": "%f"}


def vectors():
    """Elements of a vector lie one after the other; here they are stored in reverse."""
    for name, register in VECTORS.items():
        count, kind = int(name[1]), name.split(".")[1]
        size = SIZES[kind]
        names = [f"{PREFIX[register]}{30 + n}" for n in range(count)]
        body = (
            OWN.format(count * size)
            + f"""
    add.u64 %rd21, %rd1, %rd20; add.u64 %rd22, %rd2, %rd20;
    ld.global.{name} {{{", ".join(names)}}}, [%rd21];
    st.global.{name} [%rd22], {{{", ".join(names[::-1])}}};"""
        )
        data = BYTES[: 32 * count * size].view(f"u{size}").reshape(32, count)
        yield program(
            f"vector {name}",
            body,
            MOVEMENT.format("ld, st") + ", Vectors",
            [f"ld.global.{name}", f"st.global.{name}"],
            [data],
            [data[:, ::-1].copy()],
        )


def spaces():
    """A value goes through shared and local memory, by addresses of the space and generic ones."""
    words = BYTES[:128].view(np.uint32)
    body = (
        OWN.format(4)
        + """
    add.u64 %rd21, %rd1, %rd20; add.u64 %rd22, %rd2, %rd20;
    ld.global.u32 %r21, [%rd21];
    mov.u32 %r22, s; add.u32 %r22, %r22, %r20; st.shared.u32 [%r22 + 128], %r21;
    cvt.u64.u32 %rd23, %r22; cvta.shared.u64 %rd24, %rd23; ld.u32 %r23, [%rd24 + 128];
    st.local.u32 [l + 4], %r23; mov.u64 %rd25, l; cvta.local.u64 %rd26, %rd25; ld.u32 %r24, [%rd26 + 4];
    st.u32 [%rd26], %r24; ld.local.u32 %r25, [l];
    cvta.to.shared.u64 %rd27, %rd24; cvt.u32.u64 %r26, %rd27; sub.u32 %r26, %r26, %r22;
    cvta.to.global.u64 %rd28, %rd22; add.u32 %r25, %r25, %r26; st.global.u32 [%rd28], %r25;
    isspacep.shared %p1, %rd24; isspacep.local %p2, %rd26; isspacep.global %p3, %rd22;
    isspacep.global %p4, %rd24; isspacep.shared %p5, %rd22; isspacep.local %p6, %rd24;
    add.u64 %rd29, %rd3, %rd20;
    selp.u32 %r30, 1, 0, %p1; selp.u32 %r31, 2, 0, %p2; selp.u32 %r32, 4, 0, %p3; selp.u32 %r33, 8, 0, %p4;
    selp.u32 %r34, 16, 0, %p5; selp.u32 %r35, 32, 0, %p6;
    or.b32 %r30, %r30, %r31; or.b32 %r30, %r30, %r32; or.b32 %r30, %r30, %r33; or.b32 %r30, %r30, %r34;
    or.b32 %r30, %r30, %r35; st.global.u32 [%rd29], %r30;"""
    )
    covers = (
        "ld.global.u32",
        "st.shared.u32",
        "st.local.u32",
        "ld.local.u32",
        "st.u32",
        "ld.u32",
        "cvta.shared.u64",
        "cvta.local.u64",
        "cvta.to.shared.u64",
        "cvta.to.global.u64",
        "isspacep.shared",
        "isspacep.local",
        "isspacep.global",
    )
    before = SHARED
    return program(
        "spaces",
        ".local .align 8 .b8 l[8];\n    " + body,
        MOVEMENT.format("ld, st, cvta, isspacep") + "; Generic Addressing",
        covers,
        [words],
        [words, np.full(32, 7, np.uint32)],
        before=before,
    )


def constants():
    """Initialised variables of .const and .global."""
    body = (
        OWN.format(4)
        + """
    and.b32 %r21, %r20, 12; mov.u64 %rd21, c; cvt.u64.u32 %rd22, %r21; add.u64 %rd21, %rd21, %rd22;
    ld.const.u32 %r22, [%rd21]; ld.global.u32 %r23, [g + 4]; ldu.global.u32 %r24, [g];
    add.u32 %r22, %r22, %r23; xor.b32 %r22, %r22, %r24;
    add.u64 %rd23, %rd1, %rd20; st.global.u32 [%rd23], %r22;"""
    )
    before = ".const .align 4 .u32 c[4] = {10, 20, 30, 40};\n.global .align 4 .u32 g[2] = {5, 7};\n"
    expected = ((10 * (LANES % 4 + 1) + 7) ^ 5).astype(np.uint32)
    return program(
        "constants",
        body,
        MOVEMENT.format("ld, ldu") + "; Constant State Space",
        ("ld.const.u32", "ldu.global.u32"),
        [],
        [expected],
        before=before,
    )


def cached():
    """Cache operators, eviction priorities, volatile and relaxed: the same value."""
    opcodes = (
        "ld.global.nc.u32",
        "ld.global.ca.u32",
        "ld.global.cg.u32",
        "ld.global.cs.u32",
        "ld.volatile.global.u32",
        "ld.relaxed.gpu.global.u32",
        "ld.acquire.gpu.global.u32",
        "ld.global.L1::evict_last.u32",
        "ld.global.L1::no_allocate.L2::128B.u32",
    )
    stores = (
        "st.global.wb.u32",
        "st.global.cg.u32",
        "st.global.cs.u32",
        "st.global.wt.u32",
        "st.volatile.global.u32",
        "st.relaxed.gpu.global.u32",
        "st.release.gpu.global.u32",
        "st.global.L1::evict_first.u32",
        "st.weak.global.u32",
    )
    lines = [OWN.format(4), "add.u64 %rd21, %rd1, %rd20; add.u64 %rd22, %rd2, %rd20;"]
    for n, (load, store) in enumerate(zip(opcodes, stores)):
        lines.append(f"{load} %r30, [%rd21]; add.u32 %r30, %r30, {n}; {store} [%rd22 + {128 * n}], %r30;")
    words = BYTES[:128].view(np.uint32)
    return program(
        "cache operators",
        "\n    ".join(lines),
        MOVEMENT.format("ld, st") + "; Cache Operators",
        (*opcodes, *stores),
        [words],
        [words + np.arange(9, dtype=np.uint32)[:, None]],
    )


def hints():
    """Instructions that change nothing a program can see."""
    body = (
        """
    prefetch.global.L1 [%rd1]; prefetchu.L1 [%rd1]; applypriority.global.L2::evict_normal [%rd1], 128;
    discard.global.L2 [%rd2], 128; nanosleep.u32 1; pmevent 1; membar.cta; membar.gl; membar.sys;
    fence.acq_rel.cta; fence.sc.gpu; fence.acq_rel.sys; """
        + OWN.format(4)
        + """
    add.u64 %rd21, %rd1, %rd20; add.u64 %rd22, %rd2, %rd20; ld.global.u32 %r21, [%rd21];
    st.global.u32 [%rd22], %r21;"""
    )
    words = BYTES[:128].view(np.uint32)
    return program(
        "hints",
        body,
        MOVEMENT.format("prefetch, prefetchu, applypriority, discard")
        + f"; {titles.MISC}nanosleep, pmevent; "
        + ATOMIC.format("membar/fence"),
        (
            "prefetch.global.L1",
            "prefetchu.L1",
            "applypriority.global.L2::evict_normal",
            "discard.global.L2",
            "nanosleep.u32",
            "pmevent",
            "membar.cta",
            "membar.gl",
            "membar.sys",
            "fence.acq_rel.cta",
            "fence.sc.gpu",
            "fence.acq_rel.sys",
        ),
        [words],
        [words],
    )


def newer_hints():
    body = (
        """
    griddepcontrol.launch_dependents; griddepcontrol.wait; setmaxnreg.inc.sync.aligned.u32 64;
    fence.proxy.async; fence.acq_rel.cluster; """
        + OWN.format(4)
        + """
    mov.u32 %r22, s; add.u32 %r22, %r22, %r20; mapa.shared::cluster.u32 %r23, %r22, 0;
    st.shared.u32 [%r22], 5; sub.u32 %r23, %r23, %r22;
    ld.shared.u32 %r24, [%r22]; add.u32 %r23, %r23, %r24;
    add.u64 %rd22, %rd1, %rd20; st.global.u32 [%rd22], %r23;"""
    )
    return program(
        "hints of sm_90",
        body,
        f"{titles.SYNC}griddepcontrol, membar/fence; {titles.MISC}setmaxnreg; {titles.MOVE}mapa",
        (
            "griddepcontrol.launch_dependents",
            "griddepcontrol.wait",
            "setmaxnreg.inc.sync.aligned.u32",
            "fence.proxy.async",
            "fence.acq_rel.cluster",
            "mapa.shared::cluster.u32",
        ),
        [],
        [np.full(32, 5, np.uint32)],
        before=SHARED,
        arch="sm_90a",
        on_gpu=False,
    )


# --- atomics ------------------------------------------------------------------------------------------


def masked(x, kind):
    x &= (1 << 8 * SIZES[kind]) - 1
    return x - (1 << 8 * SIZES[kind]) if kind[0] == "s" and x >> 8 * SIZES[kind] - 1 else x


INTEGER = {
    "add": lambda old, b: old + b,
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda old, b: b,
    "min": min,
    "max": max,
    "inc": lambda old, b: 0 if old >= b else old + 1,
    "dec": lambda old, b: b if old == 0 or old > b else old - 1,
}
FORMS = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "inc": ("u32",),
    "dec": ("u32",),
}
CELLS = ("global", "shared")


def atomic_code(space, opcode, kind, third=False):
    """A cell of the thread's own holds a; the operation combines b with it; $d shows old and new value."""
    bits = 8 * SIZES[kind]
    cell = "%rd35" if space == "global" else "%r40"
    old, new, mixed = ("%rd31", "%rd32", "%rd33") if bits == 64 else ("%r51", "%r52", "%r53")
    operands = f"$b, {mixed}" if third else "$b"
    return (
        f"xor.b{bits} {mixed}, $a, $b; st.{space}.b{bits} [{cell}], $a; "
        f"{opcode} {old}, [{cell}], {operands}; "
        f"ld.{space}.b{bits} {new}, [{cell}]; shl.b{bits} {new}, {new}, 1; xor.b{bits} $d, {old}, {new};"
    )


def atomics(space):
    for name, kinds in FORMS.items():
        for kind in kinds:
            yield name, kind, f"atom.{space}.{name}.{kind}"


def own_cells(space, size):
    """Every operation on cells of one size; cas puts a ^ b where it finds b."""
    bits = f"b{8 * size}"
    for name, kind, opcode in atomics(space):
        if SIZES[kind] == size:

            def model(a, b, name=name, kind=kind):
                old, operand = (masked(x, kind) for x in (a, b))
                return old ^ masked(INTEGER[name](old, operand), kind) << 1

            yield Instruction(opcode, model, bits, atomic_code(space, opcode, kind))
    opcode = f"atom.{space}.cas.{bits}"
    yield Instruction(
        opcode, lambda a, b: a ^ (a ^ b if a == b else a) << 1, bits, atomic_code(space, opcode, bits, True)
    )


class AtomicFamily(Family):
    """A family whose threads also have a cell of 8 bytes in global (%rd35) and in shared memory (%r40)."""

    @property
    def text(self):
        text = super().text
        start = text.index("    mul.wide.u32 %rd20")
        cells = (
            "    mul.wide.u32 %rd35, %r0, 8; mov.u64 %rd36, cells; add.u64 %rd35, %rd35, %rd36;\n"
            "    shl.b32 %r40, %r0, 3; mov.u32 %r41, s; add.u32 %r40, %r40, %r41;\n"
        )
        declared = ".global .align 8 .b8 cells[4096];\n.shared .align 8 .b8 s[4096];\n.visible .entry"
        return (text[:start] + cells + text[start:]).replace(".visible .entry", declared)


def scattered(name, opcode, kind, total, values, covers=None, arch="sm_80"):
    """All lanes meet at four cells: with ``red`` only the sum shows, whatever the order."""
    size = values.dtype.itemsize
    body = (
        OWN.format(size)
        + f"""
    add.u64 %rd21, %rd1, %rd20; and.b32 %r21, %r0, 3; mul.wide.u32 %rd22, %r21, {size};
    add.u64 %rd22, %rd22, %rd2;
    ld.global.b{8 * size} {"%rd30" if size == 8 else "%r30" if size == 4 else "%h30"}, [%rd21];
    {opcode} [%rd22], {"%rd30" if size == 8 else "%r30" if size == 4 else "%h30"};"""
    )
    return program(
        name, body, ATOMIC.format("red"), covers or opcode, [values], [total(values.reshape(8, 4))], arch=arch
    )


NUMBERS = RNG.integers(-1000, 1000, 32)
SUMS = [
    scattered(
        "red.global.add.u32",
        "red.global.add.u32",
        "u32",
        lambda v: v.sum(axis=0, dtype="u4"),
        NUMBERS.astype("u4"),
    ),
    scattered(
        "red.global.add.u64",
        "red.global.add.u64",
        "u64",
        lambda v: v.sum(axis=0, dtype="u8"),
        NUMBERS.astype("u8"),
    ),
    scattered(
        "red.global.max.s32",
        "red.global.max.s32",
        "s32",
        lambda v: v.max(axis=0).clip(0),
        NUMBERS.astype("i4"),
    ),
    scattered(
        "red.global.min.s64",
        "red.global.min.s64",
        "s64",
        lambda v: v.min(axis=0).clip(None, 0),
        NUMBERS.astype("i8"),
    ),
    scattered(
        "red.global.or.b32",
        "red.global.or.b32",
        "b32",
        lambda v: np.bitwise_or.reduce(v, axis=0),
        NUMBERS.astype("u4"),
    ),
    scattered(
        "red.global.xor.b64",
        "red.global.xor.b64",
        "b64",
        lambda v: np.bitwise_xor.reduce(v, axis=0),
        NUMBERS.astype("u8"),
    ),
    scattered(
        "red.global.add.f32", "red.global.add.f32", "f32", lambda v: v.sum(axis=0), NUMBERS.astype("f4")
    ),
    scattered(
        "red.relaxed.gpu.global.add.f64",
        "red.relaxed.gpu.global.add.f64",
        "f64",
        lambda v: v.sum(axis=0),
        NUMBERS.astype("f8"),
    ),
    scattered(
        "red.global.add.noftz.f16",
        "red.global.add.noftz.f16",
        "f16",
        lambda v: v.sum(axis=0),
        (NUMBERS % 50).astype("f2"),
    ),
    scattered(
        "red.global.add.noftz.f16x2",
        "red.global.add.noftz.f16x2",
        "f16x2",
        lambda v: v.view("f2").reshape(8, 4, 2).sum(axis=0).astype("f2").view("u4").reshape(4),
        (np.random.default_rng(1).integers(0, 50, 64)).astype("f2").view("u4"),
    ),
]


def queue():
    """atom gives every lane another ticket: all numbers once, in an order the ISA leaves open."""
    made = program(
        "tickets",
        OWN.format(4)
        + """
    add.u64 %rd21, %rd2, %rd20; atom.global.add.u32 %r21, [%rd1], 1; st.global.u32 [%rd21], %r21;""",
        ATOMIC.format("atom"),
        "atom.global.add.u32",
        [np.zeros(1, np.uint32)],
        [np.zeros(32, np.uint32)],
        exact=False,
    )

    def check(arrays):
        assert arrays[0][0] == 32
        assert sorted(arrays[1].tolist()) == list(range(32))

    made.check = check
    return made


FAMILIES = [
    AtomicFamily(
        f"atom {space} {8 * size}", ATOMIC.format("atom"), (f"b{8 * size}",) * 2, list(own_cells(space, size))
    )
    for space in CELLS
    for size in (4, 8)
]
PROGRAMS = [*loads(), *vectors(), spaces(), constants(), cached(), hints(), newer_hints(), *SUMS, queue()]
