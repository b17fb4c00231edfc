"""The attention calls that are measured, and their inputs."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

FORWARD, BOTH = "forward", "forward+backward"
PASSES = (FORWARD, "backward", BOTH)


class Case(NamedTuple):
    """One call. ``floors`` holds goals: least peer time / our time by (pass, peer), on two AVX2 cores.

    ``kv_heads``, ``n_k`` and ``v_dim`` default to heads, n_q and head_dim.
    ``padded`` hides the second half of the keys by kv_lengths; ``mask`` is a random boolean mask; ``lengths``
    packs sequences of these lengths instead of a batch.
    """

    name: str
    batch: int = 1
    heads: int = 8
    n_q: int = 1024
    head_dim: int = 64
    kv_heads: int | None = None
    n_k: int | None = None
    v_dim: int | None = None
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    padded: bool = False
    bias: bool = False
    mask: bool = False
    alibi: bool = False
    dropout: float = 0.0
    lengths: tuple[int, ...] | None = None
    passes: tuple[str, ...] = (FORWARD, BOTH)
    floors: dict[tuple[str, str], float] = {}

    @property
    def full_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def keys(self) -> int:
        return self.n_q if self.n_k is None else self.n_k

    @property
    def values(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def decode(self) -> bool:
        """Bound by reading K and V, not by arithmetic."""
        return self.n_q <= 8 < self.keys

    def shape(self) -> str:
        """For people: batch, heads, lengths, head dim."""
        heads = f"{self.heads}" if self.full_kv_heads == self.heads else f"{self.heads}/{self.full_kv_heads}"
        n = f"{self.n_q}" if self.keys == self.n_q else f"{self.n_q}x{self.keys}"
        dim = f"{self.head_dim}" if self.values == self.head_dim else f"{self.head_dim}/{self.values}"
        if self.lengths is not None:
            return f"({len(self.lengths)} packed,{heads},{min(self.lengths)}..{max(self.lengths)},{dim})"
        return f"({self.batch},{heads},{n},{dim})"


def _floors(forward: float, both: float | None = None) -> dict[tuple[str, str], float]:
    floors = {(FORWARD, "torch"): forward}
    return floors if both is None else floors | {(BOTH, "torch"): both}


ONLY_FORWARD = (FORWARD,)
CASES = (
    Case("n1024-d64-full", floors=_floors(1.15, 1.2)),
    Case("n1024-d64-causal", causal=True, floors=_floors(1.5, 1.6)),
    Case("n4096-d64-full", n_q=4096, floors=_floors(1.15, 1.2)),
    Case("n4096-d64-causal", n_q=4096, causal=True, floors=_floors(1.28, 1.35)),
    Case("n4096-d128-full", heads=4, n_q=4096, head_dim=128, floors=_floors(1.1, 1.08)),
    Case("n4096-d128-causal", heads=4, n_q=4096, head_dim=128, causal=True, floors=_floors(1.2, 1.2)),
    Case("one-head-8192", heads=1, n_q=8192, causal=True),
    Case("window256", n_q=4096, window=(256, 0), passes=ONLY_FORWARD, floors=_floors(4.0)),
    Case("padding-half", batch=4, padded=True, passes=ONLY_FORWARD, floors=_floors(1.6)),
    Case("gqa16-4-causal", heads=16, kv_heads=4, n_q=2048, causal=True, floors=_floors(1.3)),
    Case("bias", n_q=2048, bias=True, passes=ONLY_FORWARD, floors=_floors(1.1)),
    Case("bool-mask", n_q=2048, mask=True),
    Case("softcap", n_q=2048, softcap=30.0),
    Case("alibi-causal", n_q=2048, causal=True, alibi=True, passes=ONLY_FORWARD),
    Case("dropout", n_q=2048, dropout=0.1),
    Case("batch4-n384", batch=4, heads=12, n_q=384, floors=_floors(1.1)),
    Case("batch8-n64-d32", batch=8, n_q=64, head_dim=32, floors=_floors(0.9)),
    Case("cross200x1500", batch=2, n_q=200, n_k=1500, floors=_floors(1.1)),
    Case("d80-odd-causal", n_q=1023, head_dim=80, causal=True, floors=_floors(1.3)),
    Case("dv128", v_dim=128),
    Case("varlen-causal", lengths=(700, 33, 512, 200, 1000, 64), causal=True),
    Case("bfloat16", n_q=2048, dtype="bfloat16", floors=_floors(1.2)),
    Case("float16", n_q=2048, dtype="float16", floors=_floors(1.2)),
    Case("float64", n_q=2048, dtype="float64", floors=_floors(1.0)),
    Case("tiny", heads=1, n_q=1, passes=ONLY_FORWARD),
    Case(
        "decode-float32",
        heads=32,
        kv_heads=8,
        n_q=1,
        n_k=8192,
        head_dim=128,
        passes=ONLY_FORWARD,
        floors={(FORWARD, "torch"): 4.0, (FORWARD, "torch-folded"): 1.8},
    ),
    Case(
        "decode-bfloat16",
        heads=32,
        kv_heads=8,
        n_q=1,
        n_k=8192,
        head_dim=128,
        dtype="bfloat16",
        passes=ONLY_FORWARD,
        floors={(FORWARD, "torch-folded"): 2.2},
    ),
)
QUICK = ("n1024-d64-causal", "batch8-n64-d32", "decode-float32")


class Inputs(NamedTuple):
    """Arrays of a case.

    Attributes
    ----------
    q, k, v, dout : ndarray
        4-D head-major, or packed (total, H, D) where ``case.lengths`` is given.
    bias : ndarray or None
        (1, H, Nq, Nk), of q's dtype.
    mask : ndarray of bool or None
        (1, 1, Nq, Nk).
    slopes : ndarray or None
        (H,) float32.
    kv_lengths : ndarray or None
        (B,).
    offsets : ndarray or None
        The packed sequences' cumulative lengths.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    bias: np.ndarray | None
    mask: np.ndarray | None
    slopes: np.ndarray | None
    kv_lengths: np.ndarray | None
    offsets: np.ndarray | None


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random inputs, normally distributed."""
    rng = np.random.default_rng(seed)
    dtype = dtype_of(case.dtype)

    def normal(*shape: int) -> np.ndarray:
        kind = np.float64 if case.dtype == "float64" else np.float32
        return rng.standard_normal(shape, dtype=kind).astype(dtype, copy=False)

    heads, kv_heads, n, m = case.heads, case.full_kv_heads, case.n_q, case.keys
    if case.lengths is not None:
        total = sum(case.lengths)
        shapes = [
            (total, heads, case.head_dim),
            (total, kv_heads, case.head_dim),
            (total, kv_heads, case.values),
            (total, heads, case.values),
        ]
    else:
        shapes = [
            (case.batch, heads, n, case.head_dim),
            (case.batch, kv_heads, m, case.head_dim),
            (case.batch, kv_heads, m, case.values),
            (case.batch, heads, n, case.values),
        ]
    q, k, v, dout = (normal(*shape) for shape in shapes)
    return Inputs(
        q,
        k,
        v,
        dout,
        bias=normal(1, heads, n, m) if case.bias else None,
        mask=rng.random((1, 1, n, m)) < 0.7 if case.mask else None,
        slopes=2.0 ** (-8.0 * np.arange(1, heads + 1, dtype=np.float32) / heads) if case.alibi else None,
        kv_lengths=np.full(case.batch, m // 2) if case.padded else None,
        offsets=None if case.lengths is None else np.concatenate(([0], np.cumsum(case.lengths))),
    )


def our_options(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The keywords of ``numbaflash.attention`` that say what the case asks for."""
    options = {
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "bias": inputs.bias,
        "mask": inputs.mask,
        "alibi_slopes": inputs.slopes,
        "kv_lengths": inputs.kv_lengths,
        "dropout_p": case.dropout,
        "seed": 1 if case.dropout else None,
    }
    return {name: value for name, value in options.items() if value is not None and value is not False}


