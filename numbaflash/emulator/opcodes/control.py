"""Control flow and instructions that only concern order or caches."""
from __future__ import annotations

import numpy as np

from ..errors import MemoryFault, TrapError, UnknownInstruction
from ..fences import WIDE, is_fence
from ..registry import opcode
from .titles import CONTROL, MISC, MOVE, SYNC


@opcode("bra", section=CONTROL + "bra", group="control", control=True)
def bra(d, i):
    """Go on at the target label; lanes with a false guard fall through."""
    label = i.operands[0]
    if label not in d.function.labels:
        raise UnknownInstruction(f"label {label!r} is not defined")
    target = d.function.labels[label]
    guard = d.guard(i)
    if guard is None:
        return lambda machine, active, following: target

    def control(machine, active, following):
        flags = guard()
        lanes = active.lanes
        if lanes is not None:
            flags = flags[lanes]
        count = np.count_nonzero(flags)
        if count == len(flags):
            return target
        if not count:
            return following
        if lanes is None:
            machine.pc[:] = np.where(flags, target, following)
        else:
            machine.pc[lanes] = np.where(flags, target, following)
        return None
    return control


@opcode("brx.idx", section=CONTROL + "brx.idx", group="control", control=True)
def brx(d, i):
    """Branch to the index-th label of a .branchtargets list."""
    targets = np.array([d.function.labels[name] for name in d.function.tables[i.operands[1]]])
    index, guard = d.source(i.operands[0], "u4"), d.guard(i)

    def control(machine, active, following):
        lanes = np.arange(machine.lanes) if active.lanes is None else active.lanes
        chosen = np.broadcast_to(index, machine.lanes)[lanes]
        goes = np.ones(len(lanes), bool) if guard is None else guard()[lanes]
        outside = goes & (chosen >= len(targets))
        if outside.any():
            machine.fail(MemoryFault, f"brx.idx beyond its {len(targets)} targets", i, int(lanes[outside][0]))
        machine.pc[lanes] = np.where(goes, targets[np.where(goes, chosen, 0)], following)
        return None
    return control


@opcode("ret", "exit", section=CONTROL + "ret, exit", group="control", control=True)
def exit_(d, i):
    """The thread ends (a ``ret`` of a called function has become a branch)."""
    guard = d.guard(i)

    def control(machine, active, following):
        if guard is None:
            machine.exit(active)
            return None
        flags = guard() if active.lanes is None else guard()[active.lanes]
        machine.set_pc(active, following)
        if flags.any():
            machine.exit(active.subset(flags))
        return None
    return control


@opcode("trap", "brkpt", section=MISC + "brkpt, trap", group="control", control=True)
def trap(d, i):
    """Abort the grid."""
    guard = d.guard(i)

    def control(machine, active, following):
        flags = np.ones(machine.lanes, bool) if guard is None else guard()
        lanes = np.arange(machine.lanes) if active.lanes is None else active.lanes
        hit = lanes[flags[lanes]]
        if len(hit):
            machine.fail(TrapError, f"{i.parts[0]} executed", i, int(hit[0]), len(hit))
        return following
    return control


@opcode("membar", "fence", section=SYNC + "membar/fence", group="synchronisation")
def fence(d, i):
    """Order this thread's accesses: see `fences`."""
    wide, order = not WIDE.isdisjoint(i.parts), d.machine.order
    if not is_fence(i):
        return lambda active: None
    return lambda active: order.fence(active, wide)


@opcode("nanosleep", "pmevent", "setmaxnreg", section=MISC + "nanosleep, pmevent, setmaxnreg",
        group="control", any_modifier=True)
@opcode("prefetch", "prefetchu", "applypriority", "discard", group="control", any_modifier=True,
        section=MOVE + "prefetch, prefetchu, applypriority, discard")
@opcode("griddepcontrol", section=SYNC + "griddepcontrol", group="control", any_modifier=True)
@opcode("fence.proxy", section=SYNC + "membar/fence", group="control", any_modifier=True)
def nothing(d, i):
    """No effect that a program can observe here."""
    return lambda active: None
