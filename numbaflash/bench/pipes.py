"""Which unit of a multiprocessor executes an instruction, for how long, and the bound that follows.

Tables, and the one formula: a tile cannot take less time than the busiest unit needs for it,

    cycles(unit) = warps * sum over instructions of what each costs the unit
    bound        = operations of a tile / max over units of cycles * multiprocessors * clock

Everything overlaps perfectly in this model: latencies, barriers, waves and what lies outside the main loop
are left out.  It says what a kernel cannot exceed, and which unit to relieve; not what it will reach.

Rates are results per clock and multiprocessor: from the throughput table of the CUDA programming guide and
the data sheets, but for those marked as assumed in `GPUS`.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .sass import Instruction, Path

WARP = 32


class Gpu(NamedTuple):
    """Rates of a multiprocessor, per clock.

    Attributes
    ----------
    name, arch : str
        A model, and what is compiled for it.
    multiprocessors : int
    ghz : float
        Boost clock; under full load GPUs run slower.
    tensor : float
        Operations of dense float16 products with float32 sums, by `mma.sync`.
    fp32, fp64 : float
        Multiply-adds.
    l2 : float
        Bytes from or to the L2 cache.
    reductions : float
        Bytes of float32 reductions in the L2 cache.
    """

    name: str
    arch: str
    multiprocessors: int
    ghz: float
    tensor: float
    fp32: float
    fp64: float
    l2: float
    reductions: float


GPUS = {
    gpu.arch: gpu
    for gpu in (
        # L2: measured by others, 1.27 TB/s; reductions assumed as 32 bytes per slice
        Gpu("T4", "sm_75", 40, 1.59, 1024, 64, 2, 20.0, 25.6),
        # L2 by NVIDIA's paper: 5120 bytes per clock; reductions assumed as 32 bytes per slice of 80
        Gpu("A100", "sm_80", 108, 1.41, 2048, 64, 32, 47.4, 23.7),
        # L2: measured by others, about 5 TB/s; reductions assumed likewise
        Gpu("RTX 4090", "sm_89", 128, 2.52, 512, 128, 2, 15.5, 24.0),
        # mma.sync assumed to reach 62 % of wgmma's 4096; L2: measured by others, about 5.5 TB/s; 96 slices
        Gpu("H200", "sm_90a", 132, 1.83, 0.62 * 4096, 128, 64, 22.8, 23.3),
    )
}
"""By architecture."""

SHARED_BYTES, TRANSCENDENTAL, INTEGER, UNIFORM, ADDRESSES, ISSUE = 128, 16, 64, 64, 32, 4
"""Rates that all of these have in common."""

UNITS = (
    "tensor",
    "shared",
    "issue",
    "mufu",
    "fp32",
    "imad",
    "alu",
    "lsu",
    "l2",
    "reductions",
    "uniform",
    "fp64",
)
UNIT_HELP = {
    "tensor": "matrix products",
    "shared": f"shared memory and shuffles, {SHARED_BYTES} bytes a clock",
    "issue": f"instructions issued, {ISSUE} a clock",
    "mufu": f"exp2, rcp, conversions of numbers, {TRANSCENDENTAL} a clock",
    "fp32": "multiply-adds, float32 and integer",
    "imad": f"integer multiply-adds, {INTEGER} a clock",
    "alu": f"min, max, compare, select, logic, shifts, packing, {INTEGER} a clock",
    "lsu": f"addresses of loads and stores, {ADDRESSES} a clock",
    "l2": "bytes of global loads and stores",
    "reductions": "bytes of global reductions",
    "uniform": f"the uniform datapath, {UNIFORM} a clock",
    "fp64": "float64",
}


class Rule(NamedTuple):
    """Opcodes that match `pattern` count as `group` and keep `units` busy."""

    pattern: re.Pattern
    group: str
    units: tuple[str, ...]


def _rule(pattern: str, group: str, *units: str) -> Rule:
    return Rule(re.compile(rf"(?:{pattern})(?![A-Z0-9])"), group, units)


RULES = (
    # the first one that matches
    _rule(r"[HIDBQO]MMA", "MMA", "tensor"),
    _rule(r"LDSM", "LDSM", "shared", "lsu"),
    _rule(r"LDS", "LDS", "shared", "lsu"),
    _rule(r"STSM?|ATOMS", "STS", "shared", "lsu"),
    _rule(r"LDGSTS", "LDGSTS", "shared", "l2", "lsu"),
    _rule(r"REDG?|ATOMG?", "RED", "reductions", "lsu"),
    _rule(r"LDG?|LDL", "LDG", "l2", "lsu"),
    _rule(r"STG?|STL", "STG", "l2", "lsu"),
    _rule(r"SHFL", "SHFL", "shared", "lsu"),
    _rule(r"MUFU", "MUFU", "mufu"),
    _rule(r"F2F|F2I|I2F|FRND|POPC|FLO|BREV", "CVT", "mufu"),
    _rule(r"FFMA|FADD|FMUL|HFMA2|HADD2|HMUL2|FSWZADD", "FP32", "fp32"),
    _rule(r"HMNMX2|HSETP2|HSET2", "ALU", "alu"),
    _rule(r"IMAD|IDP|IMUL|XMAD", "IMAD", "imad", "fp32"),
    _rule(r"DFMA|DADD|DMUL|DSETP|DMNMX", "FP64", "fp64"),
    _rule(
        r"FMNMX3?|FSEL|FSETP|FCHK|FSET|F2FP|F2IP|I2FP|I2IP|IADD3?|VIADD|VIADDMNMX|VIMNMX3?|IMNMX|IABS"
        r"|ISETP|ISCADD|LOP3|LOP|SHF|SHL|SHR|LEA|SEL|PRMT|BMSK|SGXT|MOV|MOVM|PLOP3|P2R|R2P|CS2R|VOTE",
        "ALU",
        "alu",
    ),
    _rule(r"R2UR|VOTEU|REDUX|S2UR|U[A-Z][A-Z0-9]*", "UNI", "uniform"),
    _rule(r"LDC|LDCU|S2R", "CONST", "lsu"),
    _rule(
        r"BRA|BRX|CALL|RET|EXIT|BSSY|BSYNC|BREAK|BMOV|WARPSYNC|BAR|DEPBAR|LDGDEPBAR|NOP|YIELD|NANOSLEEP"
        r"|MEMBAR|ERRBAR|CCTL|CCTLL|SYNCS|WARPGROUP|ELECT|ACQBULK|ENDCOLLECTIVE|KILL|JMP|JMX|MATCH|PREEXIT",
        "CTRL",
    ),
)
GROUPS = tuple(dict.fromkeys(rule.group for rule in RULES))
OTHER = "OTHER"
"""Group of opcodes that no rule knows: they take an issue slot and nothing else."""

_SHAPE = re.compile(r"\.(1684|1688|16816|16832|16864|884|8816|8832)(?:\.|$)")
_SHAPES = {
    "884": (8, 8, 4),
    "1684": (16, 8, 4),
    "1688": (16, 8, 8),
    "16816": (16, 8, 16),
    "16832": (16, 8, 32),
    "16864": (16, 8, 64),
    "8816": (8, 8, 16),
    "8832": (8, 8, 32),
}
_WIDTH = re.compile(r"\.(8|16|32|64|128|U8|S8|U16|S16)(?=\.|$)")
_MATRICES = re.compile(r"\.(4|2)(?:\.|$)")


def rule_of(instruction: Instruction) -> Rule | None:
    """The first rule for an instruction; None where there is none."""
    return next((rule for rule in RULES if rule.pattern.match(instruction.opcode)), None)


def matrix_flops(instruction: Instruction) -> int:
    """Operations of one matrix instruction of a warp: 2 m n k."""
    shape = _SHAPE.search(instruction.opcode)
    if shape is None:
        raise ValueError(f"no known shape in {instruction.opcode}")
    m, n, k = _SHAPES[shape[1]]
    return 2 * m * n * k


def bytes_of(instruction: Instruction) -> int:
    """Bytes that a warp moves by a memory instruction, all lanes taking part."""
    if instruction.opcode.startswith(("LDSM", "STSM")):
        matrices = _MATRICES.search(instruction.opcode)
        return 128 * (int(matrices[1]) if matrices else 1)
    width = _WIDTH.search(instruction.opcode)
    bits = int(width[1].strip("US")) if width else 32
    if ".F32x4" in instruction.opcode or ".F32x2" in instruction.opcode:
        bits = 32 * int(instruction.opcode.partition(".F32x")[2][0])
    return WARP * bits // 8


def costs(instruction: Instruction, gpu: Gpu) -> dict[str, float]:
    """Clocks for which an instruction of one warp keeps each unit of a multiprocessor busy."""
    rule = rule_of(instruction)
    found = {"issue": 1 / ISSUE}
    for unit in rule.units if rule else ():
        found[unit] = _cost(instruction, unit, gpu)
    return found


def _cost(instruction: Instruction, unit: str, gpu: Gpu) -> float:
    if unit == "tensor":
        return matrix_flops(instruction) / _tensor_rate(instruction, gpu)
    if unit == "shared":
        return max(1.0, bytes_of(instruction) / SHARED_BYTES)
    if unit in ("l2", "reductions"):
        return bytes_of(instruction) / getattr(gpu, unit)
    rates = {
        "mufu": TRANSCENDENTAL,
        "fp32": gpu.fp32,
        "imad": INTEGER,
        "alu": INTEGER,
        "lsu": ADDRESSES,
        "uniform": UNIFORM,
        "fp64": gpu.fp64,
    }
    return WARP / rates[unit]


def _tensor_rate(instruction: Instruction, gpu: Gpu) -> float:
    """Of float16 and bfloat16; float32 inputs take twice as long, 8-bit ones half."""
    opcode = instruction.opcode
    if opcode.startswith("DMMA"):
        return 4 * gpu.fp64
    if opcode.startswith("IMMA") or ".E4M3" in opcode or ".E5M2" in opcode:
        return 2 * gpu.tensor
    return gpu.tensor / 2 if ".TF32" in opcode else gpu.tensor


class Usage(NamedTuple):
    """What a warp executes for a tile: instructions by group, in all, and clocks by unit for one warp."""

    groups: Counter
    instructions: float
    clocks: Counter
    unknown: tuple[str, ...]


def usage(path: Path, tiles: int, gpu: Gpu) -> Usage:
    """Instructions and clocks per tile of a steady path that computes `tiles` tiles."""
    groups, clocks, unknown = Counter(), Counter(), set()
    for instruction, times in path.instructions:
        rule = rule_of(instruction)
        if rule is None:
            unknown.add(instruction.opcode.partition(".")[0])
        groups[rule.group if rule else OTHER] += times / tiles
        for unit, clock in costs(instruction, gpu).items():
            clocks[unit] += times * clock / tiles
    return Usage(groups, sum(groups.values()), clocks, tuple(sorted(unknown)))


def limit(clocks: Counter) -> tuple[str, float]:
    """The busiest unit, and its clocks."""
    unit = max(UNITS, key=lambda name: clocks[name])
    return unit, clocks[unit]


def teraflops(flops_per_pair: float, clocks_per_pair: float, gpu: Gpu) -> float:
    """10^12 operations per second of the whole GPU, from operations and clocks of a multiprocessor."""
    return flops_per_pair / clocks_per_pair * gpu.multiprocessors * gpu.ghz / 1e3


def legend(gpus: Iterable[Gpu]) -> str:
    """Formula and rates, for people."""
    lines = [
        "clocks(unit) = warps * sum of what each instruction of the loop costs the unit;",
        "bound = operations of a tile / clocks of the busiest unit * multiprocessors * clock.",
        "Perfect overlap: no latency, no barrier, nothing outside the main loop.",
        "Rates, per multiprocessor and clock:",
    ]
    for gpu in gpus:
        lines.append(
            f"  {gpu.name} ({gpu.arch}): {gpu.multiprocessors} at {gpu.ghz} GHz; mma.sync {gpu.tensor:.0f} "
            f"FLOP of float16, half of that for tf32; fp32 {gpu.fp32:.0f}, fp64 {gpu.fp64:.0f}; L2 {gpu.l2}, "
            f"reductions {gpu.reductions} bytes"
        )
    lines += [f"  {unit:10} {text}" for unit, text in UNIT_HELP.items()]
    return "\n".join(lines)
