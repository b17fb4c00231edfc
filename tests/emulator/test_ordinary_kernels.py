"""Kernels of the kind people write: right ones run silently and give what NumPy gives, wrong ones are
reported."""
import math

import numpy as np
import pytest
from numba import complex64, cuda, float32, float64, int8, int32, types, uint16
from numba.cuda.random import xoroshiro128p_dtype, xoroshiro128p_uniform_float32

from numbaflash import emulator
from numbaflash.emulator import MemoryFault, RaceError, UninitializedRead
from numbaflash.emulator.compiling import compile_kernel

RNG = np.random.default_rng(11)
PARTICLE = np.dtype([("mass", np.float32), ("kind", np.int8), ("at", np.float64, 3)], align=True)
WEIGHTS = np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]], np.float32)


def test_records():
    @cuda.jit
    def kick(particles, dt):
        i = cuda.grid(1)
        if i < particles.size and particles[i].kind != 0:
            for axis in range(3):
                particles[i].at[axis] += dt / particles[i].mass

    particles = np.zeros(70, PARTICLE)
    particles["mass"], particles["kind"] = RNG.uniform(1, 2, 70), RNG.integers(0, 2, 70)
    wanted = np.where(particles["kind"] != 0, 0.5 / particles["mass"].astype(np.float64), 0)
    emulator.launch(kick, 3, 32, particles, 0.5)
    np.testing.assert_allclose(particles["at"], np.repeat(wanted[:, None], 3, axis=1), rtol=1e-12)


def test_a_stencil_in_three_dimensions():
    @cuda.jit
    def laplace(x, y):
        i, j, k = cuda.grid(3)
        if 0 < i < x.shape[0] - 1 and 0 < j < x.shape[1] - 1 and 0 < k < x.shape[2] - 1:
            y[i, j, k] = (x[i - 1, j, k] + x[i + 1, j, k] + x[i, j - 1, k] + x[i, j + 1, k] + x[i, j, k - 1]
                          + x[i, j, k + 1] - 6 * x[i, j, k])

    @cuda.jit
    def too_far(x, y):
        i, j, k = cuda.grid(3)
        if i < x.shape[0] and j < x.shape[1] and k < x.shape[2]:
            y[i, j, k] = x[i + 1, j, k]

    x = RNG.standard_normal((9, 10, 11))
    y = np.zeros_like(x)
    emulator.launch(laplace, (3, 3, 3), (4, 4, 4), x, y)
    inner = (slice(1, -1),) * 3
    wanted = sum(np.roll(x, s, a)[inner] for s in (1, -1) for a in range(3)) - 6 * x[inner]
    np.testing.assert_allclose(y[inner], wanted, atol=1e-12)
    with pytest.raises(MemoryFault, match="read of 8 bytes.*past the end of x"):
        emulator.launch(too_far, (3, 3, 3), (4, 4, 4), x, y)


