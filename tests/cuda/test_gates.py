"""Machine code of the CUDA kernels: no spills, no local memory, within the limits of a multiprocessor."""

import pytest

from numbaflash.bench import cli, kernels, report
from numbaflash.cuda import variants
from numbaflash.cuda.compile import Resources

GATED = [
    kernel
    for arch in (*variants.FULL, *variants.SAMPLED)
    for kernel in variants.kernels(
        variants.select(variants.QUICK if arch != "sm_80" else variants.SAMPLE), arch
    )
]


def gate(kernel: variants.Kernel) -> None:
    row = kernels.measure(kernel)
    assert row["verdict"] == "ok", row


@pytest.mark.slow
@pytest.mark.parametrize("name", variants.QUICK)
def test_a_kernel_keeps_its_limits(name):
    (kernel,) = variants.kernels([name], "sm_80")
    row = kernels.measure(kernel)
    assert row["verdict"] == "ok", row
    assert (row["matrix"] is None) == name.startswith("simt")
    assert row["blocks"] >= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kernel", GATED, ids=lambda kernel: f"{kernel.arch}-{kernel.variant}-{kernel.launch}"
)
def test_the_sample_keeps_its_limits(kernel):
    gate(kernel)


GOOD = Resources(registers=168, barriers=1)
BREACHES = {
    "64 bytes of local memory": {"stack": 64},
    "spills": {"spill_loads": 4},
    "more than 255 registers": {"registers": 256},
    "bytes of shared memory": {"static_shared": 1 << 20},
    "C7512": {"warnings": ("warning C7512",)},
}


def launch_of(name: str):
    return variants.plan_of(name, "sm_80").launches[0]


def test_good_code_breaks_no_limit():
    assert kernels.breaches(GOOD, launch_of(variants.QUICK[0]), "sm_80", None) == []
    assert kernels.breaches(GOOD, launch_of(variants.QUICK[1]), "sm_80", 8) == []


@pytest.mark.parametrize("text", BREACHES)
def test_every_limit_is_noticed(text):
    resources = Resources(**(vars(GOOD) | BREACHES[text]))
    assert any(
        text in one for one in kernels.breaches(resources, launch_of(variants.QUICK[0]), "sm_80", None)
    )


def test_missing_matrix_instructions_and_broken_launch_bounds_are_noticed():
    launch = launch_of(variants.QUICK[1])
    assert launch.kernel.launch_bounds[1] == 2
    assert kernels.breaches(GOOD, launch, "sm_80", 0) == ["no mma.sync"]
    tight = Resources(registers=255)
    assert kernels.breaches(tight, launch, "sm_80", 8) == []
    assert kernels._register_blocks(Resources(registers=200), launch) == 2
    crowded = launch.__class__(launch.kernel, 1, 256, 0, launch.arguments)
    assert kernels.breaches(tight, crowded, "sm_80", 8) == ["registers for 1 blocks, not 2"]


def test_shared_memory_is_held_to_the_architecture():
    launch = launch_of("simt-forward-float32-d256-plain")
    assert kernels.breaches(GOOD, launch, "sm_80", None) == []
    assert "shared memory" in kernels.breaches(GOOD, launch, "sm_75", None)[0]


def test_each_kernel_is_compiled_once_and_every_family_is_in_the_sample():
    names = variants.select(
        ("*-float32-d64-everything", "*-float32-d64-strided", "simt-forward-float16-d32-*")
    )
    found = variants.kernels(names, "sm_80")
    functions = [one.planned.kernel.function for one in found]
    assert len(functions) == len(set(functions))
    sample = [variants.VARIANTS[name] for name in variants.select(variants.SAMPLE)]
    assert {(one.family, one.direction) for one in sample} == {
        (family, direction) for family in variants.PLANNERS for direction in variants.DIRECTIONS
    }
    assert {one.style for one in sample} >= set(variants.STYLES)


def test_gradients_on_tensor_cores_are_gated_bit_equal_and_not():
    names = variants.select(("tensor-backward-bfloat16-d64-*",))
    found = {one.planned.kernel.name.split("_sm80")[0] for one in variants.kernels(names, "sm_80")}
    assert {"backward_keys", "backward_queries", "backward_reduced"} <= found


def test_every_pattern_of_the_samples_names_something():
    for pattern in variants.SAMPLE + variants.SAMPLE_ELSEWHERE + variants.QUICK:
        assert variants.select((pattern,)), pattern


def test_an_unknown_filter_is_told_before_anything_is_compiled(capsys):
    arguments = cli.parser().parse_args(["kernels", "--filter", "nothing-like-this"])
    with pytest.raises(report.UsageError, match="nothing-like-this"):
        kernels.chosen(arguments)


def test_a_breach_makes_the_command_fail(monkeypatch, capsys):
    row = {"arch": "sm_80", "verdict": "spills"}
    monkeypatch.setattr(kernels, "in_processes", lambda *_: iter([row]))
    arguments = cli.parser().parse_args(["kernels", "--quick", "--threads", "1"])
    assert kernels.run(arguments) == ([row], False)
    row["verdict"] = "ok"
    assert kernels.run(arguments) == ([row], True)
