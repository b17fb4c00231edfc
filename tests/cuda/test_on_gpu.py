"""What a GPU must show, with ``pytest -m gpu``: right results, those of the emulator too, in any array."""

import numpy as np
import pytest

import numbaflash
from numbaflash.bench import report
from numbaflash.bench.gpu import checks, device
from numbaflash.cuda.variants import plan_of

pytestmark = pytest.mark.gpu
SAMPLE = [
    check
    for check in checks.CHECKS
    if check.name
    in (
        "bfloat16-d64-causal",
        "float16-d128-causal",
        "tf32-d64-causal",
        "float32-d64-full",
        "bfloat16-packed",
        "bfloat16-deterministic",
        "float32-everything",
    )
]


@pytest.fixture(scope="module")
def gpu():
    try:
        return device.find()
    except report.UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.name)
def test_results_are_those_of_the_oracle(gpu, check):
    row = checks.run_check(check, gpu, np.random.default_rng(0))
    assert row["verdict"] == "ok", row


@pytest.mark.parametrize("check", SAMPLE, ids=lambda check: check.name)
def test_hardware_and_emulator_agree(gpu, check):
    """The same plans of the same call: each kernel writes a result of its own, or what the next one reads."""
    small = check._replace(heads=2, kv_heads=1, n_q=70, n_k=90, packed=(40, 1, 29) if check.packed else ())
    call = checks.make_call(small, np.random.default_rng(0))
    attention = numbaflash.attention_varlen if call.offsets else numbaflash.attention
    results = []
    for backend in ("cuda", "emulator"):
        options = dict(call.options, backend=backend)
        if backend == "emulator":
            options["config"] = numbaflash.CUDAConfig(arch=gpu.arch)
        out, lse = attention(*call[:3], return_lse=True, **call.offsets, **options)
        gradients = numbaflash.attention_backward(call.dout, *call[:3], out, lse, **call.offsets, **options)
        results.append([out, lse, *gradients, gradients.dbias, gradients.dsinks])
    # the order of a tensor core's sums is the hardware's own, and exp2 differs in its last bit
    unit = 2.0**-11 if check.kind == "tf32" else checks.eps(check.dtype)
    for ours, emulated in zip(*results):
        if ours is None:
            assert emulated is None
            continue
        a, b = (np.asarray(x, np.float64) for x in (ours, emulated))
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        assert np.abs(a - b)[finite].max() <= 4 * unit * np.abs(b[finite]).max()


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_arrays_of_a_library_stay_where_they_are_and_of_their_kind(gpu, name):
    library = pytest.importorskip(name)
    host = np.random.default_rng(0).standard_normal((3, 1, 2, 65, 64)).astype(np.float16)
    make = {
        "torch": lambda x: library.from_numpy(x).cuda(),
        "cupy": lambda x: library.asarray(x),
        "jax": lambda x: library.device_put(x),
    }[name]
    q, k, v = (make(x) for x in host)
    out = numbaflash.attention(q, k, v, causal=True)
    assert type(out) is type(q)
    expected = numbaflash.attention(*host, causal=True, backend="cpu")
    back = {"torch": lambda x: x.cpu().numpy(), "cupy": lambda x: library.asnumpy(x), "jax": np.asarray}[name]
    np.testing.assert_allclose(back(out).astype(float), expected.astype(float), atol=4e-3)


def test_the_kernels_of_this_gpu_are_those_that_were_planned_for_it(gpu):
    from numbaflash.cuda import driver

    spec = plan_of("tensor-forward-float16-d64-plain", gpu.arch).launches[0].kernel
    assert driver.device(0).kernel(spec, 0) is not None
