"""Where the fields of a call's record lie: what kernels read besides the arrays themselves."""

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from ..arrays import Operand, address

_WORD = 8


class Layout:
    """A record: addresses and byte strides of arrays, then integers, then floating numbers.

    Parameters
    ----------
    arrays : mapping of str to str
        Names of the arrays, and letters of their strides.
    integers, numbers : sequence of str
        Names of the other fields.
    stride : str
        How the field of a stride is called, from the array's name and the letter.

    Attributes
    ----------
    dtype : dtype
        Of the record: int64 and float64 fields.
    words : dict of str to int
        Where the arrays' addresses stand, counted in words of eight bytes.
    at_integers, at_numbers : int
        Bytes from the beginning.

    Examples
    --------
    >>> layout = Layout({"x": "ij"}, ["count"], ["factor"], "{}_{}")
    >>> layout.dtype.names
    ('x', 'x_i', 'x_j', 'count', 'factor')
    """

    def __init__(
        self, arrays: Mapping[str, str], integers: Sequence[str], numbers: Sequence[str], stride: str
    ) -> None:
        places = [
            field for name, axes in arrays.items() for field in (name, *(stride.format(name, axis) for axis in axes))
        ]
        self.dtype = np.dtype(
            [(name, np.int64) for name in (*places, *integers)] + [(name, np.float64) for name in numbers]
        )
        self.words = {name: places.index(name) for name in arrays}
        self.at_integers = _WORD * len(places)
        self.at_numbers = self.at_integers + _WORD * len(integers)
        self._packed = {
            name: (_WORD * self.words[name], len(axes), struct.Struct(f"={1 + len(axes)}q"))
            for name, axes in arrays.items()
        }

    def place(self, record: bytearray, name: str, array: np.ndarray | Operand | None) -> None:
        """Write where an array lies; for None nothing, and kernels read address 0 as absent."""
        if array is None:
            return
        at, axes, packed = self._packed[name]
        pointer = array.pointer if type(array) is Operand else address(array)
        packed.pack_into(record, at, pointer, *array.strides[:axes])
