"""From the float32 sums of dq, in the order of fragments, to rows of dq (see `backward_sm80`)."""
from functools import lru_cache

from numba import cuda, float32, int32, int64

from numbaflash.cuda import ptx
from numbaflash.cuda.backward_sm80 import BackwardConfig
from numbaflash.cuda.results import make_write
from numbaflash.cuda.tiles import Q_LENGTH, column, locate, query_rows
from numbaflash.cuda.unroll import unrolled


@lru_cache(maxsize=None)
def make_backward_reduced(config: BackwardConfig):
    """The kernel of a configuration: ``backward_reduced(back, sums, tiles)``, a block to `columns` queries."""
    config.check()
    COLUMNS, WIDTH, THREADS, VECTOR = config.columns, config.head_dim, config.threads, config.reduce == "vector"
    SIZE, STAGED = WIDTH // 2, config.staged
    LANE_BYTES = 16 if VECTOR else 4
    write_dq = make_write(1, WIDTH, COLUMNS, THREADS, config.dtype, config.staged)

    def read_number(n, acc, address):
        acc[n] = ptx.ld_global_f32(address + 128 * n)

    def read_fragment(n, acc, address):
        ptx.ld_global_v4_f32(acc, n, address + 512 * n)

    read_all = unrolled(SIZE // 4, read_fragment) if VECTOR else unrolled(SIZE, read_number)

    def backward_reduced(back, sums, tiles):
        call = back.call
        base = 0
        if STAGED:                                  # NVVM fails on line information for shared memory that is not used
            base = ptx.dynamic_shared_address()
        place = locate(call, ptx.block_index())
        thread = ptx.thread_index()
        count = int32(column(call, place, Q_LENGTH) - place.tile * COLUMNS)
        if count <= 0:
            return
        tile = (int64(place.segment) * call.heads + place.head) * tiles + place.tile
        acc = cuda.local.array(SIZE, float32)
        read_all(acc, sums + tile * (4 * COLUMNS * WIDTH) + int64(thread >> 5) * (128 * SIZE)
                 + int64(thread & 31) * LANE_BYTES)
        factors = cuda.local.array(2, float32)
        factors[0] = factors[1] = float32(call.scale)
        target = query_rows(call, back.dq, place) + int64(place.tile * COLUMNS) * back.dq.row
        write_dq(acc, factors, base, int32((thread >> 5) * 16 + ((thread & 31) >> 2)), target, back.dq.row,
                 back.dq.column, count, call.head_dim)

    return backward_reduced
