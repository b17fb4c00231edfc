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


class Library:
    """How a library takes arrays to a GPU and back."""

    def __init__(self, name: str) -> None:
        self.module = pytest.importorskip("numba.cuda" if name == "numba" else name)
        self.there, self.back = {
            "torch": lambda: (lambda x: self.module.from_numpy(x).cuda(), lambda x: x.cpu().numpy()),
            "cupy": lambda: (self.module.asarray, self.module.asnumpy),
            "jax": lambda: (self.module.device_put, np.asarray),
            "numba": lambda: (self.module.to_device, lambda x: x.copy_to_host()),
        }[name]()


@pytest.fixture(params=["torch", "cupy", "jax", "numba"])
def library(gpu, request):
    return Library(request.param)


def test_arrays_of_a_library_stay_where_they_are_and_of_their_kind(library):
    rng = np.random.default_rng(0)
    *host, dout = rng.standard_normal((4, 1, 2, 65, 64)).astype(np.float16)
    tables = {"bias": rng.standard_normal((65, 65)).astype(np.float16), "sinks": np.ones(2, np.float32)}
    q, k, v = (library.there(x) for x in host)
    out, vjp = numbaflash.attention_vjp(q, k, v, causal=True, **{n: library.there(x) for n, x in tables.items()})
    gradients = vjp(library.there(dout))
    expected, expected_vjp = numbaflash.attention_vjp(*host, causal=True, backend="cpu", **tables)
    wanted = expected_vjp(dout)
    pairs = [(out, expected)]
    pairs += [(getattr(gradients, n), getattr(wanted, n)) for n in ("dq", "dk", "dv", "dbias", "dsinks")]
    for ours, right in pairs:
        assert type(ours) is type(q)
        ours, right = library.back(ours), np.asarray(right, float)
        np.testing.assert_allclose(ours.astype(float), right, atol=4e-3 * max(1, np.abs(right).max()))


def test_rows_of_no_sequence_are_constants_on_a_device(library):
    host = np.random.default_rng(0).standard_normal((3, 2, 1, 40, 16), dtype=np.float32)
    options = dict(q_lengths=[40, 3], kv_lengths=[17, 40], sinks=np.ones(1, np.float32), return_lse=True)
    expected = numbaflash.attention(*host, backend="cpu", **options)
    options["sinks"] = library.there(options["sinks"])
    for ours, right in zip(numbaflash.attention(*map(library.there, host), **options), expected):
        np.testing.assert_allclose(library.back(ours), right, atol=2e-6)


def test_work_is_ordered_by_the_callers_stream(gpu):
    """A slow producer on a side stream: results are right only if the kernels wait for it, and for it alone."""
    torch = pytest.importorskip("torch")
    x = torch.randn(1, 1, 64, 64, device="cuda")
    expected = numbaflash.attention(x, x, x)
    side, late = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    for given in (None, side):
        late.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            late.copy_(x)
            if given is None:
                out = numbaflash.attention(late, late, late)
        if given is not None:
            out = numbaflash.attention(late, late, late, stream=given)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_results_lie_on_the_gpu_of_the_inputs(gpu):
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(1, 1, 64, 64)
    here, there = (numbaflash.attention(y, y, y) for y in (x.to("cuda:0"), x.to("cuda:1")))
    assert there.device.index == 1 and torch.equal(here.cpu(), there.cpu())


def test_the_kernels_of_this_gpu_are_those_that_were_planned_for_it(gpu):
    from numbaflash.cuda import driver

    spec = plan_of("tensor-forward-float16-d64-plain", gpu.arch).launches[0].kernel
    assert driver.device(0).kernel(spec, 0) is not None
