"""bar and barrier: threads of a block wait for each other."""
from __future__ import annotations

import numpy as np

from ..errors import BarrierError
from ..machine import AT_BARRIER, EXITED, RUNNING, Park
from ..parser import Instruction
from ..registry import opcode
from .titles import SYNC


class Meeting:
    """One use of one barrier of one block: who has arrived and what they know."""

    __slots__ = ("warps", "waiting", "arrived", "expected", "clock", "votes", "deliver", "instruction")

    def __init__(self, expected, instruction):
        self.instruction = instruction
        self.warps, self.waiting, self.arrived, self.expected = [], [], 0, expected
        self.clock, self.votes, self.deliver = None, [], []


class Barriers:
    """The sixteen barriers of every block of the batch."""

    def __init__(self, machine):
        self.machine = machine
        self.meetings = {}
        self.number = np.full(machine.lanes, -1)
        machine.batch_hooks.append(self.new_batch)
        machine.exit_hooks.append(self.after_exit)

    def new_batch(self, ids):
        self.meetings.clear()
        self.number[:] = -1

    def arrive(self, block, number, lanes, expected, waits, instruction, vote=None, deliver=None):
        machine = self.machine
        meeting = self.meetings.get((block, number))
        if meeting is None:
            meeting = self.meetings[block, number] = Meeting(expected, instruction)
        if meeting.expected != expected:
            machine.fail(
                BarrierError, f"barrier {number} is used with {expected or 'all'} threads while others "
                f"wait for it with {meeting.expected or 'all'}", instruction, int(lanes[0]))
        warps = np.unique(machine.warp_in_block[lanes])
        clock = machine.clocks.release(block, warps)
        meeting.clock = clock if meeting.clock is None else np.maximum(meeting.clock, clock)
        meeting.warps += warps.tolist()
        meeting.arrived += 32 * len(warps)
        if vote is not None:
            meeting.votes.append(vote)
        if waits:
            meeting.waiting.append(lanes)
            meeting.deliver.append((deliver, lanes))
            self.number[lanes] = number
        if expected and meeting.arrived > expected:
            machine.fail(BarrierError,
                         f"barrier {number} expects {expected} threads but {meeting.arrived} have arrived",
                         instruction, int(lanes[0]))

    def settle(self, block, number):
        """Let everyone go on if all have arrived."""
        meeting = self.meetings.get((block, number))
        if meeting is None or not meeting.waiting and not meeting.expected:
            return
        machine = self.machine
        if meeting.expected:
            done = meeting.arrived >= meeting.expected
        else:
            self.nobody_left(block, meeting.waiting[0], meeting.instruction)
            mine = slice(block * machine.padded, (block + 1) * machine.padded)
            alive = (machine.state[mine] != EXITED).reshape(-1, 32).any(axis=1)
            done = not len(np.setdiff1d(np.flatnonzero(alive), meeting.warps))
        if not done:
            return
        del self.meetings[block, number]
        machine.clocks.tick()
        for lanes in meeting.waiting:
            machine.state[lanes] = RUNNING
            self.number[lanes] = -1
        if meeting.waiting:
            warps = np.unique(machine.warp_in_block[np.concatenate(meeting.waiting)])
            machine.clocks.acquire(block, warps, meeting.clock)
            machine.clocks.seen[block, warps, warps] = np.maximum(machine.clocks.seen[block, warps, warps],
                                                                  machine.clocks.time - 1)
            machine.clocks.refresh(np.array([block]))
        machine.clocks.tick()
        for deliver, lanes in meeting.deliver:
            if deliver is not None:
                deliver(lanes, meeting.votes)

    def nobody_left(self, block, lanes, instruction):
        """A barrier without a count is for all threads of the block; those that have exited never come.

        GPUs count an exited warp as arrived, but neither CUDA nor the ISA promise that.
        """
        machine = self.machine
        gone = (machine.state == EXITED) & machine.real & (machine.block_of == block)
        if gone.any():
            name = machine.lane_name(int(np.flatnonzero(gone)[0]))
            machine.fail(BarrierError, f"barrier in divergent code: {name} has exited without it",
                         instruction, int(lanes[0]), len(lanes))

    def after_exit(self, active):
        if self.meetings:
            for block, number in list(self.meetings):
                self.settle(block, number)


def barriers(machine):
    if "barriers" not in machine.parts:
        machine.parts["barriers"] = Barriers(machine)
    return machine.parts["barriers"]


def whole(machine, active, instruction):
    """``.aligned``: all threads of a warp execute the same barrier. Lanes that are on their way are waited
    for."""
    if active.lanes is None:
        return
    warps = active.warps(machine)
    here = active.mask.reshape(-1, 32)[warps]
    missing = machine.real.reshape(-1, 32)[warps] & ~here
    if not missing.any():
        return
    exited = (machine.state.reshape(-1, 32)[warps] == EXITED)
    lost = (missing & exited).any(axis=1)
    if lost.any():
        row = int(np.flatnonzero(lost)[0])
        lane = int(32 * warps[row] + np.flatnonzero(here[row])[0])
        gone = int(32 * warps[row] + np.flatnonzero(missing[row] & exited[row])[0])
        machine.fail(BarrierError,
                     f"barrier in divergent code: {machine.lane_name(gone)} of the same warp has exited",
                     instruction, lane)
    incomplete = missing.any(axis=1)
    lanes = (32 * warps[incomplete][:, None] + np.arange(32))[here[incomplete]]
    raise Park(instruction.index, lanes)


