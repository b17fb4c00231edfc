"""Microkernels, transposes and elementary functions against NumPy, in the vector widths of all machines."""

import mpmath
import ml_dtypes
import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic

from numbaflash.cpu.compile import Kernel, Static
from numbaflash.cpu.gemm import gemm_add, gemm_max, gemm_rescale, gemm_set
from numbaflash.cpu.simd import Lanes
from numbaflash.cpu.storage import BFLOAT16, CODES, FLOAT16, FLOAT32, FLOAT64
from numbaflash.cpu.tiles import all_finite, pack_panel, pack_rows, unpack_panel

WIDTHS = [(32, 4), (32, 8), (32, 16), (64, 2), (64, 4), (64, 8)]
DTYPES = {32: np.float32, 64: np.float64}
STORED = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
VECTORS = 3


def static_of(bits, lanes, rows=4):
    return Static(bits=bits, size=bits // 8, lanes=lanes, vectors=VECTORS, rows=rows, panel=VECTORS * lanes)


def ids(width):
    return f"{width[1]}x{width[0]}"


@pytest.fixture(params=WIDTHS, ids=ids)
def width(request):
    return request.param


def address(array):
    return array.ctypes.data


# --------------------------------------------------------------------------------------------------- products


def products(mode, a, a_row, a_column, b, c, m, inner, extra, static):
    b_row = static.panel * static.size
    if mode == 0:
        gemm_set(static, a, a_row, a_column, b, b_row, c, b_row, m, inner, extra, b, b_row, 100)
    elif mode == 1:
        gemm_add(static, a, a_row, a_column, b, b_row, c, b_row, m, inner, extra, b, b_row, 100)
    elif mode == 2:
        gemm_rescale(static, a, a_row, a_column, b, b_row, c, b_row, m, inner, extra, b, b_row, 100)
    else:
        gemm_max(static, a, a_row, a_column, b, b_row, c, b_row, m, inner, extra, b, b_row, 100)


product_kernel = Kernel(products)


@pytest.mark.parametrize("rows", [3, 4, 8])
@pytest.mark.parametrize("bits, lanes", [(32, 8), (32, 16), (64, 4)])
def test_products_of_any_size_agree_with_numpy(bits, lanes, rows):
    static, dtype = static_of(bits, lanes, rows), DTYPES[bits]
    run = product_kernel.specialise((types.intp,) * 9, static)
    rng = np.random.default_rng(0)
    tolerance = 40 * np.finfo(dtype).eps
    for m, inner in [(0, 3), (1, 0), (1, 1), (5, 2), (8, 7), (17, 33), (24, 64)]:
        a, transposed = rng.standard_normal((m, inner)).astype(dtype), m % 2
        stored = np.asarray(a, order="F" if transposed else "C")
        b = rng.standard_normal((inner, static["panel"])).astype(dtype)
        c = rng.standard_normal((m, static["panel"])).astype(dtype)
        factors = rng.random(static["panel"]).astype(dtype)
        product = a.astype(float) @ b.astype(float)
        expected = [product, c + product, c * factors + product, product]
        for mode, exact in enumerate(expected):
            result, extra = c.copy(), factors.copy()
            run(mode, address(stored), *stored.strides, address(b), address(result), m, inner, address(extra), None)
            np.testing.assert_allclose(result, exact, atol=tolerance * max(1, inner**0.5))
            largest = np.maximum(factors, result.max(axis=0, initial=-np.inf)) if mode == 3 else factors
            np.testing.assert_array_equal(extra, largest)


# -------------------------------------------------------------------------------------------------- functions


def elementwise(name):
    """A kernel that applies one function of Lanes to an array."""

    @intrinsic
    def apply(typing_context, static, source, target, count):
        def generate(context, builder, signature, arguments):
            x = Lanes(context, builder, static)
            _, source, target, count = arguments

            def body(i, _):
                offset = x.times(i, x.size)
                value = getattr(x, name)(x.load(x.at(x.pointer(source), offset)))
                x.store(value, x.at(x.pointer(target), offset))
                return []

            x.loop(count, [], body, step=x.lanes)
            return context.get_dummy_value()

        return types.void(static, types.intp, types.intp, types.intp), generate

    def run(source, target, count, static):
        apply(static, source, target, count)

    return Kernel(run)


KERNELS = {name: elementwise(name) for name in ("exp2", "tanh", "log2")}


def apply(name, static, values):
    values = np.ascontiguousarray(values, DTYPES[static["bits"]])
    assert values.size % static["lanes"] == 0
    result = np.empty_like(values)
    entry = KERNELS[name].specialise((types.intp,) * 3, static)
    entry(address(values), address(result), values.size, None)
    return result


def relative_errors(name, values, results):
    exact = {"exp2": lambda x: mpmath.mpf(2) ** x, "tanh": mpmath.tanh, "log2": lambda x: mpmath.log(x, 2)}[name]
    with mpmath.workdps(40):
        errors = []
        for value, result in zip(values.tolist(), results.tolist()):
            true = exact(mpmath.mpf(value))
            errors.append(float(abs(mpmath.mpf(result) - true) / abs(true)) if true else float(result != 0))
    return max(errors)


@pytest.mark.parametrize("bits, lanes, bound", [(32, 8, 2.0e-7), (64, 4, 3.5e-16)])
@pytest.mark.parametrize("name, low, high", [
    ("exp2", -125.9, 0.0), ("exp2", -1.0, 0.0), ("tanh", -9.0, 9.0), ("tanh", -1.0, 1.0), ("log2", 1.5, 1e6),
])
def test_functions_are_exact_to_the_last_places(name, low, high, bits, lanes, bound):
    values = np.random.default_rng(0).uniform(low, high, 2000).astype(DTYPES[bits])
    assert relative_errors(name, values, apply(name, static_of(bits, lanes), values)) < bound


def test_exp2_at_its_ends(width):
    bits, _ = width
    static = static_of(*width)
    lowest = {32: -126, 64: -1022}[bits]
    values = np.array([0, -0.0, -np.inf, np.nan, lowest, lowest - 1, -1e30, -1] + [0] * 8, DTYPES[bits])
    result = apply("exp2", static, values)[:8]
    np.testing.assert_array_equal(result, [1, 1, 0, np.nan, 2.0**lowest, 0, 0, 0.5])


def test_exp2_keeps_nan_with_any_payload():
    values = np.full(16, 0x7FC00001, np.uint32).view(np.float32)
    assert np.isnan(apply("exp2", static_of(32, 8), values)).all()


def test_tanh_at_its_ends(width):
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 100, -100, 1e-30] * 2, DTYPES[width[0]])
    result = apply("tanh", static_of(*width), values)[:8]
    np.testing.assert_array_equal(result, np.tanh(values[:8]))


