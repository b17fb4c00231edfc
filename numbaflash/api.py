"""The public calls: thin, each one Options -> Problem -> backend."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from . import backend as backends
from . import replay
from . import segments as seg
from .arrays import Home, adopt, host_values
from .device import DeviceView
from .options import Gradients, Options
from .problem import Problem, _boolean, head_major, make_problem

TABLES = ("sinks", "alibi_slopes", "q_offset", "q_lengths", "kv_lengths")
"""Options that are small arrays, read before the work."""


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Sequence[int] | np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    mod_args: tuple = (),
    score_mod_grad: Callable | None = None,
    mod_args_grad: bool = False,
    block_mask: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    layout: str = "BHND",
    return_lse: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    precision: str = "ieee",
    deterministic: bool = False,
    validate: bool = False,
    backend: str = "auto",
    config: Any = None,
    stream: Any = None,
) -> Any:
    """Exact attention, ``softmax(scale * q @ k.T) @ v``, without the N x N matrix in memory.

    Parameters
    ----------
    q : ndarray, shape (B, H, Nq, D)
        Queries: float16, bfloat16 (ml_dtypes), float32 or float64, with any strides. (N, D) and (H, N, D) work
        too, for q, k and v together, and come back as such.
    k, v : ndarray, shapes (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv)
        Keys and values, of q's dtype. H must be a multiple of Hkv; query head h reads KV head
        ``h // (H // Hkv)`` (grouped-query attention). Dv may differ from D.
    causal : bool
        Query i sees keys ``j <= i + q_offset``.
    window : (left, right), optional
        Query i sees keys ``i + q_offset - left <= j <= i + q_offset + right``; None leaves a side open.
    q_offset : int or (B,) ints, optional
        Where query 0 stands on the key axis, for causal, window and ALiBi. None is ``k_length - q_length``: the
        last query stands at the last key, as FlashAttention and every KV cache have it. 0 is the top-left corner,
        as torch's SDPA, JAX and ONNX have it. The two agree where there are as many queries as keys.
    scale : float, optional
        Factor of the scores; None is ``1 / sqrt(D)``.
    softcap : float, optional
        Scores s become ``softcap * tanh(s / softcap)``.
    bias : floating ndarray, optional
        Added to the scaled and capped scores; broadcasts like NumPy against (B, H, Nq, Nk). -inf hides a pair.
    mask : boolean ndarray, optional
        True = visible; broadcasts like bias.
    alibi_slopes : (H,) or (B, H) numbers, optional
        ALiBi: ``-slope * abs(i + q_offset - j)`` is added to the scores.
    sinks : (H,) floating ndarray, optional
        Attention sinks: one more logit per head in the denominator, without a value.
    q_lengths, kv_lengths : (B,) ints, optional
        Padded batches: only the first queries and keys of each sequence exist. The rest is never read; out is 0
        and lse -inf in the missing rows.
    dropout_p : float
        Probability of dropping a pair after the softmax, 0 <= p < 1; kept pairs are scaled by ``1 / (1 - p)``.
    seed : int, optional
        Needed by dropout: the pattern is a pure function of (seed, sequence, head, i, j).
    score_mod, mask_mod, mod_args, score_mod_grad, mod_args_grad, block_mask, q_descale, k_descale, v_descale
        Not available in this version.
    layout : {"BHND", "BNHD"}
        "BNHD" swaps the head and the row axis of q, k, v and out. mask, bias, sinks and lse stay head-major.
    return_lse : bool
        Also return the natural logarithm of the softmax denominators, (B, H, Nq).
    out : ndarray, optional
        Written and returned instead of a new array; exact shape and dtype, no overlap with an input.
    out_dtype : dtype, optional
        float16, bfloat16, float32 or float64; q's dtype by default. Rounded once, from the accumulator.
    precision : {"ieee", "tf32", "tf32x3"}
        Whether tensor cores may be used for float32 products; no effect on a CPU.
    deterministic : bool
        Bit-equal gradients from run to run; the CPU backend always gives them.
    validate : bool
        Check values that lie on a device; host values are always checked.
    backend : {"auto", "cpu", "cuda", "emulator"}
        "auto" takes what is there; a named backend never falls back.
    config : CPUConfig or CUDAConfig, optional
        Tile sizes of the CPU backend; by default those that :func:`autotune` kept for such calls on this machine,
        else from a model of the caches. Or which kernels run on the CUDA backend and in the emulator.
    stream : optional
        For device arrays only.

    Returns
    -------
    out : ndarray, shape (B, H, Nq, Dv)
        C-contiguous in the layout asked for. A query that sees no key gives 0, never NaN.
    lse : ndarray, shape (B, H, Nq)
        Only with ``return_lse``: float32, or float64 for float64 inputs; -inf where no key is seen.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument.
    NotImplementedError
        For a documented option that this version or the named backend lacks.

    Examples
    --------
    >>> import numpy as np, numbaflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 8, 300, 64), dtype=np.float32)
    >>> out = numbaflash.attention(q, k, v, causal=True)
    >>> out.shape
    (1, 8, 300, 64)

    Notes
    -----
    FlashAttention-2 (Dao, 2023): tiles, online softmax; scores are accumulated in float32, or in float64 for
    float64 inputs.
    """
    values = (
        causal, window, q_offset, scale, softcap, bias, mask, alibi_slopes, sinks, q_lengths, kv_lengths, dropout_p, seed,
        score_mod, mask_mod, mod_args, score_mod_grad, mod_args_grad, block_mask, q_descale, k_descale, v_descale,
        layout, out_dtype, precision, deterministic, validate, backend, config,
    )
    key = replay.likeness(q, k, v, values) if out is None and stream is None else None
    again = replay.find(key)
    if again is None:
        return _forward(q, k, v, Options.of(values), None, None, return_lse, out, stream, key)
    return again(q, k, v) if _boolean("return_lse", return_lse) else again(q, k, v)[0]


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    **options: Any,
) -> Any:
    """Attention over packed sequences of different lengths, without padding.

    Parameters
    ----------
    q : ndarray, shape (total_q, H, D)
        The queries of all sequences, one after the other.
    k, v : ndarray, shapes (total_k, Hkv, D) and (total_k, Hkv, Dv)
    cu_seqlens_q, cu_seqlens_k : (S + 1,) int32 or int64
        Sequence s owns the rows ``cu_seqlens[s] : cu_seqlens[s + 1]``. They start at 0 and never decrease; rows
        past the last are never read, and give out 0 and lse -inf.
    return_lse, out, stream, **options
        As for :func:`attention`, except that per-sequence options (q_offset, lengths, slopes) have length S, and
        mask and bias broadcast to (S, H, max_q, max_k), indexed within each sequence. ``layout`` must be left alone.

    Returns
    -------
    out : ndarray, shape (total_q, H, Dv)
    lse : ndarray, shape (H, total_q)
        Only with ``return_lse``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np, numbaflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 70, 4, 32), dtype=np.float32)
    >>> offsets = np.array([0, 50, 70])
    >>> numbaflash.attention_varlen(q, k, v, offsets, offsets, causal=True).shape
    (70, 4, 32)
    """
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu is None:
            raise TypeError(f"{name} must be a vector of sequences + 1 offsets, not None")
    return _forward(q, k, v, _options(options), cu_seqlens_q, cu_seqlens_k, return_lse, out, stream)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    stream: Any = None,
    **options: Any,
) -> Gradients:
    """Gradients of :func:`attention` by recomputation, in memory linear in the sequence length.

    Parameters
    ----------
    dout : ndarray
        Gradient of out: its shape and dtype.
    q, k, v : ndarray
        Inputs of the forward call.
    out, lse : ndarray
        Results of the forward call with identical options, sinks and seed included.
    dlse : ndarray, optional
        Gradient of lse: its shape and dtype.
    cu_seqlens_q, cu_seqlens_k : optional
        For packed sequences, as in :func:`attention_varlen`.
    stream : optional
        For device arrays only.
    **options
        The options of the forward call.

    Returns
    -------
    Gradients
        ``dq, dk, dv = gradients``; ``gradients.dbias`` and ``gradients.dsinks`` whenever bias or sinks were given.
        Each has the shape and dtype of its input; dk and dv are summed over the query heads of a group.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np, numbaflash
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 2, 100, 32))
    >>> out, lse = numbaflash.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = numbaflash.attention_backward(dout, q, k, v, out, lse)
    >>> dk.shape
    (1, 2, 100, 32)

    Notes
    -----
    FlashAttention-2 (Dao, 2023), algorithm 2, with ``delta = rowsum(dout * out) - dlse``.
    """
    arrays = q, k, v, dout, out, lse, dlse
    key = replay.gradient_likeness(arrays, options) if cu_seqlens_q is cu_seqlens_k is stream is None else None
    again = replay.find(key)
    if again is not None:
        return again(*arrays)
    options = _options(options)
    problem = make_problem(q, k, v, options, cu_seqlens_q, cu_seqlens_k)
    _refuse_stream(stream, problem)
    return _backward(problem, options, (q, k, v), dout, out, lse, dlse, stream, key)


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    stream: Any = None,
    **options: Any,
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention and a function that pulls a gradient of its output back to its inputs.

    Parameters
    ----------
    q, k, v : ndarray
        As for :func:`attention`.
    return_lse : bool
        Return ``(out, lse), vjp``; then ``vjp(dout, dlse)`` takes the gradient of lse as well.
    cu_seqlens_q, cu_seqlens_k : optional
        For packed sequences, as in :func:`attention_varlen`.
    stream : optional
        For device arrays only.
    **options
        As for :func:`attention`.

    Returns
    -------
    out : ndarray, or (out, lse)
    vjp : callable
        ``vjp(dout)`` or ``vjp(dout, dlse)`` gives :class:`Gradients`. It keeps q, k, v, out and lse alive and may
        be called any number of times.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np, numbaflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 32))
    >>> out, vjp = numbaflash.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = vjp(2 * out)      # of the loss (out ** 2).sum()
    """
    _boolean("return_lse", return_lse)
    given, options = options, _options(options)
    problem = make_problem(q, k, v, options, cu_seqlens_q, cu_seqlens_k)
    _refuse_stream(stream, problem)
    out, lse = _run(problem, options, backends.choose(options.backend, problem), q, None, stream)

    def vjp(dout: Any, dlse: Any = None) -> Gradients:
        if dlse is not None and not return_lse:
            raise TypeError("dlse is the gradient of lse: ask for lse with return_lse=True")
        arrays = q, k, v, dout, out, lse, dlse
        key = None if problem.varlen else replay.gradient_likeness(arrays, given)
        again = replay.find(key)
        if again is not None:
            return again(*arrays)
        return _backward(problem, options, (q, k, v), dout, out, lse, dlse, stream, key)

    return ((out, lse) if return_lse else out), vjp


