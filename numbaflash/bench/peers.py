"""Whose attention is measured: numbaflash, and others where they are installed.

A peer turns a case into a callable that does the work and nothing else; arrays are converted beforehand, into
the layout and dtype that the peer likes best. Where a peer has no words for an option (a window, lengths), it
gets the equivalent mask or bias.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import numbaflash
from numbaflash.cpu.threads import get_num_threads

from . import plain
from .cases import BOTH, FORWARD, Case, Inputs, dense_bias, dense_visibility, dtype_of, our_options
from .contest import OURS, Contestant, Unsupported, attempt
from .report import UsageError


class Peer(Contestant):
    """Base of all contestants on the CPU.

    Attributes
    ----------
    restricted : bool
        Whether ``--avx2`` can hold it to AVX2.
    """

    restricted = True

    def prepare(self, case: Case, inputs: Inputs, which: str) -> Callable[[], Any]:
        """A callable that returns out ("forward") or (dq, dk, dv)."""
        raise NotImplementedError

    def arrays(self, case: Case, result: Any) -> list[np.ndarray]:
        """A result as NumPy arrays in numbaflash's layout."""
        return list(result) if isinstance(result, tuple) else [result]

    def threads(self) -> int | None:
        """How many threads it uses; None if it does not say."""
        return None

    def attempt(self, case: Case, inputs: Inputs, which: str) -> tuple[Callable[[], Any], list[np.ndarray]]:
        """The callable of :meth:`prepare` and its first result; Unsupported, whatever goes wrong."""
        return attempt(lambda: self.prepare(case, inputs, which), lambda result: self.arrays(case, result))


class Numbaflash(Peer):
    name = OURS

    def threads(self) -> int:
        return get_num_threads()

    def prepare(self, case: Case, inputs: Inputs, which: str) -> Callable[[], Any]:
        q, k, v, dout = inputs[:4]
        options = our_options(case, inputs)
        packed = (
            {} if case.lengths is None else {"cu_seqlens_q": inputs.offsets, "cu_seqlens_k": inputs.offsets}
        )
        attention = numbaflash.attention if case.lengths is None else numbaflash.attention_varlen
        if which == FORWARD:
            return lambda: attention(q, k, v, **packed, **options)

        def backward(out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, ...]:
            return tuple(numbaflash.attention_backward(dout, q, k, v, out, lse, **packed, **options))

        if which == BOTH:
            return lambda: backward(*attention(q, k, v, return_lse=True, **packed, **options))
        saved = attention(q, k, v, return_lse=True, **packed, **options)
        return lambda: backward(*saved)


class Torch(Peer):
    """``torch.nn.functional.scaled_dot_product_attention``; packed sequences one after the other."""

    name = "torch"
    modules = ("torch",)

    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def prepare(self, case: Case, inputs: Inputs, which: str) -> Callable[[], Any]:
        import torch

        if case.softcap is not None:
            raise Unsupported("SDPA has no softcap")
        q, k, v, dout = (_to_torch(array) for array in inputs[:4])
        simple_causal = (
            case.causal and case.window is None and inputs.slopes is None and case.n_q == case.keys
        )
        visible = None if simple_causal or case.lengths is not None else dense_visibility(case, inputs)
        bias = dense_bias(case, inputs)
        mask = None if visible is None else torch.from_numpy(visible)
        if bias is not None:
            mask = _to_torch(bias if visible is None else np.where(visible, bias, -np.inf).astype(bias.dtype))
        keywords = {
            "attn_mask": mask,
            "dropout_p": case.dropout,
            "is_causal": simple_causal,
            "enable_gqa": case.heads != case.full_kv_heads,
        }
        sdpa = torch.nn.functional.scaled_dot_product_attention

        def forward() -> Any:
            if case.lengths is None:
                return sdpa(q, k, v, **keywords)
            parts = (torch.split(x.transpose(0, 1), case.lengths, dim=1) for x in (q, k, v))
            outs = [sdpa(*(x[None] for x in part), **keywords)[0] for part in zip(*parts)]
            return torch.cat(outs, dim=1).transpose(0, 1)

        if which == FORWARD:
            return forward
        for leaf in (q, k, v):
            leaf.requires_grad_()
        if which == BOTH:
            return lambda: torch.autograd.grad(forward(), (q, k, v), dout)
        out = forward()
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def arrays(self, case: Case, result: Any) -> list[np.ndarray]:
        import torch

        parts = result if isinstance(result, tuple) else (result,)
        return [x.detach().to(torch.float64).numpy() for x in parts]


