"""Warp-level matrix instructions: ldmatrix, stmatrix, movmatrix and mma.sync.

Where an element lives is written as the ISA writes it: row and column of element i of a thread, from
groupID = laneid >> 2 and threadID_in_group = laneid % 4.
"""

import ml_dtypes
import numpy as np
from ptx_programs import program

from numbaflash.emulator.opcodes import titles

LANES = np.arange(32)
RNG = np.random.default_rng(8)
HALVES = RNG.permutation(2**16)[: 4 * 64].astype(np.uint16).reshape(4, 8, 8)
ADDRESS = "shl.b32 %r20, %r0, 4; mov.u32 %r21, s; add.u32 %r22, %r21, %r20;"
SHARED = ".shared .align 16 .b8 s[1024];\n"


def held(matrix, lane, transposed):
    """The register of a lane of an 8x8 matrix: elements (lane / 4, 2 (lane % 4)) and the next, low first."""
    row, column = lane // 4, 2 * (lane % 4)
    m = matrix.T if transposed else matrix
    return int(m[row, column]) | int(m[row, column + 1]) << 16


def registers(count, transposed):
    return np.array([[held(HALVES[n], lane, transposed) for n in range(count)] for lane in LANES], np.uint32)


def load(count, transposed):
    """Thread i gives the address of row i % 8 of matrix i / 8."""
    name = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
    outs = ", ".join(f"%r{30 + n}" for n in range(count))
    rows = HALVES.reshape(32, 8)
    body = (
        ADDRESS
        + f"""
    mul.wide.u32 %rd20, %r0, 16; add.u64 %rd21, %rd1, %rd20;
    ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd21];
    st.shared.v4.u32 [%r22], {{%r10, %r11, %r12, %r13}}; bar.sync 0;
    {name} {{{outs}}}, [%r22];
    mul.wide.u32 %rd20, %r0, {4 * count}; add.u64 %rd22, %rd2, %rd20;
    """
        + " ".join(f"st.global.u32 [%rd22 + {4 * n}], %r{30 + n};" for n in range(count))
    )
    return program(
        name,
        body,
        titles.MATRIX["ldmatrix"],
        name,
        [rows],
        [registers(count, transposed)],
        before=SHARED,
        arch="sm_80",
    )


def store(count, transposed):
    name = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
    sources = ", ".join(f"%r{30 + n}" for n in range(count))
    body = (
        ADDRESS
        + f"""
    mul.wide.u32 %rd20, %r0, {4 * count}; add.u64 %rd21, %rd1, %rd20;
    """
        + " ".join(f"ld.global.u32 %r{30 + n}, [%rd21 + {4 * n}];" for n in range(count))
        + f"""
    {name} [%r22], {{{sources}}}; bar.sync 0;
    setp.ge.u32 %p1, %r0, {8 * count}; @%p1 bra done;
    ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r22];
    mul.wide.u32 %rd20, %r0, 16; add.u64 %rd22, %rd2, %rd20;
    st.global.v4.u32 [%rd22], {{%r10, %r11, %r12, %r13}};
 done:"""
    )
    return program(
        name,
        body,
        titles.MATRIX["stmatrix"],
        name,
        [registers(count, transposed)],
        [HALVES[:count].reshape(-1, 8)],
        before=SHARED,
        arch="sm_90",
    )


def move():
    name = "movmatrix.sync.aligned.m8n8.trans.b16"
    body = f"""mul.wide.u32 %rd20, %r0, 4; add.u64 %rd21, %rd1, %rd20; add.u64 %rd22, %rd2, %rd20;
    ld.global.u32 %r10, [%rd21]; {name} %r11, %r10; st.global.u32 [%rd22], %r11;"""
    return program(name, body, titles.MATRIX["movmatrix"], name, [registers(1, False)], [registers(1, True)])


# --- mma ----------------------------------------------------------------------------------------------


def group(lane):
    return lane >> 2


def within(lane):
    return lane % 4


