"""One checked call: the only place where arguments are checked, and the value that every kernel reads."""

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import segments as seg
from .arrays import FLOAT8, FLOATING, Home, Operand, adopt, bfloat16, float32, float64, home_of, host_values, operand
from .config import CUDAConfig
from .options import Options
from .score import Score
from .tuning import CPUConfig
from .visibility import UNBOUNDED, Band, make_band

LAYOUTS = ("BHND", "BNHD")
PRECISIONS = ("ieee", "tf32", "tf32x3")
LARGEST_OFFSET = UNBOUNDED >> 1
"""Positions stay far from the reach of an open side of a band."""
LARGEST_ALIBI_OFFSET = 1 << 30
"""Distances are counted in 32 bits beside float32 scores."""
LARGEST_FLOAT = 1e37
"""Factors of float32 scores stay clear of where float32 overflows."""
BACKENDS = ("auto", "cpu", "cuda", "emulator")


class Dropout(NamedTuple):
    """Probability of dropping a pair, 0 < p < 1, and the 64-bit seed of the pattern."""

    p: float
    seed: int


class Variant(NamedTuple):
    """What is known when a kernel is compiled; everything else is a run-time argument."""

    dtype: np.dtype
    out_dtype: np.dtype
    softcap: bool
    bias: bool
    alibi: bool
    mask: bool
    dropout: bool


class Problem(NamedTuple):
    """One checked attention call. Nothing behind this value checks again.

    Attributes
    ----------
    q : Operand
        (batch, H, Nq, D), head-major whatever the caller's layout; strides say where the data lies.
    k, v : Operand
        (batch, Hkv, Nk, D) and (batch, Hkv, Nk, Dv). Query head h reads KV head ``h // (H // Hkv)``.
    segments : ndarray of int64
        (sequences, segments.COLUMNS); batch is 1 where sequences are packed.
    band : Band
    score : Score
    mask : Operand or None
        Boolean (sequences, H, q, k), True = visible, broadcast axes with stride 0, indexed within the sequence.
    sinks : ndarray of float64 or None
        (H,) extra logits of the denominator.
    scale : float
    dropout : Dropout or None
    out_dtype : numpy.dtype
    head_origin : int
        Number of head 0 for dropout and mods.
    deterministic : bool
    precision : str
    varlen : bool
        True where sequences are packed into batch 0.
    padded : bool
        True where rows of q, k and v may belong to no segment.
    ndim : int
        Dimensions of the caller's q, k and v (2, 3 or 4).
    layout : str
        The caller's layout.
    home : Home
        Where the arrays live.
    config : CPUConfig, CUDAConfig or None
        What the caller asks of the kernels.
    """

    q: Operand
    k: Operand
    v: Operand
    segments: np.ndarray
    band: Band
    score: Score
    mask: Operand | None
    sinks: np.ndarray | None
    scale: float
    dropout: Dropout | None
    out_dtype: np.dtype
    head_origin: int
    deterministic: bool
    precision: str
    varlen: bool
    padded: bool
    ndim: int
    layout: str
    home: Home
    config: CPUConfig | CUDAConfig | None = None

    @property
    def compute_dtype(self) -> np.dtype:
        """Dtype of products, softmax and lse: float64 for float64 inputs, else float32."""
        return float64 if self.q.dtype == float64 else float32

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // max(1, self.k.shape[1])

    @property
    def variant(self) -> Variant:
        """The compile-time part."""
        score = self.score
        return Variant(
            self.q.dtype, self.out_dtype, score.softcap is not None, score.bias is not None,
            score.alibi is not None, self.mask is not None, self.dropout is not None,
        )

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output, head-major and 4-D."""
        return self.q.shape[:3] + self.v.shape[3:]


def make_problem(
    q: Any, k: Any, v: Any, options: Options, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None
) -> Problem:
    """Check a call and describe it.

    Raises
    ------
    TypeError
        Wrong kind or dtype of an argument.
    ValueError
        Wrong shape or value of an argument.
    NotImplementedError
        A documented option that this version lacks.
    """
    _refuse_unfinished(options)
    home = home_of("q", q)
    q, k, v = adopt("q", q, home), adopt("k", k, home), adopt("v", v, home)
    _check_dtypes(q, k, v)
    layout = _one_of("layout", options.layout, LAYOUTS)
    precision = _one_of("precision", options.precision, PRECISIONS)
    out_dtype = _out_dtype(options.out_dtype, q.dtype)
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    ndim = q.ndim
    if varlen:
        q, k, v = _packed(q, k, v, layout)
    else:
        q, k, v = (head_major(name, array, layout, ndim) for name, array in (("q", q), ("k", k), ("v", v)))
    _check_shapes(q, k, v)
    heads, head_dim = q.shape[1], q.shape[3]
    band = make_band(_boolean("causal", options.causal), _window(options.window))
    if varlen:
        table, max_q, max_k = _packed_segments(q, k, cu_seqlens_q, cu_seqlens_k)
    else:
        table, max_q, max_k = None, q.shape[2], k.shape[2]
    sequences = q.shape[0] if table is None else len(table)
    slopes = _slopes(options.alibi_slopes, sequences, heads)
    directed = not band.is_open or slopes is not None
    table = _lengths_and_offset(table, options, sequences, max_q, max_k, directed)
    if slopes is not None and len(table) and abs(table[:, seg.Q_OFFSET]).max() >= LARGEST_ALIBI_OFFSET:
        raise ValueError("q_offset must be below 2**30 in size where alibi_slopes are given")
    dense = (sequences, heads, max_q, max_k)
    bias = _broadcast("bias", options.bias, dense, home)
    softcap = options.softcap
    if softcap is not None and not _real("softcap", softcap) > 0:
        raise ValueError(f"softcap must be positive, not {softcap!r}; None switches it off")
    if softcap is not None:
        _within_float32("softcap", float(softcap), q.dtype)
    _boolean("validate", options.validate)
    return Problem(
        q=operand(q), k=operand(k), v=operand(v), segments=table, band=band,
        score=Score(
            None if softcap is None else float(softcap), bias,
            None if bias is None else (1,) * (4 - options.bias.ndim) + tuple(options.bias.shape), slopes,
        ),
        mask=_broadcast("mask", options.mask, dense, home),
        sinks=_sinks(options.sinks, heads, home),
        scale=_scale(options.scale, head_dim, q.dtype),
        dropout=_dropout(options.dropout_p, options.seed),
        out_dtype=out_dtype, head_origin=0, deterministic=_boolean("deterministic", options.deterministic),
        precision=precision, varlen=varlen,
        padded=varlen or options.q_lengths is not None or options.kv_lengths is not None, ndim=ndim,
        layout=layout, home=home, config=_config(options.config),
    )


def head_major(name: str, array: np.ndarray, layout: str, ndim: int) -> np.ndarray:
    """A (batch, heads, rows, dim) view of an array in the caller's layout."""
    if array.ndim != ndim:
        raise ValueError(f"{name} has {array.ndim} dimensions and q has {ndim}; q, k and v must have equally many")
    if ndim == 4:
        return array if layout == "BHND" else array.transpose(0, 2, 1, 3)
    if ndim == 3:
        return array[None] if layout == "BHND" else array.transpose(1, 0, 2)[None]
    if ndim == 2:
        return array[None, None]
    raise ValueError(f"{name} must have 2, 3 or 4 dimensions, not {ndim} (shape {array.shape})")


