"""Faults that give right values on a lucky day: next to other arrays, between lanes, behind a copy's back."""
import numpy as np
import pytest
from numba import cuda, float32, uint16, uint32

from numbaflash import emulator
from numbaflash.cuda import ptx


@cuda.jit
def one_row_too_far(source, out, row):
    i = cuda.grid(1)
    out[0, i] = source[row, i]


@pytest.mark.parametrize("columns", [64, 1024, 4096])
def test_every_element_of_a_row_behind_the_last_is_out_of_bounds(columns):
    source, out = np.zeros((4, columns)), np.zeros((8, columns))
    for i in 0, columns - 1:
        with pytest.raises(emulator.MemoryFault, match="source"):
            emulator.launch(one_row_too_far, 1, 1, source[:, i:], out, 4)


@cuda.jit
def shared_row_too_far(out, row):
    first = cuda.shared.array((4, 32), float32)
    second = cuda.shared.array((4, 32), float32)
    i = cuda.threadIdx.x
    for j in range(4):
        first[j, i] = i
        second[j, i] = i
    out[i] = first[row, i]
    out[i] += second[0, i]


def test_a_row_behind_the_last_of_a_shared_array_is_not_in_the_next_array():
    out = np.zeros(32, np.float32)
    emulator.launch(shared_row_too_far, 1, 32, out, 3)
    assert (out == 2 * np.arange(32)).all()
    with pytest.raises(emulator.MemoryFault, match="shared array first"):
        emulator.launch(shared_row_too_far, 1, 32, out, 4)


@cuda.jit
def all_write_one_place(out, different, space):
    memory = cuda.shared.array(1, float32)
    i = cuda.threadIdx.x
    if space == 0:
        out[0] = i if different else 1
    else:
        memory[0] = i if different else 1
        cuda.syncthreads()
        out[i] = memory[0]


@pytest.mark.parametrize("space", [0, 1], ids=["global", "shared"])
@pytest.mark.parametrize("threads", [2, 32, 64])
def test_lanes_that_write_different_values_to_one_place_race(threads, space):
    out = np.zeros(64, np.float32)
    emulator.launch(all_write_one_place, 1, threads, out, False, space)
    with pytest.raises(emulator.RaceError, match=r"written by thread \(\d+, 0, 0\)"):
        emulator.launch(all_write_one_place, 1, threads, out, True, space)


@cuda.jit
def matrix_of_some_lanes(out, lanes):
    tile = cuda.shared.array((8, 8), uint16)
    i = cuda.threadIdx.x
    for j in range(i, 64, cuda.blockDim.x):
        tile[j // 8, j % 8] = j
    cuda.syncthreads()
    a = cuda.local.array(1, uint32)
    if i < lanes:
        ptx.ldmatrix_x1(a, 0, ptx.shared_address(tile) + 16 * (i % 8))
        out[i] = a[0]


@pytest.mark.parametrize("threads, lanes", [(32, 16), (32, 31), (16, 32), (48, 48)])
def test_a_matrix_instruction_without_all_lanes_of_a_warp_is_found(threads, lanes):
    with pytest.raises(emulator.BarrierError, match=r"ldmatrix in divergent code|warp collective in divergent"):
        emulator.launch(matrix_of_some_lanes, 1, threads, np.zeros(64, np.uint32), lanes)


def test_a_block_has_sixteen_barriers():
    @cuda.jit
    def kernel(barrier):
        ptx.bar_sync(barrier, 64)

    emulator.launch(kernel, 1, 64, 15)
    with pytest.raises(emulator.BarrierError, match="barrier 16: a block has barriers 0 to 15"):
        emulator.launch(kernel, 1, 64, 16)


@cuda.jit
def copy_and_overwrite(source, out, early, shift):
    tile = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    ptx.cp_async_4(ptx.shared_address(tile) + 4 * i, ptx.global_address(source) + 4 * i)
    ptx.cp_async_commit_group()
    if early:
        source[i + shift] = -1
    ptx.cp_async_wait_group(0)
    cuda.syncwarp()
    if not early:
        source[i + shift] = -1
    out[i] = tile[i]


@pytest.mark.parametrize("shift", [0, 5, 31])
def test_overwriting_what_an_asynchronous_copy_still_reads_is_a_race(shift):
    source, out = np.arange(64, dtype=np.float32), np.zeros(32, np.float32)
    with pytest.raises(emulator.RaceError, match="source .* which an asynchronous copy of .* still reads"):
        emulator.launch(copy_and_overwrite, 1, 32, source, out, True, shift)


@pytest.mark.parametrize("early, shift", [(True, 32), (False, 0)])
def test_writing_beside_an_asynchronous_copy_or_after_its_wait_is_right(early, shift):
    source, out = np.arange(64, dtype=np.float32), np.zeros(32, np.float32)
    emulator.launch(copy_and_overwrite, 1, 32, source, out, early, shift)
    assert (out == np.arange(32)).all()


def test_a_non_coherent_read_of_what_the_kernel_wrote_is_found():
    @cuda.jit
    def kernel(source, out, write):
        i = cuda.threadIdx.x
        if write:
            source[i] = i
        cuda.syncthreads()
        out[i] = ptx.ld_global_nc_f32(ptx.global_address(source) + 4 * (31 - i))

    source, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    emulator.launch(kernel, 1, 32, source, out, False)
    assert (out == np.arange(32)[::-1]).all()
    with pytest.raises(emulator.RaceError, match="non-coherent read of 4 bytes, source .* which the kernel has written"):
        emulator.launch(kernel, 1, 32, source, out, True)


def test_lanes_that_name_each_other_have_one_membermask():
    @cuda.jit
    def kernel(out, low, mixed):
        i = cuda.threadIdx.x
        mask = (0xFFFFFFFF if mixed else low) if i < 16 else low << 16
        out[i] = cuda.shfl_sync(mask, i, (i & 16) + 1)

    out = np.zeros(32, np.int64)
    emulator.launch(kernel, 1, 32, out, 0xFFFF, False)
    assert (out == np.arange(32) // 16 * 16 + 1).all()
    with pytest.raises(emulator.BarrierError, match="membermask 0xffffffff names lane 16, which .* with 0xffff0000"):
        emulator.launch(kernel, 1, 32, out, 0xFFFF, True)


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_read_is_not_forgotten_because_the_writer_reads_too(broadcast):
    @cuda.jit
    def kernel(x, wait, broadcast):
        shared = cuda.shared.array(32, np.float32)
        i = cuda.threadIdx.x
        shared[i] = x[i]
        cuda.syncwarp()
        other = shared[0] if broadcast else shared[i ^ 1]
        if wait:
            cuda.syncwarp()
        shared[i] += other                      # its own number, which another lane has read
        cuda.syncwarp()
        x[i] = shared[i]

    x = np.ones(32, np.float32)
    emulator.launch(kernel, 1, 32, x, True, broadcast)
    assert (x == 2).all()
    with pytest.raises(emulator.RaceError, match="read by thread"):
        emulator.launch(kernel, 1, 32, x, False, broadcast)
