"""Bit manipulation: logic and shifts, bit fields and counts, byte permutes."""
from __future__ import annotations

import numpy as np

from ..registry import opcode
from ..values import DTYPES, UNSIGNED as UNSIGNED_OF
from .common import BITWISE, INTEGERS, computed, ufunc
from .titles import INTEGER, LOGIC, MOVE

CONNECTIVES = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@opcode("and", "or", "xor", section=LOGIC + "and, or, xor", group="logic", types=(*BITWISE, "pred"))
def logic(d, i):
    """d = a & b, a | b, a ^ b."""
    return ufunc(d, i, CONNECTIVES[i.parts[0]])


@opcode("not", section=LOGIC + "not", group="logic", types=(*BITWISE, "pred"))
def invert(d, i):
    """d = ~a."""
    return ufunc(d, i, np.invert)


@opcode("cnot", section=LOGIC + "cnot", group="logic", types=BITWISE)
def cnot(d, i):
    """d = a == 0 ? 1 : 0."""
    return computed(d, i, lambda a: a == 0, DTYPES[i.parts[-1]])


@opcode("lop3", section=LOGIC + "lop3", group="logic")
def lop3(d, i):
    """d = F(a, b, c), F given by its truth table immLut; lop3.BoolOp also sets p = (d != 0) BoolOp q."""
    pair = i.operands[0].split("|")
    out = d.target(pair[0], np.dtype("u4"))
    a, b, c = (d.source(o, "u4") for o in i.operands[1:4])
    table = int(d.source(i.operands[4], "u4"))
    boolean = {"or": np.logical_or, "and": np.logical_and}.get(i.parts[1])
    flag = d.target(pair[1], np.dtype(bool)) if len(pair) > 1 else None
    q = d.source(i.operands[5], bool) if len(i.operands) > 5 else None
    ones, lanes = np.uint32(0xFFFFFFFF), d.machine.lanes

    def step(active):
        total = np.zeros(lanes, np.uint32)
        for row in range(8):
            if table >> row & 1:
                x, y, z = (value if row & bit else value ^ ones for value, bit in ((a, 4), (b, 2), (c, 1)))
                total |= x & y & z
        if flag is not None:
            np.copyto(flag, boolean(total != 0, q), where=active.where)
        np.copyto(out, total, where=active.where)
    return step


@opcode("shl", section=LOGIC + "shl", group="logic", types=BITWISE)
@opcode("shr", section=LOGIC + "shr", group="logic", types=(*BITWISE, *INTEGERS))
def shift(d, i):
    """d = a << b or a >> b; amounts of the register's width and more give 0, or the sign for shr.s."""
    dtype = DTYPES[i.parts[-1]]
    width = 8 * dtype.itemsize
    function = np.left_shift if i.parts[0] == "shl" else np.right_shift
    out = d.target(i.operands[0], dtype)
    a, amount = d.source(i.operands[1], dtype), d.source(i.operands[2], "u4")
    arithmetic = dtype.kind == "i" and i.parts[0] == "shr"
    if not isinstance(amount, np.ndarray):
        if amount >= width and not arithmetic:
            return lambda active: np.copyto(out, dtype.type(0), where=active.where)
        constant = dtype.type(min(int(amount), width - 1))
        return lambda active: function(a, constant, out=out, where=active.where)

    def step(active):
        clamped = np.minimum(amount, np.uint32(width - 1)).astype(dtype)
        value = function(a, clamped)
        if not arithmetic:
            value = np.where(amount >= width, dtype.type(0), value)
        np.copyto(out, value, where=active.where)
    return step


@opcode("shf", section=LOGIC + "shf", group="logic")
def funnel_shift(d, i):
    """shf.l: the upper, shf.r: the lower 32 bits of {b, a} shifted; .clamp limits c to 32, .wrap takes c mod
    32."""
    left, clamp = i.parts[1] == "l", i.parts[2] == "clamp"

    def shifted(a, b, c):
        c = np.minimum(c, np.uint32(32)) if clamp else c & np.uint32(31)
        both = (np.asarray(b).astype("u8") << np.uint64(32)) | a
        c = c.astype("u8") if isinstance(c, np.ndarray) else np.uint64(c)
        if left:
            return np.where(c == 32, a, ((both << c) >> np.uint64(32)) & np.uint64(0xFFFFFFFF))
        return (both >> c) & np.uint64(0xFFFFFFFF)

    return computed(d, i, shifted, np.dtype("u4"))


