"""Blocks are ordered by fences with atomics, as the PTX memory model has it: what is right is silent, and
what lacks one fence, or is weak where it must be strong, is a race, on every schedule."""
import numpy as np
import pytest
from numba import cuda, int32

from numbaflash import emulator
from numbaflash.emulator import RaceError

SEEDS = [None, 0, 1, 2]
HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"


def races(kernel, grid, block, *sizes, seed=None):
    """Whether a launch on zeroed int32 arrays is reported."""
    try:
        emulator.launch(kernel, grid, block, *(np.zeros(n, np.int32) for n in sizes), seed=seed)
    except RaceError as error:
        assert "global memory" in str(error)
        return True
    return False


def last_block(before, after, everybody):
    """The block that comes last adds up what all blocks wrote, each one value or a value per thread."""
    @cuda.jit
    def kernel(partial, ticket, total):
        flag = cuda.shared.array(1, int32)
        i, n = cuda.threadIdx.x, cuda.blockDim.x
        if everybody:
            partial[cuda.grid(1)] = i
            if before:
                cuda.threadfence()
            cuda.syncthreads()
        elif i == 0:
            partial[n * cuda.blockIdx.x] = 7
            if before:
                cuda.threadfence()
        if i == 0:
            flag[0] = cuda.atomic.add(ticket, 0, 1)
            if after and not everybody:
                cuda.threadfence()
        cuda.syncthreads()
        if flag[0] == cuda.gridDim.x - 1:
            if after and everybody:
                cuda.threadfence()
            if i == 0:
                for j in range(cuda.gridDim.x):
                    total[0] += partial[n * j]
                ticket[0] = 0
    return kernel


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("everybody", [False, True])
def test_the_last_block_needs_a_fence_on_each_side_of_the_ticket(everybody, seed):
    sizes = 8 * 64, 1, 1
    assert not races(last_block(True, True, everybody), 8, 64, *sizes, seed=seed)
    assert races(last_block(False, True, everybody), 8, 64, *sizes, seed=seed)
    assert races(last_block(True, False, everybody), 8, 64, *sizes, seed=seed)


