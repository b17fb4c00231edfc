"""A bfloat16 matrix product and a flash attention forward on tensor cores (ldmatrix, mma.sync, cp.async).

A tile row is cut into chunks of 16 bytes; chunk c of row r lies at c ^ (r & 7) (a *swizzle*), so that the
eight rows that ldmatrix reads at once fall into different banks.
"""
import math

import numpy as np
from emulator_kernels.case import Case
from emulator_kernels.numbers import attention, bfloat16_bits, from_bits
from numba import cuda, float32, int32, int64, types, uint32

from numbaflash.cuda import ptx

NEGATIVE_INFINITY = float32(-math.inf)
LOG2E, LN2 = float32(math.log2(math.e)), float32(math.log(2))
ROW_BYTES = 128                 # 64 bfloat16
inline = cuda.jit(device=True, inline="always")


@inline
def chunk_offset(row, chunk):
    return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4)


@inline
def left_operand(a, tile, first_row, step, lane):
    """a = rows first_row.. (16 of them), columns 16 step.. of a tile."""
    ptx.ldmatrix_x4(a, 0, tile + chunk_offset(first_row + (lane & 15), 2 * step + (lane >> 4)))


@inline
def right_operand(b, tile, first_row, step, lane):
    """b = two fragments: transposed rows first_row.. (8 and 8 of them), columns 16 step.. of a tile."""
    row = first_row + (lane & 7) + ((lane >> 4) << 3)
    ptx.ldmatrix_x4(b, 0, tile + chunk_offset(row, 2 * step + ((lane >> 3) & 1)))


@inline
def right_operand_rows(b, tile, first_row, column_pair, lane):
    """b = two fragments: rows first_row.. (16 of them), columns 16 column_pair.. (8 and 8) of a tile."""
    row = first_row + (lane & 15)
    ptx.ldmatrix_x4_trans(b, 0, tile + chunk_offset(row, 2 * column_pair + (lane >> 4)))


# --- matrix product -----------------------------------------------------------------------------------

BLOCK_M, BLOCK_N, BLOCK_K = 64, 32, 64
MATMUL_WORDS = (BLOCK_M + BLOCK_N) * ROW_BYTES // 4
ACCUMULATORS = BLOCK_N // 2             # registers per lane