# ---------------------------------------------------------------------------------------------- single checks


_UNFINISHED = {
    "score_mod": None, "mask_mod": None, "score_mod_grad": None, "mod_args": (), "mod_args_grad": False,
    "block_mask": None, "q_descale": None, "k_descale": None, "v_descale": None,
}
"""Documented options that this version lacks, and the value that asks for nothing."""


def _refuse_unfinished(options: Options) -> None:
    for name, default in _UNFINISHED.items():
        value = getattr(options, name)
        if value is not default and not (type(value) is type(default) and value == default):
            raise NotImplementedError(f"{name} is not available in this version")


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _real(name: str, value: Any) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    array = host_values(name, value)
    if array.ndim or not (array.dtype.kind in "iuf" or array.dtype in FLOATING or isinstance(value, numbers.Real)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {type(value).__qualname__}") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    return number


def _integer(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def _check_dtypes(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    if q.dtype in FLOAT8:
        raise NotImplementedError(f"q is {q.dtype}; float8 inputs are not available in this version")
    if q.dtype not in FLOATING:
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, not {q.dtype}")
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise TypeError(f"{name} is {array.dtype} and q is {q.dtype}; q, k and v must have one dtype")


def _out_dtype(out_dtype: Any, default: np.dtype) -> np.dtype:
    if out_dtype is None:
        return default
    if isinstance(out_dtype, str) and out_dtype == "bfloat16":
        return bfloat16
    try:
        dtype = np.dtype(out_dtype)
    except (TypeError, ValueError, OverflowError):
        dtype = None
    if dtype is None or dtype not in FLOATING:
        raise TypeError(f"out_dtype must be float16, bfloat16, float32 or float64, not {out_dtype!r}")
    return dtype


def _config(config: Any) -> CPUConfig | CUDAConfig | None:
    if config is not None and type(config) not in (CPUConfig, CUDAConfig):
        raise TypeError(f"config must be a CPUConfig, a CUDAConfig or None, not {type(config).__qualname__}")
    return config


def _packed(q: np.ndarray, k: np.ndarray, v: np.ndarray, layout: str) -> tuple[np.ndarray, ...]:
    if layout != "BHND":
        raise ValueError("layout must be left at its default for packed sequences, which are (total, H, D)")
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 3:
            raise ValueError(f"{name} must be packed as (total, heads, dim), not of shape {array.shape}")
    return tuple(array.transpose(1, 0, 2)[None] for array in (q, k, v))


def _check_shapes(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v have batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]}; they must be equal")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"k has {k.shape[1]} heads of {k.shape[2]} keys and v has {v.shape[1]} of {v.shape[2]}; they must agree"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[3]} and k has {k.shape[3]}; they must be equal")
    heads, kv_heads = q.shape[1], k.shape[1]
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"q has {heads} heads and k has {kv_heads}; the first must be a multiple of the second")


