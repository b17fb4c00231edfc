"""Accumulators to global memory: rounded once, and by whole 16-byte chunks where rows allow it."""
from numba import cuda, float32, int64, uint32

from numbaflash.cuda import ptx
from numbaflash.cuda.fragments import matrix_instructions
from numbaflash.cuda.panels import CHUNKS, chunk_place
from numbaflash.cuda.stores import STORE_FLOAT
from numbaflash.cuda.inlining import device
from numbaflash.cuda.packing import ONE_HEAD, make_row_place
from numbaflash.cuda.unroll import unrolled


def make_write(m_tiles: int, width: int, height: int, threads: int, dtype: str, staged: bool, turing: bool = False,
               packed: bool = False):
    """``write(acc, factors, tile, own, target, row_stride, column_stride, count, columns)`` for all threads of a block.

    The rows of an accumulator, times the lane's factor of each row, go to `count` rows and `columns` columns of
    global memory from address `target` on.  `own` is the lane's first row.  Staged results need 16-byte aligned rows of
    whole chunks: float32 leaves two numbers at a time, 16-bit ones through `height` rows of panels at shared address
    `tile`, which nobody reads any more.  Packed rows (see `packing`) need two arguments more, ``head_stride, packing``.
    """
    row_place = make_row_place(packed)
    N_TILES, WIDTH_CHUNKS = width // 8, width // 8
    ROWS, ROUNDS = threads // CHUNKS, height * CHUNKS // threads
    store_float = STORE_FLOAT[dtype]
    pairs, staged = staged and dtype == "float32", staged and dtype != "float32"
    _, pack = matrix_instructions(dtype if staged else "float16", turing)

    def stage_pair(j, acc, factor, r, tile, own, exists, address, column_stride, columns):
        x = 4 * ((r // 2) * N_TILES + j) + 2 * (r % 2)
        ptx.st_shared_b32(tile + chunk_place(own, j, height) + 4 * (ptx.thread_index() & 3),
                          pack(acc[x] * factor, acc[x + 1] * factor))

    def write_pair(j, acc, factor, r, tile, own, exists, address, column_stride, columns):
        x, at = 4 * ((r // 2) * N_TILES + j) + 2 * (r % 2), 8 * j + 2 * (ptx.thread_index() & 3)
        if exists and at < columns:
            pair = cuda.local.array(2, float32)
            pair[0], pair[1] = acc[x] * factor, acc[x + 1] * factor
            ptx.st_global_v2_f32(address + int64(at) * 4, pair, 0)

    def write_number(n, acc, factor, r, tile, own, exists, address, column_stride, columns):
        at = 8 * (n // 2) + 2 * (ptx.thread_index() & 3) + n % 2
        if exists and at < columns:
            store_float(address + int64(at) * column_stride,
                        acc[4 * ((r // 2) * N_TILES + n // 2) + 2 * (r % 2) + n % 2] * factor)

    def write_row(r, acc, factors, tile, own, target, row_stride, column_stride, count, columns, head_stride, packing):
        row = own + 8 * r
        address, exists = row_place(target, row, row_stride, head_stride, count, packing)
        write_columns(acc, factors[r], r, tile, row, exists, address, column_stride, columns)

    if staged:
        write_columns = unrolled(N_TILES, stage_pair)
    elif pairs:
        write_columns = unrolled(N_TILES, write_pair)
    else:
        write_columns = unrolled(2 * N_TILES, write_number)
    write_rows = unrolled(2 * m_tiles, write_row)

    @device
    def write_packed(acc, factors, tile, own, target, row_stride, column_stride, count, columns, head_stride, packing):
        write_rows(acc, factors, tile, own, target, row_stride, column_stride, count, columns, head_stride, packing)
        if staged:
            cuda.syncthreads()
            words = cuda.local.array(4, uint32)
            thread = ptx.thread_index()
            for i in range(ROUNDS):
                row = (thread >> 3) + i * ROWS
                address, exists = row_place(target, row, row_stride, head_stride, count, packing)
                for first in range(0, WIDTH_CHUNKS, CHUNKS):
                    chunk = first + (thread & 7)
                    if exists and 8 * chunk < columns:
                        ptx.ld_shared_v4_b32(words, 0, tile + chunk_place(row, chunk, height))
                        ptx.st_global_v4_b32(address + 16 * int64(chunk), words, 0)

    @device
    def write(acc, factors, tile, own, target, row_stride, column_stride, count, columns):
        write_packed(acc, factors, tile, own, target, row_stride, column_stride, count, columns, 0, ONE_HEAD)

    return write_packed if packed else write
