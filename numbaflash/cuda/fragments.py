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
from numbaflash.cuda.tiles import device

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


def matrix_instructions(dtype: str, turing: bool = False):
    """``mma(acc, c, a, i, b, j)``, a product of 16 x 16 by 16 x 8, and ``pack(low, high)`` for a 16-bit dtype."""
    if turing:
        return _mma_turing, _pack_turing
    return {"float16": (ptx.mma_m16n8k16_f16, ptx.cvt_f16x2), "bfloat16": (ptx.mma_m16n8k16_bf16, ptx.cvt_bf16x2)}[dtype]


def make_load_rows(m_tiles: int, width: int, height: int):
    """``load_rows(a, address)``: all A operands of a warp's rows; fragment ``step * m_tiles + i``."""
    STEPS = width // 16

    @device
    def load_rows(a, address):
        for step in range(STEPS):
            turn, at = step % 4 * 32, step // 4 * height * PANEL_ROW
            for i in range(m_tiles):
                ptx.ldmatrix_x4(a, step * m_tiles + i, (address ^ turn) + (at + i * STRIP))
    return load_rows


def make_multiply_nt(m_tiles: int, n_tiles: int, width: int, a_height: int, b_height: int, mma, resident: bool):
    """``multiply(acc, a, a_address, b_address)``: acc = A B^T over `width` columns of two tiles in panels.

    `a_address` is a `lane_down` address in A's rows of this warp, `b_address` a `lane_across` one in B's.  A
    resident A was loaded by `load_rows` before; otherwise `a` holds `m_tiles` fragments of scratch.
    """
    STEPS, PAIRS, SIZE = width // 16, n_tiles // 2, 4 * m_tiles * n_tiles
    A_STEP = m_tiles if resident else 0

    @device
    def multiply(acc, a, a_address, b_address):
        b = cuda.local.array(4, uint32)
        for x in range(SIZE):
            acc[x] = ZERO
        for step in range(STEPS):
            turn, at = step % 4 * 32, step // 4
            if not resident:
                for i in range(m_tiles):
                    ptx.ldmatrix_x4(a, i, (a_address ^ turn) + (at * a_height * PANEL_ROW + i * STRIP))
            for j in range(PAIRS):
                ptx.ldmatrix_x4(b, 0, (b_address ^ turn) + (at * b_height * PANEL_ROW + j * STRIP))
                for i in range(m_tiles):
                    mma(acc, i * n_tiles + 2 * j, a, step * A_STEP + i, b, 0)
                    mma(acc, i * n_tiles + 2 * j + 1, a, step * A_STEP + i, b, 1)
    return multiply


def make_multiply_add_nn(m_tiles: int, depth: int, width: int, b_height: int, mma):
    """``multiply_add(acc, a, b_address)``: acc += A B, A in registers, B of `depth` rows and `width` columns.

    Fragment ``step * m_tiles + i`` of `a` holds row tile i and columns 16 step .. 16 step + 15; `b_address`
    is a `lane_down` address.
    """
    STEPS, PAIRS, N_TILES = depth // 16, width // 16, width // 8

    @device
    def multiply_add(acc, a, b_address):
        b = cuda.local.array(4, uint32)
        for step in range(STEPS):
            for j in range(PAIRS):
                turn, at = j % 4 * 32, j // 4 * b_height * PANEL_ROW
                ptx.ldmatrix_x4_trans(b, 0, (b_address ^ turn) + (at + step * STRIP))
                for i in range(m_tiles):
                    mma(acc, i * N_TILES + 2 * j, a, step * m_tiles + i, b, 0)
                    mma(acc, i * N_TILES + 2 * j + 1, a, step * m_tiles + i, b, 1)
    return multiply_add


def make_pack(m_tiles: int, n_tiles: int, pack):
    """``pack_fragments(acc, a)``: a result as the A operand of the next product."""
    STEPS = n_tiles // 2

    @device
    def pack_fragments(acc, a):
        for step in range(STEPS):
            for i in range(m_tiles):
                x = 4 * (i * n_tiles + 2 * step)
                for e in range(4):
                    a[4 * (step * m_tiles + i) + e] = pack(acc[x + 2 * e], acc[x + 2 * e + 1])
    return pack_fragments
