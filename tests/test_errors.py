"""Bad calls are refused before any work: the right exception, the argument's name, nothing written."""

import ml_dtypes
import numpy as np
import pytest

import numbaflash

bfloat16 = np.dtype(ml_dtypes.bfloat16)
BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM, VALUE_DIM = 2, 4, 2, 5, 7, 8, 6
Q, K, V = (BATCH, HEADS, ROWS, DIM), (BATCH, KV_HEADS, KEYS, DIM), (BATCH, KV_HEADS, KEYS, VALUE_DIM)
OUT = (BATCH, HEADS, ROWS, VALUE_DIM)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


class Unreadable:
    """A value of no known kind."""

    def __repr__(self):
        return "<something>"


WRONG_CALLS = [
    # what is wrong, exception, argument that the message must name, changed arguments
    ("q a list", TypeError, "q", dict(q=[[1.0]])),
    ("k a list", TypeError, "k", dict(k=[[1.0]])),
    ("v a number", TypeError, "v", dict(v=1.0)),
    ("q None", TypeError, "q", dict(q=None)),
    ("q a masked array", TypeError, "q", dict(q=np.ma.ones(Q, np.float32))),
    ("q integers", TypeError, "q", dict(q=ones(*Q, dtype=np.int64))),
    ("q complex", TypeError, "q", dict(q=ones(*Q, dtype=np.complex64))),
    ("q long double", TypeError, "q", dict(q=ones(*Q, dtype=np.longdouble))),
    ("q booleans", TypeError, "q", dict(q=ones(*Q, dtype=bool))),
    ("q objects", TypeError, "q", dict(q=ones(*Q, dtype=object))),
    ("k of another dtype", TypeError, "k", dict(k=ones(*K, dtype=np.float64))),
    ("v of another dtype", TypeError, "v", dict(v=ones(*V, dtype=np.float16))),
    ("q of the other byte order", TypeError, "q", dict(q=ones(*Q, dtype=">f4"))),
    ("k of the other byte order", TypeError, "k", dict(k=ones(*K, dtype=">f4"))),
    (
        "q float8",
        NotImplementedError,
        "q",
        {name: ones(*shape).astype(ml_dtypes.float8_e4m3fn) for name, shape in zip("qkv", (Q, K, V))},
    ),
    ("q 1-D", ValueError, "q", dict(q=ones(8), k=ones(8), v=ones(8))),
    ("q 0-D", ValueError, "q", dict(q=ones(), k=ones(), v=ones())),
    ("q 5-D", ValueError, "q", {name: ones(1, *shape) for name, shape in zip("qkv", (Q, K, V))}),
    ("k with fewer dimensions", ValueError, "k", dict(k=ones(*K[1:]))),
    ("v with fewer dimensions", ValueError, "v", dict(v=ones(*V[1:]))),
    ("batches that differ", ValueError, "k", dict(k=ones(3, *K[1:]))),
    ("v's batch differs", ValueError, "v", dict(v=ones(1, *V[1:]))),
    ("heads that do not divide", ValueError, "q", dict(q=ones(2, 3, 5, 8))),
    ("more kv heads than heads", ValueError, "q", dict(q=ones(2, 1, 5, 8))),
    ("no kv heads", ValueError, "k", dict(k=ones(2, 0, 7, 8), v=ones(2, 0, 7, 6))),
    ("v with other heads", ValueError, "v", dict(v=ones(2, 4, 7, 6))),
    ("v with other keys", ValueError, "v", dict(v=ones(2, 2, 8, 6))),
    ("k with another head_dim", ValueError, "head_dim", dict(k=ones(2, 2, 7, 9))),
    ("layout unknown", ValueError, "layout", dict(layout="NHD")),
    ("layout not a string", ValueError, "layout", dict(layout=3)),
    ("precision unknown", ValueError, "precision", dict(precision="fast")),
    ("backend unknown", ValueError, "backend", dict(backend="gpu")),
    ("backend None", ValueError, "backend", dict(backend=None)),
    ("out_dtype an integer", TypeError, "out_dtype", dict(out_dtype=np.int32)),
    ("out_dtype nonsense", TypeError, "out_dtype", dict(out_dtype="half-ish")),
    ("out_dtype float8", TypeError, "out_dtype", dict(out_dtype=ml_dtypes.float8_e5m2)),
    ("causal a number", TypeError, "causal", dict(causal=1)),
    ("causal a string", TypeError, "causal", dict(causal="yes")),
    ("deterministic a number", TypeError, "deterministic", dict(deterministic=0)),
    ("window a number", TypeError, "window", dict(window=3)),
    ("window of one", TypeError, "window", dict(window=(3,))),
    ("window of three", TypeError, "window", dict(window=(3, 3, 3))),
    ("window a set", TypeError, "window", dict(window={1, 2})),
    ("window a dictionary", TypeError, "window", dict(window={1: 2, 3: 4})),
    ("window a string", TypeError, "window", dict(window="ab")),
    ("window of floats", TypeError, "window", dict(window=(1.0, 2))),
    ("window of booleans", TypeError, "window", dict(window=(True, 2))),
    ("window negative on the left", ValueError, "window", dict(window=(-1, 2))),
    ("window negative on the right", ValueError, "window", dict(window=(0, -2))),
    ("scale a string", TypeError, "scale", dict(scale="0.1")),
    ("scale a boolean", TypeError, "scale", dict(scale=True)),
    ("scale an array", TypeError, "scale", dict(scale=ones(2))),
    ("scale complex", TypeError, "scale", dict(scale=1j)),
    ("scale complex, of NumPy", TypeError, "scale", dict(scale=np.complex64(1))),
    ("scale a boolean, of NumPy", TypeError, "scale", dict(scale=np.array(True))),
    ("scale a string, of NumPy", TypeError, "scale", dict(scale=np.array("0.5"))),
    ("scale ragged", ValueError, "scale", dict(scale=[[1], [1, 2]])),
    ("scale of no kind", TypeError, "scale", dict(scale=Unreadable())),
    ("scale NaN", ValueError, "scale", dict(scale=float("nan"))),
    ("scale infinite", ValueError, "scale", dict(scale=np.inf)),
    ("softcap zero", ValueError, "softcap", dict(softcap=0)),
    ("softcap negative", ValueError, "softcap", dict(softcap=-1.0)),
    ("softcap NaN", ValueError, "softcap", dict(softcap=np.nan)),
    ("softcap a string", TypeError, "softcap", dict(softcap="30")),
    ("dropout_p 1", ValueError, "dropout_p", dict(dropout_p=1.0, seed=0)),
    ("dropout_p negative", ValueError, "dropout_p", dict(dropout_p=-0.1, seed=0)),
    ("dropout_p NaN", ValueError, "dropout_p", dict(dropout_p=np.nan, seed=0)),
    ("dropout_p a string", TypeError, "dropout_p", dict(dropout_p="0.1", seed=0)),
    ("dropout without a seed", ValueError, "seed", dict(dropout_p=0.1)),
    ("seed a float", TypeError, "seed", dict(dropout_p=0.1, seed=1.0)),
    ("seed a boolean", TypeError, "seed", dict(dropout_p=0.1, seed=True)),
    ("seed negative", ValueError, "seed", dict(dropout_p=0.1, seed=-1)),
    ("seed too large", ValueError, "seed", dict(dropout_p=0.1, seed=2**64)),
    ("sinks a list", TypeError, "sinks", dict(sinks=[0.0] * 4)),
    ("sinks integers", TypeError, "sinks", dict(sinks=ones(4, dtype=int))),
    ("sinks per kv head", ValueError, "sinks", dict(sinks=ones(2))),
    ("sinks per sequence", ValueError, "sinks", dict(sinks=ones(2, 4))),
    ("slopes strings", TypeError, "alibi_slopes", dict(alibi_slopes=["a"] * 4)),
    ("slopes complex", TypeError, "alibi_slopes", dict(alibi_slopes=ones(4, dtype=complex))),
    ("slopes booleans", TypeError, "alibi_slopes", dict(alibi_slopes=ones(4, dtype=bool))),
    ("slopes per kv head", ValueError, "alibi_slopes", dict(alibi_slopes=ones(2))),
    ("slopes of another batch", ValueError, "alibi_slopes", dict(alibi_slopes=ones(3, 4))),
    ("one slope", ValueError, "alibi_slopes", dict(alibi_slopes=0.5)),
    ("mask a list", TypeError, "mask", dict(mask=[[True] * 7] * 5)),
    ("mask a boolean", TypeError, "mask", dict(mask=True)),
    ("mask floating", TypeError, "bias", dict(mask=ones(5, 7))),
    ("mask of integers", TypeError, "mask", dict(mask=ones(5, 7, dtype=np.uint8))),
    ("mask that does not broadcast", ValueError, "mask", dict(mask=ones(5, 6, dtype=bool))),
    ("mask with five axes", ValueError, "mask", dict(mask=ones(1, 1, 1, 5, 7, dtype=bool))),
    ("mask of layout BNHD", ValueError, "mask", dict(mask=ones(2, 5, 4, 7, dtype=bool))),
    ("bias a list", TypeError, "bias", dict(bias=[[0.0] * 7] * 5)),
    ("bias boolean", TypeError, "mask", dict(bias=ones(5, 7, dtype=bool))),
    ("bias of integers", TypeError, "bias", dict(bias=ones(5, 7, dtype=int))),
    ("bias long double", TypeError, "bias", dict(bias=ones(5, 7, dtype=np.longdouble))),
    ("bias that does not broadcast", ValueError, "bias", dict(bias=ones(7, 5))),
    ("bias with five axes", ValueError, "bias", dict(bias=ones(1, 1, 1, 5, 7))),
    ("q_offset a float", TypeError, "q_offset", dict(q_offset=1.0)),
    ("q_offset a boolean", TypeError, "q_offset", dict(q_offset=True)),
    ("q_offset of floats", TypeError, "q_offset", dict(q_offset=[1.0, 2.0])),
    ("q_offset of another batch", ValueError, "q_offset", dict(q_offset=[1, 2, 3])),
    ("q_offset a matrix", ValueError, "q_offset", dict(q_offset=[[1, 2]])),
    ("q_offset huge", ValueError, "q_offset", dict(q_offset=2**41)),
    ("q_offset hugely negative", ValueError, "q_offset", dict(q_offset=-(2**70))),
    ("one q_offset huge", ValueError, "q_offset", dict(q_offset=[0, 2**41])),
    ("one q_offset beyond int64", (TypeError, ValueError), "q_offset", dict(q_offset=[0, 2**70])),
    (
        "one q_offset beyond int64, unsigned",
        ValueError,
        "q_offset",
        dict(q_offset=np.array([0, 2**64 - 1], np.uint64)),
    ),
    ("q_lengths too long", ValueError, "q_lengths", dict(q_lengths=[5, 6])),
    ("q_lengths negative", ValueError, "q_lengths", dict(q_lengths=[5, -1])),
    ("q_lengths of floats", TypeError, "q_lengths", dict(q_lengths=[5.0, 5.0])),
    ("q_lengths of booleans", TypeError, "q_lengths", dict(q_lengths=[True, False])),
    ("q_lengths of another batch", ValueError, "q_lengths", dict(q_lengths=[5, 5, 5])),
    ("kv_lengths too long", ValueError, "kv_lengths", dict(kv_lengths=[8, 7])),
    ("kv_lengths negative", ValueError, "kv_lengths", dict(kv_lengths=[-1, 7])),
    ("kv_lengths of floats", TypeError, "kv_lengths", dict(kv_lengths=[5.0, 5.0])),
    ("kv_lengths ragged", ValueError, "kv_lengths", dict(kv_lengths=[[5], [5, 6]])),
    ("kv_lengths a matrix", ValueError, "kv_lengths", dict(kv_lengths=[[5, 5]])),
    ("kv_lengths beyond int64", (TypeError, ValueError), "kv_lengths", dict(kv_lengths=[2**70, 1])),
    (
        "kv_lengths beyond int64, unsigned",
        ValueError,
        "kv_lengths",
        dict(kv_lengths=np.array([2**64 - 1, 1], np.uint64)),
    ),
    ("score_mod", NotImplementedError, "score_mod", dict(score_mod=lambda *x: x[0])),
    ("mask_mod", NotImplementedError, "mask_mod", dict(mask_mod=lambda *x: True)),
    ("mod_args", NotImplementedError, "mod_args", dict(mod_args=(1,))),
    ("score_mod_grad", NotImplementedError, "score_mod_grad", dict(score_mod_grad=lambda *x: x[0])),
    ("mod_args_grad", NotImplementedError, "mod_args_grad", dict(mod_args_grad=True)),
    ("block_mask", NotImplementedError, "block_mask", dict(block_mask=object())),
    ("q_descale", NotImplementedError, "q_descale", dict(q_descale=1.0)),
    ("k_descale", NotImplementedError, "k_descale", dict(k_descale=1.0)),
    ("v_descale", NotImplementedError, "v_descale", dict(v_descale=1.0)),
    ("config", TypeError, "config", dict(config={})),
]
WRONG_CALLS += [
    (
        "kv_lengths without a place for the queries, " + name,
        ValueError,
        "q_lengths",
        dict(kv_lengths=[4, 7], **option),
    )
    for name, option in [
        ("causal", dict(causal=True)),
        ("window", dict(window=(2, None))),
        ("alibi", dict(alibi_slopes=ones(4))),
    ]
]
RIGHT_CALLS = [
    ("kv_lengths alone", dict(kv_lengths=[4, 7])),
    ("kv_lengths with an offset", dict(kv_lengths=[4, 7], causal=True, q_offset=2)),
    ("kv_lengths with q_lengths", dict(kv_lengths=[4, 7], causal=True, q_lengths=[4, 5])),
    ("kv_lengths no shorter than the queries", dict(kv_lengths=[5, 6], causal=True)),
    ("lists of lengths and slopes", dict(kv_lengths=[4, 7], q_lengths=(5, 5), alibi_slopes=[1, 2, 3, 4])),
    (
        "NumPy scalars",
        dict(causal=np.True_, scale=np.float32(0.5), q_offset=np.int32(1), window=(np.int8(1), None)),
    ),
    ("a scalar length", dict(q_lengths=3, kv_lengths=np.int64(6))),
    ("an open window", dict(window=(None, None))),
    ("a list for the window", dict(window=[2, 3])),
    ("unsigned lengths", dict(kv_lengths=np.array([4, 7], np.uint8), q_lengths=np.array([1, 2], np.uint64))),
    (
        "bfloat16 bias and slopes",
        dict(bias=ones(5, 7).astype(bfloat16), alibi_slopes=ones(4).astype(bfloat16)),
    ),
    ("numbers as 0-d arrays", dict(scale=np.array(0.5), softcap=np.array(3, np.float32))),
    ("a seed without dropout", dict(seed=2**64 - 1)),
    ("validate", dict(validate=True)),
]


