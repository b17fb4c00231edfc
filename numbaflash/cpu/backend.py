"""The CPU backend: vectorised, parallel kernels compiled by ``numba.njit``."""

from .backward import backward
from .forward import forward
from .replay import GradientReplay, Replay

__all__ = ["GradientReplay", "Replay", "backward", "forward"]
