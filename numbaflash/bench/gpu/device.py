"""The GPU under measurement: arrays on it, and clocks that it runs itself.

With PyTorch its tensors and events, since most peers want these; otherwise Numba's device arrays.
"""

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np

from numbaflash.arrays import home_of
from numbaflash.backend import gpu_is_usable

from ..report import UsageError

SAMPLE_SECONDS = 2e-3
MIN_ROUNDS, MAX_ROUNDS = 3, 21


class Gpu:
    """Base of the layers over a GPU.

    Attributes
    ----------
    name, arch : str
        A model, and the target that kernels are compiled for.
    backend : str
        What ``backend=`` of a call is given.
    library : str
        Whose arrays these are.
    """

    name = arch = library = ""
    backend = "cuda"

    def upload(self, array: np.ndarray) -> Any:
        """A copy on the GPU."""
        raise NotImplementedError

    def host(self, array: Any) -> np.ndarray:
        """A copy in host memory."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for everything."""
        raise NotImplementedError

    def seconds(self, call: Callable[[], Any], repeats: int) -> float:
        """Time of a call by the GPU's clock, the mean over repeats."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What a number needs beside it to mean something."""
        return {"gpu": self.name, "arch": self.arch, "arrays": self.library}


class TorchGpu(Gpu):
    """Tensors and events of PyTorch, on `device`."""

    library, device = "torch", "cuda"

    def __init__(self, arch: str) -> None:
        import torch

        self.torch, self.arch = torch, arch
        self.name = torch.cuda.get_device_name(0) if self.device == "cuda" else self.device

    def upload(self, array: np.ndarray) -> Any:
        if array.dtype.name == "bfloat16":
            words = self.torch.from_numpy(array.view(np.int16)).to(self.device)
            return words.view(self.torch.bfloat16)
        return self.torch.from_numpy(array).to(self.device)

    def host(self, array: Any) -> np.ndarray:
        array = array.detach()
        if array.dtype == self.torch.bfloat16:
            array = array.float()
        return array.cpu().numpy()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any], repeats: int) -> float:
        start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / repeats

    def describe(self) -> dict[str, Any]:
        torch = self.torch
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return super().describe() | {
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "cudnn": cudnn,
        }


class NumbaGpu(Gpu):
    """Device arrays and events of Numba, which allocates and copies but compiles nothing here."""

    library = "numba"

    def __init__(self, arch: str) -> None:
        from numba import cuda

        self.cuda, self.arch = cuda, arch
        name = cuda.get_current_device().name
        self.name = name.decode() if isinstance(name, bytes) else name

    def upload(self, array: np.ndarray) -> Any:
        return self.cuda.to_device(np.ascontiguousarray(array))

    def host(self, array: Any) -> np.ndarray:
        return array.copy_to_host()

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def seconds(self, call: Callable[[], Any], repeats: int) -> float:
        start, stop = self.cuda.event(timing=True), self.cuda.event(timing=True)
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / repeats


def find() -> Gpu:
    """GPU 0.

    Raises
    ------
    UsageError
        Where there is none that the driver can use.
    """
    if not gpu_is_usable():
        raise UsageError(
            "there is no NVIDIA GPU here that a driver could use, so nothing is measured. "
            "bench.py gpu --make-bundle compiles the kernels here for a machine that has one; "
            "bench.py kernels --sass prints what they may reach"
        )
    from numbaflash.cuda.driver import device

    arch = device(0).arch
    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return TorchGpu(arch)
    return NumbaGpu(arch)


@contextmanager
def poisoned(gpu: Gpu, like: Any):
    """Fill every array that the library makes for a result with NaN before a kernel writes it."""
    library = home_of("q", like).library

    def filled(shape: tuple[int, ...], dtype: np.dtype, like: Any) -> tuple[Any, np.ndarray]:
        array = gpu.upload(np.full(shape, np.nan, dtype))
        return array, library.view(array)

    library.empty = filled
    try:
        yield
    finally:
        del library.empty


def interleave(
    gpu: Gpu, contestants: Mapping[str, Callable[[], Any]], budget: float
) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one number per round; they take turns, A B C, then C B A.

    Parameters
    ----------
    gpu : Gpu
    contestants : mapping of str to callable
    budget : float
        Seconds of GPU time to spend in all, where 3 rounds take no longer.
    """
    repeats, round_seconds = {}, 0.0
    for name, call in contestants.items():
        call()
        once = max(gpu.seconds(call, 1), 1e-7)
        repeats[name] = max(1, round(SAMPLE_SECONDS / once))
        round_seconds += once * repeats[name]
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(budget / round_seconds)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants.items())
        for name, call in order if number % 2 == 0 else reversed(order):
            times[name].append(gpu.seconds(call, repeats[name]))
    return times


def ratio(times: Mapping[str, list[float]], peer: str, ours: str) -> float:
    """Median over rounds of peer / ours: above 1 where ours is faster."""
    return median(p / o for p, o in zip(times[peer], times[ours]))
