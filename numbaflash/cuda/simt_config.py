"""Tile sizes of the SIMT kernels: one checked record per compiled variant, and the tables that choose it.

A block computes ``block_rows`` x ``block_columns`` scores at a time.  Forward and for dq, rows are queries
and columns keys; for dk and dv it is the other way round.  Row tiles stay in shared memory, column tiles
stream past.

The lanes of a warp stand 4 x 8, and a warp owns its rows: lane (r, c) holds the scores of rows ``r + 4 i``
and columns ``c + 8 j``, so that a row is reduced by three shuffles and probabilities never leave the warp.
The same lane accumulates, of its rows, the 16-byte pieces ``c + 8 n`` of the result.
"""
from typing import NamedTuple

import numpy as np

from numbaflash.arrays import FLOATING

ROW_LANES, COLUMN_LANES, WARP = 4, 8, 32
VECTOR_BYTES = 16
"""Bytes of the widest access; a row in shared memory is padded by as much, so that eight rows hit all
banks."""
PROBABILITY_PAD = 8
"""Numbers behind each row of probabilities: the four row lanes then write to disjoint banks."""

CLASSES = (32, 64, 128, 256)
"""Head dimensions that a tile is compiled for; smaller ones are padded with zeros in shared memory."""
SLICE = 64
"""Columns of q and k held at a time where the head dimension exceeds the last class."""
DTYPES = tuple(dtype.name for dtype in FLOATING)

SHARED_LIMIT = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_87": 163 << 10, "sm_90": 227 << 10,
                "sm_90a": 227 << 10,
                "sm_100": 227 << 10, "sm_100a": 227 << 10, "sm_103": 227 << 10, "sm_103a": 227 << 10}
"""Shared memory that one block may ask for."""
SMALL_SHARED = 99 << 10
"""The same on every other architecture (sm_86, 89, 120, 121)."""


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that one block may have."""
    return SHARED_LIMIT.get(arch, SMALL_SHARED)


class _Fields(NamedTuple):
    dtype: str
    out_dtype: str
    head_dim: int
    value_dim: int
    rows: int
    columns: int
    warps: int
    sliced: bool
    vector: bool
    general: bool
    bias_dtype: str


class SimtConfig(_Fields):
    """What a SIMT kernel is compiled for.

    Attributes
    ----------
    dtype, out_dtype : str
        Of q, k, v and of the result.
    head_dim, value_dim : int
        Columns of a tile of q or k, and of a tile of v.
    rows, columns : int
        Scores per thread.
    warps : int
        Per block.
    sliced : bool
        Products over the head dimension are summed over slices of ``head_dim`` columns.
    vector : bool
        Every row of every array can be read in 16-byte pieces.
    general : bool
        The code of softcap, bias, ALiBi, mask and dropout is there; which of them are on is a run-time
        matter.
    bias_dtype : str
        Of the bias; any where there is none.

    Raises
    ------
    ValueError
        If the numbers do not fit together.
    """

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> "SimtConfig":
        self = super().__new__(cls, *args, **kwargs)
        for name in ("dtype", "out_dtype", "bias_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, not {getattr(self, name)!r}")
        for name in ("head_dim", "value_dim"):
            if getattr(self, name) not in CLASSES:
                raise ValueError(f"{name} must be one of {CLASSES}, not {getattr(self, name)}")
        for name in ("rows", "columns", "warps"):
            if getattr(self, name) not in (1, 2, 4, 8):
                raise ValueError(f"{name} must be 1, 2, 4 or 8, not {getattr(self, name)}")
        if self.sliced and self.head_dim != SLICE:
            raise ValueError(f"head_dim of a sliced kernel must be {SLICE}, not {self.head_dim}")
        if self.rows > COLUMN_LANES:
            raise ValueError(f"rows must be at most {COLUMN_LANES}, one per lane that stores lse, "
                             f"not {self.rows}")
        return self

    @property
    def compute(self) -> str:
        """Dtype of products, softmax and shared tiles."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def size(self) -> int:
        """Bytes of a number in shared memory."""
        return np.dtype(self.compute).itemsize

    @property
    def lanes(self) -> int:
        """Numbers in 16 bytes of shared memory."""
        return VECTOR_BYTES // self.size

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def block_rows(self) -> int:
        return ROW_LANES * self.rows * self.warps

    @property
    def block_columns(self) -> int:
        return COLUMN_LANES * self.columns

    def pitch(self, columns: int) -> int:
        """Bytes from row to row of a tile in shared memory."""
        return columns * self.size + VECTOR_BYTES

    @property
    def probability_pitch(self) -> int:
        """Bytes from row to row of the probabilities in shared memory."""
        return (self.block_columns + PROBABILITY_PAD) * self.size

    @property
    def name(self) -> str:
        """For profiles and messages."""
        flags = "".join(
            letter for letter, on in (("s", self.sliced), ("v", self.vector), ("g", self.general)) if on)
        parts = [self.dtype, self.out_dtype, f"{self.head_dim}x{self.value_dim}",
                 f"{self.block_rows}x{self.block_columns}", flags, self.bias_dtype if self.general else ""]
        return "_".join(filter(None, parts))


def dimension_class(dim: int) -> int:
    """The smallest class that holds a dimension; the last one for larger ones, which take several passes."""
    return next((width for width in CLASSES if width >= dim), CLASSES[-1])