@pytest.mark.parametrize("inline", ["never", "always"])
def test_device_functions(inline):
    @cuda.jit(device=True, inline=inline)
    def norm_and_index(a, b):
        return math.sqrt(a * a + b * b), 1 if a > b else 2

    @cuda.jit(device=True)
    def twice(x, i):
        x[i] = 2 * norm_and_index(x[i], 1.0)[0]

    @cuda.jit
    def kernel(x, which):
        i = cuda.grid(1)
        if i < x.size:
            twice(x, i)
            _, which[i] = norm_and_index(x[i], 3.0)

    x = RNG.standard_normal(50)
    wanted, which = 2 * np.hypot(x, 1), np.zeros(50, np.int32)
    emulator.launch(kernel, 2, 32, x, which)
    np.testing.assert_allclose(x, wanted)
    assert (which == np.where(wanted > 3, 1, 2)).all()


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float64, 1e-13)])
def test_mathematical_functions(dtype, tolerance):
    @cuda.jit
    def kernel(x, y):
        i = cuda.grid(1)
        v = x[i]
        y[i, 0], y[i, 1], y[i, 2] = math.sin(v), math.cos(50 * v), math.tan(v)
        y[i, 3], y[i, 4], y[i, 5] = math.exp(v), math.log(v), math.log1p(v)
        y[i, 6], y[i, 7], y[i, 8] = math.pow(v, v), math.erf(v), math.lgamma(v)
        y[i, 9], y[i, 10], y[i, 11] = math.atan2(v, -v), math.tanh(v), math.floor(v)
        y[i, 12], y[i, 13], y[i, 14] = math.fmod(7 * v, v + 1), math.hypot(v, 3), v ** 3
        y[i, 15], y[i, 16] = math.asin(v / 5), math.expm1(v)

    x = np.linspace(0.1, 4, 64).astype(dtype)
    y = np.zeros((64, 17), dtype)
    emulator.launch(kernel, 2, 32, x, y)
    v = x.astype(np.float64)
    functions = [np.sin(v), np.cos((50 * x).astype(np.float64)), np.tan(v), np.exp(v), np.log(v), np.log1p(v),
                 v ** v, np.vectorize(math.erf)(v), np.vectorize(math.lgamma)(v), np.arctan2(v, -v),
                 np.tanh(v), np.floor(v), np.fmod((7 * x).astype(np.float64), (x + 1).astype(np.float64)),
                 np.hypot(v, 3), v ** 3, np.arcsin((x / dtype(5)).astype(np.float64)), np.expm1(v)]
    for n, wanted in enumerate(functions):
        np.testing.assert_allclose(y[:, n], wanted, rtol=tolerance, atol=tolerance, err_msg=str(n))


def test_half_precision_and_complex_numbers():
    @cuda.jit
    def halves(x, y):
        i = cuda.grid(1)
        y[i] = x[i] * x[i] - cuda.fp16.hsqrt(x[i]) if x[i] > y[i] else -x[i]

    x = RNG.uniform(0, 2, 64).astype(np.float16)
    y = np.ones(64, np.float16)
    wanted = np.where(x > 1, x * x - np.sqrt(x), -x)
    emulator.launch(halves, 2, 32, x, y)
    np.testing.assert_allclose(y.astype(np.float64), wanted.astype(np.float64), atol=2e-3)

    @cuda.jit
    def rotate(z, w, power):
        i = cuda.grid(1)
        z[i] = z[i] * w + z[i].conjugate() / w
        for _ in range(power):
            z[i] *= z[i]
        if abs(z[i]) > 100:
            z[i] = 0

    z = RNG.standard_normal(64) + 1j * RNG.standard_normal(64)
    wanted = (z * (1 + 2j) + z.conj() / (1 + 2j)) ** 4
    wanted[np.abs(wanted) > 100] = 0
    emulator.launch(rotate, 2, 32, z, 1 + 2j, 2)
    np.testing.assert_allclose(z, wanted, rtol=1e-10)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint8])
