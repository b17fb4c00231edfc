"""Reading machine code: the loop, the way through it, and what each instruction costs."""

import itertools
import re

import pytest

from numbaflash.bench import bounds, cli, pipes, report, sass
from numbaflash.cuda import variants
from numbaflash.cuda.compile import compile_cubin

A100, H200 = pipes.GPUS["sm_80"], pipes.GPUS["sm_90a"]
MMA = "HMMA.16816.F32.BF16 R4, R8, R10, R4"


def listing(text: str) -> str:
    """A disassembly of a few instructions and labels, one to a line."""
    lines, address = [], 0
    for line in text.strip().splitlines():
        if line.strip().startswith("."):
            lines.append(line.strip() + ":")
            continue
        lines.append(f"        /*{address:04x}*/                   {line.strip()} ;")
        address += 16
    return "\n".join(lines)


def counted(text: str, expected: int) -> tuple[list[str], int]:
    """Opcodes of the steady path, and tiles, where each matrix instruction is one operation."""
    path, tiles = sass.tile_path(listing(text), lambda instruction: 1, expected)
    opcodes = [itertools.repeat(one.opcode.partition(".")[0], times) for one, times in path.instructions]
    return list(itertools.chain.from_iterable(opcodes)), tiles


PLAIN = f"""
    MOV R0, R1
    .L_x_0
    @P0 BRA `(.L_x_1)
    LDGSTS.E.BYPASS.128 [R2], desc[UR4][R6.64]
    .L_x_1
    {MMA}
    @P1 BRA P2, `(.L_x_2)
    FSEL R4, R4, -INF , P0
    FSEL R5, R5, -INF , P0
    .L_x_2
    {MMA}
    @P3 BRA `(.L_x_0)
    EXIT
    .L_x_9
    BRA `(.L_x_9)
"""


def test_the_steady_path_copies_the_next_tile_and_masks_nothing():
    assert counted(PLAIN, 2) == (["BRA", "LDGSTS", "HMMA", "BRA", "HMMA", "BRA"], 1)


def test_a_loop_over_two_tiles_counts_as_two():
    assert counted(PLAIN, 1)[1] == 2


def test_targets_may_be_addresses():
    text = listing(PLAIN)
    labels = sass.parse(text)[1]
    for label, number in labels.items():
        text = text.replace(f"`({label})", hex(16 * number))
    paths = [sass.tile_path(one, lambda _: 1, 2)[0] for one in (text, listing(PLAIN))]
    by_address, by_label = ([one.address for one, _ in path.instructions] for path in paths)
    assert by_address == by_label


NESTED = f"""
    .L_x_0
    LDGSTS.E [R2], desc[UR4][R6.64]
    .L_x_1
    @P0 BRA `(.L_x_2)
    {MMA}
    {MMA}
    .L_x_2
    @!P1 CALL.REL.NOINC `(.L_x_3)
    BRA `(.L_x_1)
    .L_x_3
    {MMA}
    @P3 BRA `(.L_x_0)
    EXIT
"""


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_an_inner_loop_runs_as_often_as_the_work_of_a_tile_takes(passes):
    opcodes, tiles = counted(NESTED, 2 * passes + 1)
    assert tiles == 1
    assert opcodes.count("HMMA") == 2 * passes + 1 and opcodes.count("CALL") == passes
    assert opcodes.count("LDGSTS") == 1


@pytest.mark.parametrize("text, expected", [(PLAIN, 3), (PLAIN, 4), (NESTED, 4), (NESTED, 2)])
def test_work_that_does_not_fit_a_tile_is_an_error(text, expected):
    with pytest.raises(sass.SassError, match="do not fit"):
        counted(text, expected)


@pytest.mark.parametrize(
    "text, message",
    [
        ("EXIT", "no loop holds matrix instructions"),
        ("BRA `(.L_x_7)", "branch to nowhere"),
        ("BRA R4", "branch without a target"),
        (".L_x_0", "no instructions"),
    ],
)
def test_text_that_is_no_kernel_is_an_error(text, message):
    with pytest.raises(sass.SassError, match=message):
        counted(text, 1)


def test_a_cubin_that_is_none_is_an_error():
    with pytest.raises(sass.SassError, match="nvdisasm"):
        sass.disassemble(b"not a cubin")


def test_without_nvdisasm_the_error_says_what_to_install(monkeypatch):
    def absent(name):
        raise sass.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sass.metadata, "files", absent)
    monkeypatch.setattr(sass.shutil, "which", lambda name: None)
    with pytest.raises(report.UsageError, match="pip install nvidia-cuda-nvdisasm"):
        sass.find_nvdisasm.__wrapped__()


# --- rates ----------------------------------------------------------------------------------------

