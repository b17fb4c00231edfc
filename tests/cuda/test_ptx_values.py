"""Each instruction does what its name says, with its operands in the order of the call.

The kernels run in the emulator and, with ``-m gpu``, on a GPU: the same kernels, the same expectations.
"""
import ml_dtypes
import numpy as np
import pytest
from numba import cuda, float32, float64, uint32

from numbaflash import emulator
from numbaflash.cuda import ptx
from numbaflash.cuda.compile import parse_arch

LANES = np.arange(32)
X = np.array([0.0, 1.0, -1.5, 3.14159, 1e-3, -65504.0, 2.0**-20, 1.0009766] * 4, np.float32)
Y = np.array([7.0, -0.25, 1e5, -2.71828, 0.1, 1.0, -3e-5, 255.5] * 4, np.float32)


def on_emulator(kernel, *arguments, arch="sm_80", threads=32):
    emulator.launch(kernel, 1, threads, *arguments, arch=arch)


def on_gpu(kernel, *arguments, arch="sm_80", threads=32):
    if not cuda.is_available():
        pytest.skip("needs a GPU")
    if cuda.get_current_device().compute_capability < parse_arch(arch).capability:
        pytest.skip(f"needs a GPU of {arch}")
    cuda.jit(kernel)[1, threads](*arguments)


@pytest.fixture(params=[on_emulator, pytest.param(on_gpu, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
def run(request):
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# --- conversions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair, single, dtype", [
    (ptx.cvt_f16x2, ptx.cvt_f16, np.float16), (ptx.cvt_bf16x2, ptx.cvt_bf16, ml_dtypes.bfloat16)])
def test_packing_rounds_to_nearest_and_puts_the_first_argument_low(run, pair, single, dtype):
    def kernel(x, y, packed, alone):
        i = ptx.thread_index()
        packed[i] = pair(x[i], y[i])
        alone[i] = single(x[i])

    packed, alone = np.zeros(32, np.uint32), np.zeros(32, np.uint16)
    run(kernel, X, Y, packed, alone)
    with np.errstate(over="ignore"):
        halves = np.stack([X.astype(dtype), Y.astype(dtype)], axis=1)
    np.testing.assert_array_equal(packed, halves.view(np.uint16).reshape(32, 2).view(np.uint32)[:, 0])
    np.testing.assert_array_equal(alone, halves[:, 0].view(np.uint16))


@pytest.mark.parametrize("low, high, dtype", [
    (ptx.f16_low, ptx.f16_high, np.float16), (ptx.bf16_low, ptx.bf16_high, ml_dtypes.bfloat16)])
def test_unpacking_is_exact(run, low, high, dtype):
    def kernel(bits, lows, highs):
        i = ptx.thread_index()
        lows[i] = low(bits[i])
        highs[i] = high(bits[i])

    halves = np.stack([X / 8, Y / 1e4], axis=1).astype(dtype)
    lows, highs = np.zeros(32, np.float32), np.zeros(32, np.float32)
    run(kernel, halves.view(np.uint16).reshape(32, 2).view(np.uint32)[:, 0].copy(), lows, highs)
    np.testing.assert_array_equal(np.stack([lows, highs], axis=1), halves.astype(np.float32))


def test_float16_of_16_bits_becomes_float32(run):
    def kernel(bits, out):
        i = ptx.thread_index()
        out[i] = ptx.f16_to_f32(bits[i])

    out = np.zeros(32, np.float32)
    run(kernel, (X / 8).astype(np.float16).view(np.uint16), out)
    np.testing.assert_array_equal(out, (X / 8).astype(np.float16).astype(np.float32))


def test_tf32_rounds_to_ten_bits_with_ties_away_from_zero(run):
    def kernel(x, out):
        i = ptx.thread_index()
        out[i] = ptx.cvt_rna_tf32(x[i])

    out = np.zeros(32, np.uint32)
    ties = (X.view(np.uint32) & ~np.uint32(0x1fff)) | np.uint32(0x1000)
    x = np.concatenate([X[:16], ties.view(np.float32)[:16]])
    run(kernel, x, out)
    np.testing.assert_array_equal(out & ~np.uint32(0x1fff), (x.view(np.uint32) + 0x1000) & ~np.uint32(0x1fff))


def test_bits_and_floats_are_the_same_register(run):
    def kernel(x, bits, back):
        i = ptx.thread_index()
        bits[i] = ptx.float_bits(x[i])
        back[i] = ptx.bits_float(bits[i])

    bits, back = np.zeros(32, np.uint32), np.zeros(32, np.float32)
    run(kernel, X, bits, back)
    np.testing.assert_array_equal(bits, X.view(np.uint32))
    np.testing.assert_array_equal(back, X)


# --- arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function, exact, inputs", [
    (ptx.ex2_approx, np.exp2, np.linspace(-20, 20, 32)),
    (ptx.ex2_approx_ftz, np.exp2, np.linspace(-20, 20, 32)),
    (ptx.lg2_approx, np.log2, np.linspace(0.01, 50, 32)),
    (ptx.lg2_approx_ftz, np.log2, np.linspace(0.01, 50, 32)),
    (ptx.rcp_approx, np.reciprocal, np.linspace(0.3, 9, 32)),
    (ptx.rcp_approx_ftz, np.reciprocal, np.linspace(-9, -0.3, 32)),
    (ptx.tanh_approx, np.tanh, np.linspace(-4, 4, 32)),
], ids=lambda value: getattr(value, "__name__", ""))
def test_approximate_functions_are_near_the_exact_ones(run, function, exact, inputs):
    def kernel(x, out):
        i = ptx.thread_index()
        out[i] = function(x[i])

    x, out = inputs.astype(np.float32), np.zeros(32, np.float32)
    run(kernel, x, out)
    np.testing.assert_allclose(out, exact(x.astype(np.float64)), rtol=2.0**-10.9, atol=2.0**-22)


