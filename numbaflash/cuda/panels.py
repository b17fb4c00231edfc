"""Tiles in shared memory, and how rows of global memory get there.

A tile is cut into panels of 64 columns (a number of 32 bits counts as two): a row of a panel is 128 bytes, once
around the 32 banks.  Panel p of a tile of `height` rows starts ``p * height * 128`` bytes into it, and the 16-byte
chunk c of row r lies at chunk ``c ^ (r & 7)``, so that eight rows of one chunk (an ldmatrix) and eight chunks of one
row (a copy) both touch every bank once.

Head dimensions are padded here, in shared memory, and nowhere else: rows and columns that do not exist become zeros,
never a number read from memory.
"""
from numba import cuda, int32, int64, uint32

from numbaflash.cuda import ptx
from numbaflash.cuda.inlining import device
from numbaflash.cuda.packing import make_row_place
from numbaflash.cuda.unroll import unrolled

PANEL_ROW = 128
PANEL_COLUMNS = 64
CHUNK = 16
CHUNKS = PANEL_ROW // CHUNK
COPIES = ("async", "vector", "element", "word")
"""Ways to load a tile: cp.async of 16 bytes; 16-byte loads through registers; single numbers of 16 or 32 bits of any
stride."""


def panels(width: int) -> int:
    """Panels of a tile of so many columns."""
    return -(-width // PANEL_COLUMNS)


def tile_bytes(height: int, width: int) -> int:
    """Bytes of a tile in shared memory."""
    return panels(width) * height * PANEL_ROW


@device
def lane_down(lane):
    """A lane's address in 16 rows x 16 columns for ldmatrix that goes down the rows first.

    These four matrices are an A operand, or (transposed) two B operands of a product over the rows.
    """
    return (lane & 15) * PANEL_ROW + ((((lane >> 4) & 1) ^ (lane & 7)) << 4)


@device
def lane_across(lane):
    """A lane's address in 16 rows x 16 columns for ldmatrix that goes along the columns first.

    These four matrices are two B operands of a product over the columns, or (transposed) an A operand.
    """
    return ((lane & 7) + ((lane & 16) >> 1)) * PANEL_ROW + ((((lane >> 3) & 1) ^ (lane & 7)) << 4)


@device
def chunk_place(row, chunk, height):
    """Offset of chunk `chunk` (any panel) of a row in a tile."""
    return (chunk >> 3) * (height * PANEL_ROW) + row * PANEL_ROW + (((chunk & 7) ^ (row & 7)) << 4)


def make_load(height: int, width: int, threads: int, copy: str):
    """Factory of ``load(tile, source, row_stride, column_stride, columns, lo, hi)``; columns are of 16 bits.

    The device function brings rows of global memory into the tile at shared address `tile`; all threads of the
    block take part.  `source` is the address of column 0 of the tile's row 0 (which need not exist); the rows
    ``[lo, hi)`` of the tile and the first `columns` columns exist.  With copy "async" the data arrive when
    the cp.async group does, otherwise at the next barrier.
    """
    PANELS = panels(width)
    PANEL = height * PANEL_ROW
    ROWS = threads // CHUNKS
    ROUNDS = height // ROWS
    assert threads % 64 == 0 and height % ROWS == 0, "whole rounds, and one swizzle per thread"
    copy_chunk = _COPY_CHUNK[copy]
    CONTIGUOUS = copy not in ("element", "word")
    PER_CHUNK = 4 if copy == "word" else 8      # numbers; strides are between numbers

    @device
    def load(tile, source, row_stride, column_stride, columns, lo, hi):
        thread = ptx.thread_index()             # volatile: addresses are made anew and occupy no register meanwhile
        row = thread >> 3
        chunk = thread & 7
        target = tile + row * PANEL_ROW + ((chunk ^ (row & 7)) << 4)
        row_stride = ptx.anew_s64(row_stride)
        if CONTIGUOUS:
            column_stride = 2
        address = source + int64(row) * row_stride + int64(PER_CHUNK * chunk) * column_stride
        for i in range(ROUNDS):
            exists = lo <= row + i * ROWS and row + i * ROWS < hi
            for p in range(PANELS):
                present = int32(columns - PANEL_COLUMNS * p - 8 * chunk) if exists else int32(0)
                copy_chunk(target + (i * ROWS * PANEL_ROW + p * PANEL),
                           address + (CHUNKS * PER_CHUNK * p) * column_stride, column_stride, present)
            address += ROWS * row_stride
    return load


def make_load_packed(height: int, width: int, threads: int, copy: str):
    """Factory of ``load(tile, source, row_stride, column_stride, columns, head_stride, count, packing)``.

    As `make_load`, for rows of several heads (see `packing`), `count` of each.
    """
    PANELS = panels(width)
    PANEL = height * PANEL_ROW
    ROWS = threads // CHUNKS
    ROUNDS = height // ROWS
    assert threads % 64 == 0 and height % ROWS == 0, "whole rounds, and one swizzle per thread"
    copy_chunk, row_place = _COPY_CHUNK[copy], make_row_place(True)
    CONTIGUOUS = copy not in ("element", "word")
    PER_CHUNK = 4 if copy == "word" else 8

    @device
    def load(tile, source, row_stride, column_stride, columns, head_stride, count, packing):
        thread = ptx.thread_index()
        chunk = thread & 7
        if CONTIGUOUS:
            column_stride = 2
        for i in range(ROUNDS):
            row = int32((thread >> 3) + i * ROWS)
            target = tile + row * PANEL_ROW + ((chunk ^ (row & 7)) << 4)
            address, exists = row_place(source, row, row_stride, head_stride, count, packing)
            for p in range(PANELS):
                present = int32(columns - PANEL_COLUMNS * p - 8 * chunk) if exists else int32(0)
                first = int64(PER_CHUNK * chunk + CHUNKS * PER_CHUNK * p) * column_stride
                copy_chunk(target + p * PANEL, address + first, column_stride, present)
    return load


@device
def _copy_async(target, address, column_stride, present):
    ptx.cp_async_16_zfill(target, address, 2 * min(max(present, 0), 8))


@device
def _copy_vector(target, address, column_stride, present):
    words = cuda.local.array(4, uint32)
    _clear_words(words)
    if present > 0:
        ptx.ld_global_nc_v4_b32(words, 0, address)
    ptx.st_shared_v4_b32(target, words, 0)


def _clear_word(w, words):
    words[w] = uint32(0)


def _read_word(w, words, address, column_stride, present):
    words[w] = uint32(0)
    if 2 * w < present:
        words[w] = uint32(ptx.ld_global_nc_b16(address + (2 * w) * column_stride))
    if 2 * w + 1 < present:
        words[w] |= uint32(ptx.ld_global_nc_b16(address + (2 * w + 1) * column_stride)) << uint32(16)


def _read_whole_word(w, words, address, column_stride, present):
    words[w] = uint32(0)
    if 2 * w < present:
        words[w] = ptx.ld_global_nc_b32(address + w * column_stride)


_clear_words, _read_words = unrolled(4, _clear_word), unrolled(4, _read_word)
_read_whole_words = unrolled(4, _read_whole_word)


@device
def _copy_elements(target, address, column_stride, present):
    words = cuda.local.array(4, uint32)
    _read_words(words, address, column_stride, present)
    ptx.st_shared_v4_b32(target, words, 0)


@device
def _copy_words(target, address, column_stride, present):
    words = cuda.local.array(4, uint32)
    _read_whole_words(words, address, column_stride, present)
    ptx.st_shared_v4_b32(target, words, 0)


_COPY_CHUNK = dict(zip(COPIES, (_copy_async, _copy_vector, _copy_elements, _copy_words)))