REDUCTIONS = {
    "popc": lambda votes: int(np.concatenate(votes).sum()),
    "and": lambda votes: bool(np.concatenate(votes).all()),
    "or": lambda votes: bool(np.concatenate(votes).any())
}


@opcode("bar", "barrier", section=SYNC + "bar, barrier", group="synchronisation", control=True)
def bar(d, i: Instruction):
    """sync: wait for all threads (or ``b`` of them) to arrive; arrive: do not wait; red: also combine a
    predicate."""
    machine = d.machine
    what = next(p for p in i.parts if p in ("sync", "arrive", "red"))
    aligned = i.parts[0] == "bar" or "aligned" in i.parts
    reduction = next((p for p in i.parts if p in REDUCTIONS), None)
    operands = list(i.operands)
    out = flags = None
    if what == "red":
        is_count = reduction == "popc"
        out = d.target(operands.pop(0), np.dtype("u4") if is_count else np.dtype(bool))
        text = operands.pop()
        flags = d.source(text.lstrip("!"), bool)
        inverted = text.startswith("!")
    number = d.source(operands[0], "u4")
    count = d.source(operands[1], "u4") if len(operands) > 1 else None
    guard = d.guard(i)
    store = barriers(machine)

    def proceed(active, following):
        if aligned:
            whole(machine, active, i)
        simple = what == "sync" and count is None and not isinstance(number, np.ndarray)
        if simple and not store.meetings:
            if active.lanes is None:
                machine.clocks.barrier_blocks()
                return following
            arrived = active.mask.reshape(machine.blocks, -1).sum(axis=1)
            alive = machine.alive().reshape(machine.blocks, -1).sum(axis=1)
            if ((arrived == alive) | (arrived == 0)).all():
                for block in np.flatnonzero((arrived > 0) & (arrived < machine.threads)).tolist():
                    lanes = active.lanes[machine.block_of[active.lanes] == block]
                    store.nobody_left(block, lanes, i)
                machine.clocks.barrier_blocks(np.flatnonzero(arrived))
                return following
        lanes = np.arange(machine.lanes) if active.lanes is None else active.lanes
        machine.pc[lanes] = following
        if what != "arrive":
            machine.state[lanes] = AT_BARRIER
        numbers = np.broadcast_to(number, machine.lanes)[lanes]
        counts = np.broadcast_to(0 if count is None else count, machine.lanes)[lanes]
        if (numbers > 15).any():
            machine.fail(BarrierError, f"barrier {int(numbers.max())}: a block has barriers 0 to 15", i,
                         int(lanes[numbers.argmax()]))
        votes = None
        if flags is not None:
            votes = np.broadcast_to(flags, machine.lanes)[lanes] ^ inverted
        key = machine.block_of[lanes] * 4096 + numbers
        for one in np.unique(key).tolist():
            chosen = key == one
            who = lanes[chosen]
            block, which = divmod(one, 4096)
            expected = int(counts[chosen][0])
            if expected % 32:
                machine.fail(BarrierError,
                             f"barrier {which} expects {expected} threads, not a multiple of 32", i,
                             int(who[0]))
            store.arrive(block, which, who, expected, what != "arrive", i,
                         None if votes is None else votes[chosen], deliver if what == "red" else None)
            store.settle(block, which)
        return None

    def deliver(lanes, votes):
        out[lanes] = REDUCTIONS[reduction](votes)

    def control(machine, active, following):
        if guard is not None:
            flags_here = guard() if active.lanes is None else guard()[active.lanes]
            if not flags_here.any():
                return following
            if not flags_here.all():
                machine.set_pc(active, following)
                chosen = active.subset(flags_here)
                machine.set_pc(chosen, i.index)
                machine.split_at(i.index)
                if proceed(chosen, following) is not None:
                    machine.set_pc(chosen, following)
                return None
        return proceed(active, following)

    return control


@opcode("bar.warp", section=SYNC + "bar.warp.sync", group="synchronisation")
def bar_warp(d, i):
    """bar.warp.sync: the threads of membermask wait for each other and see each other's memory accesses."""
    machine = d.machine
    mask = member_mask(d, i.operands[0])

    def step(active):
        machine.whole_warps(active, i, mask)
        machine.clocks.warp_barrier(active.warps(machine))
    return step


def member_mask(d, operand):
    """None for the full mask, else an array."""
    mask = d.source(operand, "u4")
    if isinstance(mask, np.ndarray):
        return mask
    return None if int(mask) == 0xFFFFFFFF else np.full(d.machine.lanes, mask, np.uint32)
