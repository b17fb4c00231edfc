"""Whose kernels are measured on a GPU: numbaflash's, and others' where they are installed."""

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numbaflash

from ..contest import OURS, Contestant, Unsupported, attempt
from .cases import FORWARD, GpuCase
from .device import Gpu

SIXTEEN = ("float16", "bfloat16")


class Peer(Contestant):
    """Base of all contestants on a GPU.

    Attributes
    ----------
    library : str
        Whose arrays it takes.
    """

    modules, library = ("torch",), "torch"

    def missing(self, gpu: Gpu) -> str:
        """Why it cannot take part here at all; empty where it can."""
        if lacking := self.lacking():
            return f"needs {', '.join(lacking)}"
        return "" if self.library in ("", gpu.library) else f"needs {self.library} with CUDA"

    def prepare(self, case: GpuCase, arrays: tuple, direction: str, gpu: Gpu) -> Callable[[], Any]:
        """A callable that returns out, or (dq, dk, dv), in numbaflash's layout."""
        raise NotImplementedError

    def attempt(
        self, case: GpuCase, arrays: tuple, direction: str, gpu: Gpu
    ) -> tuple[Callable[[], Any], Any]:
        """The callable of :meth:`prepare` and its first result; Unsupported, whatever goes wrong."""

        def finish(result: Any) -> Any:
            gpu.synchronize()
            return result

        return attempt(lambda: self.prepare(case, arrays, direction, gpu), finish)


class Numbaflash(Peer):
    name, modules, library = OURS, (), ""

    def prepare(self, case: GpuCase, arrays: tuple, direction: str, gpu: Gpu) -> Callable[[], Any]:
        q, k, v, dout = arrays
        options = case.options() | {"backend": gpu.backend}
        attention = numbaflash.attention_varlen if case.packed else numbaflash.attention
        if direction == FORWARD:
            return lambda: attention(q, k, v, **options)
        out, lse = attention(q, k, v, return_lse=True, **options)
        return lambda: tuple(numbaflash.attention_backward(dout, q, k, v, out, lse, **options))


class TorchPeer(Peer):
    """Base of those that PyTorch's autograd differentiates."""

    def forward(self, case: GpuCase, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        """A callable that returns out."""
        raise NotImplementedError

    def prepare(self, case: GpuCase, arrays: tuple, direction: str, gpu: Gpu) -> Callable[[], Any]:
        import torch

        q, k, v, dout = arrays
        if direction == FORWARD:
            call = self.forward(case, q, k, v)

            def without_graph() -> Any:
                with torch.no_grad():
                    return call()

            return without_graph
        leaves = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
        out = self.forward(case, *leaves)()
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


class Sdpa(TorchPeer):
    """``scaled_dot_product_attention``, held to one of its backends."""

    backend, kinds = "", SIXTEEN
    most_scores = None

    def forward(self, case: GpuCase, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        if case.packed or case.window is not None:
            raise Unsupported("no windows or packed sequences")
        if case.kind not in self.kinds:
            raise Unsupported(f"not for {case.kind}")
        if self.most_scores and case.batch * case.heads * case.length**2 > self.most_scores:
            raise Unsupported("would hold too many scores in memory")
        backend = getattr(SDPBackend, self.backend)
        grouped = {"enable_gqa": True} if case.group > 1 else {}

        def call() -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=case.causal, **grouped)

        return call


class SdpaFlash(Sdpa):
    name, backend = "torch-flash", "FLASH_ATTENTION"


class SdpaCudnn(Sdpa):
    name, backend = "torch-cudnn", "CUDNN_ATTENTION"


class SdpaEfficient(Sdpa):
    name, backend, kinds = "torch-efficient", "EFFICIENT_ATTENTION", (*SIXTEEN, "float32", "tf32", "tf32x3")


class SdpaMath(Sdpa):
    """Standard attention; only where there is nothing better, and its scores fit."""

    name, backend, kinds, most_scores = "torch-math", "MATH", ("float32",), 2**31


class TorchVarlen(TorchPeer):
    """``torch.nn.attention.varlen``, in the versions that have it."""

    name = "torch-varlen"

    def missing(self, gpu: Gpu) -> str:
        reason = super().missing(gpu)
        if not reason and find_spec("torch.nn.attention.varlen") is None:
            reason = "needs torch.nn.attention.varlen"
        return reason

    def forward(self, case: GpuCase, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        import torch
        from torch.nn.attention.varlen import varlen_attn

        if not case.packed:
            raise Unsupported("only for packed sequences")
        offsets, longest = torch.from_numpy(case.offsets).to(q.device), max(case.lengths)
        known = inspect.signature(varlen_attn).parameters  # it was renamed between versions
        causal = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
        causal = causal if case.causal else {}
        return lambda: varlen_attn(q, k, v, offsets, offsets, longest, longest, **causal)


class Flex(TorchPeer):
    """FlexAttention: a Triton kernel that torch.compile makes for the case."""

    name, modules = "flex-triton", ("torch", "triton")

    def forward(self, case: GpuCase, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not case.headline:
            raise Unsupported("compiled for the headline cases only")
        if case.packed or case.kind not in SIXTEEN:
            raise Unsupported("16-bit batches only")
        left = case.length if case.window is None else case.window

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (j <= i) & (i - j <= left)

        mask = None
        if case.causal:
            mask = create_block_mask(visible, None, None, case.length, case.length, device=q.device)
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=case.group > 1)


class FlashAttention(TorchPeer):
    """The package flash-attn: FlashAttention-2."""

    name, modules = "flash-attn", ("torch", "flash_attn")

    def forward(self, case: GpuCase, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        import torch
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        if case.kind not in SIXTEEN:
            raise Unsupported("16-bit only")
        options = {
            "causal": case.causal,
            "window_size": (-1 if case.window is None else case.window, -1),
            "deterministic": case.deterministic,
        }
        if case.packed:
            offsets, longest = torch.from_numpy(case.offsets).to(q.device), max(case.lengths)
            return lambda: flash_attn_varlen_func(q, k, v, offsets, offsets, longest, longest, **options)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return lambda: flash_attn_func(q, k, v, **options).transpose(1, 2)


PEERS: tuple[type[Peer], ...] = (
    SdpaFlash,
    SdpaCudnn,
    SdpaEfficient,
    SdpaMath,
    TorchVarlen,
    Flex,
    FlashAttention,
)


def find(gpu: Gpu) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can take part here, and the others with the reason."""
    present, missing = [], {}
    for kind in PEERS:
        peer = kind()
        reason = peer.missing(gpu)
        if reason:
            missing[peer.name] = reason
        else:
            present.append(peer)
    return present, missing


def matmul_peak(gpu: Gpu, kind: str, size: int = 8192) -> float | None:
    """Operations per second of a large product by torch's library, random numbers; None without torch."""
    if gpu.library != "torch":
        return None
    import torch

    if kind == "float32" or kind in ("tf32", "tf32x3"):
        dtype, allowed = torch.float32, kind != "float32"
    else:
        dtype, allowed = getattr(torch, kind), False
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        a, b = (torch.randn(size, size, device=gpu.device).to(dtype) for _ in range(2))
        call = lambda: torch.mm(a, b)  # noqa: E731
        call()
        best = min(gpu.seconds(call, 4) for _ in range(3))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return 2 * size**3 / best
