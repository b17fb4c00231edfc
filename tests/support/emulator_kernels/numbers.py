"""bfloat16 as uint16, and attention in float64 for comparison."""
import ml_dtypes
import numpy as np


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16 and give the bit patterns."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


def attention(q, k, v, scale, causal):
    """out and lse of (H, N, D) arrays, dense, in float64."""
    s = scale * np.einsum("hid,hjd->hij", q, k)
    if causal:
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
    m = s.max(axis=2, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(axis=2, keepdims=True)
    return (p / total) @ v, (m + np.log(total))[..., 0]
