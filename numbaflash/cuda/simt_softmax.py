"""The online softmax on scores held as `simt_config` lays them out (Milakov and Gimelshein, 2018).

A row is spread over eight lanes.  Each lane keeps its rows' largest score so far (`top`, the same in all
eight) and the sum of its own weights (`total`), which the lanes join when the row is finished.  Scores come
in units of log(2) from a general kernel's fast twin, whose scale has log2(e) folded in, and in natural
units from a general kernel: `exponent` is the factor that makes exp2 the exponential.
"""
import math
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda

from numbaflash.cuda import ptx
from numbaflash.cuda.inlining import device
from numbaflash.cuda.simt_config import SimtConfig
from numbaflash.cuda.simt_tiles import NUMBER
from numbaflash.cuda.unroll import unrolled

LOG2_E = 1 / math.log(2)
LN_2 = math.log(2)
ALL = 0xFFFFFFFF


@device
def _exp2_float64(x):
    return math.exp2(x)


EXP2 = {"float32": ptx.ex2_approx, "float64": _exp2_float64}
MAX = {"float32": ptx.max_f32, "float64": ptx.max_f64}


class Softmax(NamedTuple):
    """Device functions of one configuration: see `make_softmax`."""

    step: Callable
    finish: Callable


def make_softmax(config: SimtConfig, per_row: int) -> Softmax:
    """The softmax of a kernel whose threads accumulate `per_row` numbers of each of their rows.

    ``step(s, acc, top, total)`` turns scores into weights in place and rescales what came before.  In a
    general kernel -inf says hidden and becomes -0.0, which adds like zero and can still be told from a weight
    that underflowed; the others know their hidden pairs by their place.
    ``finish(top, total, sink)`` returns a row's log-sum-exp and the factor of its accumulated values.
    """
    rows, columns = config.rows, config.columns
    number, exp2, larger = NUMBER[config.compute], EXP2[config.compute], MAX[config.compute]
    exponent = number(LOG2_E) if config.general else number(1)
    natural = number(1) if config.general else number(LN_2)
    log2_e, marked = number(LOG2_E), config.general
    infinity, zero, hidden = number(math.inf), number(0), number(-0.0)

    @device
    def base_of(top):
        return top if top > -infinity else zero

    @device
    def row_sum(x):
        x += cuda.shfl_xor_sync(ALL, x, 1)
        x += cuda.shfl_xor_sync(ALL, x, 2)
        return x + cuda.shfl_xor_sync(ALL, x, 4)

    def larger_one(j, i, s, best):
        best[0] = larger(best[0], s[i * columns + j])

    def scale_one(j, i, acc, shrink):
        acc[i * per_row + j] *= shrink

    def weigh_one(j, i, s, total, shift):
        score = s[i * columns + j]
        weight = exp2(cuda.fma(score, exponent, shift))
        total[i] += weight
        s[i * columns + j] = hidden if marked and score == -infinity else weight

    largest, scale, weigh = (
        unrolled(columns, larger_one), unrolled(per_row, scale_one), unrolled(columns, weigh_one))

    def step_row(i, s, acc, top, total):
        best = cuda.local.array(1, number)
        best[0] = s[i * columns]
        largest(i, s, best)
        new = best[0]
        new = larger(new, cuda.shfl_xor_sync(ALL, new, 1))
        new = larger(new, cuda.shfl_xor_sync(ALL, new, 2))
        new = larger(top[i], larger(new, cuda.shfl_xor_sync(ALL, new, 4)))
        base = base_of(new)
        shrink = exp2((top[i] - base) * exponent)
        top[i] = new
        scale(i, acc, shrink)
        total[i] *= shrink
        weigh(i, s, total, -base * exponent)

    step = unrolled(rows, step_row)

    @device
    def finish(top, total, sink):
        top = top * natural
        new = larger(top, sink)
        base = base_of(new)
        shrink = exp2((top - base) * log2_e)
        total = cuda.fma(row_sum(total), shrink, exp2((sink - base) * log2_e))
        return new + math.log(total), zero if total == zero else shrink / total

    return Softmax(step, finish)
