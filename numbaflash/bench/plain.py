"""Standard attention in plain NumPy: the N x N scores in memory, products by NumPy's BLAS.

Written as well as it can be in a few lines: every step after the first product works in place.
"""

import numpy as np


def probabilities(
    q: np.ndarray,
    k: np.ndarray,
    *,
    visible: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """``softmax(q k^T / sqrt(D) + bias)`` over the visible keys: (B, H, Nq, Nk)."""
    s = q @ k.swapaxes(-1, -2)
    s *= q.dtype.type(1 / np.sqrt(q.shape[-1]))
    if softcap is not None:
        s /= q.dtype.type(softcap)
        np.tanh(s, out=s)
        s *= q.dtype.type(softcap)
    if bias is not None:
        s += bias
    if visible is not None:
        np.copyto(s, -np.inf, where=~visible)
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return s


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: np.ndarray | float | None
) -> np.ndarray:
    """Standard attention.

    Parameters
    ----------
    q, k, v : ndarray of float32 or float64
        (B, H, Nq, D), (B, H, Nk, D) and (B, H, Nk, Dv), equally many heads.
    **options
        ``visible``, boolean, and ``bias``, both broadcast against (B, H, Nq, Nk); ``softcap``.

    Returns
    -------
    ndarray, shape (B, H, Nq, Dv)

    Examples
    --------
    >>> import numpy as np
    >>> from numbaflash.bench import plain
    >>> q = k = np.zeros((1, 1, 2, 4))
    >>> plain.attention(q, k, np.array([[[[1.0], [3.0]]]])).ravel().tolist()
    [2.0, 2.0]
    """
    return probabilities(q, k, **options) @ v


def attention_and_gradients(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    visible: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Standard attention, then its gradients: out, dq, dk, dv."""
    p = probabilities(q, k, visible=visible, bias=bias)
    out = p @ v
    dv = p.swapaxes(-1, -2) @ dout
    ds = dout @ v.swapaxes(-1, -2)
    ds -= (dout * out).sum(axis=-1, keepdims=True)
    ds *= p
    ds *= q.dtype.type(1 / np.sqrt(q.shape[-1]))
    return out, ds @ k, ds.swapaxes(-1, -2) @ q, dv