def _window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    try:
        left, right = window if isinstance(window, (tuple, list, np.ndarray)) else ()
    except (TypeError, ValueError):
        raise TypeError(f"window must be a pair (left, right) of integers or None, not {window!r}") from None
    sides = []
    for side, value in (("left", left), ("right", right)):
        if value is not None:
            value = _integer(f"window's {side} side", value)
            if value < 0:
                raise ValueError(f"window's {side} side must be 0 or more, not {value}; None leaves a side open")
        sides.append(value)
    return tuple(sides)


def _scale(scale: Any, head_dim: int, dtype: np.dtype) -> float:
    if scale is not None:
        return _within_float32("scale", _real("scale", scale), dtype)
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def _within_float32(name: str, number: float, dtype: np.dtype) -> float:
    if abs(number) > LARGEST_FLOAT and dtype != float64:
        raise ValueError(f"{name} must be below {LARGEST_FLOAT} in size for {dtype} inputs, not {number}")
    return number


def _dropout(p: Any, seed: Any) -> Dropout | None:
    if seed is None and type(p) is float and p == 0.0:
        return None
    p = _real("dropout_p", p)
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), not {p}")
    if seed is not None:
        seed = _integer("seed", seed)
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), not {seed}")
    if p == 0.0:
        return None
    if seed is None:
        raise ValueError("dropout_p > 0 needs a seed: the pattern is a pure function of it, never hidden state")
    return Dropout(p, seed)


def _sinks(array: Any, heads: int, home: Home) -> np.ndarray | None:
    if array is None:
        return None
    sinks = adopt("sinks", array, home)
    if sinks.dtype not in FLOATING:
        raise TypeError(f"sinks must be floating, not {sinks.dtype}")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape ({heads},), one logit per query head, not {sinks.shape}")
    return home.library.as_float64(array)


def _slopes(slopes: Any, sequences: int, heads: int) -> Operand | None:
    if slopes is None:
        return None
    array = host_values("alibi_slopes", slopes)
    if array.dtype.kind not in "iuf" and array.dtype not in FLOATING:
        raise TypeError(f"alibi_slopes must be numbers, not {array.dtype}")
    if array.shape not in ((heads,), (sequences, heads)):
        raise ValueError(
            f"alibi_slopes must have shape ({heads},) or ({sequences}, {heads}), not {array.shape}"
        )
    return operand(np.broadcast_to(array.astype(np.float64), (sequences, heads)))


def _broadcast(name: str, array: Any, shape: tuple[int, ...], home: Home) -> Operand | None:
    if array is None:
        return None
    array = adopt(name, array, home)
    if name == "mask" and array.dtype != np.bool_:
        raise TypeError(f"mask must be boolean, True = visible, not {array.dtype}; numbers to add go into bias=")
    if name == "bias" and array.dtype not in FLOATING:
        raise TypeError(f"bias must be floating, not {array.dtype}; a boolean array goes into mask=")
    try:
        if array.ndim > 4:
            raise ValueError
        view = np.broadcast_to(array, shape, subok=True)
    except ValueError:
        raise ValueError(f"{name} of shape {array.shape} does not broadcast to (B, H, Nq, Nk) = {shape}") from None
    return operand(view)