def test_the_last_block_works_across_batches_of_blocks():
    assert not races(last_block(True, True, True), 40, 1024, 40 * 1024, 1, 1)
    assert races(last_block(True, False, True), 40, 1024, 40 * 1024, 1, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_block_may_overwrite_what_all_have_read(seed):
    def kernel_with(fences):
        @cuda.jit
        def kernel(x, ticket, out):
            flag = cuda.shared.array(1, int32)
            i = cuda.threadIdx.x
            out[cuda.grid(1)] = x[0] + x[1 + cuda.blockIdx.x]
            if fences:
                cuda.threadfence()
            cuda.syncthreads()
            if i == 0:
                flag[0] = cuda.atomic.add(ticket, 0, 1)
                cuda.threadfence()
            cuda.syncthreads()
            if flag[0] == cuda.gridDim.x - 1 and i == 0:
                x[0] = 1
        return kernel

    assert not races(kernel_with(True), 6, 64, 7, 1, 6 * 64, seed=seed)
    assert races(kernel_with(False), 6, 64, 7, 1, 6 * 64, seed=seed)


def lock(acquire, release):
    @cuda.jit
    def kernel(mutex, x):
        if cuda.threadIdx.x % 32 == 0:
            while cuda.atomic.cas(mutex, 0, 0, 1) != 0:
                pass
            if acquire:
                cuda.threadfence()
            x[0] += 1
            if release:
                cuda.threadfence()
            cuda.atomic.exch(mutex, 0, 0)
    return kernel


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("grid, block", [(4, 32), (3, 64), (1, 96)])
def test_a_lock_needs_both_of_its_fences(grid, block, seed):
    assert not races(lock(True, True), grid, block, 1, 1, seed=seed)
    assert races(lock(False, True), grid, block, 1, 1, seed=seed)
    assert races(lock(True, False), grid, block, 1, 1, seed=seed)


def test_a_lock_counts_right():
    x = np.zeros(1, np.int32)
    emulator.launch(lock(True, True), 5, 96, np.zeros(1, np.int32), x)
    assert x[0] == 15


def test_a_lock_in_shared_memory_orders_warps_of_the_block():
    def kernel_with(fences):
        @cuda.jit
        def kernel(x):
            mutex, total = cuda.shared.array(1, int32), cuda.shared.array(1, int32)
            i = cuda.threadIdx.x
            if i == 0:
                mutex[0] = 0
                total[0] = 0
            cuda.syncthreads()
            if i % 32 == 0:
                while cuda.atomic.cas(mutex, 0, 0, 1) != 0:
                    pass
                if fences:
                    cuda.threadfence_block()
                total[0] += 1
                if fences:
                    cuda.threadfence_block()
                cuda.atomic.exch(mutex, 0, 0)
            cuda.syncthreads()
            if i == 0:
                x[cuda.blockIdx.x] = total[0]
        return kernel

    x = np.zeros(2, np.int32)
    emulator.launch(kernel_with(True), 2, 128, x)
    assert x.tolist() == [4, 4]
    with pytest.raises(RaceError, match="shared memory"):
        emulator.launch(kernel_with(False), 2, 128, x)


def test_a_fence_for_the_block_does_not_order_other_blocks():
    @cuda.jit
    def kernel(mutex, x):
        if cuda.threadIdx.x == 0:
            while cuda.atomic.cas(mutex, 0, 0, 1) != 0:
                pass
            cuda.threadfence_block()
            x[0] += 1
            cuda.threadfence_block()
            cuda.atomic.exch(mutex, 0, 0)

    assert races(kernel, 2, 32, 1, 1)
    assert not races(kernel, 1, 32, 1, 1)


# ---- weak accesses beside atomic ones


@cuda.jit
def add_and_read(x, out):
    cuda.atomic.add(x, 0, 1)
    if cuda.grid(1) == 0:
        out[0] = x[0]


@cuda.jit
def read_and_add(x, out):
    if cuda.grid(1) == 0:
        out[0] = x[0]
    cuda.atomic.add(x, 0, 1)


@cuda.jit
def clear_and_add(x, out):
    if cuda.grid(1) == 0:
        x[0] = 0
    cuda.atomic.add(x, 0, 1)


@cuda.jit
def add_and_clear(x, out):
    cuda.atomic.add(x, 0, 1)
    if cuda.grid(1) == 0:
        x[0] = 5


@cuda.jit
def look_before_you_add(x, out):
    if x[0] < cuda.grid(1):
        cuda.atomic.max(x, 0, cuda.grid(1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("grid, block", [(1, 64), (4, 32), (4, 64)])
@pytest.mark.parametrize("kernel", [add_and_read, read_and_add, clear_and_add, add_and_clear,
                                    look_before_you_add])
def test_a_weak_access_races_with_the_atomics_of_other_threads(kernel, grid, block, seed):
    assert races(kernel, grid, block, 1, 1, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_and_weak_accesses_with_a_barrier_between_do_not_race(seed):
    @cuda.jit
    def kernel(x, out):
        if cuda.threadIdx.x == 0:
            x[cuda.blockIdx.x] = 0
        cuda.syncthreads()
        cuda.atomic.add(x, cuda.blockIdx.x, 1)
        cuda.syncthreads()
        out[cuda.grid(1)] = x[cuda.blockIdx.x]
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            x[cuda.blockIdx.x] = 3

    assert not races(kernel, 4, 96, 4, 4 * 96, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_of_all_may_reset_the_counter_without_a_fence(seed):
    @cuda.jit
    def kernel(ticket):
        if cuda.threadIdx.x == 0 and cuda.atomic.add(ticket, 0, 1) == cuda.gridDim.x - 1:
            ticket[0] = 0

    assert not races(kernel, 6, 32, 1, seed=seed)


# ---- flags


FLAG = HEADER + """
.visible .entry k(.param .u64 data, .param .u64 flag, .param .u64 out)
{
    .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p<3>;
    ld.param.u64 %rd1, [data]; ld.param.u64 %rd2, [flag]; ld.param.u64 %rd3, [out];
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 1;
    @%p1 bra READ;
    mov.u32 %r2, 42;
    st.global.u32 [%rd1], %r2;
    {release}
    {write} [%rd2], 1;
    ret;
READ:
    {read} %r2, [%rd2];
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra READ;
    {acquire}
    ld.global.u32 %r3, [%rd1];
    st.global.u32 [%rd3], %r3;
    ret;
}
"""
STRONG = dict(release="membar.gl;", acquire="membar.gl;", write="st.volatile.global.u32",
              read="ld.volatile.global.u32")


def flag(**changes):
    text = FLAG
    for name, value in (STRONG | changes).items():
        text = text.replace("{" + name + "}", value)
    return text


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("changes", [
    {}, dict(release="fence.acq_rel.gpu;", acquire="fence.sc.sys;"),
    dict(write="st.relaxed.gpu.global.u32", read="ld.relaxed.gpu.global.u32"),
    dict(release="", write="st.release.gpu.global.u32"), dict(acquire="", read="ld.acquire.gpu.global.u32"),
    dict(release="", acquire="", write="st.release.sys.global.u32", read="ld.acquire.sys.global.u32")])
def test_a_flag_with_strong_accesses_and_fences_or_release_and_acquire_is_right(changes, seed):
    assert not races(flag(**changes), 2, 1, 1, 1, 1, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("changes", [
    dict(write="st.global.u32"), dict(read="ld.global.u32"), dict(release=""), dict(acquire=""),
    dict(release="membar.cta;"), dict(acquire="membar.cta;"),
    dict(read="ld.relaxed.gpu.global.u32", write="st.relaxed.gpu.global.u32", acquire="")])
def test_a_flag_with_a_weak_access_or_without_a_fence_is_a_race(changes, seed):
    assert races(flag(**changes), 2, 1, 1, 1, 1, seed=seed)
