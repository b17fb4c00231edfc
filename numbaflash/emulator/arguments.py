"""Kernel arguments: NumPy arrays become global memory, values become parameter bytes (Numba's CUDA calling
convention)."""
from __future__ import annotations

import ctypes

import numpy as np

from ..problem import _integer
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
    return Address(array, _integer("offset", offset))


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
                group[5] |= array.flags.writeable
            else:
                groups.append([low, high, [name], array, initialized, array.flags.writeable])
        self.places = []
        for low, high, names, array, initialized, writable in groups:
            data = None
            if high > low:
                data = np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)
            offset = (low - byte_bounds(root_of(array))[0]) % ARENA_ALIGN
            start = self.arena.reserve(", ".join(names), high - low, data, initialized, array=array,
                                       offset=offset, writable=writable)
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


# ---- what a launch takes
def kind_of(name, value, typeof):
    """The Numba type of an argument, where ``typeof`` is how the kernel's dispatcher finds it."""
    from numba import types
    from numba.core.errors import NumbaError
    if isinstance(value, Address):
        return types.uint64
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        raise TypeError(f"{name} must be an array of numbers or records, not of dtype {value.dtype}")
    try:
        return typeof(value)
    except (NumbaError, ValueError, TypeError) as error:
        raise TypeError(f"{name} must be {WANTED}, not {told(value)}: {error}") from None


def check_argument(name, value, kind):
    """TypeError for what `flatten_numba` cannot pass."""
    from numba import types
    if isinstance(value, Address):
        return
    if isinstance(kind, types.BaseTuple):
        for n, (one, inner) in enumerate(zip(value, kind)):
            check_argument(f"{name}[{n}]", one, inner)
    elif isinstance(kind, types.EnumMember):
        check_argument(name, value.value, kind.dtype)
    elif isinstance(kind, types.Array):
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{name} must be a NumPy array, not {told(value)}: the emulator works on host memory")
    elif not isinstance(kind, (types.Number, types.Boolean, types.Record, types.NPDatetime, types.NPTimedelta,
                               types.NoneType)):
        raise TypeError(f"{name} must be {WANTED}, not {told(value)}")


WANTED = "a NumPy array, a number, a record, or a tuple of them"


def told(value):
    """``a torch.Tensor``."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{value!r}" if isinstance(value, (int, float, complex)) else f"a {name}"


def with_memory(value):
    """Records become arrays of no dimension that share their memory."""
    if isinstance(value, np.void) and value.dtype.names:
        start = np.frombuffer(value.data, np.uint8).__array_interface__["data"][0]    # value.data is read-only
        return np.ndarray((), value.dtype, (ctypes.c_uint8 * value.nbytes).from_address(start))
    if isinstance(value, tuple):
        parts = [with_memory(one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


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
    if isinstance(numba_type, types.Record):
        return [pack_scalar(memory.address(value), "u8")]
    if isinstance(numba_type, (types.NPDatetime, types.NPTimedelta)):
        return [pack_scalar(value.view("i8"), "i8")]
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
    kind, size = parameter.type, BITS[parameter.type] // 8
    what = f"parameter {parameter.name} is .{kind}"
    if isinstance(value, (np.ndarray, Address)):
        if parameter.nbytes != 8 or kind[0] == "f":
            raise TypeError(f"{name} is an array, but {what}")
        array, offset = (value.array, value.offset) if isinstance(value, Address) else (value, 0)
        return pack_scalar(memory.address(array, offset), "u8")
    if isinstance(value, (bytes, bytearray)):
        if len(value) != parameter.nbytes:
            raise ValueError(f"{name} must have the {parameter.nbytes} bytes of parameter {parameter.name}, "
                             f"not {len(value)}")
        return bytes(value)
    if parameter.nbytes != size:
        raise TypeError(f"{name} must be bytes: parameter {parameter.name} takes {parameter.nbytes} of them")
    if isinstance(value, (float, np.floating)) and kind[0] == "b":
        value = np.asarray(value, None if isinstance(value, np.floating) else f"f{size}")
        if value.itemsize == size:
            return value.tobytes()
    if kind in DTYPES and DTYPES[kind].kind == "f":
        if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
            raise TypeError(f"{name} must be a number, not {told(value)}: {what}")
        return pack_scalar(value, DTYPES[kind])
    if not isinstance(value, (int, np.integer, np.bool_)):
        raise TypeError(f"{name} must be an integer, not {told(value)}: {what}")
    if not -(1 << 8 * size - 1) <= int(value) < 1 << 8 * size:
        raise ValueError(f"{name} must fit into {8 * size} bits, which {value} does not: {what}")
    return pack_scalar(int(value) & (1 << 8 * size) - 1, f"u{size}")
