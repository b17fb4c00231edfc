"""The dropout pattern: a pure function of (seed, sequence, head, i, j).

Every backend, tile size, split and shard draws the same pattern, forward and backward, because nothing is
drawn in order: the number that decides about the pair (i, j) is one word of Philox-4x32-7 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011; seven rounds pass BigCrush there) at the counter

    (i without its bit 3, j // 2, head, sequence)        key: the 64-bit seed

One block of four words serves the queries i and i + 8 and the keys j and j + 1: those are the four pairs that a
thread of a tensor-core tile holds side by side.
"""

import numpy as np

ROUNDS = 7
_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = np.uint64(0x9E3779B9)
_W1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(c0, c1, c2, c3, k0, k1):
    """Four random 32-bit words, each in a uint64, of a 128-bit counter and a 64-bit key given as 32-bit words.

    Works on uint64 scalars (Numba compiles it) and on arrays of uint64, and needs no more than 32 x 32 -> 64 bit
    products.
    """
    for _ in range(ROUNDS):
        a = _M0 * c0
        b = _M1 * c2
        c0, c1, c2, c3 = (b >> _32) ^ c1 ^ k0, b & _LOW, (a >> _32) ^ c3 ^ k1, a & _LOW
        k0 = (k0 + _W0) & _LOW
        k1 = (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def dropout_word(seed, sequence, head, i, j):
    """The 32-bit number that decides about one pair; all arguments and the result are uint64 scalars."""
    bit3 = np.uint64(8)
    one = np.uint64(1)
    w0, w1, w2, w3 = philox(i & ~bit3 & _LOW, j >> one, head, sequence, seed & _LOW, seed >> _32)
    if i & bit3:
        w0, w1 = w2, w3
    return w1 if j & one else w0


def threshold(p: float) -> int:
    """A pair is dropped where its word is below this: p in units of 2**-32."""
    return min(int(round(p * 2.0**32)), 2**32 - 1)


def keep_pattern(p: float, seed: int, sequence: int, head: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Which pairs are kept, for index arrays that broadcast against each other.

    Parameters
    ----------
    p : float
        Probability of dropping a pair, 0 <= p < 1.
    seed : int
        0 <= seed < 2**64.
    sequence, head : int
        Numbers of the sequence and of the query head.
    i, j : ndarray of int
        Query and key indices within the sequence.

    Returns
    -------
    ndarray of bool
        True where the pair is kept (and then scaled by 1 / (1 - p)).

    Examples
    --------
    >>> import numpy as np
    >>> from numbaflash.dropout import keep_pattern
    >>> keep = keep_pattern(0.25, 7, 0, 0, np.arange(1000)[:, None], np.arange(1000))
    >>> abs(keep.mean() - 0.75) < 0.002
    np.True_
    """
    i, j = np.asarray(i).astype(np.uint64), np.asarray(j).astype(np.uint64)
    i, j = np.broadcast_arrays(i, j)
    full = lambda value: np.full(i.shape, value, np.uint64)  # noqa: E731
    words = philox(
        i & np.uint64(0xFFFFFFF7), j >> np.uint64(1), full(head), full(sequence),
        full(seed & 0xFFFFFFFF), full(seed >> 32),
    )
    which = ((i >> np.uint64(3)) & np.uint64(1)) * np.uint64(2) + (j & np.uint64(1))
    return np.choose(which.astype(np.intp), words) >= np.uint64(threshold(p))
