"""Warp-level matrices: ldmatrix, stmatrix, movmatrix and mma.sync.

Where an element of a fragment lives is a table: for each register and half of it, the row and column as
functions of ``group = lane / 4`` and ``t = lane % 4``.
"""
from __future__ import annotations

import re

import numpy as np

from .. import rounding
from ..machine import Active
from ..memory import Access
from ..registry import opcode
from .titles import MATRIX
from .warp import put

LANE = np.arange(32)
GROUP, T = LANE >> 2, LANE & 3


def fragment(rows, columns):
    """(elements, 32) row and column numbers of a fragment."""
    return tuple(np.stack([np.broadcast_to(one, 32) for one in numbers]) for numbers in (rows, columns))


def two_rows():
    """C and D of all m16n8 shapes: rows group and group + 8, columns 2 t and 2 t + 1 (Matrix Fragments for
    mma.m16n8k8)."""
    return fragment([GROUP + 8 * (e >> 1) for e in range(4)], [2 * T + (e & 1) for e in range(4)])


def a_halves(k):
    """A of m16n8k8 and m16n8k16 with 16-bit elements: a0,a1 (group, 2t..), a2,a3 (group+8), then columns +
    8."""
    return fragment([GROUP + 8 * ((e >> 1) & 1) for e in range(k // 2)],
                    [2 * T + (e & 1) + 8 * (e >> 2) for e in range(k // 2)])


def b_halves(k):
    """B of the same: rows 2t, 2t+1, then + 8; column group."""
    return fragment([2 * T + (e & 1) + 8 * (e >> 1) for e in range(k // 4)], [GROUP] * (k // 4))


def a_words(k):
    """A of m16n8k4 and m16n8k8 with tf32: (group, t), (group+8, t), then columns + 4."""
    return fragment([GROUP + 8 * (e & 1) for e in range(k // 2)], [T + 4 * (e >> 1) for e in range(k // 2)])


def b_words(k):
    """B of the same: row t, then t + 4; column group."""
    return fragment([T + 4 * e for e in range(k // 4)], [GROUP] * (k // 4))


def a_bytes(k):
    """A of m16n8k16 and m16n8k32 with 8-bit elements: four columns 4t.. per register, rows +8, columns
    +16."""
    return fragment([GROUP + 8 * ((e >> 2) & 1) for e in range(k // 2)],
                    [4 * T + (e & 3) + 16 * (e >> 3) for e in range(k // 2)])


def b_bytes(k):
    """B of the same: four rows 4t.. per register, then + 16; column group."""
    return fragment([4 * T + (e & 3) + 16 * (e >> 2) for e in range(k // 4)], [GROUP] * (k // 4))


ACCUMULATOR = two_rows()
SMALL_ACCUMULATOR = fragment([GROUP, GROUP], [2 * T, 2 * T + 1])
DOUBLE_A, DOUBLE_B = fragment([GROUP], [T]), fragment([T], [GROUP])


def halves(kind):
    def unpack(registers):
        both = np.stack([np.stack([r & np.uint32(0xFFFF), r >> np.uint32(16)]) for r in registers])
        bits = both.reshape(-1, *registers[0].shape).astype("u2")
        return bits.view("f2").astype("f4") if kind == "f16" else rounding.from_bfloat16(bits)
    return unpack


def tf32_words(registers):
    """Only the upper 19 bits of each register count."""
    return (np.stack(registers) & np.uint32(0xFFFFE000)).view("f4")


def bytes_of(kind):
    def unpack(registers):
        import ml_dtypes
        dtype = {
            "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8
        }[kind]
        pieces = np.stack([np.ascontiguousarray((r >> np.uint32(s)).astype("u1")) for r in registers
                           for s in (0, 8, 16, 24)])
        return pieces.view(dtype).astype("i8" if kind in ("s8", "u8") else "f4")
    return unpack


def doubles(registers):
    return np.stack([r.view("f8") for r in registers])


# (shape, type) -> fragment of A, of B, of C and D, how registers become elements
SHAPES = {("m16n8k8", "f16"): (a_halves(8), b_halves(8), ACCUMULATOR, halves("f16")),
          ("m16n8k16", "f16"): (a_halves(16), b_halves(16), ACCUMULATOR, halves("f16")),
          ("m16n8k8", "bf16"): (a_halves(8), b_halves(8), ACCUMULATOR, halves("bf16")),
          ("m16n8k16", "bf16"): (a_halves(16), b_halves(16), ACCUMULATOR, halves("bf16")),
          ("m16n8k4", "tf32"): (a_words(4), b_words(4), ACCUMULATOR, tf32_words),
          ("m16n8k8", "tf32"): (a_words(8), b_words(8), ACCUMULATOR, tf32_words),
          ("m8n8k4", "f64"): (DOUBLE_A, DOUBLE_B, SMALL_ACCUMULATOR, doubles)}
for _kind in ("e4m3", "e5m2", "s8", "u8"):
    for _k in (16, 32):
        SHAPES[f"m16n8k{_k}", _kind] = (a_bytes(_k), b_bytes(_k), ACCUMULATOR, bytes_of(_kind))


def place_elements(pattern, values, shape):
    """Fragment elements (elements, warps, 32) -> matrices (warps, rows, columns)."""
    rows, columns = pattern
    matrices = np.zeros((values.shape[1], *shape), values.dtype)
    matrices[:, rows, columns] = values.transpose(1, 0, 2)
    return matrices


def register_rows(machine, source, warps):
    rows = np.broadcast_to(source, machine.lanes).reshape(-1, 32)
    return rows if warps is None else rows[warps]


@opcode("mma.sync", section=MATRIX["mma"], group="tensor core")
def mma(d, i):
    """D = A * B + C over the warp. Products are exact and summed in float32 (or int32, float64); f16 D
    rounds once."""
    machine = d.machine
    shape = next(p for p in i.parts if re.fullmatch(r"m\d+n\d+k\d+", p))
    d_type, a_type, b_type, c_type = [p for p in i.parts if p in MMA_TYPES][-4:]
    m, n, k = map(int, re.findall(r"\d+", shape))
    a_pattern, b_pattern, c_pattern, unpack = SHAPES[shape, a_type]
    unpack_b = SHAPES[shape, b_type][3]
    size = 8 if a_type == "f64" else 4
    raw = np.dtype(f"u{size}")
    outs = [d.target(r, np.dtype(f"u{8 if d_type == 'f64' else 4}")) for r in d.vector(i.operands[0])]
    a, b = ([d.source(r, raw) for r in d.vector(o)] for o in i.operands[1:3])
    c = [d.source(r, np.dtype(f"u{8 if c_type == 'f64' else 4}")) for r in d.vector(i.operands[3])]
    read_c, write_d = ACCUMULATORS[c_type][0], ACCUMULATORS[d_type][1]
    wide = {"f64": "f8", "s32": "i8"}.get(d_type, "f4")

    def step(active):
        warps = machine.whole_warps(active, i, aligned=True)
        left, right = ([register_rows(machine, s, warps) for s in side] for side in (a, b))
        x = place_elements(a_pattern, unpack(left), (m, k))
        y = place_elements(b_pattern, unpack_b(right), (k, n))
        addend = read_c([register_rows(machine, s, warps) for s in c])
        product = np.matmul(x, y)
        total = product[:, c_pattern[0], c_pattern[1]].transpose(1, 0, 2).astype(wide) + addend
        if total.dtype.kind == "f":
            total = np.where(np.isnan(total), total.dtype.type(np.nan), total)
        for out, value in zip(outs, write_d(total)):
            put(machine, active, out, warps, value)
    return step


def single_in(registers):
    return np.stack([np.ascontiguousarray(r).view("f4") for r in registers])


def single_out(values):
    values = np.ascontiguousarray(values, "f4")
    rounding.settle(values, True)
    return values.view("u4")


def half_out(values):
    half = values.astype("f2")
    rounding.settle(half, True)
    bits = half.view("u2").astype("u4")
    return bits[0::2] | bits[1::2] << np.uint32(16)


ACCUMULATORS = {
    "f32": (single_in, single_out),
    "f16": (halves("f16"), half_out),
    "f64": (lambda registers: np.stack([np.ascontiguousarray(r).view("f8") for r in registers]),
            lambda values: np.ascontiguousarray(values, "f8").view("u8")),
    "s32": (lambda registers: np.stack([np.ascontiguousarray(r).view("i4") for r in registers]).astype("i8"),
            lambda values: values.astype("i4").view("u4")),
}
MMA_TYPES = {"f16", "bf16", "tf32", "f32", "f64", "e4m3", "e5m2", "s8", "u8", "s32"}


# ---- 8x8 matrices of 16-bit elements between shared memory and registers
def count_of(i):
    return next(int(p[1:]) for p in i.parts if re.fullmatch(r"x[124]", p))


@opcode("ldmatrix", section=MATRIX["ldmatrix"], group="memory",
        touches=lambda i: 16)
def ldmatrix(d, i):
    """Load 1, 2 or 4 8x8 matrices; lane gets elements (lane / 4, 2 (lane % 4)) and the next, transposed by
    .trans."""
    machine = d.machine
    count, transposed = count_of(i), "trans" in i.parts
    outs = [d.target(r, np.dtype("u4")) for r in d.vector(i.operands[0])]
    space = d.spaces["shared"]
    access = Access(d, i, space, i.operands[1], 16, "load")
    data = space.views[2]
    givers = machine.lane_in_warp < 8 * count
    all_givers = machine.everyone if count == 4 else Active.of(givers)
    column = np.arange(8)

    def step(active):
        warps = machine.whole_warps(active, i, aligned=True)
        chosen = all_givers if active.lanes is None else Active.of(active.mask & givers)
        index = access(chosen) >> 1
        rows = data.take(index[:, None] + column).reshape(-1, count, 8, 8)
        if transposed:
            rows = rows.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(rows).view("u4").reshape(-1, count, 32)
        for n, out in enumerate(outs):
            put(machine, active, out, warps, words[:, n])
    return step


@opcode("stmatrix", section=MATRIX["stmatrix"], group="memory",
        touches=lambda i: 16)
def stmatrix(d, i):
    """Store 1, 2 or 4 8x8 matrices from fragments; transposed by .trans."""
    machine = d.machine
    d.subnormals.memory.raised = True
    count, transposed = count_of(i), "trans" in i.parts
    sources = [d.source(r, "u4") for r in d.vector(i.operands[1])]
    space = d.spaces["shared"]
    access = Access(d, i, space, i.operands[0], 16, "store")
    data = space.views[2]
    givers = machine.lane_in_warp < 8 * count
    column = np.arange(8)

    def step(active):
        warps = machine.whole_warps(active, i, aligned=True)
        words = np.stack([register_rows(machine, s, warps) for s in sources], axis=1)
        rows = np.ascontiguousarray(words).view("u2").reshape(-1, count, 8, 8)
        if transposed:
            rows = rows.transpose(0, 1, 3, 2)
        rows = np.ascontiguousarray(rows.reshape(-1, 8))
        chosen = Active.of(givers & active.mask)
        index = access(chosen, lambda which: rows[which].view(np.uint8)) >> 1
        data[index[:, None] + column] = rows
    return step


@opcode("movmatrix", section=MATRIX["movmatrix"], group="warp")
def movmatrix(d, i):
    """Transpose an 8x8 matrix held by the warp."""
    machine = d.machine
    out = d.target(i.operands[0], np.dtype("u4"))
    a = d.source(i.operands[1], "u4")

    def step(active):
        warps = machine.whole_warps(active, i, aligned=True)
        words = np.ascontiguousarray(register_rows(machine, a, warps))
        rows = words.view("u2").reshape(-1, 8, 8).transpose(0, 2, 1)
        put(machine, active, out, warps, np.ascontiguousarray(rows).view("u4").reshape(-1, 32))
    return step
