"""Flash attention forward in plain float32: two threads per query row, accumulators in registers."""
import math

import numpy as np
from emulator_kernels.case import Case
from emulator_kernels.numbers import attention
from numba import cuda, float32, int32, types

from numbaflash.cuda import ptx

INF = float32(math.inf)
LOG2E, LN2 = float32(math.log2(math.e)), float32(math.log(2))


def make_flash(block_q, block_k, head_dim, threads):
    PARTS = threads // block_q              # threads that share a row; each owns every PARTS-th column
    COLUMNS = head_dim // PARTS
    STRIDE = head_dim + 1                   # one word of padding keeps the rows of Q in different banks
    BLOCK_Q, BLOCK_K, HEAD_DIM, THREADS = block_q, block_k, head_dim, threads

    @cuda.jit
    def flash_simt(q, k, v, out, lse, n, scale, causal):
        tile_q = cuda.shared.array((BLOCK_Q, STRIDE), float32)
        tile_k = cuda.shared.array((BLOCK_K, HEAD_DIM), float32)
        tile_v = cuda.shared.array((BLOCK_K, HEAD_DIM), float32)
        acc = cuda.local.array(COLUMNS, float32)
        s = cuda.local.array(BLOCK_K, float32)
        t, first, head = cuda.threadIdx.x, cuda.blockIdx.x * BLOCK_Q, cuda.blockIdx.y
        r, part = t // PARTS, t % PARTS
        row = first + r
        for i in range(t, BLOCK_Q * HEAD_DIM, THREADS):
            y, x = i // HEAD_DIM, i % HEAD_DIM
            tile_q[y, x] = q[head, first + y, x] if first + y < n else float32(0)
        for j in range(COLUMNS):
            acc[j] = float32(0)
        m, l = -INF, float32(0)
        limit = min(n, first + BLOCK_Q) if causal else n
        for start in range(0, limit, BLOCK_K):
            cuda.syncthreads()
            for i in range(t, BLOCK_K * HEAD_DIM, THREADS):
                y, x = i // HEAD_DIM, i % HEAD_DIM
                inside = start + y < n
                tile_k[y, x] = k[head, start + y, x] if inside else float32(0)
                tile_v[y, x] = v[head, start + y, x] if inside else float32(0)
            cuda.syncthreads()
            for j in range(BLOCK_K):
                s[j] = float32(0)
            for x in range(part, HEAD_DIM, PARTS):
                value = tile_q[r, x]
                for j in range(BLOCK_K):
                    s[j] += value * tile_k[j, x]
            m_new = m
            for j in range(BLOCK_K):
                score = (s[j] + ptx.shfl_bfly_f32(s[j], 1)) * scale * LOG2E
                column = start + j
                visible = column < n and (column <= row or not causal)
                s[j] = score if visible else -INF
                m_new = ptx.max_f32(m_new, s[j])
            correction = ptx.ex2_approx_ftz(m - m_new)
            m = m_new
            l *= correction
            for x in range(COLUMNS):
                acc[x] *= correction
            for j in range(BLOCK_K):
                p = ptx.ex2_approx_ftz(s[j] - m)
                l += p
                for x in range(COLUMNS):
                    acc[x] += p * tile_v[j, part + PARTS * x]
        if row < n:
            inverse = ptx.rcp_approx(l)
            for x in range(COLUMNS):
                out[head, row, part + PARTS * x] = acc[x] * inverse
            if part == 0:
                lse[head, row] = (m + ptx.lg2_approx(l)) * LN2

    return flash_simt


def flash_simt_case(rng, heads=1, n=40, head_dim=32, causal=True, block_q=32, block_k=16):
    shape = (heads, n, head_dim)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    out, lse = np.zeros(shape, np.float32), np.zeros(shape[:2], np.float32)
    scale = np.float32(1 / math.sqrt(head_dim))
    wanted = attention(*(x.astype(np.float64) for x in (q, k, v)), float(scale), causal)
    matrices = (types.float32[:, :, ::1],) * 4
    signature = (*matrices, types.float32[:, ::1], types.int32, types.float32, types.boolean)
    return Case(make_flash(block_q, block_k, head_dim, 2 * block_q), signature,
                (q, k, v, out, lse, int32(n), scale, causal), {3: wanted[0], 4: wanted[1]}, 1e-5,
                grid=(-(-n // block_q), heads), block=2 * block_q)