class TorchFolded(Torch):
    """SDPA with the query heads of a group laid out as rows of one head: the trick for decoding."""

    name = "torch-folded"

    def prepare(self, case: Case, inputs: Inputs, which: str) -> Callable[[], Any]:
        group = case.heads // case.full_kv_heads
        if not case.decode or group == 1 or case.causal or which != FORWARD:
            raise Unsupported("only for decoding with grouped heads")
        rows = case.n_q * group
        folded = case._replace(heads=case.full_kv_heads, n_q=rows, n_k=case.keys)
        q = inputs.q.reshape(case.batch, case.full_kv_heads, rows, case.head_dim)
        return super().prepare(folded, inputs._replace(q=q), which)

    def arrays(self, case: Case, result: Any) -> list[np.ndarray]:
        return [x.reshape(case.batch, case.heads, case.n_q, -1) for x in super().arrays(case, result)]


class Jax(Peer):
    """``jax.nn.dot_product_attention``, jitted, arrays in its own layout."""

    name = "jax"
    modules = ("jax",)

    def prepare(self, case: Case, inputs: Inputs, which: str) -> Callable[[], Any]:
        import jax

        if case.softcap is not None or case.dropout or case.lengths is not None:
            raise Unsupported("no softcap, dropout or packed sequences")
        if case.values != case.head_dim:
            raise Unsupported("Dv must equal D")
        if which == "backward":
            raise Unsupported("backward is not a call of its own")
        jax.config.update("jax_enable_x64", case.dtype == "float64")
        q, k, v, dout = (jax.numpy.asarray(np.ascontiguousarray(x.swapaxes(1, 2))) for x in inputs[:4])
        lengths = None if inputs.kv_lengths is None else jax.numpy.asarray(inputs.kv_lengths, "int32")
        keywords = {"bias": dense_bias(case, inputs), "mask": inputs.mask, "key_value_seq_lengths": lengths}
        keywords = {name: None if x is None else jax.numpy.asarray(x) for name, x in keywords.items()}
        keywords |= {"is_causal": case.causal, "local_window_size": case.window}

        def forward(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, **keywords)

        def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
            return jax.vjp(forward, q, k, v)[1](dout)

        compiled, operands = (forward, (q, k, v)) if which == FORWARD else (gradients, (q, k, v, dout))
        compiled = jax.jit(compiled)
        return lambda: jax.block_until_ready(compiled(*operands))

    def arrays(self, case: Case, result: Any) -> list[np.ndarray]:
        return [np.asarray(x).swapaxes(1, 2) for x in (result if isinstance(result, tuple) else (result,))]


