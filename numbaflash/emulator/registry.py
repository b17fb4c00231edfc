"""The table of opcodes. A file in opcodes/ registers each instruction it implements."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

OPCODES: dict[str, "Opcode"] = {}
_FOUND: dict[str, "Opcode"] = {}


# What may follow in an opcode; a modifier that is not here makes the instruction unknown rather than wrong.
MODIFIERS = set("""
    pred b8 b16 b32 b64 b128 s16x2 u16x2 u8 u16 u32 u64 s8 s16 s32 s64 f16 f16x2 bf16 bf16x2 tf32 f32 f64 e4m3
    e5m2 e4m3x2 e5m2x2 v2 v4 v8 rn rz rm rp rna rni rzi rmi rpi ftz sat satfinite relu approx full NaN xorsign
    abs noftz lo hi wide cc shiftamt clamp wrap l r f4e b4e rc8 ecl ecr rc16 or and xor
    eq ne lt le gt ge ls hs equ neu ltu leu gtu geu num nan
    finite infinite number notanumber normal subnormal
    global shared local const param shared::cta shared::cluster to
    nc volatile relaxed acquire release acq_rel mmio weak sc cta gpu sys cluster gl ca cg cs lu cv wb wt L1 L2
    L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate L2::evict_last
    L2::evict_normal L2::evict_first L2::64B L2::128B L2::256B L2::cache_hint
    sync aligned arrive red warp popc up down bfly idx all any uni ballot add min max exch cas inc dec
    row col m8n8 m16n8k4 m16n8k8 m16n8k16 m16n8k32 m8n8k4 x1 x2 x4 trans m8n8x4
    async commit_group wait_group wait_all mbarrier init inval expect_tx complete_tx arrive_drop noComplete
    test_wait try_wait parity noinc proxy mbarrier_init
""".split())


@dataclass(frozen=True)
class Opcode:
    """One entry of the table.

    Attributes
    ----------
    build : callable
        ``build(d, instruction)`` decodes the instruction and returns ``step(active)``, or for control
        instructions ``control(machine, active, following) -> next pc or None``.
    section : str
        Where the PTX ISA describes it.
    group : str
        Class of instruction in reports.
    touches : callable or None
        ``touches(instruction)``: bytes per lane that it accesses in memory.
    control : bool
        It ends a segment.
    any_modifier : bool
        Modifiers do not matter: it does nothing here.
    """

    build: Callable
    section: str
    group: str
    touches: Callable | None = None
    control: bool = False
    any_modifier: bool = False


def opcode(*names, section, group, types=(), touches=None, control=False, any_modifier=False):
    """Register the decorated builder for opcodes that start with one of ``names`` (and end with one of
    ``types``)."""
    def register(build):
        for name in names:
            for key in [f"{name}:{kind}" for kind in types] or [name]:
                OPCODES[key] = Opcode(build, section, group, touches, control, any_modifier)
        return build
    return register


def lookup(instruction) -> Opcode | None:
    """The entry with the longest matching prefix of the opcode; None if a modifier is not known."""
    known = _FOUND.get(instruction.opcode)
    if known is not None:
        return known
    parts = instruction.parts
    for count in range(min(len(parts), 4), 0, -1):
        name = ".".join(parts[:count])
        found = OPCODES.get(f"{name}:{parts[-1]}") or OPCODES.get(name)
        if found is not None and not found.any_modifier and not MODIFIERS.issuperset(parts[count:]):
            return None
        if found is not None:
            _FOUND[instruction.opcode] = found
            return found
    return None