def _options(options: dict[str, Any]) -> Options:
    unknown = [name for name in options if name not in Options.__dataclass_fields__]
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; options are {', '.join(Options.__dataclass_fields__)}")
    return Options(**options)


def _refuse_stream(stream: Any, problem: Problem) -> None:
    if stream is not None and problem.home.device is None:
        raise ValueError("stream is for device arrays; these arrays are in host memory")


def _forward(
    q: Any, k: Any, v: Any, options: Options, cu_q: Any, cu_k: Any, return_lse: bool, out: Any, stream: Any,
    key: tuple | None = None,
) -> Any:
    _boolean("return_lse", return_lse)
    problem = make_problem(q, k, v, options, cu_q, cu_k)
    _refuse_stream(stream, problem)
    module = backends.choose(options.backend, problem)
    out, lse = _run(problem, options, module, q, out, stream, (cu_q, cu_k))
    replay.keep(key, problem, getattr(module, "Replay", None), out, lse)
    return (out, lse) if return_lse else out


def _run(
    problem: Problem, options: Options, module: ModuleType, q: Any, out: Any, stream: Any, offsets: tuple = ()
) -> tuple[Any, Any]:
    library = problem.home.library
    out_shape, lse_shape = _caller_shape(problem, problem.out_shape), _caller_lse_shape(problem)
    if out is None:
        out, view = library.empty(out_shape, problem.out_dtype, q)
    else:
        view = _check_out(problem, options, out, out_shape, offsets)
    lse, lse_view = library.empty(lse_shape, problem.compute_dtype, q)
    rows, lse_rows = _rows("out", view, problem), _lse_rows(lse_view)
    if problem.padded and problem.home.device is None:
        for batch, start, stop in seg.uncovered(problem.segments, *_extent(problem)):
            rows[batch, :, start:stop] = 0
            lse_rows[batch, :, start:stop] = -np.inf
    if lse_view.size:
        module.forward(problem, rows, lse_rows, *_on_stream(problem, stream))
    return library.finish(out, q), library.finish(lse, q)


