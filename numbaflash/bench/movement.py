"""Bytes of global memory that the kernels of `ladder` move, as formulas; float32, one head, N rows and keys.

Three counts: ``loads`` and ``stores`` are what threads ask for, which is what passes between memory and the
multiprocessors where nothing is cached; ``distinct`` counts each 32-byte sector once per kernel, the least
that device memory must move, as if caches were large enough.  `bench.traffic` holds all three to the
emulator's counters.
"""

from collections.abc import Iterable
from typing import NamedTuple

from numbaflash.bench.ladder import TILE
from numbaflash.cuda.simt_config import COLUMN_LANES, ROW_LANES, WARP, dimension_class
from numbaflash.cuda.simt_plan import FORWARD, KEYS, QUERIES

FLOAT = 4
TABLE_BYTES = 9 * 8
"""What each thread reads of the segment table, forward and for delta."""
TABLE_BYTES_BACKWARD = 14 * 8
TABLE_SECTORS, TABLE_SECTORS_BACKWARD = 2, 3
SECTOR = 32


class Moved(NamedTuple):
    """Bytes."""

    loads: int
    stores: int
    distinct: int

    @property
    def total(self) -> int:
        """Loads and stores."""
        return self.loads + self.stores


class Shape(NamedTuple):
    """Of a tiled kernel: rows that a block owns, columns that stream past it at a time, threads."""

    rows: int
    columns: int
    threads: int


def shape_of(tiles: tuple[int, int, int]) -> Shape:
    """From (rows, columns, warps): scores per thread, down and across, and warps."""
    rows, columns, warps = tiles
    return Shape(ROW_LANES * rows * warps, COLUMN_LANES * columns, WARP * warps)


def chosen_tiles(head_dim: int, table: dict = FORWARD) -> tuple[int, int, int]:
    """What the planner takes for float32."""
    return table["float32"][dimension_class(head_dim)]


def is_exact(n: int, head_dim: int, *tiles: tuple[int, int, int]) -> bool:
    """Are the formulas of our kernels exact, to the byte: whole tiles and whole sectors?"""
    whole = all(n % size == 0 for one in tiles for size in shape_of(one)[:2])
    return whole and head_dim == dimension_class(head_dim)


def _tiles(size: int) -> int:
    return -(-size // TILE)


def _sum(parts: Iterable[Moved]) -> Moved:
    return Moved(*map(sum, zip(*parts)))


def product(rows: int, inner: int, columns: int) -> Moved:
    """A (rows x inner) by B (inner x columns): A once per tile of columns, B once per tile of rows."""
    a, b, c = (FLOAT * one for one in (rows * inner, inner * columns, rows * columns))
    return Moved(a * _tiles(columns) + b * _tiles(rows), c, a + b + c)


def standard(n: int, d: int) -> Moved:
    """S, softmax, P V: 16 N^2 + 16 N D distinct bytes, for S and P are each written once and read once."""
    scores = FLOAT * n * n
    softmax = Moved(3 * scores, scores, 2 * scores)
    return _sum([product(n, d, n), softmax, product(n, n, d)])


def standard_backward(n: int, d: int) -> Moved:
    """28 N^2 + 32 N D distinct bytes: P is read twice, dP and dS are written, and read three times in all."""
    scores = FLOAT * n * n
    softmax = Moved(4 * scores, scores, 3 * scores)
    return _sum([product(n, n, d), product(n, d, n), softmax, product(n, n, d), product(n, n, d)])


def one_row(n: int, d: int) -> Moved:
    """Each of N blocks reads a row of Q, and all of K and V."""
    rows = FLOAT * n * d
    return Moved(rows + n * 2 * rows, rows, 4 * rows)


def tiled(n: int, d: int, tiles: tuple[int, int, int] | None = None) -> Moved:
    """Q and the result once, K and V once for each of N / block_q blocks: 8 N^2 D / block_q bytes."""
    rows, _, threads = shape_of(tiles or chosen_tiles(d))
    blocks, row_bytes = -(-n // rows), FLOAT * n * d
    stores = row_bytes + FLOAT * n
    return Moved(
        row_bytes * (1 + 2 * blocks) + blocks * threads * TABLE_BYTES,
        stores,
        3 * row_bytes + stores + SECTOR * TABLE_SECTORS,
    )


def tiled_backward(n: int, d: int) -> Moved:
    """delta; dk and dv, where q and dout stream past keys; dq, where k and v stream past queries."""
    queries, keys = chosen_tiles(d, QUERIES), chosen_tiles(d, KEYS)
    rows, _, threads = shape_of(queries)
    operands, numbers = 2 * FLOAT * n * d, FLOAT * n
    table = -(-n // rows) * threads * TABLE_BYTES
    delta = Moved(operands + table, numbers, operands + numbers + SECTOR * TABLE_SECTORS)
    return _sum([delta, _gradient(n, d, keys, 2), _gradient(n, d, queries, 1)])


def _gradient(n: int, d: int, tiles: tuple[int, int, int], results: int) -> Moved:
    """dk and dv (two results) or dq: two operands owned, two that stream past, lse and delta."""
    rows, columns, threads = shape_of(tiles)
    blocks, operands, stores = -(-n // rows), 2 * FLOAT * n * d, results * FLOAT * n * d
    # Each thread reads the statistics of its own columns for every tile; for dq of its own rows, once.
    numbers = tiles[1] * -(-n // columns) if results == 2 else tiles[0]
    statistics = blocks * threads * numbers * 2 * FLOAT
    table = blocks * threads * TABLE_BYTES_BACKWARD
    distinct = 2 * operands + 2 * FLOAT * n + stores + SECTOR * TABLE_SECTORS_BACKWARD
    return Moved(operands * (1 + blocks) + statistics + table, stores, distinct)


def score_matrix(n: int) -> int:
    """Bytes of S of one head."""
    return FLOAT * n * n
