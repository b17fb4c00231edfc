"""Bands, the columns they show and the tiles they touch, against counting pair by pair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from numbaflash.jit import compile_plain
from numbaflash.visibility import UNBOUNDED, Band, make_band, tile_range, visible_range

side = st.integers(0, 40) | st.just(UNBOUNDED)
offsets = st.integers(-60, 60)


def pairs(row_lo, row_hi, length, offset, left, right):
    """Which of the rows sees which column."""
    position = np.arange(row_lo, row_hi)[:, None] + offset
    column = np.arange(length)
    return (column >= position - left) & (column <= position + right)


@given(st.integers(0, 50), st.integers(0, 20), st.integers(0, 60), offsets, side, side)
def test_the_visible_range_is_what_counting_gives(row_lo, rows, length, offset, left, right):
    band = row_lo, row_lo + rows, length, offset, left, right
    lo, all_lo, all_hi, hi = visible_range(*band)
    seen = pairs(*band)
    assert 0 <= lo <= all_lo <= all_hi <= hi <= length
    some = np.flatnonzero(seen.any(axis=0)) if rows else np.array([], int)
    every = np.flatnonzero(seen.all(axis=0)) if rows else np.array([], int)
    if len(some) == 0:
        assert lo == hi or not seen.any()
    else:
        assert (lo, hi) == (some[0], some[-1] + 1)
    assert list(range(all_lo, all_hi)) == every.tolist()


@given(
    st.integers(0, 50),
    st.integers(0, 20),
    st.sampled_from([1, 2, 7, 16]),
    st.integers(0, 60),
    offsets,
    side,
    side,
)
def test_tiles_are_empty_full_or_edges(row_lo, rows, block, length, offset, left, right):
    band = row_lo, row_lo + rows, length, offset, left, right
    lo, full_lo, full_hi, hi = tile_range(*band[:2], block, *band[2:])
    seen = pairs(*band)
    tiles = -(-length // block)
    assert 0 <= lo <= full_lo <= full_hi <= hi <= tiles
    for tile in range(tiles):
        columns = seen[:, tile * block : (tile + 1) * block]
        if columns.any():
            assert lo <= tile < hi
        if full_lo <= tile < full_hi:
            assert columns.shape == (rows, block) and columns.all()
        elif columns.shape == (rows, block) and columns.all() and rows:
            raise AssertionError(f"tile {tile} is full, yet an edge")
    if lo < hi:
        assert seen[:, lo * block : (lo + 1) * block].any() and seen[:, (hi - 1) * block : hi * block].any()


@given(st.integers(0, 30), st.integers(1, 9), st.integers(1, 40), offsets, side, side)
def test_the_transposed_band_is_what_the_keys_see(key_lo, keys, rows, offset, left, right):
    seen = pairs(0, rows, key_lo + keys, offset, left, right)[:, key_lo:].T
    back = Band(left, right).transposed()
    lo, all_lo, all_hi, hi = visible_range(key_lo, key_lo + keys, rows, -offset, back.left, back.right)
    assert all((lo <= i < hi) for i in np.flatnonzero(seen.any(axis=0)))
    assert list(range(all_lo, all_hi)) == np.flatnonzero(seen.all(axis=0)).tolist()


@given(
    st.integers(0, 50),
    st.integers(0, 20),
    st.sampled_from([1, 7, 16]),
    st.integers(0, 60),
    offsets,
    side,
    side,
)
def test_the_compiled_functions_are_the_plain_ones(row_lo, rows, block, length, offset, left, right):
    band = row_lo, row_lo + rows, length, offset, left, right
    assert compiled_visible_range(*band) == visible_range(*band)
    assert compiled_tile_range(*band[:2], block, *band[2:]) == tile_range(*band[:2], block, *band[2:])


compiled_visible_range = compile_plain(visible_range, njit)
compiled_tile_range = compile_plain(tile_range, njit)


@given(
    st.booleans(), st.none() | st.tuples(st.none() | st.integers(0, 2**60), st.none() | st.integers(0, 2**60))
)
def test_causal_and_window_make_one_band(causal, window):
    band = make_band(causal, window)
    left, right = window or (None, None)
    assert band.left == (UNBOUNDED if left is None else min(left, UNBOUNDED))
    assert band.right == (0 if causal else UNBOUNDED if right is None else min(right, UNBOUNDED))
    assert band.is_open == (band == Band())


def test_open_sides_hide_nothing_at_the_largest_offsets():
    for offset in (2**39 - 1, 1 - 2**39):
        assert visible_range(0, 1000, 1000, offset, UNBOUNDED, UNBOUNDED) == (0, 0, 1000, 1000)
        assert tile_range(0, 1000, 64, 1000, offset, UNBOUNDED, UNBOUNDED) == (0, 0, 15, 16)
