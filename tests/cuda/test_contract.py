"""The contract of the CUDA backend, through the api, on the kernels that a GPU would run, in the emulator.

Half precision and tf32 run on tensor cores, all else on plain multiply-adds. The default sample draws from few
head dimensions, since each has kernels of its own to compile; `-m exhaustive` draws from all, on more GPUs.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

import numbaflash
from backends import Backend
from numbaflash.cuda import plan_sm80, plans
from strategies import ALL_STAGES, Variant, bfloat16, calls, f16, f32
from tolerances import assert_backward, assert_forward

SMALL = Backend("emulator", rows=150, work=6_000_000, dims=(64, 40))
WIDE = Backend("emulator", rows=150, work=6_000_000)
TF32 = SMALL._replace(precision="tf32")
EVERYTHING = Variant(f16, ALL_STAGES, bias_dtype=f32)


def check(call, config=None):
    call = dataclasses.replace(call, options=call.options | {"config": config})
    out, lse = call.forward("emulator")
    assert_forward(call.problem, out, lse)
    assert_backward(call.problem, call.dout, call.dlse, call.backward("emulator", out, lse), call.options)


def examples(count):
    return settings(max_examples=max(1, count * settings().max_examples // 30))


@pytest.mark.slow
@pytest.mark.parametrize("backend, variant", [
    pytest.param(SMALL, Variant(bfloat16), id="bfloat16"),
    pytest.param(SMALL, EVERYTHING, id="float16, every stage", marks=pytest.mark.exhaustive),
    pytest.param(TF32, Variant(f32), id="tf32"),
])
def test_tensor_cores_agree_with_the_oracle(backend, variant):
    @examples(8)
    @given(calls(backend, variant=variant))
    def agree(call):
        check(call)

    agree()


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_any_call_agrees_with_the_oracle_on_any_gpu(arch, precision):
    @examples(60)
    @given(calls(WIDE._replace(precision=precision)))
    def agree(call):
        check(call, numbaflash.CUDAConfig(arch=arch))

    agree()


# --- which kernels run ----------------------------------------------------------------------------------------


def planned(dtype, arch="sm_80", **options):
    """Names of the kernels of a call."""
    q, k, v = (np.zeros((1, 2, 32, 64), dtype) for _ in range(3))
    problem = numbaflash.problem.make_problem(q, k, v, numbaflash.Options(**options))
    out, lse = np.zeros(problem.out_shape, problem.out_dtype), np.zeros(problem.out_shape[:3], problem.compute_dtype)
    return [launch.kernel.name for launch in plans.plan_forward(problem, out, lse, arch).launches]


@pytest.mark.parametrize("dtype, arch, options, family", [
    (f16, "sm_80", {}, "forward_sm80"),
    (f16, "sm_75", {}, "forward_sm80"),
    (bfloat16, "sm_75", {}, "forward_simt"),
    (bfloat16, "sm_80", {"config": numbaflash.CUDAConfig(tensor_cores=False)}, "forward_simt"),
    (f32, "sm_80", {}, "forward_simt"),
    (f32, "sm_80", {"precision": "tf32"}, "forward_sm80"),
    (np.float64, "sm_80", {"precision": "tf32"}, "forward_simt"),
])
def test_tensor_cores_run_what_they_can_and_nothing_else(dtype, arch, options, family):
    (name,) = planned(dtype, arch, **options)
    assert name.startswith(family)


@pytest.mark.parametrize("arguments, error, message", [
    (dict(tensor_cores=1), TypeError, "tensor_cores must be True or False, not 1"),
    (dict(arch=80), TypeError, "arch must be a string"),
    (dict(arch="sm_42"), ValueError, "arch must be one of sm_75"),
])
def test_a_config_checks_itself(arguments, error, message):
    with pytest.raises(error, match=message):
        numbaflash.CUDAConfig(**arguments)


@pytest.mark.parametrize("backend, config", [
    ("cpu", numbaflash.CUDAConfig()), ("emulator", numbaflash.CPUConfig()), ("auto", numbaflash.CUDAConfig())])
def test_a_config_is_for_its_own_backend(backend, config, monkeypatch):
    monkeypatch.setattr(numbaflash.backend, "gpu_is_usable", lambda: False)
    x = np.zeros((2, 4), np.float32)
    with pytest.raises(NotImplementedError, match="config must be a"):
        numbaflash.attention(x, x, x, backend=backend, config=config)