class OnnxRuntime(Peer):
    """The Attention operator of ONNX (opset 23) in onnxruntime: forward only."""

    name = "onnxruntime"
    modules = ("onnxruntime", "onnx")
    restricted = False

    def threads(self) -> int:
        return get_num_threads()

    def prepare(self, case: Case, inputs: Inputs, which: str) -> Callable[[], Any]:
        import onnxruntime
        from onnx import helper

        if which != FORWARD:
            raise Unsupported("forward only")
        if case.dropout or case.lengths is not None or case.dtype == "bfloat16":
            raise Unsupported("no dropout, packed sequences or bfloat16")
        feeds = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        simple_causal = case.causal and case.window is None and case.n_q == case.keys
        visible = None if simple_causal else dense_visibility(case, inputs)
        bias = dense_bias(case, inputs)
        if bias is not None and visible is not None:
            bias = np.where(visible, bias, -np.inf).astype(bias.dtype)
        mask = visible if bias is None else bias
        if mask is not None:
            feeds["mask"] = np.ascontiguousarray(
                np.broadcast_to(mask, mask.shape[:2] + (case.n_q, case.keys))
            )
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), None)
            for name, x in feeds.items()
        ]
        node = helper.make_node(
            "Attention", list(feeds), ["out"], is_causal=int(simple_causal), softcap=case.softcap or 0.0
        )
        out = helper.make_tensor_value_info("out", helper.np_dtype_to_tensor_dtype(inputs.q.dtype), None)
        model = helper.make_model(
            helper.make_graph([node], "attention", infos, [out]),
            opset_imports=[helper.make_opsetid("", 23)],
            ir_version=10,
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads()
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        return lambda: session.run(None, feeds)[0]


class PlainNumPy(Peer):
    """Standard attention; 16-bit inputs are converted beforehand, for NumPy multiplies them one by one."""

    name = "numpy"

    def prepare(self, case: Case, inputs: Inputs, which: str) -> Callable[[], Any]:
        if case.dropout or which == "backward":
            raise Unsupported("no dropout, and backward is not a call of its own")
        if which == BOTH and case.softcap is not None:
            raise Unsupported("gradients without softcap")
        work = np.float64 if case.dtype == "float64" else np.float32
        group = case.heads // case.full_kv_heads
        axis = 1
        q, k, v, dout = (x.astype(work, copy=False) for x in inputs[:4])
        if case.lengths is None:
            calls = [(dout, q, np.repeat(k, group, axis), np.repeat(v, group, axis))]
            bias = dense_bias(case, inputs)
            options = [
                {
                    "visible": dense_visibility(case, inputs),
                    "bias": None if bias is None else bias.astype(work, copy=False),
                }
            ]
        else:
            bounds = list(zip(inputs.offsets, inputs.offsets[1:]))
            head_major = [
                np.repeat(x, case.heads // x.shape[1], axis).swapaxes(0, 1)[None] for x in (dout, q, k, v)
            ]
            calls = [tuple(x[:, :, start:stop] for x in head_major) for start, stop in bounds]
            options = [{"visible": np.tri(n, dtype=bool) if case.causal else None} for n in case.lengths]
        if which == FORWARD:
            return lambda: self._join(
                case,
                [(plain.attention(*c[1:], softcap=case.softcap, **o),) for c, o in zip(calls, options)],
                group,
            )
        return lambda: self._join(
            case, [plain.attention_and_gradients(*c, **o)[1:] for c, o in zip(calls, options)], group
        )

    @staticmethod
    def _join(case: Case, results: list[tuple[np.ndarray, ...]], group: int) -> Any:
        parts = [x[0] if len(x) == 1 else np.concatenate(x, axis=2) for x in zip(*results)]
        if group > 1:  # keys and values were repeated: their gradients are summed
            parts[1:] = [x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2) for x in parts[1:]]
        if case.lengths is not None:
            parts = [x[0].swapaxes(0, 1) for x in parts]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def arrays(self, case: Case, result: Any) -> list[np.ndarray]:
        return [x.astype(dtype_of(case.dtype)) for x in super().arrays(case, result)]


ALL: tuple[type[Peer], ...] = (Torch, TorchFolded, Jax, OnnxRuntime, PlainNumPy)
NAMES = tuple(peer.name for peer in ALL)


def find(names: str | None, avx2: bool) -> list[Peer]:
    """The peers that can run here; says which, with how many threads, and why the others cannot.

    Parameters
    ----------
    names : str or None
        Those asked for, separated by commas; None asks for all.
    avx2 : bool
        Leave out those that cannot be held to AVX2.

    Raises
    ------
    UsageError
        For a name that is unknown.
    """
    wanted = NAMES if names is None else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in NAMES:
            raise UsageError(f"--peers has {name!r}; there is {', '.join(NAMES)}")
    present: list[Peer] = []
    for kind in ALL:
        if kind.name not in wanted:
            continue
        if lacking := kind.lacking():
            print(f"without   {kind.name}: not installed: pip install {' '.join(lacking)}")
        elif avx2 and not kind.restricted:
            print(f"without   {kind.name}: cannot be held to AVX2")
        else:
            present.append(kind())
    counts = [peer.name + (f" ({peer.threads()} threads)" if peer.threads() else "") for peer in present]
    print(f"beside    {', '.join(counts) or 'nobody'}")
    return present


class Omissions:
    """What was not measured, and why: printed once at the end."""

    def __init__(self) -> None:
        self.cases: dict[tuple[str, str], list[str]] = {}

    def add(self, who: str, reason: Unsupported, case: str) -> None:
        cases = self.cases.setdefault((who, str(reason)), [])
        if case not in cases:
            cases.append(case)

    def show(self) -> None:
        if self.cases:
            print("\nnot measured:")
        for (who, reason), cases in self.cases.items():
            print(f"  {who}: {reason}  [{', '.join(cases)}]")


def _to_torch(array: np.ndarray) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
