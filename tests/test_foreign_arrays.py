"""PyTorch tensors in host memory: same results, same kind back, nothing read wrongly or lost in silence."""

import numpy as np
import pytest

import numbaflash

torch = pytest.importorskip("torch")


@pytest.fixture
def qkv():
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.standard_normal((1, 2, 9, 8), dtype=np.float32)) for _ in "qkv"]


def test_tensors_give_tensors_with_the_numbers_of_numpy(qkv):
    arrays = [tensor.numpy() for tensor in qkv]
    out, vjp = numbaflash.attention_vjp(*qkv, causal=True)
    expected, expected_vjp = numbaflash.attention_vjp(*arrays, causal=True)
    assert torch.equal(out, torch.from_numpy(expected))
    for gradient, number in zip(vjp(out), expected_vjp(expected), strict=True):
        assert torch.equal(gradient, torch.from_numpy(number))


def test_bfloat16_tensors_come_back_as_bfloat16(qkv):
    assert numbaflash.attention(*(tensor.bfloat16() for tensor in qkv)).dtype == torch.bfloat16


def test_a_lazy_minus_sign_is_not_lost(qkv):
    q, k, v = qkv
    negative = torch.view_as_complex(torch.stack([q, q], -1).contiguous()).conj().imag
    assert negative.is_neg()
    assert torch.equal(numbaflash.attention(negative, k, v), numbaflash.attention(-q, k, v))


def test_states_merge_into_tensors(qkv):
    q, k, v = qkv
    parts = [
        numbaflash.attention(q, k[:, :, part], v[:, :, part], return_lse=True)
        for part in (slice(0, 4), slice(4, None))
    ]
    out, lse = numbaflash.merge_states(*zip(*parts, strict=True))
    assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
    torch.testing.assert_close(out, numbaflash.attention(q, k, v), atol=1e-6, rtol=0)


def test_a_gradient_is_never_lost_silently(qkv):
    with pytest.raises(NotImplementedError, match="requires grad"):
        numbaflash.attention(qkv[0].requires_grad_(), *qkv[1:])


def test_kinds_do_not_mix(qkv):
    with pytest.raises(TypeError, match="k is a torch array and q is a numpy one"):
        numbaflash.attention(qkv[0].numpy(), *qkv[1:])


def test_out_may_not_overwrite_a_small_input(qkv):
    memory = torch.zeros(144)
    with pytest.raises(ValueError, match="out overlaps sinks"):
        numbaflash.attention(*qkv, sinks=memory[:2], out=memory.view(1, 2, 9, 8))
