"""Products of tiles by tensor cores: what a warp keeps in registers and what it reads from panels.

An accumulator is a local array of fragments of 16 rows x 8 columns, fragment ``i * n_tiles + j`` for row tile i and
column tile j.  Of each a lane holds four numbers: rows g and g + 8, columns 2t and 2t + 1 (g = lane / 4,
t = lane % 4), in the order (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).  Two neighbouring column tiles
hold exactly what an A operand of 16 rows x 16 columns holds, so a result becomes a factor by packing pairs.
"""
import numpy as np
from numba import cuda, uint32

from numbaflash.cuda import ptx
from numbaflash.cuda.panels import PANEL_ROW
from numbaflash.cuda.inlining import device
from numbaflash.cuda.unroll import unrolled

ZERO = np.float32(0)
STRIP = 16 * PANEL_ROW
"""Bytes of 16 rows of a panel."""


@device
def _mma_turing(acc, c, a, i, b, j):
    ptx.mma_m16n8k8_f16(acc, c, a, 2 * i, b, 2 * j)
    ptx.mma_m16n8k8_f16(acc, c, a, 2 * i + 1, b, 2 * j + 1)


@device
def _pack_turing(low, high):
    return uint32(ptx.cvt_f16(low)) | (uint32(ptx.cvt_f16(high)) << uint32(16))


def _round_one(e, x, bits, first):
    x[e] = ptx.cvt_rna_tf32(ptx.bits_float(bits[first + e]))


def _rest_one(e, x, bits, first):
    whole = ptx.bits_float(bits[first + e])
    x[e] = ptx.cvt_rna_tf32(whole - ptx.bits_float(ptx.cvt_rna_tf32(whole)))


_round_4, _round_2, _rest_4, _rest_2 = (unrolled(n, body) for body in (_round_one, _rest_one) for n in (4, 2))


@device
def _mma_tf32(acc, c, a, i, b, j):
    x = cuda.local.array(4, uint32)
    y = cuda.local.array(2, uint32)
    _round_4(x, a, 4 * i)
    _round_2(y, b, 2 * j)
    ptx.mma_m16n8k8_tf32(acc, c, x, 0, y, 0)


@device
def _mma_tf32x3(acc, c, a, i, b, j):
    """float32 numbers as sums of two tf32 ones; the product of the two small parts is below float32's own error."""
    x = cuda.local.array(4, uint32)
    y = cuda.local.array(2, uint32)
    rest = cuda.local.array(4, uint32)
    _round_2(y, b, 2 * j)
    _rest_4(rest, a, 4 * i)
    ptx.mma_m16n8k8_tf32(acc, c, rest, 0, y, 0)
    _round_4(x, a, 4 * i)
    _rest_2(rest, b, 2 * j)
    ptx.mma_m16n8k8_tf32(acc, c, x, 0, rest, 0)
    ptx.mma_m16n8k8_tf32(acc, c, x, 0, y, 0)


HALVES = {"float16": 1, "bfloat16": 1, "tf32": 2, "tf32x3": 2}
"""Kinds of products, and 16-bit columns per number in panels."""

_INSTRUCTIONS = {
    "float16": (ptx.mma_m16n8k16_f16, ptx.cvt_f16x2),
    "bfloat16": (ptx.mma_m16n8k16_bf16, ptx.cvt_bf16x2),
    "tf32": (_mma_tf32, None),
    "tf32x3": (_mma_tf32x3, None),
}


def matrix_instructions(kind: str, turing: bool = False):
    """``mma(acc, c, a, i, b, j)``, 16 rows x 32 bytes by 8 columns, and for 16-bit kinds ``pack(low, high)``.

    32 bytes are 16 numbers of 16 bits or 8 of 32; a fragment is laid out alike in either case.
    """
    return (_mma_turing, _pack_turing) if turing else _INSTRUCTIONS[kind]


