"""What the dropout pattern counts from, on the device; the pattern itself is `numbaflash.dropout`'s."""
from typing import NamedTuple

import numpy as np
from numba import int64, uint64

from numbaflash import dropout
from numbaflash.cuda.inlining import device
from numbaflash.cuda.tiles import K_INDEX, Q_INDEX, SEQUENCE, column
from numbaflash.jit import compile_plain

philox = compile_plain(dropout.philox, device)
dropout_word = compile_plain(dropout.dropout_word, device)


class Draw(NamedTuple):
    """What the dropout pattern of a block counts from."""

    seed: np.uint64
    threshold: np.uint64
    head: np.uint64
    sequence: np.uint64
    row: np.int64
    key: np.int64


@device
def load_draw(call, place):
    """The `Draw` of a head of a sequence."""
    return Draw(
        uint64(call.seed), uint64(call.threshold), uint64(int64(place.head) + call.head_origin),
        uint64(column(call, place, SEQUENCE)), column(call, place, Q_INDEX), column(call, place, K_INDEX),
    )
