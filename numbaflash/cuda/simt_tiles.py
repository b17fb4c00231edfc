"""Tiles of the SIMT kernels on their way between global and shared memory.

In shared memory numbers are float32 or float64, what the kernel computes in; 16-bit numbers are widened as
they are loaded and rounded, once, as they are stored.  A warp moves whole rows, so global accesses are
coalesced.  Nothing outside the valid rows and columns is read: out there, addresses are clamped to the
nearest valid one and zeros take the place of what was read, which costs no branch.
"""
from collections.abc import Callable

from numba import cuda, float32, float64, int32, int64, uint16, uint32

from numbaflash.cuda import ptx
from numbaflash.cuda.inlining import device
from numbaflash.cuda.simt_config import VECTOR_BYTES, SimtConfig
from numbaflash.cuda.unroll import unrolled

BATCH = 4
"""Loads that a thread has under way at a time."""

NUMBER = {"float32": float32, "float64": float64}
NATIVE = {"float16": float32, "bfloat16": float32, "float32": float32, "float64": float64}
"""What a number of an array is as soon as it is read."""
SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

# --- one thread's share: 16 bytes, or one number ----------------------------------------------------------


def _read_halves(low: Callable, high: Callable) -> Callable:
    def widen_one(i, x, n, bits):
        x[8 * n + 2 * i] = low(bits[i])
        x[8 * n + 2 * i + 1] = high(bits[i])

    widen = unrolled(4, widen_one)

    @device
    def read(x, n, address):
        bits = cuda.local.array(4, uint32)
        ptx.ld_global_nc_v4_b32(bits, 0, address)
        widen(x, n, bits)
    return read


@device
def number_float16(address):
    return ptx.f16_to_f32(ptx.ld_global_nc_b16(address))


@device
def number_bfloat16(address):
    return ptx.bf16_low(uint32(ptx.ld_global_nc_b16(address)))


READ_VECTOR = {"float16": _read_halves(ptx.f16_low, ptx.f16_high),
               "bfloat16": _read_halves(ptx.bf16_low, ptx.bf16_high),
               "float32": ptx.ld_global_nc_v4_f32, "float64": ptx.ld_global_nc_v2_f64}
READ_NUMBER = {"float16": number_float16, "bfloat16": number_bfloat16, "float32": ptx.ld_global_nc_f32,
               "float64": ptx.ld_global_nc_f64}
NATIVE_NUMBER = {"float32": ptx.ld_global_nc_f32, "float64": ptx.ld_global_nc_f64}
NATIVE_STORE = {"float32": ptx.st_global_f32, "float64": ptx.st_global_f64}
LOAD_SHARED = {"float32": ptx.ld_shared_v4_f32, "float64": ptx.ld_shared_v2_f64}
STORE_SHARED = {"float32": ptx.st_shared_v4_f32, "float64": ptx.st_shared_v2_f64}
LOAD_NUMBER = {"float32": ptx.ld_shared_f32, "float64": ptx.ld_shared_f64}
STORE_NUMBER = {"float32": ptx.st_shared_f32, "float64": ptx.st_shared_f64}


@device
def write_same(shared, x, n, column):
    """Sixteen bytes that need no widening."""
    ptx.st_shared_v4_f32(shared, x, n)


def _select_one(i, x, n, y, swap):
    low, high = x[8 * n + i], x[8 * n + 4 + i]
    y[i] = high if swap else low
    y[4 + i] = low if swap else high


_select_all = unrolled(4, _select_one)


@device
def write_widened(shared, x, n, column):
    """Eight numbers that were 16-bit.

    Every other group of four lanes writes its second half first: eight lanes then hit all banks.
    """
    swap = (column >> 5) & 1
    y = cuda.local.array(8, float32)
    _select_all(x, n, y, swap)
    ptx.st_shared_v4_f32(shared + 16 * swap, y, 0)
    ptx.st_shared_v4_f32(shared + 16 - 16 * swap, y, 1)


def _write_doubles(vectors: int) -> Callable:
    def write_one(i, shared, x, n):
        ptx.st_shared_v2_f64(int32(shared + i * VECTOR_BYTES), x, n * vectors + i)

    write_all = unrolled(vectors, write_one)

    @device
    def write(shared, x, n, column):
        write_all(shared, x, n)
    return write