def _backward(
    problem: Problem, options: Options, inputs: tuple, dout: Any, out: Any, lse: Any, dlse: Any, stream: Any,
    key: tuple | None = None,
) -> Gradients:
    module = backends.choose(options.backend, problem)
    home, library = problem.home, problem.home.library
    rows = {}
    for name, array in (("dout", dout), ("out", out)):
        array = adopt(name, array, home)
        _check_exact(name, array, _caller_shape(problem, problem.out_shape), problem.out_dtype)
        rows[name] = _rows(name, array, problem)
    for name, array in (("lse", lse), ("dlse", dlse)):
        if array is None and name == "dlse":
            rows[name] = None
            continue
        array = adopt(name, array, home)
        _check_exact(name, array, _caller_lse_shape(problem), problem.compute_dtype)
        rows[name] = _lse_rows(array)
    made = {}
    for name, like, shape in zip(("dq", "dk", "dv"), inputs, (problem.q.shape, problem.k.shape, problem.v.shape)):
        made[name], view = library.empty(_caller_shape(problem, shape), problem.q.dtype, like)
        rows[name] = _rows(name, view, problem)
        if problem.padded and home.device is None:
            keys = name != "dq"
            for batch, start, stop in seg.uncovered(problem.segments, *_extent(problem, keys), keys=keys):
                rows[name][batch, :, start:stop] = 0
    dbias, dsinks = module.backward(problem, *rows.values(), *_on_stream(problem, stream))
    replay.keep(key, problem, getattr(module, "GradientReplay", None), rows, tuple(made.values()))
    for name, gradient in (("bias", dbias), ("sinks", dsinks)):
        made["d" + name] = None if gradient is None else _like(home, getattr(options, name), gradient)
    return Gradients(**{name: library.finish(array, inputs[0]) for name, array in made.items()})


