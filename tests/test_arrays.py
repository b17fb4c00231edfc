"""Arrays in and out: inputs unchanged, outputs fully written, any strides, the caller's shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import EVERY_DTYPE, MEMORY, Variant, calls, f32, in_memory, variants

import numbaflash


@pytest.mark.slow
def test_inputs_are_never_written(backend):
    @settings(max_examples=max(1, int(30 * backend.examples)))
    @given(variants.flatmap(lambda variant: calls(backend._replace(rows=100), variant=variant)))
    def unchanged(call):
        before = [array.tobytes() for array in call.arrays()]
        out, lse = call.forward(backend.name)
        results = out.tobytes(), lse.tobytes()
        call.backward(backend.name, out, lse)
        assert [array.tobytes() for array in call.arrays()] == before
        assert (out.tobytes(), lse.tobytes()) == results

    unchanged()


def test_read_only_inputs_are_fine(backend):
    arrays = np.random.default_rng(0).standard_normal((3, 2, 30, 8), dtype=np.float32)
    arrays.flags.writeable = False
    out, vjp = numbaflash.attention_vjp(
        *arrays, sinks=arrays[0, 0, 0, :2], bias=arrays[1, 0, :1, :1], backend=backend.name
    )
    out.flags.writeable = False
    vjp(out)


@pytest.mark.emulated
def test_a_poisoned_out_is_fully_written_and_returned(backend):
    @settings(max_examples=max(1, int(30 * backend.examples)))
    @given(calls(backend, variant=Variant(f32)))
    def written(call):
        wanted, lse = call.forward(backend.name)
        for form in ("contiguous", "transposed", "negative", "sliced", "offset"):
            out = in_memory(np.full_like(wanted, np.nan), form, axis=1)
            result, result_lse = call.forward(backend.name, out=out)
            assert result is out
            np.testing.assert_array_equal(out, wanted)
            np.testing.assert_array_equal(result_lse, lse)

    written()


def test_out_is_written_nowhere_else(backend):
    memory = np.full((4, 100, 80), 7.0, np.float32)
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 40), dtype=np.float32)
    out = memory[1:3, 20:70, 10:50]
    numbaflash.attention(q, k, v, out=out, backend=backend.name)
    assert (memory == 7).sum() == memory.size - out.size


def test_outputs_are_c_contiguous_in_the_layout_asked_for(backend):
    @settings(max_examples=max(1, int(30 * backend.examples)))
    @given(calls(backend._replace(rows=60), variant=Variant(f32, frozenset({"bias"}))))
    def contiguous(call):
        out, lse = call.forward(backend.name)
        gradients = call.backward(backend.name, out, lse)
        assert out.shape == call.dout.shape
        for array in (out, lse, *gradients, gradients.dbias):
            assert type(array) is np.ndarray and array.flags.c_contiguous and array.flags.writeable
        for gradient, array in zip(
            (*gradients, gradients.dbias), (call.q, call.k, call.v, call.options["bias"])
        ):
            assert gradient.shape == array.shape and gradient.dtype == array.dtype

    contiguous()


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("form", MEMORY)
@pytest.mark.parametrize("axis", range(4))
def test_strides_never_change_a_bit(backend, form, axis, dtype):
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal(shape).astype(dtype)
        for shape in [(2, 4, 37, 24), (2, 2, 41, 24), (2, 2, 41, 20), (2, 4, 37, 20)]
    )
    laid = [in_memory(x, form, axis) for x in (q, k, v, dout)]
    plain = [np.array(x) for x in laid]
    options = dict(causal=True, return_lse=True, backend=backend.name)
    (out, lse), vjp = numbaflash.attention_vjp(*laid[:3], **options)
    (plain_out, plain_lse), plain_vjp = numbaflash.attention_vjp(*plain[:3], **options)
    for ours, theirs in zip((out, lse, *vjp(laid[3])), (plain_out, plain_lse, *plain_vjp(plain[3]))):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_fields_of_structured_arrays(backend, dtype):
    """Strides that are no multiple of the item size, and addresses that are not aligned."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 30, 8)).astype(dtype)
    packed = np.zeros((3, 2, 30, 8), [("tag", "u1"), ("x", dtype)])
    packed["x"] = [q, k, v]
    laid = packed["x"]
    assert not laid.flags.aligned or np.dtype(dtype).alignment == 1
    out, vjp = numbaflash.attention_vjp(*laid, backend=backend.name)
    plain_out, plain_vjp = numbaflash.attention_vjp(q, k, v, backend=backend.name)
    for ours, theirs in zip((out, *vjp(out)), (plain_out, *plain_vjp(out))):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.emulated