# ------------------------------------------------------------------------------------------------------ tiles


def pack(code, panel, rows, columns, stride, factor, static):
    if code == 1:
        pack_panel(static, FLOAT16, panel, rows, columns, stride, factor)
    elif code == 2:
        pack_panel(static, BFLOAT16, panel, rows, columns, stride, factor)
    elif code == 3:
        pack_panel(static, FLOAT32, panel, rows, columns, stride, factor)
    else:
        pack_panel(static, FLOAT64, panel, rows, columns, stride, factor)


def unpack(code, panel, rows, columns, stride, factors, static):
    if code == 1:
        unpack_panel(static, FLOAT16, panel, rows, columns, stride, factors)
    elif code == 2:
        unpack_panel(static, BFLOAT16, panel, rows, columns, stride, factors)
    elif code == 3:
        unpack_panel(static, FLOAT32, panel, rows, columns, stride, factors)
    else:
        unpack_panel(static, FLOAT64, panel, rows, columns, stride, factors)


def copy_rows(code, tile, tile_row, source, row_stride, column_stride, rows, columns, static):
    if code == 1:
        pack_rows(static, FLOAT16, tile, tile_row, source, row_stride, column_stride, rows, columns)
    elif code == 2:
        pack_rows(static, BFLOAT16, tile, tile_row, source, row_stride, column_stride, rows, columns)
    elif code == 3:
        pack_rows(static, FLOAT32, tile, tile_row, source, row_stride, column_stride, rows, columns)
    else:
        pack_rows(static, FLOAT64, tile, tile_row, source, row_stride, column_stride, rows, columns)


pack_kernel, unpack_kernel, copy_kernel = Kernel(pack), Kernel(unpack), Kernel(copy_rows)
LAYOUTS = [lambda x: x, lambda x: np.asfortranarray(x), lambda x: x[:, ::-1], lambda x: np.repeat(x, 2, 1)[:, ::2]]