def test_exponential_and_logarithm_keep_infinities(run):
    def kernel(out):
        out[0] = ptx.ex2_approx_ftz(float32(-np.inf))
        out[1] = ptx.lg2_approx(float32(0))
        out[2] = ptx.rcp_approx(float32(np.inf))

    out = np.ones(3, np.float32)
    run(kernel, out, threads=1)
    assert list(out) == [0, -np.inf, 0]


def test_maximum_and_minimum_ignore_nan_unless_asked(run):
    def kernel(x, y, out):
        i = ptx.thread_index()
        out[0, i] = ptx.max_f32(x[i], y[i])
        out[1, i] = ptx.min_f32(x[i], y[i])
        out[2, i] = ptx.max_nan_f32(x[i], y[i])
        out[3, i] = ptx.min_nan_f32(x[i], y[i])

    x, out = X.copy(), np.zeros((4, 32), np.float32)
    x[3] = np.nan
    run(kernel, x, Y, out)
    np.testing.assert_array_equal(out, [np.fmax(x, Y), np.fmin(x, Y), np.maximum(x, Y), np.minimum(x, Y)])


def test_fused_multiply_add_rounds_once_and_double_maximum_is_double(run):
    def kernel(x, y, z, single, double):
        i = ptx.thread_index()
        single[i] = ptx.fma_f32(x[i], y[i], z[i])
        double[0, i] = ptx.fma_f64(float64(x[i]), float64(y[i]), float64(z[i]))
        double[1, i] = ptx.max_f64(float64(x[i]), float64(y[i]) + 1e-12)
        double[2, i] = ptx.min_f64(float64(x[i]), float64(y[i]) + 1e-12)

    single, double = np.zeros(32, np.float32), np.zeros((3, 32))
    z = -(X * Y)
    run(kernel, X, Y, z, single, double)
    x, y = X.astype(np.float64), Y.astype(np.float64)
    np.testing.assert_array_equal(single, (x * y + z).astype(np.float32))   # the error of a product is exact
    np.testing.assert_array_equal(double, [x * y + z, np.maximum(x, y + 1e-12), np.minimum(x, y + 1e-12)])