@pytest.mark.parametrize("form", MEMORY)
def test_bias_mask_and_dlse_may_lie_anyhow(backend, form):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 3, 40, 8), dtype=np.float32)
    bias, mask = rng.standard_normal((2, 3, 40, 40), dtype=np.float32), rng.random((2, 3, 40, 40)) < 0.8
    dlse, sinks = rng.standard_normal((2, 3, 40), dtype=np.float32), rng.standard_normal(3, dtype=np.float32)
    laid = [in_memory(x, form, axis=1) for x in (bias, mask, dlse, sinks)]
    results = []
    for bias, mask, dlse, sinks in (laid, [np.array(x) for x in laid]):
        (out, lse), vjp = numbaflash.attention_vjp(
            q, k, v, bias=bias, mask=mask, sinks=sinks, return_lse=True, backend=backend.name
        )
        gradients = vjp(in_memory(out, "negative"), dlse)
        results.append([out, lse, *gradients, gradients.dbias, gradients.dsinks])
    for ours, theirs in zip(*results):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.emulated
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_fewer_dimensions_are_the_same_call(backend, layout):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 1, 1, 30, 8), dtype=np.float32)
    out, lse = numbaflash.attention(*x, causal=True, return_lse=True, backend=backend.name)
    two, two_lse = numbaflash.attention(
        *x[:, 0, 0], causal=True, return_lse=True, layout=layout, backend=backend.name
    )
    three = x[:, 0] if layout == "BHND" else x[:, 0].swapaxes(1, 2)
    three, three_lse = numbaflash.attention(
        *three, causal=True, return_lse=True, layout=layout, backend=backend.name
    )
    np.testing.assert_array_equal(two, out[0, 0])
    np.testing.assert_array_equal(two_lse, lse[0, 0])
    assert three.shape == ((1, 30, 8) if layout == "BHND" else (30, 1, 8)) and three_lse.shape == (1, 30)
    np.testing.assert_array_equal(three.reshape(30, 8), out[0, 0])


def test_subclasses_come_back_as_plain_arrays(backend, tmp_path):
    class Tagged(np.ndarray):
        pass

    x = np.random.default_rng(0).standard_normal((3, 20, 8), dtype=np.float32)
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=x.shape)
    mapped[:] = x
    wanted = numbaflash.attention(*x, backend=backend.name)
    for given_ in (x.view(Tagged), mapped):
        out = numbaflash.attention(*given_, backend=backend.name)
        assert type(out) is np.ndarray
        np.testing.assert_array_equal(out, wanted)


def test_inputs_may_be_one_array(backend):
    x = np.random.default_rng(0).standard_normal((2, 30, 8), dtype=np.float32)
    out, vjp = numbaflash.attention_vjp(x, x, x, backend=backend.name)
    again, again_vjp = numbaflash.attention_vjp(x, x.copy(), x.copy(), backend=backend.name)
    for ours, theirs in zip((out, *vjp(x)), (again, *again_vjp(x.copy()))):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(backend):
    """A broadcast array of 2**31 elements and more: indices must not wrap."""
    if backend.name != "cpu":
        pytest.skip("sized for the CPU")
    heads, keys = 3, 2**25
    k = np.broadcast_to(np.float16(0), (heads, keys, 32))
    v = np.broadcast_to(np.ones(1, np.float16), (heads, keys, 1))
    q = np.zeros((heads, 1, 32), np.float16)
    out, lse = numbaflash.attention(q, k, v, return_lse=True, kv_lengths=None, backend="cpu")
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_allclose(lse, np.log(keys), rtol=1e-6)


def test_out_may_not_overwrite_lengths():
    memory = np.zeros(60, np.float32)
    lengths = memory[:2].view(np.int64)
    lengths[0] = 3
    q = np.ones((1, 2, 5, 6), np.float32)
    with pytest.raises(ValueError, match="out overlaps kv_lengths"):
        numbaflash.attention(q, q, q, kv_lengths=lengths, out=memory.reshape(1, 2, 5, 6))
    assert lengths[0] == 3


def test_out_may_not_overlap_itself():
    q = np.ones((1, 2, 5, 6), np.float32)
    out = np.lib.stride_tricks.as_strided(np.zeros(60, np.float32), (1, 2, 5, 6), (0, 24, 4, 4))
    with pytest.raises(ValueError, match="out overlaps itself"):
        numbaflash.attention(q, q, q, out=out)


def test_a_wrong_return_lse_is_refused_before_out_is_written():
    q = np.ones((1, 2, 5, 6), np.float32)
    out = np.zeros_like(q)
    with pytest.raises(TypeError, match="return_lse"):
        numbaflash.attention(q, q, q, out=out, return_lse=np.ones(2))
    assert not out.any()
