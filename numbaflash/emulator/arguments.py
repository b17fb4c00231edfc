"""Kernel arguments: NumPy arrays become global memory, values become parameter bytes (Numba's CUDA calling
convention)."""
from __future__ import annotations

import ctypes

import numpy as np

from .memory import ARENA_ALIGN, GLOBAL_BASE, Arena
from .parser import BITS
from .values import DTYPES


class Address:
    """A ``uint64`` argument that points to the memory of an array; made by `address`."""

    def __init__(self, array, offset=0, initialized=True, name=None):
        self.array, self.offset, self.initialized, self.name = array, offset, initialized, name

    def __add__(self, offset):
        return Address(self.array, self.offset + int(offset), self.initialized, self.name)


def address(array, offset: int = 0) -> Address:
    """Pass the address of an array's memory where a kernel takes a ``uint64`` pointer.

    Parameters
    ----------
    array : numpy.ndarray
        Read and written in place by the launch.
    offset : int
        Bytes to add to the address of the first element.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"address takes a numpy array, not {type(array).__name__}")
    return Address(array, offset)


def uninitialized(array) -> Address:
    """Like `address`, for memory whose content no kernel may read before it writes it (an output, a
    workspace)."""
    made = address(array)
    made.initialized = False
    return made


def byte_bounds(array):
    if array.size == 0:
        start = array.__array_interface__["data"][0]
        return start, start
    return np.lib.array_utils.byte_bounds(array)


def root_of(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Memory:
    """Puts the arrays of a launch into an arena; arrays that share bytes share them there too."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self.arrays = {}

    def add(self, array, name, initialized=True):
        found = self.arrays.get(id(array))
        if found is None:
            self.arrays[id(array)] = [array, name, initialized]
        elif name not in found[1].split(", "):
            found[1] += f", {name}"

    def place(self):
        """Assign addresses: overlapping extents become one allocation."""
        extents = sorted((*byte_bounds(array), n, array, name, initialized)
                         for n, (array, name, initialized) in enumerate(self.arrays.values()))
        groups = []
        for low, high, _, array, name, initialized in extents:
            if groups and low < groups[-1][1]:
                group = groups[-1]
                group[1] = max(group[1], high)
                group[2].append(name)
                group[4] = group[4] is True or initialized is True or group[4]
            else:
                groups.append([low, high, [name], array, initialized])
        self.places = []
        for low, high, names, array, initialized in groups:
            data = None
            if high > low:
                data = np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)
            offset = (low - byte_bounds(root_of(array))[0]) % ARENA_ALIGN
            start = self.arena.reserve(", ".join(names), high - low, data, initialized, array=array,
                                       offset=offset)
            self.places.append((low, high, start))

    def address(self, array, offset=0):
        pointer = array.__array_interface__["data"][0]
        for low, high, start in self.places:
            if low <= pointer < high or (array.size == 0 and pointer == low):
                return start + pointer - low + offset
        raise KeyError("array is not part of the launch")

    def write_back(self):
        """Copy every array back from the arena."""
        self.arena.note_written()
        for array, _, _ in self.arrays.values():
            if array.flags.writeable and array.size:
                image = np.ndarray(array.shape, array.dtype, self.arena.bytes,
                                   self.address(array) - GLOBAL_BASE, array.strides)
                np.copyto(array, image)


def gather(values, names, memory):
    """Tell ``memory`` about every array among the arguments."""
    for value, name in zip(values, names):
        if isinstance(value, Address):
            memory.add(value.array, value.name or name, value.initialized)
        elif isinstance(value, np.ndarray):
            memory.add(value, name)
        elif isinstance(value, (tuple, list)):
            gather(value, [f"{name}[{n}]" for n in range(len(value))], memory)


def pack_scalar(value, dtype):
    return np.asarray(value).astype(dtype).tobytes()


def flatten_numba(value, numba_type, memory):
    """The parameters that Numba passes for one argument: bytes each."""
    from numba import types
    if isinstance(value, Address):
        return [pack_scalar(memory.address(value.array, value.offset), "u8")]
    if isinstance(numba_type, types.Array):
        zero = pack_scalar(0, "i8")
        fields = [value.size, value.itemsize, memory.address(value), *value.shape, *value.strides]
        return [zero, zero, *(pack_scalar(f, "u8" if n == 2 else "i8") for n, f in enumerate(fields))]
    if isinstance(numba_type, types.BaseTuple):
        return [piece for one, kind in zip(value, numba_type) for piece in flatten_numba(one, kind, memory)]
    if isinstance(numba_type, types.Boolean):
        return [pack_scalar(value, "u1")]
    if isinstance(numba_type, types.Complex):
        half = f"f{numba_type.bitwidth // 16}"
        return [pack_scalar(value.real, half), pack_scalar(value.imag, half)]
    if isinstance(numba_type, types.Integer):
        return [pack_scalar(int(value) & (1 << numba_type.bitwidth) - 1, f"u{numba_type.bitwidth // 8}")]
    if isinstance(numba_type, types.Float):
        return [pack_scalar(value, f"f{numba_type.bitwidth // 8}")]
    if isinstance(numba_type, types.NoneType):
        return [pack_scalar(0, "u8")]
    if isinstance(numba_type, types.EnumMember):
        return flatten_numba(value.value, numba_type.dtype, memory)
    raise TypeError(f"the emulator cannot pass an argument of Numba type {numba_type}")


def flatten_ptx(value, parameter, name, memory):
    """The bytes of one argument for a parameter of PTX text."""
    if isinstance(value, (np.ndarray, Address)):
        if parameter.nbytes != 8:
            raise TypeError(
                f"argument {name} is an array, but parameter {parameter.name} is .{parameter.type}")
        array, offset = (value.array, value.offset) if isinstance(value, Address) else (value, 0)
        return pack_scalar(memory.address(array, offset), "u8")
    if isinstance(value, (bytes, bytearray)):
        if len(value) != parameter.nbytes:
            raise ValueError(
                f"argument {name} has {len(value)} bytes, parameter {parameter.name} {parameter.nbytes}")
        return bytes(value)
    kind = parameter.type
    size = BITS[kind] // 8
    if kind in DTYPES and DTYPES[kind].kind == "f":
        return pack_scalar(value, DTYPES[kind])
    if isinstance(value, (np.floating, float)) and not isinstance(value, (int, np.integer)):
        bits = np.asarray(value)
        bits = bits if isinstance(value, np.floating) else bits.astype(f"f{size}")
        if bits.itemsize == size:
            return bits.tobytes()
    return pack_scalar(int(value) & (1 << 8 * size) - 1, f"u{size}")