def test_integer_division_and_bits(dtype):
    @cuda.jit
    def kernel(a, b, out):
        i = cuda.grid(1)
        if b[i] != 0:
            out[i, 0], out[i, 1], out[i, 2] = a[i] // b[i], a[i] % b[i], a[i] / b[i]
        out[i, 3], out[i, 4] = a[i] << 2, a[i] >> 1
        out[i, 5], out[i, 6] = cuda.popc(np.uint32(a[i])), cuda.clz(np.uint32(b[i]))
        out[i, 7] = cuda.ffs(np.uint32(a[i]))

    low = 0 if dtype == np.uint8 else -90
    a, b = RNG.integers(low, 90, (2, 128)).astype(dtype)
    out = np.zeros((128, 8), np.float64)
    emulator.launch(kernel, 4, 32, a, b, out)
    kept = b != 0
    x, y = a.astype(np.int64)[kept], b.astype(np.int64)[kept]
    np.testing.assert_allclose(out[kept, :3], np.stack([x // y, x % y, x / y], axis=1))
    assert (out[:, 3:5] == np.stack([a.astype(np.int64) << 2, a.astype(np.int64) >> 1], axis=1)).all()
    bits = a.astype(np.int64) & 0xFFFFFFFF
    assert (out[:, 5] == [bin(v).count("1") for v in bits.tolist()]).all()
    assert (out[:, 7] == [(v & -v).bit_length() for v in bits.tolist()]).all()


def test_loops_that_lanes_leave_in_different_ways():
    @cuda.jit
    def search(x, found, steps):
        i = cuda.grid(1)
        if i >= x.size:
            return
        n, count = x[i], 0
        while True:
            count += 1
            if n == 1:
                break
            if n > 5000:
                found[i] = -1
                return
            if n % 2 == 0:
                n //= 2
                continue
            n = 3 * n + 1
        found[i] = count
        for step in range(100):
            if step * step > count:
                steps[i] = step
                break
        else:
            steps[i] = -2

    def wanted(n):
        count = 1
        while n != 1:
            if n > 5000:
                return -1, 0
            n, count = n // 2 if n % 2 == 0 else 3 * n + 1, count + 1
        return count, math.isqrt(count) + 1

    x = np.arange(1, 100)
    found, steps = np.zeros(99, np.int64), np.zeros(99, np.int64)
    emulator.launch(search, 4, 32, x, found, steps)
    assert list(zip(found.tolist(), steps.tolist())) == [wanted(n) for n in x.tolist()]


def test_cooperation_of_a_warp():
    @cuda.jit
    def kernel(x, out):
        i, lane = cuda.grid(1), cuda.laneid
        ballot = cuda.ballot_sync(0xffffffff, x[i] > 50)
        out[i, 0] = cuda.popc(ballot & ((1 << lane) - 1))
        out[i, 1] = cuda.popc(cuda.match_any_sync(0xffffffff, x[i] % 4))
        total = x[i]
        offset = 16
        while offset > 0:
            total += cuda.shfl_down_sync(0xffffffff, total, offset)
            offset //= 2
        out[i, 2] = cuda.shfl_sync(0xffffffff, total, 0)
        out[i, 3] = 1 if cuda.any_sync(0xffffffff, x[i] == 7) else 0
        if lane < 16:
            out[i, 4] = cuda.shfl_xor_sync(0xffff, x[i], 3)
            cuda.syncwarp(0xffff)

    x = RNG.integers(0, 100, 64).astype(np.int32)
    out = np.zeros((64, 5), np.int32)
    emulator.launch(kernel, 1, 64, x, out)
    for warp, rows in zip(x.reshape(2, 32), out.reshape(2, 32, 5)):
        assert (rows[:, 0] == np.r_[0, np.cumsum(warp > 50)[:-1]]).all()
        assert (rows[:, 1] == [(warp % 4 == v).sum() for v in warp % 4]).all()
        assert (rows[:, 2] == warp.sum()).all() and (rows[:, 3] == (warp == 7).any()).all()
        assert (rows[:16, 4] == warp[np.arange(16) ^ 3]).all()


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64])
def test_atomics_of_every_kind(dtype):
    integer = np.dtype(dtype).kind in "iu"

    @cuda.jit
    def common(x, out):
        v = x[cuda.grid(1)]
        cuda.atomic.add(out, 0, v)
        cuda.atomic.sub(out, 1, v)
        cuda.atomic.max(out, 2, v)
        cuda.atomic.min(out, 3, v)

    @cuda.jit
    def integers(x, out):
        v = x[cuda.grid(1)]
        cuda.atomic.and_(out, 4, v)
        cuda.atomic.or_(out, 5, v)
        cuda.atomic.xor(out, 6, v)
        cuda.atomic.exch(out, 7, v)
        cuda.atomic.cas(out, 8, 0, v)

    x = RNG.integers(1, 100, 96).astype(dtype)
    out = np.full(9, 50, dtype)
    out[8] = 0
    emulator.launch(common, 3, 32, x, out)
    less = np.full(1, 50, dtype) - x.sum(dtype=dtype)
    wanted = [50 + x.sum(), less[0], max(50, x.max()), min(50, x.min())]
    assert out[:4].tolist() == [v.item() if hasattr(v, "item") else v for v in wanted]
    if integer:
        emulator.launch(integers, 3, 32, x, out)
        assert out[4:7].tolist() == [np.bitwise_and.reduce(np.r_[x, dtype(50)]),
                                     np.bitwise_or.reduce(np.r_[x, dtype(50)]),
                                     np.bitwise_xor.reduce(np.r_[x, dtype(50)])]
        assert out[7] in x and out[8] in x


def test_atomics_that_wrap_and_those_of_a_block():
    @cuda.jit
    def kernel(out, seen):
        counts = cuda.shared.array((2, 4), int32)
        t = cuda.threadIdx.x
        if t < 8:
            counts[t // 4, t % 4] = 0
        cuda.syncthreads()
        cuda.atomic.add(counts, (t % 2, t % 4), 1)
        cuda.atomic.inc(out, 0, np.uint32(9))
        cuda.atomic.dec(out, 1, np.uint32(6))
        cuda.syncthreads()
        if t < 8:
            seen[t] = counts[t // 4, t % 4]

    out, seen = np.array([0, 3], np.uint32), np.zeros(8, np.int32)
    emulator.launch(kernel, 1, 64, out, seen)
    assert out.tolist() == [64 % 10, (3 - 64) % 7] and seen.tolist() == [16, 0, 16, 0, 0, 16, 0, 16]


@pytest.mark.parametrize("kind, dtype", [(types.boolean, np.bool_), (int8, np.int8), (uint16, np.uint16),
                                         (complex64, np.complex64), (float64, np.float64)])
@pytest.mark.parametrize("fault", [None, "barrier", "one missing"])
def test_shared_arrays_of_any_type(kind, dtype, fault):
    def reverse_with(barrier, first):
        @cuda.jit
        def reverse(x):
            buffer = cuda.shared.array((2, 48), kind)
            t = cuda.threadIdx.x
            if t >= first:
                buffer[t // 48, t % 48] = x[t]
            if barrier:
                cuda.syncthreads()
            x[t] = buffer[(95 - t) // 48, (95 - t) % 48]
        return reverse

    x = RNG.integers(0, 2, 96).astype(dtype)
    wanted = x[::-1].copy()
    if fault is None:
        emulator.launch(reverse_with(True, 0), 1, 96, x)
        assert (x == wanted).all()
    elif fault == "barrier":
        with pytest.raises((RaceError, UninitializedRead), match="shared array buffer"):
            emulator.launch(reverse_with(False, 0), 1, 96, x)
    else:
        with pytest.raises(UninitializedRead, match="shared array buffer .*at byte 0 of"):
            emulator.launch(reverse_with(True, 1), 1, 96, x)


def test_constant_arrays_and_views():
    @cuda.jit
    def blur(x, y):
        weights = cuda.const.array_like(WEIGHTS)
        i, j = cuda.grid(2)
        if i < y.shape[0] and j < y.shape[1]:
            total = float32(0)
            window = x[i:i + 3, j:j + 3]
            for a in range(3):
                row = window[a]
                for b in range(3):
                    total += weights[a, b] * row[b]
            y[i, j] = total

    memory = RNG.standard_normal((40, 30)).astype(np.float32)
    y = np.zeros((16, 12), np.float32)
    for x in (memory[:18, :14], memory[::2, ::2][:18, :14], memory[17::-1, :14], memory.T[:18, :14],
              np.asfortranarray(memory)[:18, :14]):
        emulator.launch(blur, (2, 2), (8, 8), x, y)
        wanted = sum(WEIGHTS[a, b] * x[a:a + 16, b:b + 12] for a in range(3) for b in range(3))
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(MemoryFault):
        emulator.launch(blur, (2, 2), (8, 8), memory[-17:], y)


@pytest.mark.parametrize("barrier", [True, False])
def test_sorting_in_shared_memory(barrier):
    @cuda.jit
    def bitonic(x):
        keys = cuda.shared.array(128, float32)
        t = cuda.threadIdx.x
        keys[t] = x[t]
        cuda.syncthreads()
        size = 2
        while size <= 128:
            stride = size // 2
            while stride > 0:
                other = t ^ stride
                if other > t and (keys[t] > keys[other]) == (t & size == 0):
                    keys[t], keys[other] = keys[other], keys[t]
                if barrier:
                    cuda.syncthreads()
                stride //= 2
            size *= 2
        cuda.syncthreads()
        x[t] = keys[t]

    x = RNG.standard_normal(128).astype(np.float32)
    wanted = np.sort(x)
    if barrier:
        emulator.launch(bitonic, 1, 128, x)
        assert (x == wanted).all()
    else:
        with pytest.raises(RaceError, match="shared array keys"):
            emulator.launch(bitonic, 1, 128, x)


def test_counts_of_barriers_and_uniform_decisions():
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        count = cuda.syncthreads_count(int32(x[t] > 0))
        every, some = cuda.syncthreads_and(int32(x[t] > -3)), cuda.syncthreads_or(int32(x[t] > 2))
        if count > 10:
            cuda.syncthreads()
        out[t] = count * 4 + (2 if every else 0) + (1 if some else 0)

    x = RNG.standard_normal(96)
    out = np.zeros(96, np.int32)
    emulator.launch(kernel, 1, 96, x, out)
    assert (out == (x > 0).sum() * 4 + 2 * (x > -3).all() + (x > 2).any()).all()


def test_random_numbers():
    @cuda.jit
    def estimate(states, hits):
        i = cuda.grid(1)
        inside = 0
        for _ in range(20):
            x, y = xoroshiro128p_uniform_float32(states, i), xoroshiro128p_uniform_float32(states, i)
            inside += 1 if x * x + y * y <= 1 else 0
        hits[i] = inside

    states, hits = np.zeros(256, xoroshiro128p_dtype), np.zeros(256, np.int32)
    states["s0"], states["s1"] = RNG.integers(1, 2**63, (2, 256))
    emulator.launch(estimate, 4, 64, states, hits)
    assert abs(4 * hits.sum() / (256 * 20) - math.pi) < 0.1


def test_tuples_flags_and_printing(capsys):
    @cuda.jit
    def kernel(arrays, scale, shape, negative):
        i = cuda.grid(1)
        if i < shape[0]:
            arrays[1][i] = -arrays[0][i] * scale if negative else arrays[0][i]
            if i == 2:
                print("lane", i, arrays[1][i])

    x, y = np.arange(40.0), np.zeros(40)
    emulator.launch(kernel, 2, 32, (x, y), 2.0, (40, 1), True)
    assert (y == -2 * x).all() and capsys.readouterr().out.split()[:2] == ["lane", "2"]


# ---- wrong in one place


def test_an_exception_of_a_debug_kernel_is_reported():
    @cuda.jit(debug=True, opt=False)
    def kernel(x):
        i = cuda.grid(1)
        if x[i] < 0:
            raise ValueError("negative")
        x[i] = math.sqrt(x[i])

    x = np.ones(64)
    emulator.launch(kernel, 2, 32, x)
    x[40] = -1
    with pytest.raises(emulator.KernelError, match=r"block \(1, 0, 0\) thread \(8, 0, 0\)"):
        emulator.launch(kernel, 2, 32, x)


def test_a_sum_without_atomics_is_a_race():
    @cuda.jit
    def total(x, out):
        out[0] += x[cuda.grid(1)]

    with pytest.raises(RaceError, match="out at byte 0"):
        emulator.launch(total, 2, 64, np.ones(128), np.zeros(1))


def test_rows_and_columns_mixed_up():
    @cuda.jit
    def transpose(x, y):
        i, j = cuda.grid(2)
        if i < x.shape[0] and j < x.shape[1]:
            y[i, j] = x[i, j]

    with pytest.raises(MemoryFault, match="past the end of y"):
        emulator.launch(transpose, (3, 2), (8, 8), np.ones((20, 16)), np.zeros((16, 20)))


def test_one_element_that_nobody_wrote():
    @cuda.jit
    def shift(y):
        i = cuda.grid(1)
        if i > 0:
            y[i] = i
        cuda.syncthreads()
        y[i] += 1

    for dtype in (np.int8, np.float16, np.float64):
        with pytest.raises(UninitializedRead, match="at byte 0 of"):
            emulator.launch(text_of(shift, dtype), 1, 32, *flat(np.zeros(32, dtype)))


def text_of(kernel, dtype):
    return compile_kernel(kernel, (np.zeros(1, dtype),), "sm_80")[0]


def flat(array):
    """A one-dimensional array as Numba passes it, its memory not written yet."""
    return 0, 0, array.size, array.itemsize, emulator.uninitialized(array), array.size, array.itemsize
