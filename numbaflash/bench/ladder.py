"""Attention by numba.cuda kernels, from three textbook kernels to FlashAttention, for one head in float32.

Each rung is a list of launches that a GPU or the emulator runs: `standard` and `standard_backward` write
the N x N matrices S and P to memory, `one_row` has a block for each query row and an online softmax, and
`tiled` and `tiled_backward` are this package's own kernels.
"""

from collections.abc import Callable
from functools import cache
from math import inf, sqrt
from typing import NamedTuple

import numpy as np
from numba import cuda, float32

from numbaflash import emulator
from numbaflash.cuda import simt_plan
from numbaflash.cuda.arguments import CALL, make_call
from numbaflash.cuda.forward_simt import make_forward
from numbaflash.cuda.forward_simt import shared_bytes as forward_bytes
from numbaflash.cuda.plan import KernelSpec, Launch, Plan
from numbaflash.cuda.simt_config import SimtConfig
from numbaflash.cuda.tiles import fill_grid
from numbaflash.emulator.report import Report
from numbaflash.options import Options
from numbaflash.problem import Problem, make_problem

TILE = 32
"""Rows and columns of the shared-memory tiles of the matrix products."""
PITCH = TILE + 1
"""Numbers from row to row of a tile: one more, so that a column lies in 32 banks."""
ROW_THREADS = 128
"""Threads that share a row of the softmax."""
KEYS = 64
"""Keys that the one-row kernel takes at a time, and its threads."""
NONE = np.float32(-inf)


class Step(NamedTuple):
    """One launch of a kernel; its arguments are arrays and numbers."""

    kernel: Callable
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple


# --- standard attention -----------------------------------------------------------------------------------


