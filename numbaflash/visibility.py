"""Which keys a query sees by geometry alone: the band, and the tiles it touches.

Query ``i`` of a segment stands at position ``i + offset`` on the key axis and sees the keys

    [max(0, i + offset - left), min(k_length, i + offset + right + 1))

Everything here is integer arithmetic in plain Python that Numba compiles for CPU and GPU alike. Seen from a
key, the same band is ``Band(right, left)`` with offset ``-offset``: the functions below serve the forward pass
(queries looking for key tiles) and the backward pass (keys looking for query tiles) without a second version.
"""

from typing import NamedTuple

UNBOUNDED = 1 << 40
"""Reach of an open side: beyond any sequence, yet far from overflowing 64-bit sums."""


class Band(NamedTuple):
    """How far a query sees to the left and to the right of its own position, both inclusive."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED

    @property
    def is_open(self) -> bool:
        """True when the band hides nothing."""
        return self.left >= UNBOUNDED and self.right >= UNBOUNDED

    def transposed(self) -> "Band":
        """The band as the keys see the queries."""
        return Band(self.right, self.left)


def make_band(causal: bool, window: tuple[int | None, int | None] | None) -> Band:
    """Join ``causal`` and ``window`` into one band; causal clamps the right side to 0."""
    left, right = window if window is not None else (None, None)
    left = UNBOUNDED if left is None else min(left, UNBOUNDED)
    right = UNBOUNDED if right is None else min(right, UNBOUNDED)
    return Band(left, min(right, 0) if causal else right)


def visible_range(row_lo, row_hi, length, offset, left, right):
    """Columns seen by the rows ``[row_lo, row_hi)`` of a band.

    Returns
    -------
    lo, all_lo, all_hi, hi : int
        Some row sees column ``j`` only if ``lo <= j < hi``; every row sees it if ``all_lo <= j < all_hi``.
        Always ``0 <= lo <= all_lo <= all_hi <= hi <= length``; all four are equal where nothing is seen.
        (A row inside may still see nothing, when the rows together straddle a gap at an end.)
    """
    lo = max(0, row_lo + offset - left)
    hi = min(length, row_hi - 1 + offset + right + 1)
    if hi <= lo or row_hi <= row_lo:
        return 0, 0, 0, 0
    all_lo = min(max(lo, row_hi - 1 + offset - left), hi)
    all_hi = max(all_lo, min(hi, row_lo + offset + right + 1))
    return lo, all_lo, all_hi, hi


def tile_range(row_lo, row_hi, block, length, offset, left, right):
    """Tiles of ``block`` columns that the rows ``[row_lo, row_hi)`` of a band touch.

    Returns
    -------
    lo, full_lo, full_hi, hi : int
        Tile numbers: only tiles in ``[lo, hi)`` hold a visible pair, and in the tiles of
        ``[full_lo, full_hi)`` every pair exists and is visible, so they need no mask code. The others are
        edge tiles. Always ``lo <= full_lo <= full_hi <= hi``.
    """
    column_lo, all_lo, all_hi, column_hi = visible_range(row_lo, row_hi, length, offset, left, right)
    lo = column_lo // block
    hi = (column_hi + block - 1) // block
    full_lo = min((all_lo + block - 1) // block, hi)
    full_hi = max(full_lo, all_hi // block)
    return lo, full_lo, full_hi, hi