def arguments(changed):
    return dict(q=ones(*Q), k=ones(*K), v=ones(*V)) | changed


@pytest.mark.parametrize("what, error, name, changed", WRONG_CALLS, ids=[call[0] for call in WRONG_CALLS])
def test_a_wrong_call_is_refused_by_every_entry_before_anything_is_written(what, error, name, changed):
    given = arguments(changed)
    out = np.full(OUT, 7.0, np.float32)
    with pytest.raises(error, match=rf"\b{name}\b"):
        numbaflash.attention(**given, out=out)
    assert (out == 7).all()
    with pytest.raises(error, match=rf"\b{name}\b"):
        numbaflash.attention_vjp(**given)
    with pytest.raises(error, match=rf"\b{name}\b"):
        numbaflash.attention_backward(out, **given | dict(out=out, lse=ones(*OUT[:3])))


@pytest.mark.parametrize("what, changed", RIGHT_CALLS, ids=[call[0] for call in RIGHT_CALLS])
def test_what_looks_alike_but_is_right_is_taken(what, changed):
    out = numbaflash.attention(**arguments(changed))
    assert out.shape == OUT and np.isfinite(out).all()


TOTAL_Q, TOTAL_K = 10, 12
WRONG_PACKED_CALLS = [
    ("cu_seqlens_q floats", TypeError, "cu_seqlens_q", dict(cu_seqlens_q=np.array([0.0, 10.0]))),
    ("cu_seqlens_k of int16", TypeError, "cu_seqlens_k", dict(cu_seqlens_k=np.array([0, 5, 12], np.int16))),
    ("cu_seqlens_q unsigned", TypeError, "cu_seqlens_q", dict(cu_seqlens_q=np.array([0, 5, 10], np.uint32))),
    ("cu_seqlens_q a number", ValueError, "cu_seqlens_q", dict(cu_seqlens_q=np.int64(10))),
    ("cu_seqlens_q a matrix", ValueError, "cu_seqlens_q", dict(cu_seqlens_q=np.array([[0, 5, 10]]))),
    ("cu_seqlens_q empty", ValueError, "cu_seqlens_q", dict(cu_seqlens_q=np.array([], np.int64))),
    ("cu_seqlens_q not from 0", ValueError, "cu_seqlens_q", dict(cu_seqlens_q=np.array([1, 5, 10]))),
    ("cu_seqlens_k decreasing", ValueError, "cu_seqlens_k", dict(cu_seqlens_k=np.array([0, 7, 5]))),
    ("cu_seqlens_k past the end", ValueError, "cu_seqlens_k", dict(cu_seqlens_k=np.array([0, 7, 13]))),
    ("cu_seqlens_k negative", ValueError, "cu_seqlens_k", dict(cu_seqlens_k=np.array([0, -7, 3]))),
    (
        "cu_seqlens of different lengths",
        ValueError,
        "cu_seqlens_k",
        dict(cu_seqlens_k=np.array([0, 7, 8, 9])),
    ),
    ("cu_seqlens_k missing", TypeError, "cu_seqlens_k", dict(cu_seqlens_k=None)),
    ("cu_seqlens_q missing", TypeError, "cu_seqlens_q", dict(cu_seqlens_q=None)),
    ("layout given", ValueError, "layout", dict(layout="BNHD")),
    ("q with a batch axis", ValueError, "q", dict(q=ones(1, TOTAL_Q, 4, 8))),
    ("k 2-D", ValueError, "k", dict(k=ones(TOTAL_K, 8))),
    ("v 4-D", ValueError, "v", dict(v=ones(1, TOTAL_K, 2, 6))),
    ("k and v of different totals", ValueError, "v", dict(v=ones(TOTAL_K + 1, 2, 6))),
    ("q_lengths too long", ValueError, "q_lengths", dict(q_lengths=[5, 6])),
    ("kv_lengths per row", ValueError, "kv_lengths", dict(kv_lengths=[1] * TOTAL_K)),
    ("q_offset per row", ValueError, "q_offset", dict(q_offset=[0] * TOTAL_Q)),
    ("mask for all rows", ValueError, "mask", dict(mask=ones(TOTAL_Q, TOTAL_K, dtype=bool))),
    ("bias for all rows", ValueError, "bias", dict(bias=ones(TOTAL_Q, TOTAL_K))),
    ("slopes of another count", ValueError, "alibi_slopes", dict(alibi_slopes=ones(3, 4))),
    (
        "kv_lengths without a place for the queries",
        ValueError,
        "q_lengths",
        dict(kv_lengths=[2, 7], causal=True),
    ),
]