def test_bytes_are_permuted_and_logic_follows_its_table(run):
    def kernel(x, y, z, permuted, logic):
        i = ptx.thread_index()
        permuted[i] = ptx.prmt(x[i], y[i], 0x7250)
        logic[0, i] = ptx.lop3(x[i], y[i], z[i], 0xca)          # x ? y : z
        logic[1, i] = ptx.lop3(x[i], y[i], z[i], 0x96)          # x ^ y ^ z

    x, y, z = np.random.default_rng(1).integers(0, 2**32, (3, 32), dtype=np.uint32)
    permuted, logic = np.zeros(32, np.uint32), np.zeros((2, 32), np.uint32)
    run(kernel, x, y, z, permuted, logic)
    both = np.stack([x, y], axis=1).view(np.uint8).reshape(32, 8)
    np.testing.assert_array_equal(permuted, both[:, [0, 5, 2, 7]].copy().view(np.uint32)[:, 0])
    np.testing.assert_array_equal(logic, [(x & y) | (~x & z), x ^ y ^ z])


# --- warps --------------------------------------------------------------------------------------------


def test_shuffles_read_the_lane_they_name(run):
    def kernel(x, bits, floats):
        i = ptx.thread_index()
        bits[0, i] = ptx.shfl_bfly_b32(uint32(i), 5)
        bits[1, i] = ptx.shfl_idx_b32(uint32(i), 31 - i)
        bits[2, i] = ptx.shfl_up_b32(uint32(i), 3)
        bits[3, i] = ptx.shfl_down_b32(uint32(i), 3)
        floats[0, i] = ptx.shfl_bfly_f32(x[i], 5)
        floats[1, i] = ptx.shfl_idx_f32(x[i], 31 - i)
        floats[2, i] = ptx.shfl_up_f32(x[i], 3)
        floats[3, i] = ptx.shfl_down_f32(x[i], 3)

    bits, floats = np.zeros((4, 32), np.uint32), np.zeros((4, 32), np.float32)
    run(kernel, X, bits, floats)
    source = np.stack([LANES ^ 5, 31 - LANES, np.where(LANES < 3, LANES, LANES - 3),
                       np.where(LANES > 28, LANES, LANES + 3)])
    np.testing.assert_array_equal(bits, source)
    np.testing.assert_array_equal(floats, X[source])


def test_votes_and_numbers_of_lanes(run):
    def kernel(out):
        i = ptx.thread_index()
        out[0, i] = ptx.vote_all(i < 32)
        out[1, i] = ptx.vote_all(i < 31)
        out[2, i] = ptx.vote_any(i > 30)
        out[3, i] = ptx.vote_any(i > 31)
        out[4, i] = ptx.vote_uni(i > 31)
        out[5, i] = ptx.vote_uni(i > 30)
        out[6, i] = ptx.vote_ballot(i % 3 == 0)
        out[7, i] = ptx.lane_id()

    out = np.zeros((8, 32), np.uint32)
    run(kernel, out)
    assert out[:6].T.tolist() == [[1, 0, 1, 0, 1, 0]] * 32
    assert set(out[6]) == {sum(1 << lane for lane in range(0, 32, 3))}
    np.testing.assert_array_equal(out[7], LANES)


# --- memory -------------------------------------------------------------------------------------------


def register_array(element):
    kind = {"b32": uint32, "f32": float32, "f64": float64}[element]

    @cuda.jit(device=True, inline="always")
    def make():
        return cuda.local.array(4, kind)
    return make


@pytest.mark.parametrize("element, width", [("b32", 2), ("b32", 4), ("f32", 2), ("f32", 4), ("f64", 2)])
def test_vectors_keep_their_order_through_global_and_shared_memory(run, element, width):
    load, load_nc, store, load_shared, store_shared = (
        getattr(ptx, f"{name}_v{width}_{element}")
        for name in ("ld_global", "ld_global_nc", "st_global", "ld_shared", "st_shared"))
    registers, size = register_array(element), int(element[1:]) // 8 * width

    def kernel(x, y, x_out, y_out):
        i = ptx.thread_index()
        slot = ptx.shared_address(cuda.shared.array(128, float64)) + 16 * i
        r = registers()
        load_nc(r, 0, ptx.global_address(x) + size * i)
        store_shared(slot, r, 0)
        load(r, 0, ptx.global_address(y) + size * i)
        store(ptx.global_address(y_out) + size * i, r, 0)
        load_shared(r, 0, slot)
        store(ptx.global_address(x_out) + size * i, r, 0)

    x, y = np.random.default_rng(2).standard_normal((2, 32, width)).astype(f"f{size // width}")
    x, y = (x.view(np.uint32), y.view(np.uint32)) if element == "b32" else (x, y)
    x_out, y_out = np.zeros_like(x), np.zeros_like(y)
    run(kernel, x, y, x_out, y_out)
    np.testing.assert_array_equal(x_out, x)
    np.testing.assert_array_equal(y_out, y)