WRITE_VECTOR = {
    (2, "float32"): write_widened, (4, "float32"): write_same,
    (2, "float64"): _write_doubles(4), (4, "float64"): _write_doubles(2), (8, "float64"): _write_doubles(1),
}
"""By the bytes of a number in global memory, and what it becomes."""


def make_load(config: SimtConfig, tile_rows: int, tile_columns: int, dtype: str | None = None) -> Callable:
    """A device function that brings a tile of an array (of ``config.dtype`` by default) into shared memory.

    ``load(shared, address, row_stride, column_stride, rows, columns, thread)`` loads the first `rows` rows
    and `columns` columns (both at least 1), fills the rest of the tile with zeros, and returns this
    thread's sum of 0 * x over what it loaded: 0, or NaN where something is not finite.
    """
    dtype = config.dtype if dtype is None else dtype
    size = SIZE[dtype]
    vector = config.vector and size <= config.size
    items = VECTOR_BYTES // size if vector else 1
    pitch, number_bytes, threads = config.pitch(tile_columns), config.size, config.threads
    pieces = tile_rows * tile_columns // items
    batch = max(1, min(BATCH, pieces // threads))
    if pieces % (threads * batch):
        raise ValueError(f"{tile_rows} x {tile_columns} numbers are no whole number of passes of {threads} "
                         "threads")
    shift = (tile_columns // items).bit_length() - 1
    mask = (1 << shift) - 1
    step, count = threads * batch, items * batch
    number, zero = NUMBER[config.compute], NUMBER[config.compute](0)
    read_vector, read_number = READ_VECTOR[dtype], READ_NUMBER[dtype]
    write_vector = WRITE_VECTOR[size, config.compute] if vector else None
    write_number = STORE_NUMBER[config.compute]
    loaded = NATIVE[dtype]

    def convert_one(i, x, n, y):
        x[n * items + i] = number(y[i])

    convert_all = unrolled(items, convert_one)

    @device
    def read_piece(x, n, address, column, column_stride):
        y = cuda.local.array(items, loaded)
        read_vector(y, 0, address + column * size)
        convert_all(x, n, y)

    @device
    def write_piece(shared, x, n, column):
        write_vector(shared, x, n, column)

    @device
    def read_single(x, n, address, column, column_stride):
        x[n] = number(read_number(address + int64(column) * column_stride))

    @device
    def write_single(shared, x, n, column):
        write_number(shared, x[n])

    read, write = (read_piece, write_piece) if vector else (read_single, write_single)

    def read_one(n, x, first, address, row_stride, column_stride, rows, columns):
        piece = first + n * threads
        row = int32(min(piece >> shift, rows - 1))
        column = int32(min((piece & mask) * items, columns - items))
        read(x, n, address + int64(row) * row_stride, column, column_stride)

    def check_one(i, x, n, bad, there):
        value = x[n * items + i] if there else zero
        bad[0] = cuda.fma(value, zero, bad[0])
        x[n * items + i] = value

    check_all = unrolled(items, check_one)

    def write_one(n, x, bad, first, shared, rows, columns):
        piece = first + n * threads
        row = int32(piece >> shift)
        column = int32((piece & mask) * items)
        there = (row < rows) & (column < columns)
        check_all(x, n, bad, there)
        write(int32(shared + row * pitch + column * number_bytes), x, n, column)

    read_batch, write_batch = unrolled(batch, read_one), unrolled(batch, write_one)

    @device
    def load(shared, address, row_stride, column_stride, rows, columns, thread):
        x = cuda.local.array(count, number)
        bad = cuda.local.array(1, number)
        bad[0] = zero
        for first in range(thread, pieces, step):
            read_batch(x, int32(first), address, row_stride, column_stride, rows, columns)
            write_batch(x, bad, int32(first), shared, rows, columns)
        return bad[0]

    return load


# --- results ----------------------------------------------------------------------------------------------


@device
def to_odd(x):
    """float32 of a float64, rounded so that rounding it once more to 16 bits is as rounding x itself.

    Round to odd: the inexact result with an odd last bit (Boldo and Melquiond, 2008).
    """
    y = float32(x)
    back = float64(y)
    bits = ptx.float_bits(y)
    if abs(back) > abs(x):
        bits = uint32(bits - uint32(1))
    if back != x and x == x:
        bits = uint32(bits | uint32(1))
    return ptx.bits_float(bits)


@device
def keep(x):
    return x


@device
def bits_float16(x):
    return ptx.cvt_f16(x)


@device
def bits_bfloat16(x):
    """Round to nearest even by integers: the instruction is younger than sm_75."""
    bits = ptx.float_bits(x)
    rounded = uint32(bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    return uint16(rounded if x == x else uint32(0x7FC0))


def make_store(config: SimtConfig, tile_rows: int, tile_columns: int, dtype: str) -> Callable:
    """A device function that takes a tile from shared memory to an array of `dtype`.

    ``store(shared, address, row_stride, column_stride, rows, columns, thread)`` stores the first `rows`
    rows and `columns` columns.
    """
    size = SIZE[dtype]
    vector = config.vector and size <= config.size
    items = VECTOR_BYTES // size if vector else 1
    pitch, number_bytes, threads, lanes = (
        config.pitch(tile_columns), config.size, config.threads, config.lanes)
    number = NUMBER[config.compute]
    pieces = tile_rows * tile_columns // items
    shift = (tile_columns // items).bit_length() - 1
    mask = (1 << shift) - 1
    loads = -(-items // lanes)
    count = max(items, lanes)
    load_shared, load_number = LOAD_SHARED[config.compute], LOAD_NUMBER[config.compute]
    write_vector = WRITE_GLOBAL[dtype]
    write_number = WRITE_GLOBAL_NUMBER[dtype]
    narrow = to_odd if size == 2 and config.compute == "float64" else keep

    def load_one(n, x, place):
        load_shared(x, n, int32(place + n * VECTOR_BYTES))

    def narrow_one(i, x):
        x[i] = narrow(x[i])

    load_all, narrow_all = unrolled(loads, load_one), unrolled(items, narrow_one)

    @device
    def store_pieces(shared, address, row_stride, column_stride, rows, columns, thread):
        x = cuda.local.array(count, number)
        for piece in range(thread, pieces, threads):
            row = int32(piece) >> shift
            column = (int32(piece) & mask) * items
            if (row < rows) & (column < columns):
                place = int32(shared + row * pitch + column * number_bytes)
                load_all(x, place)
                narrow_all(x)
                write_vector(address + int64(row) * row_stride + column * size, x)

    @device
    def store_numbers(shared, address, row_stride, column_stride, rows, columns, thread):
        for piece in range(thread, pieces, threads):
            row = int32(piece) >> shift
            column = int32(piece) & mask
            if (row < rows) & (column < columns):
                x = load_number(int32(shared + row * pitch + column * number_bytes))
                write_number(address + int64(row) * row_stride + int64(column) * column_stride, narrow(x))

    return store_pieces if vector else store_numbers


def _write_halves(bits_of: Callable) -> Callable:
    def pack_one(i, packed, x):
        low, high = bits_of(float32(x[2 * i])), bits_of(float32(x[2 * i + 1]))
        packed[i] = uint32(low) | (uint32(high) << uint32(16))

    pack_all = unrolled(4, pack_one)

    @device
    def write(address, x):
        packed = cuda.local.array(4, uint32)
        pack_all(packed, x)
        ptx.st_global_v4_b32(address, packed, 0)
    return write


def _write_numbers(kind: Callable, count: int, store: Callable) -> Callable:
    def convert_one(i, y, x):
        y[i] = kind(x[i])

    convert_all = unrolled(count, convert_one)

    @device
    def write(address, x):
        y = cuda.local.array(count, kind)
        convert_all(y, x)
        store(address, y, 0)
    return write


@device
def _number_float16(address, x):
    ptx.st_global_b16(address, bits_float16(float32(x)))


@device
def _number_bfloat16(address, x):
    ptx.st_global_b16(address, bits_bfloat16(float32(x)))


@device
def _number_float32(address, x):
    ptx.st_global_f32(address, float32(x))


@device
def _number_float64(address, x):
    ptx.st_global_f64(address, float64(x))


WRITE_GLOBAL = {"float16": _write_halves(bits_float16), "bfloat16": _write_halves(bits_bfloat16),
                "float32": _write_numbers(float32, 4, ptx.st_global_v4_f32),
                "float64": _write_numbers(float64, 2, ptx.st_global_v2_f64)}
WRITE_GLOBAL_NUMBER = {"float16": _number_float16, "bfloat16": _number_bfloat16, "float32": _number_float32,
                       "float64": _number_float64}