@pytest.mark.parametrize(
    "what, error, name, changed", WRONG_PACKED_CALLS, ids=[c[0] for c in WRONG_PACKED_CALLS]
)
def test_a_wrong_packed_call_is_refused(what, error, name, changed):
    given = (
        dict(
            q=ones(TOTAL_Q, 4, 8),
            k=ones(TOTAL_K, 2, 8),
            v=ones(TOTAL_K, 2, 6),
            cu_seqlens_q=np.array([0, 5, 10]),
            cu_seqlens_k=np.array([0, 5, 12], np.int32),
        )
        | changed
    )
    out = np.full((TOTAL_Q, 4, 6), 7.0, np.float32)
    with pytest.raises(error, match=rf"\b{name}\b"):
        numbaflash.attention_varlen(**given, out=out)
    assert (out == 7).all()
    with pytest.raises(error, match=rf"\b{name}\b"):
        numbaflash.attention_backward(out, **given, out=out, lse=ones(4, TOTAL_Q))
    with pytest.raises(error, match=rf"\b{name}\b"):
        numbaflash.attention_vjp(**given)


WRONG_OUT = [
    ("a list", TypeError, lambda q, k, v: [[0.0]]),
    ("another shape", ValueError, lambda q, k, v: ones(*OUT[:3], 7)),
    ("another layout", ValueError, lambda q, k, v: ones(BATCH, ROWS, HEADS, VALUE_DIM)),
    ("a shape that broadcasts", ValueError, lambda q, k, v: ones(1, *OUT[1:])),
    ("another dtype", TypeError, lambda q, k, v: ones(*OUT, dtype=np.float64)),
    ("read-only", ValueError, lambda q, k, v: np.broadcast_to(ones(), OUT)),
    (
        "a broadcast axis",
        ValueError,
        lambda q, k, v: np.lib.stride_tricks.as_strided(ones(6), OUT, (0, 0, 0, 4)),
    ),
    ("over q", ValueError, lambda q, k, v: q[..., :VALUE_DIM]),
    ("over v", ValueError, lambda q, k, v: np.lib.stride_tricks.as_strided(v, OUT, (0,) * 3 + (4,))),
]