@cache
def make_product(a_turned: bool = False, b_turned: bool = False) -> Callable:
    """``product(a, b, factor, c)``: c = factor * A @ B by tiles; turned: the array holds A^T or B^T.

    The multiplication of the CUDA programming guide: each number of A is read once per tile of columns of C,
    and neighbouring threads read and write neighbouring numbers whichever way the array lies.
    """

    @cuda.jit
    def product(a, b, factor, c):
        tile_a = cuda.shared.array((TILE, PITCH), float32)
        tile_b = cuda.shared.array((TILE, PITCH), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        row_lo, column_lo = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
        rows, columns = c.shape
        inner = a.shape[0] if a_turned else a.shape[1]
        total = float32(0)
        for lo in range(0, inner, TILE):
            if a_turned:
                inside = lo + y < inner and row_lo + x < rows
                tile_a[x, y] = a[lo + y, row_lo + x] if inside else float32(0)
            else:
                inside = row_lo + y < rows and lo + x < inner
                tile_a[y, x] = a[row_lo + y, lo + x] if inside else float32(0)
            if b_turned:
                inside = column_lo + y < columns and lo + x < inner
                tile_b[x, y] = b[column_lo + y, lo + x] if inside else float32(0)
            else:
                inside = lo + y < inner and column_lo + x < columns
                tile_b[y, x] = b[lo + y, column_lo + x] if inside else float32(0)
            cuda.syncthreads()
            for i in range(TILE):
                total += tile_a[y, i] * tile_b[i, x]
            cuda.syncthreads()
        if row_lo + y < rows and column_lo + x < columns:
            c[row_lo + y, column_lo + x] = total * factor

    return product


@cuda.jit
def softmax_rows(s, p):
    """A block for each row: its maximum, its sum, the weights; three reads of S and one write of P."""
    part = cuda.shared.array(ROW_THREADS, float32)
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    top = float32(NONE)
    for j in range(thread, s.shape[1], ROW_THREADS):
        top = max(top, s[row, j])
    part[thread] = top
    cuda.syncthreads()
    for i in range(ROW_THREADS):
        top = max(top, part[i])
    cuda.syncthreads()
    total = float32(0)
    for j in range(thread, s.shape[1], ROW_THREADS):
        total += cuda.libdevice.expf(s[row, j] - top)
    part[thread] = total
    cuda.syncthreads()
    total = float32(0)
    for i in range(ROW_THREADS):
        total += part[i]
    for j in range(thread, s.shape[1], ROW_THREADS):
        p[row, j] = cuda.libdevice.expf(s[row, j] - top) / total


@cuda.jit
def softmax_rows_backward(p, dp, ds):
    """dS = P * (dP - rowsum(P * dP)): two reads of P and of dP, one write."""
    part = cuda.shared.array(ROW_THREADS, float32)
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    total = float32(0)
    for j in range(thread, p.shape[1], ROW_THREADS):
        total += p[row, j] * dp[row, j]
    part[thread] = total
    cuda.syncthreads()
    total = float32(0)
    for i in range(ROW_THREADS):
        total += part[i]
    for j in range(thread, p.shape[1], ROW_THREADS):
        ds[row, j] = p[row, j] * (dp[row, j] - total)


def _product(a, b, c, factor=1.0, a_turned=False, b_turned=False) -> Step:
    grid = (-(-c.shape[1] // TILE), -(-c.shape[0] // TILE))
    return Step(make_product(a_turned, b_turned), grid, (TILE, TILE), (a, b, np.float32(factor), c))


def standard(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, empty: Callable = np.empty
) -> list[Step]:
    """S = scale Q K^T, P = softmax(S), out = P V: three kernels, two N x N matrices in memory.

    ``empty(shape, dtype)`` makes the matrices: on a GPU, ``cuda.device_array``.
    """
    n = q.shape[0]
    s, p = (empty((n, n), np.float32) for _ in range(2))
    return [
        _product(q, k, s, 1 / sqrt(q.shape[1]), b_turned=True),
        Step(softmax_rows, (n,), (ROW_THREADS,), (s, p)),
        _product(p, v, out),
    ]


def standard_backward(q, k, v, dout, p, dq, dk, dv, empty: Callable = np.empty) -> list[Step]:
    """Gradients from the P that the forward pass kept: five kernels, two more N x N matrices."""
    n, scale = q.shape[0], 1 / sqrt(q.shape[1])
    dp, ds = (empty((n, n), np.float32) for _ in range(2))
    return [
        _product(p, dout, dv, a_turned=True),
        _product(dout, v, dp, b_turned=True),
        Step(softmax_rows_backward, (n,), (ROW_THREADS,), (p, dp, ds)),
        _product(ds, k, dq, scale),
        _product(ds, q, dk, scale, a_turned=True),
    ]


# --- one row per block ------------------------------------------------------------------------------------


@cache
def make_one_row(head_dim: int, rescale: bool = True) -> Callable:
    """``one_row(q, k, v, scale, out)``: a block owns a query row and takes `KEYS` keys at a time.

    ``rescale=False`` leaves out the factor exp(m_old - m_new) that turns what was summed relative to the old
    maximum into what is relative to the new one.  Many texts print the kernel so; it is wrong as soon as a
    later block of keys holds a larger score.
    """
    columns = -(-head_dim // KEYS)

    @cuda.jit
    def one_row(q, k, v, scale, out):
        query = cuda.shared.array(head_dim, float32)
        weights = cuda.shared.array(KEYS, float32)
        row, thread = cuda.blockIdx.x, cuda.threadIdx.x
        n = k.shape[0]
        for x in range(thread, head_dim, KEYS):
            query[x] = q[row, x]
        acc = cuda.local.array(columns, float32)
        for i in range(columns):
            acc[i] = float32(0)
        m, l = float32(NONE), float32(0)
        for lo in range(0, n, KEYS):
            cuda.syncthreads()
            s = float32(NONE)
            if lo + thread < n:
                s = float32(0)
                for x in range(head_dim):
                    s += query[x] * k[lo + thread, x]
                s *= scale
            weights[thread] = s
            cuda.syncthreads()
            m_new = m
            for j in range(KEYS):
                m_new = max(m_new, weights[j])
            correction = cuda.libdevice.expf(m - m_new) if rescale else float32(1)
            m = m_new
            cuda.syncthreads()
            weights[thread] = cuda.libdevice.expf(s - m)
            cuda.syncthreads()
            l *= correction
            for i in range(columns):
                acc[i] *= correction
            for j in range(min(KEYS, n - lo)):
                p = weights[j]
                l += p
                for i in range(columns):
                    x = thread + i * KEYS
                    if x < head_dim:
                        acc[i] += p * v[lo + j, x]
        for i in range(columns):
            x = thread + i * KEYS
            if x < head_dim:
                out[row, x] = acc[i] / l

    return one_row


def one_row(q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, rescale: bool = True) -> list[Step]:
    """Online softmax with a block for each query row: nothing N x N, but every row reads all of K and V."""
    scale = np.float32(1 / sqrt(q.shape[1]))
    return [Step(make_one_row(q.shape[1], rescale), (q.shape[0],), (KEYS,), (q, k, v, scale, out))]


# --- our kernels ------------------------------------------------------------------------------------------


def _problem(q, k, v) -> Problem:
    return make_problem(q[None, None], k[None, None], v[None, None], Options())


def tiled(q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray, tiles=None) -> Plan:
    """This package's tiled forward kernel; `tiles` = (rows, columns, warps) instead of its own choice.

    Parameters
    ----------
    q, k, v, out : array of float32, shape (N, D)
    lse : array of float32, shape (N,)
    tiles : tuple of int, optional
        Scores per thread, down and across, and warps: a block has ``4 * rows * warps`` query rows.
    """
    problem = _problem(q, k, v)
    if tiles is None:
        return simt_plan.plan_forward(problem, out[None, None], lse[None, None])
    width = simt_plan.dimension_class(q.shape[1])
    config = SimtConfig(
        "float32",
        "float32",
        width,
        width,
        *tiles,
        sliced=False,
        vector=True,
        general=False,
        bias_dtype="float32",
    )
    call, blocks = fill_grid(
        make_call(problem, out[None, None], lse[None, None]), problem.segments, config.block_rows, 0
    )
    kernel = KernelSpec(f"forward_simt_{config.name}", make_forward(config), (CALL,), config.threads)
    return Plan([Launch(kernel, blocks, config.threads, forward_bytes(config), (call,))])


def tiled_backward(q, k, v, dout, out, lse, dq, dk, dv) -> Plan:
    """This package's gradients: delta, then dk and dv, then dq; P is computed anew, tile by tile."""
    arrays = (one[None, None] for one in (dout, out, lse))
    dout, out, lse = arrays
    gradients = (one[None, None] for one in (dq, dk, dv))
    return simt_plan.plan_backward(_problem(q, k, v), dout, out, lse, None, *gradients, None, None)


def count(work: "list[Step] | Plan", checks: bool = True) -> list[Report]:
    """Run in the emulator, in place; what each launch did."""
    if isinstance(work, Plan):
        return [emulator.execute(work, checks=checks)]
    return [
        emulator.launch(step.kernel, step.grid, step.block, *step.arguments, checks=checks) for step in work
    ]