def a_16bit(i, lane, k):
    """.m16n8k8 (4 elements) and .m16n8k16 (8): 16-bit types."""
    row = group(lane) + (8 if i % 4 >= 2 else 0)
    return row, within(lane) * 2 + (i & 1) + (8 if i >= 4 else 0)


def b_16bit(i, lane, k):
    return within(lane) * 2 + (i & 1) + (8 if i >= 2 else 0), group(lane)


def a_tf32(i, lane, k):
    """.m16n8k4 (2 elements) and .m16n8k8 (4) with .tf32."""
    return group(lane) + (8 if i % 2 else 0), within(lane) + (4 if i >= 2 else 0)


def b_tf32(i, lane, k):
    return within(lane) + (4 if i >= 1 else 0), group(lane)


def a_8bit(i, lane, k):
    """.m16n8k16 (8 elements) and .m16n8k32 (16): 8-bit types."""
    row = group(lane) if i < 4 or 8 <= i < 12 else group(lane) + 8
    return row, within(lane) * 4 + (i & 3) + (16 if i >= 8 else 0)


def b_8bit(i, lane, k):
    return within(lane) * 4 + (i & 3) + (16 if i >= 4 else 0), group(lane)


def c_16x8(i, lane, k):
    return group(lane) + (8 if i >= 2 else 0), within(lane) * 2 + (i & 1)


def a_f64(i, lane, k):
    return group(lane), within(lane)


def b_f64(i, lane, k):
    return within(lane), group(lane)


def c_f64(i, lane, k):
    return group(lane), within(lane) * 2 + i


LAYOUTS = {
    "f16": (a_16bit, b_16bit, c_16x8),
    "bf16": (a_16bit, b_16bit, c_16x8),
    "tf32": (a_tf32, b_tf32, c_16x8),
    "f64": (a_f64, b_f64, c_f64),
}
LAYOUTS |= dict.fromkeys(("s8", "u8", "e4m3", "e5m2"), (a_8bit, b_8bit, c_16x8))
TYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "f32": np.float32,
    "f64": np.float64,
    "s8": np.int8,
    "u8": np.uint8,
    "s32": np.int32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "f32": 32,
    "f64": 64,
    "s8": 8,
    "u8": 8,
    "s32": 32,
    "e4m3": 8,
    "e5m2": 8,
}


def fragments(matrix, layout, k, kind):
    """(32, registers) words of a matrix of any element type."""
    elements = matrix.size // 32
    own = np.array([[matrix[layout(i, lane, k)] for i in range(elements)] for lane in range(32)])
    return np.ascontiguousarray(own.astype(TYPES[kind])).view(np.uint64 if kind == "f64" else np.uint32)


def small_numbers(kind, shape, rng):
    """Numbers whose products and sums are exact whatever the order of summation."""
    if kind in ("s8", "u8"):
        limits = np.iinfo(TYPES[kind])
        return rng.integers(limits.min, limits.max + 1, shape).astype(np.int64)
    return rng.integers(-8, 9, shape).astype(np.float64)


MMAS = [
    ("m16n8k8", "f32", "f16", "f16", "f32"),
    ("m16n8k16", "f32", "f16", "f16", "f32"),
    ("m16n8k8", "f16", "f16", "f16", "f16"),
    ("m16n8k16", "f16", "f16", "f16", "f16"),
    ("m16n8k8", "f32", "bf16", "bf16", "f32"),
    ("m16n8k16", "f32", "bf16", "bf16", "f32"),
    ("m16n8k4", "f32", "tf32", "tf32", "f32"),
    ("m16n8k8", "f32", "tf32", "tf32", "f32"),
    ("m8n8k4", "f64", "f64", "f64", "f64"),
    *((f"m16n8k{k}", "s32", a, b, "s32") for k in (16, 32) for a in ("s8", "u8") for b in ("s8", "u8")),
    *(
        (f"m16n8k{k}", "f32", a, b, "f32")
        for k in (16, 32)
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
    ),
]