@pytest.mark.parametrize("what, error, make", WRONG_OUT, ids=[call[0] for call in WRONG_OUT])
def test_a_wrong_out_is_refused_and_not_written(what, error, make):
    q, k, v = ones(*Q), ones(*K), ones(*V)
    out = make(q, k, v)
    with pytest.raises(error, match=r"\bout\b"):
        numbaflash.attention(2 * q if what != "over q" else q, k, v, out=out)
    assert all((x == 1).all() for x in (q, k, v))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "sinks", "alibi_slopes"])
def test_out_over_any_input_is_refused(name):
    size = max(np.prod(Q), np.prod(K), np.prod(OUT), 2 * 4 * 5 * 7)
    memory = np.zeros(4 * size, np.float32)
    shape = dict(q=Q, k=K, v=V, bias=(2, 4, 5, 7), mask=(2, 4, 5, 7), sinks=(4,), alibi_slopes=(4,))[name]
    array = memory.view(bool if name == "mask" else np.float32)[: np.prod(shape)].reshape(shape)
    out = memory[: np.prod(OUT)].reshape(OUT)
    given = arguments({name: array})
    with pytest.raises(ValueError, match=rf"\bout\b.*\b{name}\b"):
        numbaflash.attention(**given, out=out)
    beside = memory[2 * size :][: np.prod(OUT)].reshape(OUT)
    assert numbaflash.attention(**given, out=beside) is beside