@pytest.mark.parametrize("bits, lanes", [(32, 8), (32, 16), (64, 4)])
def test_a_panel_is_the_scaled_transpose_of_its_rows(bits, lanes):
    static, dtype = static_of(bits, lanes), DTYPES[bits]
    entry = pack_kernel.specialise((types.intp,) * 5 + (types.float32 if bits == 32 else types.float64,), static)
    rng = np.random.default_rng(0)
    for stored in STORED[: 3 if bits == 32 else 4]:
        for columns in (0, 1, lanes, 2 * lanes + 3):
            for layout in LAYOUTS:
                source = layout(rng.standard_normal((static["panel"], columns)).astype(stored))
                rows = address(source) + np.arange(len(source)) * source.strides[0]
                panel = np.full((columns, static["panel"]), np.nan, dtype)
                entry(CODES[stored], address(panel), address(rows), columns, source.strides[1], 0.5, None)
                np.testing.assert_array_equal(panel, 0.5 * source.T.astype(dtype))


@pytest.mark.parametrize("bits, lanes", [(32, 8), (32, 16), (64, 4)])
def test_output_rows_are_rounded_once(bits, lanes):
    static, dtype = static_of(bits, lanes), DTYPES[bits]
    entry = unpack_kernel.specialise((types.intp,) * 6, static)
    rng = np.random.default_rng(0)
    for stored in STORED:
        for columns in (1, lanes, 2 * lanes + 3):
            panel = (rng.standard_normal((columns, static["panel"])) * 10.0 ** rng.integers(-4, 4)).astype(dtype)
            factors = 2.0 ** rng.integers(-1, 2, static["panel"]).astype(dtype)
            exact = (panel * factors).T
            if stored == np.float16 and bits == 64:  # a hair above a tie of float16: two roundings would lose it
                panel[0], factors[:] = 1 + 2.0**-11 + 2.0**-40, 1
                exact = (panel * factors).T
            for layout in (lambda x: x, np.asfortranarray):
                out = layout(np.full(exact.shape, np.nan, stored))
                rows = address(out) + np.arange(len(out)) * out.strides[0]
                entry(CODES[stored], address(panel), address(rows), columns, out.strides[1], address(factors), None)
                np.testing.assert_array_equal(out, round_once(exact, stored))


def round_once(values, dtype):
    """NumPy rounds float64 to bfloat16 through float32: nudge ties away first."""
    if values.dtype == np.float64 and dtype == ml_dtypes.bfloat16:
        bits = values.view(np.uint64)
        values = ((bits >> 29 << 29) | np.where(bits & (2**29 - 1), np.uint64(1 << 29), np.uint64(0))).view(np.float64)
    return values.astype(dtype)


def test_bfloat16_rounds_as_ml_dtypes_does():
    static = static_of(32, 8)
    entry = unpack_kernel.specialise((types.intp,) * 6, static)
    bits = np.random.default_rng(0).integers(0, 2**32, 48 * static["panel"], dtype=np.uint32)
    bits[:4] = 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F7FFFFF
    panel = bits.view(np.float32).reshape(48, static["panel"])
    factors, out = np.ones(static["panel"], np.float32), np.empty(panel.shape[::-1], ml_dtypes.bfloat16)
    rows = address(out) + np.arange(len(out)) * out.strides[0]
    entry(BFLOAT16, address(panel), address(rows), 48, 2, address(factors), None)
    np.testing.assert_array_equal(out.astype(np.float32), panel.T.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("bits, lanes", [(32, 8), (64, 4)])
def test_rows_are_converted_from_any_strides(bits, lanes):
    static, dtype = static_of(bits, lanes), DTYPES[bits]
    entry = copy_kernel.specialise((types.intp,) * 8, static)
    rng = np.random.default_rng(0)
    for stored in STORED[: 3 if bits == 32 else 4]:
        for layout in LAYOUTS:
            source = layout(rng.standard_normal((7, 2 * lanes + 3)).astype(stored))
            tile = np.full(source.shape, np.nan, dtype)
            entry(CODES[stored], address(tile), tile.strides[0], address(source), *source.strides, *source.shape, None)
            np.testing.assert_array_equal(tile, source.astype(dtype))


def finite(tile, row_stride, rows, columns, static):
    return all_finite(static, tile, row_stride, rows, columns)


@pytest.mark.parametrize("bits, lanes", [(32, 8), (64, 4)])
def test_one_nonfinite_number_anywhere_is_found(bits, lanes):
    static, dtype = static_of(bits, lanes), DTYPES[bits]
    entry = Kernel(finite).specialise((types.intp,) * 4, static)
    tile = np.full((3, 2 * lanes + 3), np.finfo(dtype).max, dtype)
    assert entry(address(tile), tile.strides[0], *tile.shape, None)
    for at in np.ndindex(tile.shape):
        for bad in (np.nan, np.inf, -np.inf):
            dirty = tile.copy()
            dirty[at] = bad
            assert not entry(address(dirty), tile.strides[0], *tile.shape, None)
