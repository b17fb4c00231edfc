"""The online softmax of a warp's score fragments (Milakov and Gimelshein, 2018; FlashAttention-2, algorithm 1).

Scores enter in units in which exp2 is the exponential (`factor` times the score).  Four lanes share a row; a lane
keeps the largest score and its own part of the sum for each of its ``2 * m_tiles`` rows: rows 16 i + 8 h + g.
"""
import numpy as np
from numba import cuda, float32

from numbaflash.cuda import ptx
from numbaflash.cuda.inlining import device
from numbaflash.cuda.unroll import unrolled

INFINITY = np.float32(np.inf)
ZERO = np.float32(0)
ONE = np.float32(1)
LOG2_E = np.float32(1 / np.log(2))
LN_2 = np.float32(np.log(2))


@device
def quad_max(x):
    """The largest over the four lanes of a row."""
    x = ptx.max_f32(x, ptx.shfl_bfly_f32(x, 1))
    return ptx.max_f32(x, ptx.shfl_bfly_f32(x, 2))


@device
def quad_sum(x):
    """The sum over the four lanes of a row."""
    x = x + ptx.shfl_bfly_f32(x, 1)
    return x + ptx.shfl_bfly_f32(x, 2)


@device
def finite(top):
    """What to subtract from scores: 0 where nothing was seen yet, so that -inf stays -inf instead of NaN."""
    return top if top > -INFINITY else ZERO


def make_softmax_step(m_tiles: int, n_tiles: int, value_tiles: int):
    """``softmax_step(s, acc, top, total, factor)``: scores to weights, and all earlier results rescaled."""

    def larger(j, s, new, first):
        new[0] = ptx.max_f32(new[0], ptx.max_f32(s[first + 4 * j], s[first + 4 * j + 1]))

    def rescale(j, acc, first, shrink):
        acc[first + 4 * j] *= shrink
        acc[first + 4 * j + 1] *= shrink

    def weigh(n, s, total, row, first, factor, base):
        x = first + 4 * (n // 2) + n % 2
        s[x] = ptx.ex2_approx_ftz(s[x] * factor - base)
        total[row] += s[x]

    def row_step(row, s, acc, top, total, factor):
        i, h = row // 2, row % 2
        new = cuda.local.array(1, float32)
        new[0] = -INFINITY
        all_larger(s, new, 4 * i * n_tiles + 2 * h)
        largest = ptx.max_f32(top[row], quad_max(new[0]) * factor)
        base = finite(largest)
        shrink = ptx.ex2_approx_ftz(top[row] - base)
        top[row] = largest
        total[row] *= shrink
        rescale_all(acc, 4 * i * value_tiles + 2 * h, shrink)
        weigh_all(s, total, row, 4 * i * n_tiles + 2 * h, factor, base)

    all_larger = unrolled(n_tiles, larger)
    rescale_all = unrolled(value_tiles, rescale)
    weigh_all = unrolled(2 * n_tiles, weigh)
    return unrolled(2 * m_tiles, row_step)


@device
def finish_row(top, total, sink):
    """A row's log-sum-exp (natural) and the factor of its accumulated values.

    `top` and `sink` are in exp2 units, `total` the lane's part of the sum.
    """
    new = ptx.max_f32(top, sink)
    base = finite(new)
    shrink = ptx.ex2_approx_ftz(top - base)
    total = quad_sum(total) * shrink + ptx.ex2_approx_ftz(sink - base)
    factor = ZERO if total == ZERO else shrink * ptx.rcp_approx_ftz(total)
    return (new + ptx.lg2_approx_ftz(total)) * LN_2, factor