def _on_stream(problem: Problem, stream: Any) -> tuple:
    """What a backend is told of streams: nothing on the host; on a device the caller's, else its library's own."""
    home = problem.home
    if home.device is None:
        return ()
    return (home.library.stream(home.device) if stream is None else _stream_handle(stream),)


def _stream_handle(stream: Any) -> int:
    """The driver's handle of a stream given as an integer or as an object of CuPy, PyTorch, Numba or cuda.core."""
    for attribute in ("ptr", "cuda_stream", "handle"):
        stream = getattr(stream, attribute, stream)
    return int(getattr(stream, "value", stream) or 0)


def _like(home: Home, like: Any, gradient: np.ndarray) -> Any:
    """A gradient that a backend made, in the shape, dtype and kind of its input."""
    if isinstance(gradient, np.ndarray) and home.device is None:
        array, view = home.library.empty(tuple(like.shape), home.library.view(like).dtype, like)
        view[...] = gradient.reshape(view.shape)
        return array
    return home.library.astype(gradient, home.library.view(like).dtype, tuple(like.shape))


def _extent(problem: Problem, keys: bool = False) -> tuple[int, int]:
    shape = problem.k.shape if keys else problem.q.shape
    return shape[0], shape[2]


def _caller_shape(problem: Problem, shape: tuple[int, ...]) -> tuple[int, ...]:
    batch, heads, rows, dim = shape
    if problem.varlen:
        return rows, heads, dim
    if problem.ndim == 2:
        return rows, dim
    inner = (heads, rows, dim) if problem.layout == "BHND" else (rows, heads, dim)
    return inner if problem.ndim == 3 else (batch, *inner)


def _caller_lse_shape(problem: Problem) -> tuple[int, ...]:
    shape = problem.out_shape[:3]
    if problem.varlen or problem.ndim == 3:
        return shape[1:]
    return shape if problem.ndim == 4 else shape[2:]


def _lse_rows(array: np.ndarray) -> np.ndarray:
    """(batch, H, Nq) view of an lse in the caller's shape."""
    return array[(None,) * (3 - array.ndim)]


def _rows(name: str, array: np.ndarray, problem: Problem) -> np.ndarray:
    """Head-major 4-D view of an array in the caller's layout."""
    if problem.varlen:
        return array.transpose(1, 0, 2)[None]
    return head_major(name, array, problem.layout, problem.ndim)


def _check_exact(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")
    if array.dtype != dtype:
        raise TypeError(f"{name} is {array.dtype}; it must be {dtype}")


def _check_out(
    problem: Problem, options: Options, out: Any, shape: tuple[int, ...], offsets: tuple
) -> np.ndarray:
    """The view of the caller's ``out=``, if it can be written without harm."""
    view = adopt("out", out, problem.home)
    _check_exact("out", view, shape, problem.out_dtype)
    if problem.home.library.name == "jax":
        raise TypeError("out is a JAX array, which cannot be written")
    if not view.flags.writeable:
        raise ValueError("out is read-only")
    if _overlaps_itself(view):
        raise ValueError(f"out overlaps itself: shape {view.shape}, strides {view.strides} bytes")
    inputs = {"q": problem.q.array, "k": problem.k.array, "v": problem.v.array}
    inputs |= {"bias": problem.score.bias and problem.score.bias.array, "mask": problem.mask and problem.mask.array}
    if problem.home.device is None:
        tables = {name: getattr(options, name) for name in TABLES} | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets))
        inputs |= {name: host_values(name, table) for name, table in tables.items() if hasattr(table, "dtype")}
    for name, array in inputs.items():
        if array is not None and _overlap(view, array):
            raise ValueError(f"out overlaps {name} in memory; results must not overwrite inputs")
    return view


def _overlaps_itself(array: np.ndarray) -> bool:
    """False where each axis steps over all that the finer ones span, as in any slice or transpose of an array."""
    span = array.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape)):
        if array.size and size > 1:
            if stride < span:
                return True
            span += (size - 1) * stride
    return False


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    if 0 in a.shape or 0 in b.shape:
        return False
    (a_lo, a_hi), (b_lo, b_hi) = byte_bounds(a), byte_bounds(b)
    if a_hi <= b_lo or b_hi <= a_lo:
        return False
    if isinstance(a, DeviceView):
        return True
    try:
        return np.shares_memory(a, b, max_work=1_000_000)
    except np.exceptions.TooHardError:
        return True
