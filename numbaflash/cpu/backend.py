"""The CPU backend: vectorised, parallel kernels compiled by ``numba.njit``."""

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward"]
