"""A call like an earlier one goes straight to the kernel, and nobody can tell except by a clock."""

import weakref

import numpy as np
import pytest

import numbaflash
from numbaflash import replay
from numbaflash.cpu.threads import get_num_threads, set_num_threads


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(replay, "_known", {})


def arrays(seed, *shapes, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


SHAPES = {
    "one query": ((1, 1, 1, 64),) * 3,
    "blocks": ((2, 4, 70, 40), (2, 2, 90, 40), (2, 2, 90, 24)),
    "split cache": ((1, 8, 1, 64), (1, 2, 6000, 64), (1, 2, 6000, 64)),
    "2-D": ((30, 16), (40, 16), (40, 16)),
    "3-D": ((3, 30, 16), (3, 40, 16), (3, 40, 16)),
}


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_repeated_call_gives_what_a_first_one_gives(shapes, layout):
    if layout == "BNHD" and len(shapes[0]) > 2:
        shapes = [(*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in shapes]
    options = dict(causal=True, scale=0.3, layout=layout, return_lse=True, backend="cpu")
    numbaflash.attention(*arrays(0, *shapes), **options)
    assert len(replay._known) == 1
    q, k, v = arrays(1, *shapes)
    again = numbaflash.attention(q, k, v, **options)
    assert len(replay._known) == 1
    replay._known.clear()
    for mine, first in zip(again, numbaflash.attention(q, k, v, **options)):
        np.testing.assert_array_equal(mine, first)
        assert mine.strides == first.strides and mine.dtype == first.dtype


def gradients(seed, shapes, dlse=False, **options):
    """Gradients by the call and by vjp, of a dout that is no contiguous array."""
    q, k, v = arrays(seed, *shapes)
    out, lse = numbaflash.attention(q, k, v, return_lse=True, **options)
    dout, = arrays(seed + 1, (*out.shape[:-1], 2 * out.shape[-1]))
    dout, dlse = dout[..., ::2], lse + 1 if dlse else None
    _, vjp = numbaflash.attention_vjp(q, k, v, return_lse=True, **options)
    for found in numbaflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options), vjp(dout, dlse):
        assert found.dbias is None and found.dsinks is None
        yield from found


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_repeated_backward_call_gives_what_a_first_one_gives(shapes, layout, dlse):
    if layout == "BNHD" and len(shapes[0]) > 2:
        shapes = [(*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in shapes]
    options = dict(causal=True, scale=0.3, layout=layout, backend="cpu")
    list(gradients(0, shapes, dlse, **options))
    known = len(replay._known)
    again = list(gradients(2, shapes, dlse, **options))
    assert known == len(replay._known) == 2
    replay._known.clear()
    for mine, first in zip(again, gradients(2, shapes, dlse, **options), strict=True):
        np.testing.assert_array_equal(mine, first)
        assert mine.strides == first.strides and mine.dtype == first.dtype


def test_results_of_repeated_calls_share_no_memory():
    q, k, v = arrays(0, *SHAPES["blocks"])
    first, second = numbaflash.attention(q, k, v), numbaflash.attention(q, k, v)
    assert not np.shares_memory(first, second)
    out, vjp = numbaflash.attention_vjp(q, k, v)
    for one, other in zip(vjp(out), vjp(out)):
        assert not np.shares_memory(one, other)


@pytest.mark.parametrize(
    "wrong", [dict(causal=1), dict(causal=True, dlse=0.0), dict(causal=True, dlse=np.zeros((2, 4, 70), np.float16)),
              dict(causal=True, nonsense=1), dict(causal=True, stream=1)], ids=str
)
def test_a_wrong_argument_of_a_backward_call_like_a_right_one_is_still_refused(wrong):
    q, k, v = arrays(0, *SHAPES["blocks"])
    out, lse = numbaflash.attention(q, k, v, causal=True, return_lse=True)
    for _ in range(2):
        numbaflash.attention_backward(out, q, k, v, out, lse, causal=True)
    with pytest.raises((TypeError, ValueError)):
        numbaflash.attention_backward(out, q, k, v, out, lse, **wrong)
    with pytest.raises(ValueError, match="dout"):
        numbaflash.attention_backward(out[:, :2], q, k, v, out, lse, causal=True)
    with pytest.raises(TypeError, match="dout"):
        numbaflash.attention_backward(out.astype(np.float64), q, k, v, out, lse, causal=True)


@pytest.mark.parametrize(
    "name, good, wrong",
    [("causal", True, 1), ("causal", False, 0), ("deterministic", True, 1.0), ("q_offset", 1, True), ("q_offset", 1, 1.0),
     ("window", (1, 0), (True, False)), ("dropout_p", 0.0, False), ("softcap", 1.0, True), ("q_lengths", 3, 3.0),
     ("q_lengths", (3,), (3.0,)), ("seed", 1, True), ("return_lse", True, 1)],
)
def test_a_wrong_argument_that_equals_a_right_one_is_still_refused(name, good, wrong):
    q, k, v = arrays(0, (1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    numbaflash.attention(q, k, v, **{name: good})
    with pytest.raises(TypeError, match=name):
        numbaflash.attention(q, k, v, **{name: wrong})


def test_another_number_of_threads_and_another_tuning_are_noticed():
    q, k, v = arrays(0, *SHAPES["blocks"])
    numbaflash.attention(q, k, v)
    (known,) = replay._known.values()
    assert known.is_current()
    threads = get_num_threads()
    try:
        set_num_threads(threads + 1)
        assert not known.is_current()
        numbaflash.attention(q, k, v)
        assert next(iter(replay._known.values())).is_current()
    finally:
        set_num_threads(threads)
    from numbaflash.cpu import forward

    forward.forget()
    assert not next(iter(replay._known.values())).is_current()


def test_calls_with_arrays_among_the_options_or_a_seed_are_not_kept():
    q, k, v = arrays(0, *SHAPES["blocks"])
    numbaflash.attention(q, k, v, mask=np.ones((1, 1, 70, 90), bool))
    numbaflash.attention(q, k, v, sinks=np.zeros(4, np.float32))
    numbaflash.attention(q, k, v, kv_lengths=[90, 80])
    numbaflash.attention(q, k, v, dropout_p=0.5, seed=3)
    numbaflash.attention(q[:, :, :0], k, v)
    for options in (dict(bias=np.zeros((70, 90), np.float32)), dict(window=(3, 0)), dict(dropout_p=0.5, seed=3)):
        out, vjp = numbaflash.attention_vjp(q, k, v, **options)
        vjp(out)
    assert not replay._known


def test_no_array_is_kept_alive():
    q, k, v = arrays(0, *SHAPES["one query"])  # no other thread that could hold them a little longer
    out, lse = numbaflash.attention(q, k, v, return_lse=True)
    dq, dk, dv = numbaflash.attention_backward(out, q, k, v, out, lse)
    watched = [weakref.ref(array) for array in (q, k, v, out, lse, dq, dk, dv)]
    del q, k, v, out, lse, dq, dk, dv
    assert [ref() is None for ref in watched] == [True] * 8
    assert replay._known


def test_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(replay, "_MOST_KNOWN", 4)
    q, k, v = arrays(0, *SHAPES["one query"])
    for scale in range(1, 12):
        numbaflash.attention(q, k, v, scale=float(scale))
        assert len(replay._known) <= 4