WRONG_BACKWARD = [
    ("dout a list", TypeError, "dout", dict(dout=[1.0])),
    ("dout None", TypeError, "dout", dict(dout=None)),
    ("dout of another shape", ValueError, "dout", dict(dout=ones(*Q))),
    ("dout of another dtype", TypeError, "dout", dict(dout=ones(*OUT, dtype=np.float64))),
    ("out of another shape", ValueError, "out", dict(out=ones(*OUT[1:]))),
    ("out of another dtype", TypeError, "out", dict(out=ones(*OUT, dtype=np.float16))),
    ("out None", TypeError, "out", dict(out=None)),
    ("lse of another shape", ValueError, "lse", dict(lse=ones(BATCH, ROWS, HEADS))),
    ("lse of another dtype", TypeError, "lse", dict(lse=ones(*OUT[:3], dtype=np.float64))),
    ("lse None", TypeError, "lse", dict(lse=None)),
    ("dlse of another shape", ValueError, "dlse", dict(dlse=ones(*OUT[:3], 1))),
    ("dlse of another dtype", TypeError, "dlse", dict(dlse=ones(*OUT[:3], dtype=np.float16))),
    ("dlse a number", TypeError, "dlse", dict(dlse=0.0)),
    ("an unknown option", TypeError, "casual", dict(casual=True)),
    ("return_lse", TypeError, "return_lse", dict(return_lse=True)),
]