def visible_pairs(case: Case) -> int:
    """Pairs of query and key that geometry shows, per head, over all sequences."""
    if case.lengths is not None:
        sequences = [(n, n) for n in case.lengths]
    else:
        sequences = [(case.n_q, case.keys // 2 if case.padded else case.keys)] * case.batch
    left, right = case.window or (None, None)
    if case.causal:
        right = 0
    total = 0
    for n, m in sequences:
        position = np.arange(n) + m - n
        first = np.zeros(n, int) if left is None else np.clip(position - left, 0, m)
        last = np.full(n, m) if right is None else np.clip(position + right + 1, 0, m)
        total += int(np.maximum(last - first, 0).sum())
    return total


def operations(case: Case, which: str) -> int:
    """Floating point operations: 2 (D + Dv) per pair forward, 2 (3 D + 2 Dv) backward, with S again."""
    d, dv = case.head_dim, case.values
    work = {FORWARD: 2 * (d + dv), "backward": 2 * (3 * d + 2 * dv)}
    work[BOTH] = work[FORWARD] + work["backward"]
    return visible_pairs(case) * case.heads * work[which]


def bytes_read(case: Case) -> int:
    """Bytes of K and V."""
    return (
        case.batch
        * case.full_kv_heads
        * case.keys
        * (case.head_dim + case.values)
        * dtype_of(case.dtype).itemsize
    )


def dense_visibility(case: Case, inputs: Inputs) -> np.ndarray | None:
    """What a peer without lengths and windows needs: a boolean mask, broadcast to (B, H, Nq, Nk), or None."""
    n, m = case.n_q, case.keys
    i, j = np.arange(n)[:, None] + m - n, np.arange(m)
    left, right = case.window or (None, None)
    if case.causal:
        right = 0
    parts = []
    if left is not None:
        parts.append(j >= i - left)
    if right is not None:
        parts.append(j <= i + right)
    if inputs.kv_lengths is not None:
        parts.append(j < inputs.kv_lengths[:, None, None, None])
    if inputs.mask is not None:
        parts.append(inputs.mask)
    if not parts:
        return None
    visible = parts[0]
    for part in parts[1:]:
        visible = visible & part
    return visible.reshape((1,) * (4 - visible.ndim) + visible.shape)


def dense_bias(case: Case, inputs: Inputs) -> np.ndarray | None:
    """Bias and ALiBi as one additive array of q's dtype, or None."""
    bias = inputs.bias
    if inputs.slopes is not None:
        distance = np.abs(np.arange(case.n_q)[:, None] + case.keys - case.n_q - np.arange(case.keys))
        alibi = (-inputs.slopes[:, None, None] * distance)[None]
        bias = alibi if bias is None else bias + alibi
    return None if bias is None else bias.astype(inputs.q.dtype, copy=False)
