"""Control flow, calls, spaces and arguments of the machine."""
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, float32, int32

from numbaflash import emulator


@cuda.jit
def collatz(n, steps):
    i = cuda.grid(1)
    if i < n.size:
        value, count = n[i], 0
        while value != 1:
            if value % 2:
                value = 3 * value + 1
            else:
                value //= 2
            count += 1
        steps[i] = count


def collatz_steps(n):
    count = 0
    while n != 1:
        n = 3 * n + 1 if n % 2 else n // 2
        count += 1
    return count


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_lanes_that_diverge_in_a_loop_each_go_their_own_way(seed):
    n = np.arange(1, 101)
    steps = np.zeros_like(n)
    emulator.launch(collatz, 4, 32, n, steps, seed=seed)
    assert steps.tolist() == [collatz_steps(v) for v in n.tolist()]


def test_lanes_meet_again_behind_a_branch():
    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        if i % 3 == 0:
            x[i] = 1
        elif i % 3 == 1:
            x[i] = 2
        total = x[i]
        for step in (1, 2, 4, 8, 16):
            total += cuda.shfl_xor_sync(0xffffffff, total, step)
        x[i] = total

    x = np.zeros(32, np.int32)
    emulator.launch(kernel, 1, 32, x)
    assert (x == 11 + 22).all()


def test_early_exits_leave_the_others_running():
    @cuda.jit
    def kernel(x):
        i = cuda.grid(1)
        if i % 2:
            return
        if cuda.blockIdx.x == 1:
            return
        x[i] = i

    x = np.full(96, -1)
    emulator.launch(kernel, 3, 32, x)
    i = np.arange(96)
    assert (x == np.where((i % 2 == 0) & (i // 32 != 1), i, -1)).all()


@given(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)),
       st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3)))
def test_grids_and_blocks_have_three_dimensions(grid, block):
    total = np.prod(grid) * np.prod(block)
    seen = np.zeros(total, np.int32)
    emulator.launch(number, grid, block, seen)
    assert (seen == 1 + np.arange(total)).all()