def mma_text(name, counts, kind):
    """A kernel that loads three fragments, multiplies, and stores the fourth."""
    double = "f64" in kind
    prefix, size, width = ("%rd", 8, "b64") if double else ("%r", 4, "b32")
    if double:
        prefix, width = "%fd", "f64"
    first = {"a": 1, "b": 5, "c": 9, "d": 13} if double else {"a": 10, "b": 20, "c": 30, "d": 40}
    lines, lists = [], {}
    for n, (letter, count) in enumerate(zip("abcd", counts)):
        lists[letter] = [f"{prefix}{first[letter] + i}" for i in range(count)]
        lines.append(f"mul.wide.u32 %rd20, %r0, {size * count}; add.u64 %rd{21 + n}, %rd{n + 1}, %rd20;")
        lines += [
            f"ld.global.{width} {r}, [%rd{21 + n} + {size * i}];"
            for i, r in enumerate(lists[letter])
            if letter != "d"
        ]
    operands = ", ".join("{" + ", ".join(lists[letter]) + "}" for letter in "dabc")
    lines.append(f"{name} {operands};")
    lines += [f"st.global.{width} [%rd24 + {size * i}], {r};" for i, r in enumerate(lists["d"])]
    return "\n    ".join(lines)


def mma(shape, d_kind, a_kind, b_kind, c_kind):
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    rng = np.random.default_rng(k)
    a, b = small_numbers(a_kind, (m, k), rng), small_numbers(b_kind, (k, n), rng)
    c = small_numbers("f32" if d_kind != "s32" else "s32", (m, n), rng)
    layouts = LAYOUTS[a_kind]
    words = [
        fragments(a, layouts[0], k, a_kind),
        fragments(b, layouts[1], k, b_kind),
        fragments(c, layouts[2], k, c_kind),
    ]
    expected = fragments(a @ b + c, layouts[2], k, d_kind)
    name = f"mma.sync.aligned.{shape}.row.col.{d_kind}.{a_kind}.{b_kind}.{c_kind}"
    fp8 = a_kind in ("e4m3", "e5m2")
    body = mma_text(name, [w.shape[1] for w in (*words, expected)], d_kind)
    section = f"{titles.MATRIX['mma']}; Matrix Fragments for mma.{shape}"
    if shape == "m16n8k16":
        section += " with integer type" if fp8 else " with floating point type"
    return program(name, body, section, name, words, [expected], arch="sm_89" if fp8 else "sm_80")


def rounding_mma():
    """Sums in f32: within the error of "at least single precision", special values included."""
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(16, 16)).astype("f2"), rng.normal(size=(16, 8)).astype("f2")
    c = rng.normal(size=(16, 8)).astype("f4")
    a[3, 5], a[9, 0], c[12, 2], b[7, 6] = np.inf, np.nan, -np.inf, 65504
    exact = a.astype("f8") @ b.astype("f8") + c
    size = np.abs(a.astype("f8")) @ np.abs(b.astype("f8")) + np.abs(c)
    name = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    layouts = LAYOUTS["f16"]
    words = [
        fragments(a, layouts[0], 16, "f16"),
        fragments(b, layouts[1], 16, "f16"),
        fragments(c, layouts[2], 16, "f32"),
    ]
    made = program(
        "mma with rounding",
        mma_text(name, [4, 2, 4, 4], "f32"),
        titles.MATRIX["mma"],
        name,
        words,
        [words[2]],
        exact=False,
    )

    def check(arrays):
        got = arrays[3].view("f4")
        for lane in range(32):
            for i in range(4):
                where = c_16x8(i, lane, 16)
                want, bound = exact[where], 2.0**-20 * size[where]
                assert (
                    (np.isnan(got[lane, i]) and np.isnan(want))
                    or got[lane, i] == want
                    or (abs(got[lane, i] - want) <= bound)
                ), (where, got[lane, i], want)

    made.check = check
    return made


PROGRAMS = [
    *(load(n, t) for n in (1, 2, 4) for t in (False, True)),
    *(store(n, t) for n in (1, 2, 4) for t in (False, True)),
    move(),
    *(mma(*one) for one in MMAS),
    rounding_mma(),
]