@opcode("popc", section=INTEGER + "popc", group="integer")
def popc(d, i):
    """d = number of ones of a."""
    return counted(d, i, np.bitwise_count)


def bit_length(a, bits):
    """Bits up to and including the most significant one."""
    value, length = a.astype("u8"), np.zeros(a.shape, np.uint32)
    for step in (32, 16, 8, 4, 2, 1):
        big = value >= np.uint64(1 << step)
        length += np.where(big, np.uint32(step), np.uint32(0))
        value = np.where(big, value >> np.uint64(step), value)
    return length + value.astype(np.uint32)


@opcode("clz", section=INTEGER + "clz", group="integer")
def clz(d, i):
    """d = number of leading zeros of a."""
    bits = 8 * DTYPES[i.parts[-1]].itemsize
    return counted(d, i, lambda a: np.uint32(bits) - bit_length(a, bits))


def counted(d, i, function):
    source = UNSIGNED_OF[DTYPES[i.parts[-1]].itemsize]
    return computed(d, i, function, np.dtype("u4"), [source])


@opcode("bfind", section=INTEGER + "bfind", group="integer")
def bfind(d, i):
    """d = position of the most significant bit that is not a sign bit, or all ones; .shiftamt: bits - 1 -
    d."""
    dtype = DTYPES[i.parts[-1]]
    bits = 8 * dtype.itemsize
    shift_amount = "shiftamt" in i.parts

    def find(a):
        magnitude = np.where(a < 0, ~a, a) if dtype.kind == "i" else a
        length = bit_length(magnitude.view(UNSIGNED_OF[dtype.itemsize]), bits)
        position = length - np.uint32(1)
        if shift_amount:
            position = np.uint32(bits) - length
        return np.where(length == 0, np.uint32(0xFFFFFFFF), position)

    return computed(d, i, find, np.dtype("u4"), [dtype])


@opcode("fns", section=INTEGER + "fns", group="integer")
def fns(d, i):
    """d = the bit of mask that is the offset-th set one counted from base (upwards if offset > 0), or all
    ones."""
    def find(mask, base, offset):
        mask, base, offset = np.broadcast_arrays(mask, base, offset)
        result = []
        for m, b, o in zip(mask.tolist(), base.tolist(), offset.tolist()):
            step = 1 if o >= 0 else -1
            reach = range(b, 32 if step > 0 else -1, step) if o else [b]
            places = [p for p in reach if m >> p & 1]
            result.append(places[max(abs(o), 1) - 1] if len(places) >= max(abs(o), 1) else 0xFFFFFFFF)
        return np.array(result, np.uint32)

    return computed(d, i, find, np.dtype("u4"), [np.dtype("u4"), np.dtype("u4"), np.dtype("i4")])


@opcode("brev", section=INTEGER + "brev", group="integer")
def brev(d, i):
    """d = the bits of a in reverse order."""
    dtype = DTYPES[i.parts[-1]]

    def reverse(a):
        value = a.byteswap()
        for mask, step in ((0x55, 1), (0x33, 2), (0x0F, 4)):
            pattern = dtype.type(int.from_bytes(bytes([mask]) * dtype.itemsize, "little"))
            value = ((value & pattern) << dtype.type(step)) | ((value >> dtype.type(step)) & pattern)
        return value

    return computed(d, i, reverse, dtype)


@opcode("bfe", section=INTEGER + "bfe", group="integer", types=("u32", "u64", "s32", "s64"))
def bfe(d, i):
    """d = the field of c bits at bit b of a, zero- or sign-extended; past the msb the sign is repeated."""
    dtype = DTYPES[i.parts[-1]]
    bits = 8 * dtype.itemsize
    unsigned = UNSIGNED_OF[dtype.itemsize]

    def extract(a, position, length):
        pos, length = (np.minimum(x & np.uint32(0xFF), np.uint32(bits)).astype("i8")
                       for x in (position, length))
        a = np.broadcast_to(a, np.broadcast_shapes(np.shape(a), np.shape(pos), np.shape(length)))
        raw = a.view(unsigned)
        field = np.where(pos >= bits, unsigned.type(0), raw >> np.minimum(pos, bits - 1).astype(unsigned))
        mask = np.where(length >= bits, unsigned.type(2**bits - 1),
                        (unsigned.type(1) << np.minimum(length, bits - 1).astype(unsigned)) -
                        unsigned.type(1))
        value = field & mask
        if dtype.kind == "i":
            sign_at = np.minimum(pos + length - 1, bits - 1)
            sign = (raw >> np.maximum(sign_at, 0).astype(unsigned)) & unsigned.type(1)
            value = np.where((length > 0) & (sign != 0), value | ~mask, value)
            beyond = (pos + length > bits) & (sign != 0)
            missing = np.where(pos >= bits, unsigned.type(2**bits - 1),
                               ~((unsigned.type(2**bits - 1)) >> np.minimum(pos, bits - 1).astype(unsigned)))
            value = np.where(beyond & (length > 0), value | missing, value)
        return value.view(dtype)

    return computed(d, i, extract, dtype, [dtype, np.dtype("u4"), np.dtype("u4")])