@pytest.mark.parametrize(
    "what, error, name, changed", WRONG_BACKWARD, ids=[call[0] for call in WRONG_BACKWARD]
)
def test_a_wrong_backward_call_is_refused(what, error, name, changed):
    given = (
        dict(dout=ones(*OUT), q=ones(*Q), k=ones(*K), v=ones(*V), out=ones(*OUT), lse=ones(*OUT[:3]))
        | changed
    )
    with pytest.raises(error, match=rf"\b{name}\b"):
        numbaflash.attention_backward(**given)


def test_the_vjp_checks_what_it_is_given():
    q, k, v = ones(*Q), ones(*K), ones(*V)
    _, vjp = numbaflash.attention_vjp(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r"\bdout\b"):
        vjp(ones(*Q))
    with pytest.raises(TypeError, match=r"\bdlse\b"):
        vjp(ones(*OUT), ones(*OUT[:3], dtype=np.float64))


def test_unknown_options_are_refused_by_name():
    q, k, v = ones(*Q), ones(*K), ones(*V)
    cu = np.array([0, 2])
    for call in (
        lambda: numbaflash.attention(q, k, v, casual=True),
        lambda: numbaflash.attention_vjp(q, k, v, casual=True),
        lambda: numbaflash.attention_varlen(q[0], k[0], v[0], cu, cu, casual=True),
    ):
        with pytest.raises(TypeError, match="casual"):
            call()


