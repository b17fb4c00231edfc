"""What is measured on a GPU: 16384 tokens in all and 2048 hidden columns, as in the FlashAttention papers."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..cases import Case, visible_pairs

TOKENS, HIDDEN = 16384, 2048
FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)
PRECISIONS = ("tf32", "tf32x3")


class GpuCase(NamedTuple):
    """One call.

    Attributes
    ----------
    name : str
    head_dim, length : int
        There are ``HIDDEN / head_dim`` heads and ``TOKENS / length`` sequences.
    kind : str
        Dtype, or the precision of float32 products.
    causal : bool
    window : int or None
        Keys before each query that it sees.
    group : int
        Query heads per head of keys and values.
    packed : bool
        Sequences of many lengths, one after the other.
    deterministic : bool
    headline : bool
        Worth the time that slow peers take to compile.
    """

    name: str
    head_dim: int
    length: int
    kind: str = "bfloat16"
    causal: bool = False
    window: int | None = None
    group: int = 1
    packed: bool = False
    deterministic: bool = False
    headline: bool = False

    @property
    def batch(self) -> int:
        return TOKENS // self.length

    @property
    def heads(self) -> int:
        return HIDDEN // self.head_dim

    @property
    def dtype(self) -> np.dtype:
        name = "float32" if self.kind in PRECISIONS else self.kind
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Of packed sequences: from an eighth of `length` to twice as long."""
        if not self.packed:
            return None
        rng, lengths, left = np.random.default_rng(0), [], TOKENS
        while left:
            lengths.append(min(left, int(rng.integers(self.length // 8, 2 * self.length))))
            left -= lengths[-1]
        return tuple(lengths)

    @property
    def offsets(self) -> np.ndarray | None:
        """Where packed sequences begin, and their end."""
        return (
            None if self.lengths is None else np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int32)
        )

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k, v and dout."""
        kv_heads = self.heads // self.group
        if self.packed:
            return tuple(
                (TOKENS, heads, self.head_dim) for heads in (self.heads, kv_heads, kv_heads, self.heads)
            )
        return tuple(
            (self.batch, heads, self.length, self.head_dim)
            for heads in (self.heads, kv_heads, kv_heads, self.heads)
        )

    def options(self) -> dict[str, Any]:
        """Keywords of `numbaflash.attention`."""
        found = {"causal": self.causal, "deterministic": self.deterministic}
        if self.window is not None:
            found["window"] = (self.window, 0)
        if self.kind in PRECISIONS:
            found["precision"] = self.kind
        if self.packed:
            found |= {"cu_seqlens_q": self.offsets, "cu_seqlens_k": self.offsets}
        return found

    def flops(self, direction: str) -> float:
        """4 B H N N D forward, half where causal, 2.5 times that backward; else of the pairs in sight."""
        if self.packed or self.window is not None:
            one = Case(
                "",
                batch=self.batch,
                n_q=self.length,
                causal=self.causal,
                lengths=self.lengths,
                window=None if self.window is None else (self.window, 0),
            )
            pairs = float(visible_pairs(one))
        else:
            pairs = self.batch * self.length**2 / (2 if self.causal else 1)
        return 4 * pairs * self.heads * self.head_dim * (1 if direction == FORWARD else 2.5)


def _grid(length: int) -> list[GpuCase]:
    return [
        GpuCase(
            f"d{dim}-{'causal' if causal else 'full'}-{length}",
            dim,
            length,
            causal=causal,
            headline=length == TOKENS and dim < 256,
        )
        for dim in (128, 64, 256)
        for causal in (False, True)
    ]


def _kinds() -> list[GpuCase]:
    return [
        GpuCase(f"{kind}-d{dim}-{'causal' if causal else 'full'}-4096", dim, 4096, kind=kind, causal=causal)
        for kind in ("float32", "float16", "tf32", "tf32x3")
        for dim in (64, 128)
        for causal in ((False, True) if kind == "float16" else (False,))
    ]


OPTIONS = [
    GpuCase("gqa4-d128-causal-16384", 128, 16384, causal=True, group=4),
    GpuCase("gqa4-d128-full-4096", 128, 4096, group=4),
    GpuCase("window1024-d128-16384", 128, 16384, causal=True, window=1024, headline=True),
    GpuCase("varlen-d128-causal", 128, 2048, causal=True, packed=True),
    GpuCase("varlen-d64-full", 64, 2048, packed=True),
    GpuCase("deterministic-d128-causal-16384", 128, 16384, causal=True, deterministic=True),
    GpuCase("deterministic-d64-full-16384", 64, 16384, deterministic=True),
]
CASES = tuple(
    [
        *_grid(16384),
        *_kinds()[:2],
        *OPTIONS,
        *_grid(4096),
        *_kinds()[2:],
        *_grid(512),
        *_grid(8192),
        *_grid(2048),
        *_grid(1024),
    ]
)
"""In the order of how much one wants to know: time may run out."""
QUICK = ("d128-full-16384", "d128-causal-4096", "d64-full-16384")