@opcode("bfi", section=INTEGER + "bfi", group="integer", types=("b32", "b64"))
def bfi(d, i):
    """d = b with its field of d bits at bit c replaced by the low bits of a."""
    dtype = DTYPES[i.parts[-1]]
    bits = 8 * dtype.itemsize

    def insert(a, b, position, length):
        pos, length = (np.asarray(x & np.uint32(0xFF)).astype("i8") for x in (position, length))
        safe = np.minimum(pos, bits - 1).astype(dtype)
        mask = np.where(length >= bits, dtype.type(2**bits - 1),
                        (dtype.type(1) << np.minimum(length, bits - 1).astype(dtype)) - dtype.type(1))
        mask = np.where(pos >= bits, dtype.type(0), mask << safe)
        return (b & ~mask) | ((a << safe) & mask)

    return computed(d, i, insert, dtype, [dtype, dtype, np.dtype("u4"), np.dtype("u4")])


@opcode("szext", section=INTEGER + "szext", group="integer", types=("u32", "s32"))
def szext(d, i):
    """d = the low b bits of a, sign- or zero-extended; .clamp limits b to 32, .wrap takes it mod 32."""
    dtype = DTYPES[i.parts[-1]]
    clamp = "clamp" in i.parts

    def extend(a, b):
        n = (np.minimum(b, np.uint32(32)) if clamp else b & np.uint32(31)).astype("i8")
        value = np.asarray(a).astype("i8") & ((np.int64(1) << n) - 1)
        if dtype.kind == "i":
            sign = (n > 0) & ((value >> np.maximum(n - 1, 0)) & 1 == 1)
            value = np.where(sign, value - (np.int64(1) << n), value)
        return value.astype(dtype)

    return computed(d, i, extend, dtype, [dtype, np.dtype("u4")])


@opcode("bmsk", section=INTEGER + "bmsk", group="integer")
def bmsk(d, i):
    """d = b ones from bit a; .clamp limits both to 32, .wrap takes them mod 32."""
    clamp = "clamp" in i.parts

    def mask(a, b):
        a, b = ((np.minimum(x, np.uint32(32)) if clamp else x & np.uint32(31)).astype("u8") for x in (a, b))
        return (((np.uint64(1) << b) - np.uint64(1)) << a) & np.uint64(0xFFFFFFFF)

    return computed(d, i, mask, np.dtype("u4"))


@opcode("prmt", section=MOVE + "prmt", group="logic")
def prmt(d, i):
    """d = four bytes picked from {b, a} by the nibbles of c (msb of a nibble: the byte's sign), or by a
    mode."""
    mode = i.parts[2] if len(i.parts) > 2 else None
    table = {"f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
             "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
             "rc8": [[0] * 4, [1] * 4, [2] * 4, [3] * 4],
             "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
             "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
             "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]]}.get(mode)

    def permute(a, b, c):
        both = (np.asarray(b).astype("u8") << np.uint64(32)) | a
        result = np.uint64(0)
        for place in range(4):
            if table is None:
                nibble = (c >> np.uint32(4 * place)) & np.uint32(15)
                index, sign = (nibble & np.uint32(7)).astype("u8"), nibble >> np.uint32(3)
            else:
                index, sign = np.array(table, "u8")[:, place][c & np.uint32(3)], np.uint32(0)
            byte = (both >> (index * np.uint64(8))) & np.uint64(0xFF)
            byte = np.where(sign != 0, np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0)), byte)
            result = result | (byte << np.uint64(8 * place))
        return result

    return computed(d, i, permute, np.dtype("u4"))