@pytest.mark.parametrize("element", ["b16", "b32", "f32", "f64"])
def test_single_elements_pass_through_global_and_shared_memory(run, element):
    load, load_nc, store, load_shared, store_shared = (
        getattr(ptx, f"{name}_{element}")
        for name in ("ld_global", "ld_global_nc", "st_global", "ld_shared", "st_shared"))
    size = int(element[1:]) // 8

    def kernel(x, x_out, y_out):
        i = ptx.thread_index()
        slot = ptx.shared_address(cuda.shared.array(32, float64)) + 8 * i
        store_shared(slot, load(ptx.global_address(x) + size * i))
        store(ptx.global_address(x_out) + size * i, load_shared(slot))
        store(ptx.global_address(y_out) + size * i, load_nc(ptx.global_address(x) + size * (31 - i)))

    dtype = {"b16": np.uint16, "b32": np.uint32, "f32": np.float32, "f64": np.float64}[element]
    x = np.random.default_rng(3).integers(0, 60000, 32).astype(dtype)
    x_out, y_out = np.zeros_like(x), np.zeros_like(x)
    run(kernel, x, x_out, y_out)
    np.testing.assert_array_equal(x_out, x)
    np.testing.assert_array_equal(y_out, x[::-1])


@pytest.mark.parametrize("size", [4, 8, 16])
def test_asynchronous_copies_bring_what_is_there_and_zeros_behind_it(run, size):
    copy, fill = getattr(ptx, f"cp_async_{size}"), getattr(ptx, f"cp_async_{size}_zfill")

    def kernel(x, out):
        i = ptx.thread_index()
        slot = ptx.shared_address(cuda.shared.array(128, float64)) + 32 * i
        copy(slot, ptx.global_address(x) + size * i)
        ptx.cp_async_commit_group()
        fill(slot + 16, ptx.global_address(x) + size * i, i % (size + 1))
        ptx.cp_async_wait_all()
        for k in range(size // 4):
            out[0, i, k] = ptx.ld_shared_b32(slot + 4 * k)
            out[1, i, k] = ptx.ld_shared_b32(slot + 16 + 4 * k)

    x = np.random.default_rng(4).integers(1, 256, (32, size), dtype=np.uint8)
    out = np.zeros((2, 32, size // 4), np.uint32)
    run(kernel, x, out)
    filled = np.where(np.arange(size) < (LANES % (size + 1))[:, None], x, 0)
    np.testing.assert_array_equal(out.view(np.uint8), [x, filled])


def test_reductions_and_atomics_add(run):
    def kernel(x, single, double, count, before):
        i = ptx.thread_index()
        shared = cuda.shared.array(1, float32)
        if i == 0:
            shared[0] = 0
        cuda.syncthreads()
        ptx.red_global_add_f32(ptx.global_address(single), x[i])
        ptx.red_global_add_f64(ptx.global_address(double), x[i])
        ptx.atom_global_add_f32(ptx.global_address(single) + 4, x[i])
        ptx.atom_global_add_f64(ptx.global_address(double) + 8, x[i])
        before[0, i] = ptx.atom_global_add_s32(ptx.global_address(count), 2)
        before[1, i] = ptx.atom_global_add_acq_rel_s32(ptx.global_address(count) + 4, -1)
        ptx.red_shared_add_f32(ptx.shared_address(shared), x[i])
        cuda.syncthreads()
        single[2] = shared[0]

    x = np.arange(32, dtype=np.float32)
    single, double, count = np.zeros(3, np.float32), np.zeros(2), np.zeros(2, np.int32)
    before = np.zeros((2, 32), np.int32)
    run(kernel, x, single, double, count, before)
    assert set(single) == set(double) == {x.sum()} and list(count) == [64, -32]
    assert sorted(before[0]) == list(range(0, 64, 2)) and sorted(before[1]) == list(range(-31, 1))


@pytest.mark.parametrize("width", [2, 4])
def test_vector_reductions_add_each_element(run, width):
    add = getattr(ptx, f"red_global_add_v{width}_f32")

    def kernel(x, sums):
        i = ptx.thread_index()
        r = cuda.local.array(4, float32)
        for k in range(width):
            r[k] = x[i, k]
        add(ptx.global_address(sums), r, 0)

    x, sums = np.arange(32.0 * width, dtype=np.float32).reshape(32, width), np.zeros(width, np.float32)
    run(kernel, x, sums, arch="sm_90")
    np.testing.assert_array_equal(sums, x.sum(axis=0))


# --- matrices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trans", ["", "_trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_arrive_two_elements_per_lane(run, count, trans):
    load = getattr(ptx, f"ldmatrix_x{count}{trans}")

    def kernel(x, out):
        i = ptx.thread_index()
        tile = ptx.shared_address(cuda.shared.array(64, float64))
        r = cuda.local.array(4, uint32)
        for k in range(4):
            ptx.st_shared_b32(tile + 16 * i + 4 * k, x[i, k])
        cuda.syncthreads()
        load(r, 0, tile + 16 * i)
        for k in range(count):
            out[k, i] = r[k]

    x = np.arange(256, dtype=np.uint16)
    out = np.zeros((count, 32), np.uint32)
    run(kernel, x.view(np.uint32).reshape(32, 4).copy(), out)
    matrices = x.reshape(4, 8, 8)[:count]
    matrices = matrices.swapaxes(1, 2) if trans else matrices
    np.testing.assert_array_equal(out.view(np.uint16).reshape(count, 8, 8), matrices)


@pytest.mark.parametrize("trans", ["", "_trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_storing_matrices_is_the_inverse_of_loading_them(run, count, trans):
    load, save = getattr(ptx, f"ldmatrix_x{count}{trans}"), getattr(ptx, f"stmatrix_x{count}{trans}")

    def kernel(x, out):
        i = ptx.thread_index()
        tile = ptx.shared_address(cuda.shared.array(64, float64))
        copy = ptx.shared_address(cuda.shared.array(128, uint32, alignment=16))
        r = cuda.local.array(4, uint32)
        for k in range(4):
            ptx.st_shared_b32(tile + 16 * i + 4 * k, x[i, k])
        cuda.syncthreads()
        load(r, 0, tile + 16 * i)
        save(copy + 16 * i, r, 0)
        cuda.syncthreads()
        if i < 8 * count:
            for k in range(4):
                out[i, k] = ptx.ld_shared_b32(copy + 16 * i + 4 * k)

    x = np.arange(256, dtype=np.uint16).view(np.uint32).reshape(32, 4).copy()
    out = np.zeros((32, 4), np.uint32)
    run(kernel, x, out, arch="sm_90")
    np.testing.assert_array_equal(out[:8 * count], x[:8 * count])


GROUP, QUAD = LANES // 4, LANES % 4
"""Row and column of a lane in the fragments of mma (PTX ISA: Matrix Fragments for mma)."""


def fragments_of_16_bits(k):
    """(row, column) of every element of A and B, by lane, register and half."""
    steps = range(k // 8)
    a = [(GROUP + 8 * r, 2 * QUAD + 8 * s + h) for s in steps for r in range(2) for h in range(2)]
    b = [(2 * QUAD + 8 * s + h, GROUP) for s in steps for h in range(2)]
    return a, b


def gathered(matrix, places):
    return np.stack([matrix[row, column] for row, column in places], axis=1)


def accumulator_places():
    return [(GROUP + 8 * r, 2 * QUAD + h) for r in range(2) for h in range(2)]


@pytest.mark.parametrize("multiply, dtype, k", [
    (ptx.mma_m16n8k8_f16, np.float16, 8), (ptx.mma_m16n8k16_f16, np.float16, 16),
    (ptx.mma_m16n8k16_bf16, ml_dtypes.bfloat16, 16)], ids=lambda value: getattr(value, "__name__", value))
def test_product_of_16_bit_matrices_is_added_to_the_accumulator(run, rng, multiply, dtype, k):
    size_a, size_b = k // 4, k // 8

    def kernel(a, b, c):
        i = ptx.thread_index()
        left, right = cuda.local.array(8, uint32), cuda.local.array(8, uint32)
        acc = cuda.local.array(8, float32)
        for r in range(size_a):
            left[size_a + r] = a[i, r]
        for r in range(size_b):
            right[size_b + r] = b[i, r]
        for r in range(4):
            acc[4 + r] = c[i, r]
        multiply(acc, 1, left, 1, right, 1)
        for r in range(4):
            c[i, r] = acc[4 + r]

    a, b = rng.standard_normal((16, k)).astype(dtype), rng.standard_normal((k, 8)).astype(dtype)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    places_a, places_b = fragments_of_16_bits(k)
    result = gathered(c, accumulator_places())
    run(kernel, gathered(a, places_a).view(np.uint16).view(np.uint32),
        gathered(b, places_b).view(np.uint16).view(np.uint32), result)
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(result, gathered(exact, accumulator_places()), rtol=0, atol=1e-5)


def test_product_of_tf32_matrices_takes_float_registers(run, rng):
    def kernel(a, b, c):
        i = ptx.thread_index()
        left, right = cuda.local.array(4, float32), cuda.local.array(2, uint32)
        acc = cuda.local.array(4, float32)
        for r in range(4):
            left[r] = a[i, r]
            acc[r] = c[i, r]
        for r in range(2):
            right[r] = ptx.cvt_rna_tf32(b[i, r])
        ptx.mma_m16n8k8_tf32(acc, 0, left, 0, right, 0)
        for r in range(4):
            c[i, r] = acc[r]

    shapes = (16, 8), (8, 8), (16, 8)
    a, b, c = (rng.integers(-512, 512, shape).astype(np.float32) for shape in shapes)       # exact in tf32
    places_a = [(GROUP + 8 * r, QUAD + 4 * s) for s in range(2) for r in range(2)]
    places_b = [(QUAD + 4 * s, GROUP) for s in range(2)]
    result = gathered(c, accumulator_places())
    run(kernel, gathered(a, places_a), gathered(b, places_b), result)
    np.testing.assert_array_equal(result, gathered(a @ b + c, accumulator_places()))


def test_product_of_double_matrices_is_double(run, rng):
    def kernel(a, b, c):
        i = ptx.thread_index()
        left, right = cuda.local.array(1, float64), cuda.local.array(1, float64)
        acc = cuda.local.array(2, float64)
        left[0], right[0], acc[0], acc[1] = a[i], b[i], c[i, 0], c[i, 1]
        ptx.mma_m8n8k4_f64(acc, 0, left, 0, right, 0)
        c[i, 0], c[i, 1] = acc[0], acc[1]

    a, b, c = (rng.standard_normal(shape) for shape in ((8, 4), (4, 8), (8, 8)))
    places = [(GROUP, 2 * QUAD + h) for h in range(2)]
    result = gathered(c, places)
    run(kernel, a[GROUP, QUAD].copy(), b[QUAD, GROUP].copy(), result)
    np.testing.assert_allclose(result, gathered(a @ b + c, places), rtol=0, atol=1e-14)


# --- synchronisation ----------------------------------------------------------------------------------


def test_an_mbarrier_lets_through_when_all_have_arrived(run):
    def kernel(out):
        i = ptx.thread_index()
        barrier = ptx.shared_address(cuda.shared.array(1, float64))
        if i == 0:
            ptx.mbarrier_init(barrier, 32)
        cuda.syncthreads()
        ptx.mbarrier_arrive(barrier)
        ptx.mbarrier_wait_parity(barrier, 0)
        out[0, i] = ptx.mbarrier_test_wait_parity(barrier, 0)
        out[1, i] = ptx.mbarrier_try_wait_parity(barrier, 0)

    out = np.full((2, 32), 2, np.int32)
    run(kernel, out, arch="sm_90")
    assert out.tolist() == [[1] * 32] * 2


def test_a_test_of_an_mbarrier_does_not_wait(run):
    def kernel(out):
        i = ptx.thread_index()
        barrier = ptx.shared_address(cuda.shared.array(1, float64))
        if i == 0:
            ptx.mbarrier_init(barrier, 32)
        cuda.syncthreads()
        out[i] = ptx.mbarrier_test_wait_parity(barrier, 0)
        ptx.bar_warp_sync(0xffffffff)
        ptx.mbarrier_arrive(barrier)
        ptx.mbarrier_spin_parity(barrier, 0)

    out = np.full(32, 2, np.int32)
    run(kernel, out)
    assert out.tolist() == [0] * 32