COSTS = {
    "HMMA.16816.F32.BF16": ("MMA", {"tensor": 2.0}),
    "HMMA.1688.F32.TF32": ("MMA", {"tensor": 2.0}),
    "HMMA.1688.F32": ("MMA", {"tensor": 1.0}),
    "IMMA.16832.S8.S8": ("MMA", {"tensor": 2.0}),
    "DMMA.884": ("MMA", {"tensor": 4.0}),
    "LDSM.16.M88.4": ("LDSM", {"shared": 4.0, "lsu": 1.0}),
    "LDSM.16.MT88.2": ("LDSM", {"shared": 2.0, "lsu": 1.0}),
    "LDSM.16.M88": ("LDSM", {"shared": 1.0, "lsu": 1.0}),
    "LDS.128": ("LDS", {"shared": 4.0, "lsu": 1.0}),
    "LDS.U16": ("LDS", {"shared": 1.0, "lsu": 1.0}),
    "STS": ("STS", {"shared": 1.0, "lsu": 1.0}),
    "STSM.16.M88.4": ("STS", {"shared": 4.0, "lsu": 1.0}),
    "SHFL.BFLY": ("SHFL", {"shared": 1.0, "lsu": 1.0}),
    "LDGSTS.E.BYPASS.128.ZFILL": ("LDGSTS", {"shared": 4.0, "l2": 512 / 47.4, "lsu": 1.0}),
    "REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU": ("RED", {"reductions": 512 / 23.7, "lsu": 1.0}),
    "RED.E.ADD.F32.FTZ.RN.STRONG.GPU": ("RED", {"reductions": 128 / 23.7, "lsu": 1.0}),
    "STG.E.128": ("STG", {"l2": 512 / 47.4, "lsu": 1.0}),
    "MUFU.EX2": ("MUFU", {"mufu": 2.0}),
    "FFMA": ("FP32", {"fp32": 0.5}),
    "IMAD.MOV.U32": ("IMAD", {"fp32": 0.5, "imad": 0.5}),
    "F2FP.BF16.F32.PACK_AB": ("ALU", {"alu": 0.5}),
    "FMNMX": ("ALU", {"alu": 0.5}),
    "ISETP.GT.AND.EX": ("ALU", {"alu": 0.5}),
    "LOP3.LUT": ("ALU", {"alu": 0.5}),
    "UIADD3": ("UNI", {"uniform": 0.5}),
    "S2UR": ("UNI", {"uniform": 0.5}),
    "S2R": ("CONST", {"lsu": 1.0}),
    "BAR.SYNC.DEFER_BLOCKING": ("CTRL", {}),
    "BRA": ("CTRL", {}),
}


@pytest.mark.parametrize("opcode", COSTS)
def test_an_instruction_costs_what_the_tables_of_an_a100_say(opcode):
    instruction = sass.Instruction(0, "", opcode)
    group, expected = COSTS[opcode]
    assert pipes.rule_of(instruction).group == group
    assert pipes.costs(instruction, A100) == pytest.approx(expected | {"issue": 0.25})


def test_every_unit_and_group_is_charged_by_some_rule():
    assert {unit for rule in pipes.RULES for unit in rule.units} | {"issue"} == set(pipes.UNITS)
    assert set(pipes.UNIT_HELP) == set(pipes.UNITS)


def test_an_opcode_without_a_rule_is_named_and_issued():
    path = sass.Path(((sass.Instruction(0, "", "QQQ.X"), 3), (sass.Instruction(16, "", "FADD"), 1)))
    used = pipes.usage(path, 1, A100)
    assert used.unknown == ("QQQ",) and used.groups == {pipes.OTHER: 3, "FP32": 1}
    assert used.clocks == {"issue": 1.0, "fp32": 0.5}


@pytest.mark.parametrize("gpu, peak", [(A100, 312), (H200, 0.62 * 989)])
def test_matrix_products_alone_run_at_the_peak_of_the_data_sheet(gpu, peak):
    instruction = sass.Instruction(0, "", MMA.split()[0])
    unit, clocks = pipes.limit(pipes.usage(sass.Path(((instruction, 8),)), 1, gpu).clocks)
    assert unit == "tensor"
    assert pipes.teraflops(8 * pipes.matrix_flops(instruction), clocks, gpu) == pytest.approx(peak, rel=0.01)


def test_the_legend_prints_formula_and_rates():
    text = pipes.legend([A100, H200])
    for word in ("bound =", "A100", "H200", "2048", "2540", *pipes.UNITS):
        assert word in text


# --- passes ---------------------------------------------------------------------------------------


def row_of(variant: str, clocks: float, pairs: int) -> dict:
    one = variants.VARIANTS[variant]
    return {
        "arch": "sm_90a",
        "variant": variant,
        "direction": one.direction,
        "dim": one.dim,
        "style": one.style,
        "clocks": clocks,
        "pairs": pairs,
    }


