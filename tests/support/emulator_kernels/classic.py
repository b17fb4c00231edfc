"""The kernels people write first: reduction, scan, matrix product, histogram, stencil."""
import numpy as np
from emulator_kernels.case import Case
from numba import cuda, float32, int32, types

THREADS = 128
WARPS = THREADS // 32
TILE = 16
BINS = 32
PADDED = THREADS + 2          # a stencil row with one neighbour on each side


@cuda.jit
def reduction(x, sums):
    """One sum per block: strided loads, then a tree in shared memory."""
    partial = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[i]
    partial[t] = total
    stride = THREADS // 2
    while stride > 0:
        cuda.syncthreads()
        if t < stride:
            partial[t] += partial[t + stride]
        stride //= 2
    if t == 0:
        sums[cuda.blockIdx.x] = partial[0]


@cuda.jit
def grid_reduction(x, partial, ticket, total):
    """One sum in one launch: the block that comes last adds up what all blocks wrote."""
    sums = cuda.shared.array(THREADS, float32)
    last = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    sums[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    if t == 0:
        block_sum = float32(0)
        for i in range(THREADS):
            block_sum += sums[i]
        partial[cuda.blockIdx.x] = block_sum
        cuda.threadfence()
        last[0] = cuda.atomic.add(ticket, 0, 1) == cuda.gridDim.x - 1
        cuda.threadfence()
    cuda.syncthreads()
    if last[0] and t == 0:
        grid_sum = float32(0)
        for i in range(cuda.gridDim.x):
            grid_sum += partial[i]
        total[0] = grid_sum


@cuda.jit
def scan(x, sums):
    """Inclusive scan of each block: shuffles within a warp, the totals of the warps through shared memory."""
    totals = cuda.shared.array(WARPS, int32)
    i = cuda.grid(1)
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    value = x[i]
    for shift in (1, 2, 4, 8, 16):
        below = cuda.shfl_up_sync(0xffffffff, value, shift)
        if lane >= shift:
            value = int32(value + below)
    if lane == 31:
        totals[warp] = value
    cuda.syncthreads()
    for w in range(warp):
        value = int32(value + totals[w])
    sums[i] = value


@cuda.jit
def matmul(a, b, c):
    """c = a b in tiles of 16 x 16; the sizes need not be multiples."""
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    column, row = cuda.grid(2)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for start in range(0, a.shape[1], TILE):
        inside_a = row < a.shape[0] and start + x < a.shape[1]
        inside_b = start + y < b.shape[0] and column < b.shape[1]
        tile_a[y, x] = a[row, start + x] if inside_a else float32(0)
        tile_b[y, x] = b[start + y, column] if inside_b else float32(0)
        cuda.syncthreads()
        for k in range(TILE):
            total += tile_a[y, k] * tile_b[k, x]
        cuda.syncthreads()
    if row < c.shape[0] and column < c.shape[1]:
        c[row, column] = total


@cuda.jit
def histogram(x, counts):
    """Counts in shared memory first, then one global addition per bin and block."""
    local = cuda.shared.array(BINS, int32)
    t = cuda.threadIdx.x
    if t < BINS:
        local[t] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(local, x[i], 1)
    cuda.syncthreads()
    if t < BINS:
        cuda.atomic.add(counts, t, local[t])


@cuda.jit
def stencil(x, y, steps):
    """`steps` rounds of a 3-point mean over a periodic block; neighbours through shared memory."""
    row = cuda.shared.array(PADDED, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    value = x[i]
    for _ in range(steps):
        row[t + 1] = value
        if t == 0:
            row[THREADS + 1] = value
        if t == THREADS - 1:
            row[0] = value
        cuda.syncthreads()
        value = (row[t] + row[t + 1] + row[t + 2]) * float32(1 / 3)
        cuda.syncthreads()
    y[i] = value


def _mean_of_neighbours(x, steps):
    x = x.astype(np.float64).reshape(-1, THREADS)
    for _ in range(steps):
        x = (np.roll(x, 1, axis=1) + x + np.roll(x, -1, axis=1)) / 3
    return x.ravel()


def reduction_case(rng):
    x = rng.standard_normal(1000).astype(np.float32)
    sums = np.zeros(3, np.float32)
    padded = np.zeros((-(-x.size // (3 * THREADS)), 3, THREADS))
    padded.ravel()[:x.size] = x
    return Case(reduction, (types.float32[::1],) * 2, (x, sums), {1: padded.sum(axis=(0, 2))}, 1e-5,
                grid=3, block=THREADS)


def grid_reduction_case(rng):
    x = rng.standard_normal(4 * THREADS).astype(np.float32)
    signature = (types.float32[::1], types.float32[::1], types.int32[::1], types.float32[::1])
    scratch = np.zeros(4, np.float32), np.zeros(1, np.int32)
    return Case(grid_reduction, signature, (x, *scratch, np.zeros(1, np.float32)),
                {3: x.astype(np.float64).sum(keepdims=True)}, 1e-4, grid=4, block=THREADS)


def scan_case(rng):
    x = rng.integers(-100, 100, 2 * THREADS, dtype=np.int32)
    return Case(scan, (types.int32[::1],) * 2, (x, np.zeros_like(x)),
                {1: x.reshape(2, THREADS).cumsum(axis=1).ravel()}, 0, grid=2, block=THREADS)


def matmul_case(rng):
    a, b = rng.standard_normal((40, 50)), rng.standard_normal((50, 20))
    a, b = a.astype(np.float32), b.astype(np.float32)
    return Case(matmul, (types.float32[:, ::1],) * 3, (a, b, np.zeros((40, 20), np.float32)),
                {2: a.astype(np.float64) @ b}, 1e-4, grid=(2, 3), block=(TILE, TILE))


def histogram_case(rng):
    x = rng.integers(0, BINS, 1000, dtype=np.int32)
    return Case(histogram, (types.int32[::1],) * 2, (x, np.zeros(BINS, np.int32)),
                {1: np.bincount(x, minlength=BINS)}, 0, grid=2, block=THREADS)


def stencil_case(rng):
    x = rng.standard_normal(2 * THREADS).astype(np.float32)
    return Case(stencil, (types.float32[::1], types.float32[::1], types.int32), (x, np.zeros_like(x), 11),
                {1: _mean_of_neighbours(x, 11)}, 1e-5, grid=2, block=THREADS)
