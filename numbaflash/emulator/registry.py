"""The table of opcodes. A file in opcodes/ registers each instruction it implements."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

OPCODES: dict[str, "Opcode"] = {}
_FOUND: dict[str, "Opcode"] = {}


@dataclass(frozen=True)
class Opcode:
    """One entry of the table.

    Attributes
    ----------
    build : callable
        ``build(d, instruction)`` decodes the instruction and returns ``step(active)``, or for control instructions
        ``control(machine, active, following) -> next pc or None``.
    section : str
        Where the PTX ISA describes it.
    group : str
        Class of instruction in reports.
    touches : callable or None
        ``touches(instruction)``: bytes per lane that it accesses in memory.
    control : bool
        It ends a segment.
    """

    build: Callable
    section: str
    group: str
    touches: Callable | None = None
    control: bool = False


def opcode(*names, section, group, types=(), touches=None, control=False):
    """Register the decorated builder for opcodes that start with one of ``names`` (and end with one of ``types``)."""
    def register(build):
        for name in names:
            for key in [f"{name}:{kind}" for kind in types] or [name]:
                OPCODES[key] = Opcode(build, section, group, touches, control)
        return build
    return register


def lookup(instruction) -> Opcode | None:
    """The entry with the longest matching prefix of the opcode."""
    known = _FOUND.get(instruction.opcode)
    if known is not None:
        return known
    parts = instruction.parts
    for count in range(min(len(parts), 4), 0, -1):
        name = ".".join(parts[:count])
        found = OPCODES.get(f"{name}:{parts[-1]}") or OPCODES.get(name)
        if found is not None:
            _FOUND[instruction.opcode] = found
            return found
    return None