def make_load_rows(m_tiles: int, width: int, height: int):
    """``load_rows(a, address)``: all A operands of a warp's rows; fragment ``step * m_tiles + i``."""

    def load_one(n, a, address):
        step, i = n // m_tiles, n % m_tiles
        ptx.ldmatrix_x4(a, n, (address ^ (step % 4 * 32)) + (step // 4 * height * PANEL_ROW + i * STRIP))

    return unrolled(width // 16 * m_tiles, load_one)


def make_clear(size: int):
    """``clear(acc)``."""

    def clear_one(x, acc):
        acc[x] = ZERO

    return unrolled(size, clear_one)


def make_multiply_nt(m_tiles: int, n_tiles: int, width: int, a_height: int, b_height: int, mma, resident: bool):
    """``multiply_add(acc, a, a_address, b_address)``: acc += A B^T over `width` 16-bit columns of two tiles in panels.

    `a_address` is a `lane_down` address in A's rows of this warp, `b_address` a `lane_across` one in B's.  A
    resident A was loaded by `load_rows` before; otherwise `a` holds `m_tiles` fragments of scratch.
    """

    def load_a(i, a, address):
        ptx.ldmatrix_x4(a, i, address + i * STRIP)

    def multiply_row(i, acc, a, b, step, j):
        at = step * m_tiles + i if resident else i
        mma(acc, i * n_tiles + 2 * j, a, at, b, 0)
        mma(acc, i * n_tiles + 2 * j + 1, a, at, b, 1)

    def multiply_columns(j, acc, a, b, step, address):
        ptx.ldmatrix_x4(b, 0, address + j * STRIP)
        rows(acc, a, b, step, j)

    def multiply_step(step, acc, a, b, a_address, b_address):
        turn, panel = step % 4 * 32, step // 4 * PANEL_ROW
        if not resident:
            load_step(a, (a_address ^ turn) + panel * a_height)
        columns(acc, a, b, step, (b_address ^ turn) + panel * b_height)

    load_step = unrolled(m_tiles, load_a)
    rows = unrolled(m_tiles, multiply_row)
    columns = unrolled(n_tiles // 2, multiply_columns)
    steps = unrolled(width // 16, multiply_step)

    @device
    def multiply_add(acc, a, a_address, b_address):
        b = cuda.local.array(4, uint32)
        steps(acc, a, b, a_address, b_address)
    return multiply_add


def make_multiply_nn(m_tiles: int, depth: int, width: int, b_height: int, mma):
    """``multiply_add(acc, a, b_address)``: acc += A B, A in registers, B of `depth` rows and `width` columns.

    Fragment ``step * m_tiles + i`` of `a` holds row tile i and columns 16 step .. 16 step + 15; `b_address`
    is a `lane_down` address.
    """
    N_TILES = width // 8

    def multiply_row(i, acc, a, b, step, j):
        mma(acc, i * N_TILES + 2 * j, a, step * m_tiles + i, b, 0)
        mma(acc, i * N_TILES + 2 * j + 1, a, step * m_tiles + i, b, 1)

    def multiply_columns(j, acc, a, b, step, address):
        ptx.ldmatrix_x4_trans(b, 0, (address ^ (j % 4 * 32)) + (j // 4 * b_height * PANEL_ROW + step * STRIP))
        rows(acc, a, b, step, j)

    def multiply_step(step, acc, a, b, address):
        columns(acc, a, b, step, address)

    rows = unrolled(m_tiles, multiply_row)
    columns = unrolled(width // 16, multiply_columns)
    steps = unrolled(depth // 16, multiply_step)

    @device
    def multiply_add(acc, a, b_address):
        b = cuda.local.array(4, uint32)
        steps(acc, a, b, b_address)
    return multiply_add


def make_multiply_tn(m_tiles: int, depth: int, width: int, b_height: int, mma):
    """``multiply_add(acc, a_address, b_address)``: acc += A^T B for ``16 * m_tiles`` columns of A, and `width` of B.

    Both have `depth` rows in panels.  `a_address` is a `lane_across` address turned to the warp's columns, `b_address`
    a `lane_down` one.
    """
    N_TILES = width // 8

    def load_a(i, a, address):
        ptx.ldmatrix_x4_trans(a, i, address ^ (32 * i))

    def multiply_row(i, acc, a, b, j):
        mma(acc, i * N_TILES + 2 * j, a, i, b, 0)
        mma(acc, i * N_TILES + 2 * j + 1, a, i, b, 1)

    def multiply_columns(j, acc, a, b, address):
        ptx.ldmatrix_x4_trans(b, 0, (address ^ (j % 4 * 32)) + j // 4 * b_height * PANEL_ROW)
        rows(acc, a, b, j)

    def multiply_step(step, acc, a, b, a_address, b_address):
        load_step(a, a_address + step * STRIP)
        columns(acc, a, b, b_address + step * STRIP)

    load_step = unrolled(m_tiles, load_a)
    rows = unrolled(m_tiles, multiply_row)
    columns = unrolled(width // 16, multiply_columns)
    steps = unrolled(depth // 16, multiply_step)
    A_SIZE = 4 * m_tiles

    @device
    def multiply_add(acc, a_address, b_address):
        a = cuda.local.array(A_SIZE, uint32)
        b = cuda.local.array(4, uint32)
        steps(acc, a, b, a_address, b_address)
    return multiply_add


def make_pack(m_tiles: int, n_tiles: int, pack):
    """``pack_fragments(acc, a)``: a result as the A operand of the next product."""

    def pack_one(n, acc, a):
        fragment, e = n // 4, n % 4
        x = 4 * (fragment % m_tiles * n_tiles + fragment // m_tiles * 2) + 2 * e
        a[n] = pack(acc[x], acc[x + 1])

    return unrolled(m_tiles * n_tiles * 2, pack_one)


# --- float32: the same for numbers of 32 bits ------------------------------------------------------------------


@device
def lane_words(lane):
    """A lane's address of row 2t and column g in 8 rows x 8 columns of 32-bit numbers; row 2t + 1: see below."""
    double, g = (lane & 3) * 2, (lane & 31) >> 2
    return double * PANEL_ROW + (((g >> 2) ^ double) << 4) + (g & 3) * 4


def make_multiply_nn_words(m_tiles: int, depth: int, width: int, b_height: int, mma):
    """As `make_multiply_nn` for 32-bit numbers: k steps of 8, and `b_address` is a `lane_words` address.

    Steps take the rows of B in the order that an accumulator has its columns in: 2t for k = t, 2t + 1 for k = t + 4.
    """
    N_TILES = width // 8

    def multiply_row(i, acc, a, b, step, j):
        mma(acc, i * N_TILES + j, a, step * m_tiles + i, b, 0)

    def multiply_columns(j, acc, a, b, step, address):
        at = j // 4 * b_height * PANEL_ROW + step * (8 * PANEL_ROW)
        turned = address ^ (j % 4 * 32)
        b[0] = ptx.ld_shared_b32(turned + at)
        b[1] = ptx.ld_shared_b32((turned ^ 16) + (at + PANEL_ROW))
        rows(acc, a, b, step, j)

    def multiply_step(step, acc, a, b, address):
        columns(acc, a, b, step, address)

    rows = unrolled(m_tiles, multiply_row)
    columns = unrolled(N_TILES, multiply_columns)
    steps = unrolled(depth // 8, multiply_step)

    @device
    def multiply_add(acc, a, b_address):
        b = cuda.local.array(2, uint32)
        steps(acc, a, b, b_address)
    return multiply_add


def make_pack_words(m_tiles: int, n_tiles: int):
    """As `make_pack`: fragment ``step * m_tiles + i`` is column tile `step`, in the order of `make_multiply_nn_words`."""

    def pack_one(n, acc, a):
        fragment, e = n // 4, n % 4
        x = 4 * (fragment % m_tiles * n_tiles + fragment // m_tiles)
        a[n] = ptx.float_bits(acc[x + 2 * (e % 2) + e // 2])

    return unrolled(m_tiles * n_tiles * 4, pack_one)
