"""FlashAttention in pure Python: exact attention on NumPy arrays, forward and backward, written with Numba.

>>> import numpy as np, numbaflash
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 1000, 64), dtype=np.float32)
>>> out = numbaflash.attention(q, k, v, causal=True)
"""

from .api import attention, attention_backward, attention_varlen, attention_vjp
from .config import CUDAConfig
from .merge import merge_states
from .options import Gradients, Options
from .tuning import CPUConfig, autotune
from .warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "CPUConfig",
    "CUDAConfig",
    "Gradients",
    "Options",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_vjp",
    "autotune",
    "merge_states",
    "warmup",
]