def test_a_stream_is_for_device_arrays():
    q = ones(3, 2)
    with pytest.raises(ValueError, match=r"\bstream\b"):
        numbaflash.attention(q, q, q, stream=0)
    with pytest.raises(ValueError, match=r"\bstream\b"):
        numbaflash.attention_vjp(q, q, q, stream=0)
    with pytest.raises(ValueError, match=r"\bstream\b"):
        numbaflash.attention_backward(q, q, q, q, q, ones(3), stream=0)


def test_mixed_kinds_of_arrays_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"\bk\b.*torch"):
        numbaflash.attention(ones(3, 2), torch.ones(3, 2), ones(3, 2))
    with pytest.raises(TypeError, match=r"\bbias\b.*torch"):
        numbaflash.attention(ones(3, 2), ones(3, 2), ones(3, 2), bias=torch.ones(3, 3))


NONSENSE = dict(
    matrix=ones(3, 2), character=np.array("x"), text="text", object=object(), inf=float("inf"), huge=10**400
)


@pytest.mark.parametrize("value", NONSENSE.values(), ids=NONSENSE.keys())
@pytest.mark.parametrize(
    "name",
    [
        "causal",
        "window",
        "q_offset",
        "scale",
        "softcap",
        "bias",
        "mask",
        "alibi_slopes",
        "sinks",
        "q_lengths",
        "kv_lengths",
        "dropout_p",
        "seed",
        "layout",
        "out_dtype",
        "precision",
        "deterministic",
        "backend",
    ],
)
def test_nonsense_is_never_anything_but_a_type_or_value_error(name, value):
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        numbaflash.attention(ones(*Q), ones(*K), ones(*V), **{name: value})
