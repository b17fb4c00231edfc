"""The CPU backward pass: bits that no thread count changes, gradients of everything, errors beside torch."""

import numpy as np
import pytest

import numbaflash
from numbaflash import reference
from numbaflash.cpu import backward as cpu_backward
from numbaflash.cpu.threads import set_num_threads

f32, f64 = np.float32, np.float64


@pytest.fixture(autouse=True)
def default_threads():
    yield
    set_num_threads(None)


def arrays(seed, *shapes, dtype=f32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def gradients(q, k, v, dout, dlse=None, **options):
    out, lse = numbaflash.attention(q, k, v, return_lse=True, backend="cpu", **options)
    result = numbaflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, backend="cpu", **options)
    return [g for g in (*result, result.dbias, result.dsinks) if g is not None]


def exact_gradients(q, k, v, dout, dlse=None, **options):
    result = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    return [g for g in (*result, result.dbias, result.dsinks) if g is not None]


def assert_close(actual, exact, tolerance):
    assert len(actual) == len(exact)
    for ours, theirs in zip(actual, exact):
        np.testing.assert_allclose(ours, np.asarray(theirs, f64), rtol=0, atol=tolerance)


BIAS_SHAPES = [
    (3, 1, 130, 170), (1, 4, 130, 170), (1, 1, 130, 170), (4, 130, 170), (3, 1, 1, 170), (4, 130, 1), (1,),
]


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (40, 3)}, {"softcap": 2.0, "dropout_p": 0.2, "seed": 3, "causal": True},
    *({"bias": shape} for shape in BIAS_SHAPES),
], ids=str)
def test_gradients_have_the_same_bits_for_any_number_of_threads(options):
    q, k, v, dout = arrays(0, (3, 4, 130, 24), (3, 2, 170, 24), (3, 2, 170, 24), (3, 4, 130, 24))
    if "bias" in options:
        options = {"bias": arrays(1, options["bias"])[0]}
    out, lse = numbaflash.attention(q, k, v, return_lse=True, backend="cpu", **options)

    def with_threads(count):
        set_num_threads(count)
        result = numbaflash.attention_backward(dout, q, k, v, out, lse, backend="cpu", **options)
        return [g for g in (*result, result.dbias) if g is not None]

    alone = with_threads(1)
    for count in (2, 3, 7):
        for ours, theirs in zip(with_threads(count), alone):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
def test_one_head_is_shared_by_all_threads_and_stays_exact(causal):
    q, k, v, dout = arrays(2, *[(700, 40)] * 4, dtype=f64)
    set_num_threads(5)
    exact = exact_gradients(q, k, v, dout, causal=causal)
    for _ in range(5):
        assert_close(gradients(q, k, v, dout, causal=causal), exact, 1e-13)


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (11, 2), "q_offset": 30}, {"window": (None, 0), "q_offset": -25},
    {"causal": True, "softcap": 1.5}, {"alibi_slopes": [0.1, 0.3, 0.5, 0.7]}, {"dropout_p": 0.4, "seed": 11},
], ids=str)
@pytest.mark.parametrize("dim, value_dim", [(1, 3), (33, 64), (257, 16)])
def test_any_head_dims_and_groups_agree_with_the_oracle(options, dim, value_dim):
    shapes = (4, 105, dim), (2, 133, dim), (2, 133, value_dim), (4, 105, value_dim)
    q, k, v, dout = arrays(3, *shapes, dtype=f64)
    dlse, sinks = arrays(4, (4, 105), (4,), dtype=f64)
    actual = gradients(q, k, v, dout, dlse, sinks=sinks, **options)
    assert_close(actual, exact_gradients(q, k, v, dout, dlse, sinks=sinks, **options), 2e-13)


@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_a_broadcast_bias_gets_the_sum_of_its_gradients(shape):
    q, k, v, dout = arrays(5, (3, 4, 130, 8), (3, 2, 170, 8), (3, 2, 170, 8), (3, 4, 130, 8), dtype=f64)
    (bias,) = arrays(6, shape, dtype=f64)
    options = dict(bias=bias, softcap=3.0, kv_lengths=[170, 3, 99], q_lengths=[130, 40, 0], causal=True)
    assert_close(gradients(q, k, v, dout, **options), exact_gradients(q, k, v, dout, **options), 3e-13)


def test_gradients_are_the_slopes_of_the_loss():
    q, k, v, dout = arrays(7, (2, 9, 5), (1, 11, 5), (1, 11, 4), (2, 9, 4), dtype=f64)
    dlse, sinks, bias = arrays(8, (2, 9), (2,), (2, 9, 11), dtype=f64)
    inputs = dict(q=q, k=k, v=v, bias=bias, sinks=sinks)
    options = dict(causal=True, softcap=2.0, dropout_p=0.3, seed=5)

    def loss(**changed):
        out, lse = numbaflash.attention(**(inputs | changed), **options, return_lse=True, backend="cpu")
        return (out * dout).sum() + (lse * dlse).sum()

    slopes = dict(zip(inputs, gradients(q, k, v, dout, dlse, bias=bias, sinks=sinks, **options)))
    rng = np.random.default_rng(9)
    for name, array in inputs.items():
        for _ in range(4):
            direction, step = rng.standard_normal(array.shape), 1e-5
            ahead, behind = (loss(**{name: array + sign * step * direction}) for sign in (1, -1))
            slope = (ahead - behind) / (2 * step)
            actual = (slopes[name] * direction).sum()
            np.testing.assert_allclose(actual, slope, rtol=1e-7, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_float32_errors_are_those_of_careful_code(dim, causal):
    """Largest errors of torch 2.13's float32 SDPA in these cases, median of five seeds, times 1.2."""
    torch = {(64, False): 5.4e-7, (64, True): 3.0e-6, (128, False): 6.5e-7, (128, True): 3.0e-6}
    errors = []
    for seed in range(3):
        q, k, v, dout = arrays(seed, *[(2, 1000, dim)] * 4)
        pairs = zip(gradients(q, k, v, dout, causal=causal), exact_gradients(q, k, v, dout, causal=causal))
        errors.append(max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs))
    assert np.median(errors) <= 1.2 * torch[dim, causal]


def test_few_kernels_serve_all_calls():
    kernels = set()
    for dtype in (np.float16, f32, f64):
        q, k, v = arrays(0, (2, 5, 3), (2, 5, 3), (2, 5, 3), dtype=dtype)
        for options in ({}, {"causal": True}, {"window": (1, 1)}, {"bias": np.zeros(1)}, {"softcap": 1.0},
                        {"dropout_p": 0.5, "seed": 1}, {"mask": np.ones(1, bool)},
                        {"alibi_slopes": [1.0, 2.0]}):
            problem = numbaflash.problem.make_problem(q, k, v, numbaflash.Options(**options))
            kernels.add(cpu_backward.kernel_statics(problem).kernel)
    assert len(kernels) == 6