def _integers(name: str, values: Any, count: int, *, lo: int | None = None, hi: Any = None) -> np.ndarray:
    """A checked int64 vector of ``count`` values (a scalar is repeated)."""
    array = host_values(name, values)
    if array.dtype.kind not in "iu" and not (array.size == 0 and array.dtype == np.float64):
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    if array.ndim > 1 or (array.ndim == 1 and len(array) != count):
        raise ValueError(f"{name} must be an integer or {count} integers, one per sequence, not of shape {array.shape}")
    if array.dtype.kind == "u" and array.size and int(array.max()) >= 1 << 63:
        raise ValueError(f"{name} holds {int(array.max())}, which is too large")
    array = np.broadcast_to(array.astype(np.int64), (count,))
    if lo is not None and count:
        hi = np.broadcast_to(np.asarray(hi, np.int64), (count,))
        bad = np.flatnonzero((array < lo) | (array > hi))
        if len(bad):
            at = bad[0]
            raise ValueError(f"{name}[{at}] is {array[at]}; it must be in [{lo}, {hi[at]}]")
    return array


def _packed_segments(q: np.ndarray, k: np.ndarray, cu_q: Any, cu_k: Any) -> tuple[np.ndarray, int, int]:
    starts = []
    for name, cu, total in (("cu_seqlens_q", cu_q, q.shape[2]), ("cu_seqlens_k", cu_k, k.shape[2])):
        if cu is None:
            raise TypeError(f"{name} is missing: packed sequences need cu_seqlens_q and cu_seqlens_k")
        cu = host_values(name, cu)
        if cu.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
            raise TypeError(f"{name} must be int32 or int64, not {cu.dtype}")
        if cu.ndim != 1 or len(cu) < 1:
            raise ValueError(f"{name} must be a vector of sequences + 1 offsets, not of shape {cu.shape}")
        cu = cu.astype(np.int64)
        if cu[0] != 0 or (np.diff(cu) < 0).any() or cu[-1] > total:
            raise ValueError(f"{name} must start at 0, never decrease and end at or below {total}, not {cu.tolist()}")
        starts.append(cu)
    cu_q, cu_k = starts
    if len(cu_q) != len(cu_k):
        raise ValueError(f"cu_seqlens_q has {len(cu_q)} offsets and cu_seqlens_k {len(cu_k)}; they must be equally many")
    table = seg.empty_segments(len(cu_q) - 1)
    table[:, seg.Q_START], table[:, seg.Q_LENGTH] = cu_q[:-1], np.diff(cu_q)
    table[:, seg.K_START], table[:, seg.K_LENGTH] = cu_k[:-1], np.diff(cu_k)
    longest = table.max(axis=0, initial=0)
    return table, int(longest[seg.Q_LENGTH]), int(longest[seg.K_LENGTH])


def _lengths_and_offset(
    table: np.ndarray | None, options: Options, sequences: int, max_q: int, max_k: int, directed: bool
) -> np.ndarray:
    """Shorten the segments to the given lengths and place the queries on the key axis."""
    q_lengths, kv_lengths, q_offset = options.q_lengths, options.kv_lengths, options.q_offset
    if table is None and q_lengths is None and kv_lengths is None and (q_offset is None or isinstance(q_offset, int)):
        offset = max_k - max_q if q_offset is None else _integer("q_offset", q_offset)
        return seg.dense_segments(sequences, max_q, max_k, _sane_offset(offset))
    table = seg.dense_segments(sequences, max_q, max_k, 0).copy() if table is None else table
    if kv_lengths is not None:
        lengths = _integers("kv_lengths", kv_lengths, sequences, lo=0, hi=table[:, seg.K_LENGTH])
        short = np.flatnonzero(lengths < table[:, seg.Q_LENGTH])
        if directed and q_lengths is None and q_offset is None and len(short):
            raise ValueError(
                f"kv_lengths[{short[0]}] is {lengths[short[0]]}, fewer than its {table[short[0], seg.Q_LENGTH]} queries, "
                "so where the queries stand for causal, window or ALiBi is ambiguous: pass q_lengths for padded "
                "self-attention, or q_offset"
            )
        table[:, seg.K_LENGTH] = lengths
    if q_lengths is not None:
        table[:, seg.Q_LENGTH] = _integers("q_lengths", q_lengths, sequences, lo=0, hi=table[:, seg.Q_LENGTH])
    if q_offset is None:
        table[:, seg.Q_OFFSET] = table[:, seg.K_LENGTH] - table[:, seg.Q_LENGTH]
    else:
        for value in (offsets := _integers("q_offset", q_offset, sequences)):
            _sane_offset(int(value))
        table[:, seg.Q_OFFSET] = offsets
    return table


def _sane_offset(offset: int) -> int:
    if abs(offset) >= LARGEST_OFFSET:
        raise ValueError(f"q_offset must be below 2**39 in size, not {offset}")
    return offset
