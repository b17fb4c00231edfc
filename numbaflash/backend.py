"""Which backend runs a call: one readable table.

A backend is a module with

    forward(problem, out, lse)
        write every row of out (head-major 4-D view of ``out_dtype``) and lse ((batch, H, Nq), ``compute_dtype``)
        that belongs to a segment;
    backward(problem, dout, out, lse, dlse, dq, dk, dv) -> dbias, dsinks
        write every row of the gradients that belongs to a segment; return the gradient of bias in
        ``score.bias_shape`` and of sinks in (H,), or None where there are none.

    Replay(problem, out, lse)
        optional: a call to repeat, see :mod:`numbaflash.replay`.

For arrays on a device both take one more argument, the stream, and write every row.
"""

import ctypes
import os
import sys
from functools import cache
from importlib import import_module
from types import ModuleType

from .config import CUDAConfig
from .problem import BACKENDS, Problem, _one_of
from .tuning import CPUConfig

MODULES = {
    "cpu": "numbaflash.cpu.backend",
    "cuda": "numbaflash.cuda.backend",
    "emulator": "numbaflash.emulator.backend",
}
"""Modules of the backends; imported on first use, so that importing numbaflash compiles nothing."""


def choose(name: str, problem: Problem) -> ModuleType:
    """The module that runs a problem.

    ========================  ==========================================================
    arrays                    "auto" takes
    ========================  ==========================================================
    on a GPU                  cuda
    in host memory            cuda where a GPU is usable, else cpu
    ========================  ==========================================================

    Raises
    ------
    ValueError
        A backend that cannot reach the arrays.
    RuntimeError
        ``backend="cuda"`` without a usable GPU.
    NotImplementedError
        A config for another backend.
    """
    _one_of("backend", name, BACKENDS)
    on_device = problem.home.device is not None
    if name == "auto":
        device = problem.config is None or isinstance(problem.config, CUDAConfig)
        name = "cuda" if on_device or (device and gpu_is_usable()) else "cpu"
    elif on_device and name != "cuda":
        raise ValueError(f"backend={name!r} works in host memory; q lies on GPU {problem.home.device}")
    wanted = CPUConfig if name == "cpu" else CUDAConfig
    if problem.config is not None and type(problem.config) is not wanted:
        raise NotImplementedError(f"config must be a {wanted.__name__} for backend={name!r}, not a "
                                  f"{type(problem.config).__name__}")
    if name == "cuda" and problem.config is not None and problem.config.arch is not None:
        raise NotImplementedError(f"config.arch is for backend='emulator'; a GPU has its own, not {problem.config.arch!r}")
    if name == "cuda":
        _require_gpu()
    return _module(name)


@cache
def _module(name: str) -> ModuleType:
    return import_module(MODULES[name])


@cache
def gpu_is_usable() -> bool:
    """True where a driver and a GPU are there; asks cheaply first, since most machines have neither."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    from .cuda.driver import available

    return available()


def _require_gpu() -> None:
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        raise RuntimeError(
            "NUMBA_ENABLE_CUDASIM replaces the CUDA compiler by Numba's simulator, which cannot run these kernels; "
            "unset it and use backend='emulator', which runs their PTX"
        )
    if not gpu_is_usable():
        raise RuntimeError(
            "backend='cuda' needs an NVIDIA driver and a GPU, and there is none here; backend='cpu' is the fast one "
            "on this machine, and backend='emulator' runs the CUDA kernels without a GPU"
        )