@cuda.jit
def number(seen):
    thread = (cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y) * cuda.blockDim.x + cuda.threadIdx.x
    block = (cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
    size = cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z
    cuda.atomic.add(seen, block * size + thread, 1 + block * size + thread)


def test_more_blocks_than_fit_into_a_batch():
    seen = np.zeros(40 * 512, np.int32)
    emulator.launch(number, 40, 512, seen)
    assert (seen == 1 + np.arange(seen.size)).all()


def test_device_functions_are_called():
    @cuda.jit(device=True)
    def power(x, n):
        result = float32(1)
        for _ in range(n):
            result *= x
        return result

    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        x[i] = power(x[i], i % 4)

    x = np.arange(32, dtype=np.float32)
    expected = x ** (np.arange(32) % 4)
    emulator.launch(kernel, 1, 32, x)
    assert (x == expected).all()


CALL = """.version 8.0
.target sm_80
.address_size 64
.func (.param .b32 result) twice(.param .b32 value)
{
    .reg .b32 %r<4>;
    .local .align 4 .b8 frame[4];
    ld.param.b32 %r1, [value];
    st.local.u32 [frame], %r1;
    ld.local.u32 %r2, [frame];
    add.u32 %r3, %r1, %r2;
    st.param.b32 [result], %r3;
    ret;
}
.visible .entry k(.param .u64 out)
{
    .reg .b64 %rd<4>; .reg .b32 %r<4>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    { .param .b32 given; .param .b32 taken;
      st.param.b32 [given], %r1;
      call.uni (taken), twice, (given);
      ld.param.b32 %r2, [taken]; }
    { .param .b32 given; .param .b32 taken;
      st.param.b32 [given], %r2;
      call.uni (taken), twice, (given);
      ld.param.b32 %r2, [taken]; }
    mul.wide.u32 %rd2, %r1, 4; add.u64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r2;
    ret;
}
"""


def test_functions_of_ptx_are_called_with_their_own_frames():
    out = np.zeros(32, np.int32)
    emulator.launch(CALL, 1, 32, out)
    assert (out == 4 * np.arange(32)).all()


def test_scopes_of_inline_assembly_have_their_own_registers_and_labels():
    body = """{ .reg .pred p; .reg .b32 t; mov.b32 t, %r1; setp.gt.u32 p, t, 3; @p bra DONE;
    add.u32 %r1, %r1, 100;
    DONE: }"""
    text = CALL[:CALL.index(".func")] + f""".visible .entry k(.param .u64 out)
{{
    .reg .b64 %rd<4>; .reg .b32 %r<4>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %r1;
    {body} {body}
    mul.wide.u32 %rd2, %r2, 4; add.u64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r1;
    ret;
}}"""
    out = np.zeros(8, np.int32)
    emulator.launch(text, 1, 8, out)
    assert out.tolist() == [100, 101, 102, 103, 4, 5, 6, 7]


@cuda.jit
def scale(x, factor, flag, y):
    i, j = cuda.grid(2)
    if i < x.shape[0] and j < x.shape[1] and flag:
        y[i, j] = x[i, j] * factor


@pytest.mark.parametrize("view", [lambda a: a, lambda a: a.T, lambda a: a[::-1], lambda a: a[:, ::-2],
                                  lambda a: a[1:3, 2:], lambda a: np.broadcast_to(a[0], a.shape)])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u1", "i8", "f2"])
def test_arrays_have_any_strides(view, dtype):
    x = view(np.arange(48).reshape(6, 8).astype(dtype))
    backing = np.zeros((6, 16), dtype)
    y = backing[:x.shape[0], :2 * x.shape[1]:2] if x.shape[0] <= 6 else np.zeros(x.shape, dtype)
    emulator.launch(scale, (2, 2), (8, 8), x, np.dtype(dtype).type(2), True, y)
    assert (y == x * np.dtype(dtype).type(2)).all()


def test_arguments_that_share_memory_share_it():
    @cuda.jit
    def kernel(a, b):
        i = cuda.threadIdx.x
        a[i] = i + 1
        cuda.syncthreads()
        b[i] += 10

    x = np.zeros(40)
    emulator.launch(kernel, 1, 32, x[:32], x[8:])
    assert (x[8:32] == np.arange(8, 32) + 11).all() and (x[32:] == 10).all() and (x[:8] == np.arange(
        1, 9)).all()


def test_addresses_stand_for_arrays():
    text = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 x, .param .f32 a, .param .u8 flag, .param .s32 n)
{
    .reg .b64 %rd<4>; .reg .f32 %f<4>; .reg .b32 %r<4>; .reg .b16 %rs<2>;
    ld.param.u64 %rd1, [x]; ld.param.f32 %f1, [a]; ld.param.u8 %rs1, [flag]; ld.param.s32 %r1, [n];
    cvt.rn.f32.s32 %f2, %r1; add.f32 %f1, %f1, %f2; cvt.rn.f32.u16 %f2, %rs1; add.f32 %f1, %f1, %f2;
    st.global.f32 [%rd1], %f1;
    ret;
}"""
    x = np.zeros(4, np.float32)
    emulator.launch(text, 1, 1, emulator.address(x, 4), 0.5, True, -3)
    assert x.tolist() == [0, -1.5, 0, 0]
    emulator.launch(text, 1, 1, x, np.float32(1), 0, 1)
    assert x[0] == 2
    with pytest.raises(TypeError, match="k takes 4 arguments"):
        emulator.launch(text, 1, 1, x)


def test_a_plain_function_is_compiled_as_a_kernel():
    def kernel(x, y):
        x[cuda.threadIdx.x] = y

    x = np.zeros(32)
    emulator.launch(kernel, 1, 32, x, 2.5, arch="sm_90")
    assert (x == 2.5).all()
    with pytest.raises(TypeError, match=r"kernel takes 2 arguments \(x, y\), not 1"):
        emulator.launch(kernel, 1, 32, x)


def test_constant_arrays_and_tuples_and_complex_numbers_are_passed():
    table = np.arange(8, dtype=np.float32)

    @cuda.jit
    def kernel(x, pair, z):
        constants = cuda.const.array_like(table)
        i = cuda.threadIdx.x
        x[i] = constants[i % 8] + pair[0] + pair[1] + z.imag

    x = np.zeros(16)
    emulator.launch(kernel, 1, 16, x, (1, 0.5), 2j)
    assert (x == np.arange(16) % 8 + 3.5).all()


def test_lanes_of_one_access_can_be_in_several_spaces():
    @cuda.jit
    def kernel(x):
        buffer = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        buffer[i] = 2 * i
        source = buffer if i % 2 else x[:32]
        cuda.syncwarp()
        x[32 + i] = source[i]

    x = np.r_[np.arange(32), np.zeros(32)].astype(np.int32)
    emulator.launch(kernel, 1, 32, x)
    i = np.arange(32)
    assert (x[32:] == np.where(i % 2, 2 * i, i)).all()


def test_a_spin_wait_ends_when_the_other_thread_comes():
    @cuda.jit
    def kernel(x):
        if cuda.threadIdx.x == 0:
            while cuda.atomic.add(x, 0, 0) == 0:
                pass
            x[1] = 7
        else:
            cuda.atomic.exch(x, 0, 1)

    x = np.zeros(2, np.int32)
    emulator.launch(kernel, 1, 33, x)
    assert x.tolist() == [1, 7]


@pytest.mark.parametrize("grid, block", [(0, 32), ((1, 2, 3, 4), 1), (1, 2048), (1, (64, 0))])
def test_a_launch_of_no_possible_size_is_an_error(grid, block):
    with pytest.raises(ValueError):
        emulator.launch(number, grid, block, np.zeros(1, np.int32))


def test_importing_the_package_does_not_import_the_emulator_nor_the_emulator_numba():
    code = ("import sys, numbaflash; assert 'numbaflash.emulator' not in sys.modules; "
            "from numbaflash import emulator; assert emulator.launch; assert 'numba.cuda' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_print(capsys):
    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        if i < 2:
            print("lane", i, "holds", x[i], float32(0.5))

    emulator.launch(kernel, 1, 32, np.array([7, -8]))
    assert capsys.readouterr().out.splitlines() == ["lane 0 holds 7 0.500000", "lane 1 holds -8 0.500000"]


def test_branches_through_a_table():
    text = CALL[:CALL.index(".func")] + """.visible .entry k(.param .u64 out)
{
    .reg .b64 %rd<4>; .reg .b32 %r<4>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3;
    TABLE: .branchtargets A, B, C, B;
    brx.idx %r2, TABLE;
    A: mov.u32 %r3, 10; bra END;
    B: mov.u32 %r3, 20; bra END;
    C: mov.u32 %r3, 30;
    END: mul.wide.u32 %rd2, %r1, 4; add.u64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r3;
    ret;
}"""
    out = np.zeros(8, np.int32)
    emulator.launch(text, 1, 8, out)
    assert out.tolist() == [10, 20, 30, 20] * 2