@cuda.jit
def matmul_mma(a_pointer, b_pointer, c, k):
    """c = a b^T; a (M, k) and b (N, k) bfloat16; sizes are multiples of the tiles."""
    memory = cuda.shared.array(MATMUL_WORDS, uint32)
    tile_a = ptx.shared_address(memory)
    tile_b = tile_a + BLOCK_M * ROW_BYTES
    a, b = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
    acc = cuda.local.array(ACCUMULATORS, float32)
    copied = cuda.local.array(4, uint32)
    t = ptx.thread_index()
    lane, warp = t & 31, t >> 5
    first_row, first_column = int32(cuda.blockIdx.y) * BLOCK_M, int32(cuda.blockIdx.x) * BLOCK_N
    for i in range(ACCUMULATORS):
        acc[i] = float32(0)
    for start in range(0, k, BLOCK_K):
        for i in range((BLOCK_M + BLOCK_N) // 16):
            row, chunk = 16 * i + (t >> 3), t & 7
            if 16 * i < BLOCK_M:
                source = int64(a_pointer) + 2 * (int64(first_row + row) * k + start)
            else:
                source = int64(b_pointer) + 2 * (int64(first_column + row - BLOCK_M) * k + start)
            ptx.ld_global_nc_v4_b32(copied, 0, source + 16 * chunk)
            ptx.st_shared_v4_b32(tile_a + chunk_offset(row, chunk), copied, 0)
        cuda.syncthreads()
        for step in range(BLOCK_K // 16):
            left_operand(a, tile_a, 16 * warp, step, lane)
            for pair in range(BLOCK_N // 16):
                right_operand(b, tile_b, 16 * pair, step, lane)
                ptx.mma_m16n8k16_bf16(acc, 2 * pair, a, 0, b, 0)
                ptx.mma_m16n8k16_bf16(acc, 2 * pair + 1, a, 0, b, 1)
        cuda.syncthreads()
    for j in range(BLOCK_N // 8):
        for e in range(4):
            row = first_row + 16 * warp + (lane >> 2) + 8 * (e >> 1)
            c[row, first_column + 8 * j + 2 * (lane & 3) + (e & 1)] = acc[4 * j + e]


def matmul_mma_case(rng, m=64, n=64, k=128):
    a, b = bfloat16_bits(rng.standard_normal((m, k))), bfloat16_bits(rng.standard_normal((n, k)))
    c = np.zeros((m, n), np.float32)
    return Case(matmul_mma, (types.int64, types.int64, types.float32[:, ::1], types.int32),
                (a, b, c, int32(k)), {2: from_bits(a) @ from_bits(b).T}, 1e-4,
                grid=(n // BLOCK_N, m // BLOCK_M), block=128)


# --- flash attention ----------------------------------------------------------------------------------


def make_flash(block_q, block_k, causal):
    """Head dimension 64, 16 query rows per warp, K and V double-buffered."""
    HEAD_DIM = 64
    BLOCK_Q, BLOCK_K, CAUSAL = block_q, block_k, causal
    THREADS = 2 * block_q
    Q_BYTES, KV_BYTES = block_q * ROW_BYTES, block_k * ROW_BYTES
    SCORES, PAIRS, OUTPUTS = block_k // 2, block_k // 4, HEAD_DIM // 2      # registers per lane

    @inline
    def copy_tile(tile, source, rows, t):
        for i in range(rows * 8 // THREADS):
            row, chunk = (t >> 3) + i * (THREADS // 8), t & 7
            ptx.cp_async_16(tile + chunk_offset(row, chunk), source + row * ROW_BYTES + chunk * 16)

    @inline
    def quad_max(x):
        x = ptx.max_f32(x, ptx.shfl_bfly_f32(x, 1))
        return ptx.max_f32(x, ptx.shfl_bfly_f32(x, 2))

    @inline
    def quad_sum(x):
        x += ptx.shfl_bfly_f32(x, 1)
        return x + ptx.shfl_bfly_f32(x, 2)

    @cuda.jit
    def flash_mma(q_pointer, k_pointer, v_pointer, out, lse, n, scale):
        t = ptx.thread_index()
        lane, warp = t & 31, t >> 5
        block, head = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y)
        tile_q = ptx.dynamic_shared_address()
        tiles_k = tile_q + Q_BYTES
        tiles_v = tiles_k + 2 * KV_BYTES
        head_bytes = int64(head) * n * ROW_BYTES
        k_source, v_source = int64(k_pointer) + head_bytes, int64(v_pointer) + head_bytes
        scale_log2 = scale * LOG2E
        copy_tile(tile_q, int64(q_pointer) + head_bytes + block * Q_BYTES, BLOCK_Q, t)
        copy_tile(tiles_k, k_source, BLOCK_K, t)
        copy_tile(tiles_v, v_source, BLOCK_K, t)
        ptx.cp_async_commit_group()

        a, b = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        s, p = cuda.local.array(SCORES, float32), cuda.local.array(PAIRS, uint32)
        acc = cuda.local.array(OUTPUTS, float32)
        m, l = cuda.local.array(2, float32), cuda.local.array(2, float32)
        for i in range(OUTPUTS):
            acc[i] = float32(0)
        for half in range(2):
            m[half], l[half] = NEGATIVE_INFINITY, float32(0)
        row = block * BLOCK_Q + 16 * warp + (lane >> 2)
        column = 2 * (lane & 3)
        tiles = (block * BLOCK_Q + BLOCK_Q + BLOCK_K - 1) // BLOCK_K if CAUSAL else n // BLOCK_K
        for j in range(tiles):
            stage, other = (j & 1) * KV_BYTES, (~j & 1) * KV_BYTES
            if j + 1 < tiles:
                copy_tile(tiles_k + other, k_source + int64(j + 1) * KV_BYTES, BLOCK_K, t)
                copy_tile(tiles_v + other, v_source + int64(j + 1) * KV_BYTES, BLOCK_K, t)
            ptx.cp_async_commit_group()
            ptx.cp_async_wait_group(1)
            cuda.syncthreads()
            for i in range(SCORES):
                s[i] = float32(0)
            for step in range(HEAD_DIM // 16):
                left_operand(a, tile_q, 16 * warp, step, lane)
                for pair in range(BLOCK_K // 16):
                    right_operand(b, tiles_k + stage, 16 * pair, step, lane)
                    ptx.mma_m16n8k16_bf16(s, 2 * pair, a, 0, b, 0)
                    ptx.mma_m16n8k16_bf16(s, 2 * pair + 1, a, 0, b, 1)
            if CAUSAL and (j + 1) * BLOCK_K > block * BLOCK_Q:
                for i in range(SCORES):
                    if j * BLOCK_K + 8 * (i >> 2) + column + (i & 1) > row + 8 * ((i >> 1) & 1):
                        s[i] = NEGATIVE_INFINITY
            for half in range(2):
                m_new = m[half]
                for i in range(SCORES // 4):
                    m_new = ptx.max_f32(m_new, ptx.max_f32(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]))
                m_new = quad_max(m_new)
                shift = m_new * scale_log2
                correction = ptx.ex2_approx_ftz(m[half] * scale_log2 - shift)
                m[half] = m_new
                l[half] *= correction
                for i in range(OUTPUTS // 4):
                    acc[4 * i + 2 * half] *= correction
                    acc[4 * i + 2 * half + 1] *= correction
                for i in range(SCORES // 4):
                    low = ptx.ex2_approx_ftz(s[4 * i + 2 * half] * scale_log2 - shift)
                    high = ptx.ex2_approx_ftz(s[4 * i + 2 * half + 1] * scale_log2 - shift)
                    l[half] += low + high
                    p[2 * i + half] = ptx.cvt_bf16x2(low, high)     # accumulator layout is operand layout
            for step in range(BLOCK_K // 16):
                for pair in range(HEAD_DIM // 16):
                    right_operand_rows(b, tiles_v + stage, 16 * step, pair, lane)
                    ptx.mma_m16n8k16_bf16(acc, 2 * pair, p, step, b, 0)
                    ptx.mma_m16n8k16_bf16(acc, 2 * pair + 1, p, step, b, 1)
            cuda.syncthreads()

        for half in range(2):
            total = quad_sum(l[half])
            inverse = ptx.rcp_approx(total)
            for i in range(OUTPUTS // 4):
                out[head, row + 8 * half, 8 * i + column] = acc[4 * i + 2 * half] * inverse
                out[head, row + 8 * half, 8 * i + column + 1] = acc[4 * i + 2 * half + 1] * inverse
            if lane & 3 == 0:
                lse[head, row + 8 * half] = m[half] * scale + ptx.lg2_approx(total) * LN2

    return flash_mma


def flash_mma_case(rng, heads=1, n=192, causal=True, block_q=64, block_k=64):
    shape = (heads, n, 64)
    q, k, v = (bfloat16_bits(rng.standard_normal(shape)) for _ in range(3))
    out, lse = np.zeros(shape, np.float32), np.zeros(shape[:2], np.float32)
    wanted = attention(from_bits(q), from_bits(k), from_bits(v), 0.125, causal)
    outputs = (types.float32[:, :, ::1], types.float32[:, ::1])
    signature = (types.int64,) * 3 + (*outputs, types.int32, types.float32)
    arguments = (q, k, v, out, lse, int32(n), float32(0.125))
    return Case(make_flash(block_q, block_k, causal), signature, arguments,
                {3: wanted[0], 4: wanted[1]}, 0.02, grid=(n // block_q, heads), block=2 * block_q,
                shared_bytes=(block_q + 4 * block_k) * ROW_BYTES, launch_bounds=(2 * block_q, 1))
