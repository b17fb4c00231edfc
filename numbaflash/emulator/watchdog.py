"""Ends launches that would never end themselves."""
from __future__ import annotations

import zlib

import numpy as np

from .errors import DeadlockError, StepLimitError
from .journal import place

FIRST_LOOK, LOOKS = 8, 64


class Watchdog:
    """Is asked once in a while, between two instructions.

    It counts, and it looks for a state that comes again: then the threads go round in circles, for instance
    because they wait for a block that has not started, and will do so for ever. A state is remembered for
    `LOOKS` times, at times 8, 16, 32... (Brent's way to find a cycle).
    """

    def __init__(self, machine, max_steps):
        self.machine, self.max_steps = machine, max_steps
        self.times, self.until, self.remembered = 0, 0, None

    def new_batch(self):
        self.times, self.until, self.remembered = 0, 0, None

    def look(self, active, following):
        machine = self.machine
        self.times += 1
        segments = (*machine.segments.values(), *machine.retired_segments)
        steps = sum(segment.visits * (segment.end - segment.start) for segment in segments)
        if steps > self.max_steps:
            self.complain(StepLimitError, active, following,
                          f"no end after {steps} steps (max_steps is {self.max_steps})")
        if machine.random is not None or self.times < FIRST_LOOK:
            return
        pc = machine.pc.copy()
        if following is not None:
            pc[slice(None) if active.lanes is None else active.lanes] = following
        where = pc.tobytes(), machine.state.tobytes(), machine.turn, machine.spinning.state(), sum(
            part.changes for part in machine.parts.values() if hasattr(part, "changes"))
        if not self.times & self.times - 1:
            self.remembered, self.until = (where, list(self.contents())), self.times + LOOKS
        elif self.times <= self.until and where == self.remembered[0] and \
                all(new == old for new, old in zip(self.contents(), self.remembered[1])):
            self.complain(DeadlockError, active, following,
                          "endless loop: nothing changes any more, neither in registers nor in memory")

    def contents(self):
        """Checksums of all registers and memories."""
        decoder = self.machine.decoder
        for array in decoder.registers.arrays.values():
            yield zlib.crc32(np.ascontiguousarray(array).view(np.uint8))
        for space in decoder.spaces.values():
            yield zlib.crc32(space.bytes)

    def complain(self, error, active, following, what):
        """Raise ``error`` with a list of who is where."""
        machine = self.machine
        if following is not None:
            machine.set_pc(active, following)
        lines, code = [], machine.code
        first = None
        live = machine.alive()
        for pc in np.unique(machine.pc[live]).tolist():
            lanes = np.flatnonzero(live & (machine.pc == pc))
            instruction = code[min(pc, len(code) - 1)]
            first = first or instruction
            lines.append(f"  {len(lanes)} threads, first {machine.lane_name(int(lanes[0]))}\n"
                         f"    before {place(instruction)}")
        waiting = machine.grid_blocks - int(machine.block_id.max()) - 1
        if waiting > 0:
            lines.append(f"  {waiting} blocks have not started: {machine.blocks} run at a time "
                         "(resident_blocks), so none may wait for a later one")
        raise error("\n".join((what, *lines)), first.line, first.source)