def test_kernels_of_a_pass_run_one_after_the_other():
    name = "tensor-backward-bfloat16-d64-plain"
    (whole,) = bounds.passes([row_of(name, 800.0, 4096), row_of(name, 1600.0, 8192)])
    (alone,) = bounds.passes([row_of(name, 1600.0, 4096)])
    assert whole["bound"] == pytest.approx(alone["bound"])
    assert whole["bound"] == pytest.approx(640 / (1600 / 4096) * 132 * 1.83 / 1e3)


@pytest.mark.parametrize("clocks, verdict", [(800.0, "ok"), (1700.0, "too low")])
def test_a_bound_below_its_goal_is_a_breach(clocks, verdict):
    (row,) = bounds.passes([row_of("tensor-forward-bfloat16-d64-plain", clocks, 128 * 64)])
    assert row["goal"] == 495 and row["verdict"] == verdict


def test_float32_inputs_are_held_to_the_peak_of_tf32():
    halves, words = bounds.passes(
        [row_of(f"tensor-forward-{kind}-d64-plain", 826.0, 128 * 64) for kind in ("float16", "tf32")]
    )
    assert words["percent"] == pytest.approx(2 * halves["percent"]) and words["goal"] is None


def test_bit_equal_gradients_have_no_goal():
    (row,) = bounds.passes([row_of("tensor-backward-bfloat16-d64-deterministic", 1e9, 1)])
    assert row["goal"] is None and row["verdict"] == ""


@pytest.mark.parametrize("name", variants.select(("tensor-*-plain", "tensor-*-deterministic")))
def test_tiles_hold_the_products_of_their_kernels(name):
    """Together the kernels of a pass make the useful products, and those that are made twice."""
    variant, arch = variants.VARIANTS[name], "sm_90a"
    products = 0.0
    for number, config in variants.configurations(name, arch).items():
        kernel = variants.plan_of(name, arch).launches[number].kernel.name
        tile = bounds.queries_tile_of(config) if "queries" in kernel else bounds.tile_of(config)
        products += tile.flops / tile.pairs / 2 / variant.dim
    times = 3 if variant.kind == "tf32x3" else 1
    known = {"forward": {2}, "backward": {5, 7, 8}}[variant.direction]  # S again, or S and dP, made twice
    assert products / times in known


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--arch", "sm_100a"], "not of sm_100a"),
        (["--filter", "simt-*"], "no kernel of tensor cores matches simt"),
    ],
)
def test_what_cannot_be_counted_is_told_before_compiling(arguments, message):
    with pytest.raises(report.UsageError, match=re.escape(message)):
        bounds.chosen(cli.parser().parse_args(["kernels", "--sass", *arguments]))


def test_default_kernels_cover_both_passes_and_widths():
    found = bounds.chosen(cli.parser().parse_args(["kernels", "--sass"]))
    for arch, direction, dim in bounds.GOALS:
        assert any(
            one.arch == arch
            and variants.VARIANTS[one.variant].direction == direction
            and variants.VARIANTS[one.variant].dim == dim
            for one in found
        )


@pytest.mark.slow
def test_a_real_kernel_is_counted_whole():
    (kernel,) = [
        one
        for one in bounds.chosen(
            cli.parser().parse_args(
                ["kernels", "--sass", "--arch", "sm_80", "--filter", "tensor-forward-float16-d64-plain"]
            )
        )
    ]
    row = bounds.measure(kernel)
    config = variants.configurations(kernel.variant, kernel.arch)[0]
    per_warp = 4 * config.block_q * config.block_k * 64 // config.warps
    assert row["MMA"] * 4096 == per_warp and row["unknown"] == []
    assert row["LDGSTS"] * 512 * config.warps == 2 * config.block_k * 64 * 2
    assert row["MUFU"] >= config.block_q * config.block_k / config.threads
    assert 100 < row["bound"] <= 312.1


@pytest.mark.slow
def test_work_that_the_code_does_not_do_is_noticed(monkeypatch):
    name = "tensor-forward-float16-d64-plain"
    spec = variants.plan_of(name, "sm_80").launches[0].kernel
    cubin = compile_cubin(spec.function, tuple(spec.signature), "sm_80", launch_bounds=spec.launch_bounds)
    text = sass.disassemble(cubin.code)
    config = variants.configurations(name, "sm_80")[0]
    work = bounds.tile_of(config).flops // config.warps
    assert sass.tile_path(text, pipes.matrix_flops, work)[1] == 1
    lines = text.splitlines()
    at = [n for n, line in enumerate(lines) if "HMMA" in line]
    fewer = "\n".join(line for n, line in enumerate(lines) if n != at[len(at) // 2])
    with pytest.raises(sass.SassError, match="do not fit"):
        sass.tile_path(fewer, pipes.matrix_flops, work)
