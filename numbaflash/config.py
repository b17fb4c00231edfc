"""What a caller may choose about CUDA kernels, for ``config=``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CUDAConfig:
    """Which CUDA kernels run a call, for ``config=`` with ``backend="cuda"`` or ``"emulator"``.

    Parameters
    ----------
    tensor_cores : bool
        Use tensor cores where they compute what is asked for; otherwise plain multiply-adds do.
    arch : str, optional
        The GPU that the emulator stands for, such as ``"sm_75"`` or ``"sm_90a"``; by default ``"sm_80"``. Backend
        "cuda" takes the GPU that is there.

    Raises
    ------
    TypeError
        If `tensor_cores` is not a bool or `arch` not a string.
    ValueError
        If there is no such architecture.

    Examples
    --------
    >>> import numpy as np, numbaflash
    >>> q = k = v = np.ones((1, 2, 100, 64), np.float16)
    >>> turing = numbaflash.CUDAConfig(arch="sm_75")
    >>> out = numbaflash.attention(q, k, v, backend="emulator", config=turing)      # doctest: +SKIP
    """

    tensor_cores: bool = True
    arch: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tensor_cores, bool):
            raise TypeError(f"tensor_cores must be True or False, not {self.tensor_cores!r}")
        if self.arch is None:
            return
        if not isinstance(self.arch, str):
            raise TypeError(f"arch must be a string such as 'sm_80' or None, not {self.arch!r}")
        from numbaflash.cuda.compile import parse_arch

        parse_arch(self.arch)
