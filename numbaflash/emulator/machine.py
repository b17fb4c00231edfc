"""The SIMT machine: lanes, segments of straight-line code, divergence and reconvergence (PTX ISA,
PTX Machine Model).

All threads of a batch of blocks are lanes of NumPy arrays. While every live lane is at the same place, an
instruction is one NumPy call without a mask. Otherwise each lane has its own program counter and the group
with the smallest one runs, up to the next place where others wait: lanes that went through a branch meet
again behind it.
"""
from __future__ import annotations

import numpy as np

from .errors import BarrierError, DeadlockError, EmulatorError, UnknownInstruction
from .fences import Order
from .journal import Journal, place
from .races import Clocks
from .spinning import Spinning
from .watchdog import Watchdog

RUNNING, AT_BARRIER, PARKED, AT_MBARRIER, EXITED = range(5)
STATES = ("running", "waiting at a barrier", "waiting for the rest of their warp", "waiting at an mbarrier",
          "exited")
FAR = 1 << 30
FAIRNESS = 1024
MAX_STEPS = 50_000_000


class Active:
    """The lanes that execute.

    Attributes
    ----------
    lanes : array of int or None
        Their indices; None is all of them.
    mask : array of bool or True
    where : array of bool or True
        The mask for results in registers; True also where all other lanes have exited and nobody sees what
        they hold.
    """

    __slots__ = ("where", "lanes", "mask", "_warps")

    def __init__(self, where=True, lanes=None, mask=True):
        self.where, self.lanes, self.mask, self._warps = where, lanes, mask, None

    @classmethod
    def of(cls, mask):
        return cls(mask, np.flatnonzero(mask), mask)

    def subset(self, flags):
        """Those of its lanes for which ``flags`` (over `lanes`) holds."""
        lanes = np.flatnonzero(flags) if self.lanes is None else self.lanes[flags]
        mask = np.zeros(len(flags) if self.lanes is None else len(self.mask), bool)
        mask[lanes] = True
        return Active(mask, lanes, mask)

    def warps(self, machine):
        """Numbers of the warps that take part."""
        if self.lanes is None:
            return machine.all_warps
        if self._warps is None:
            self._warps = np.flatnonzero(self.mask.reshape(-1, 32).any(axis=1))
        return self._warps


class Park(Exception):
    """A warp collective met a warp of which not all lanes are here yet."""

    def __init__(self, index, lanes):
        self.index, self.lanes = index, lanes


class Segment:
    __slots__ = ("start", "end", "steps", "control", "visits", "lanes", "warps")

    def __init__(self, start, end, steps, control):
        self.start, self.end, self.steps, self.control = start, end, steps, control
        self.visits = self.lanes = self.warps = 0


class Machine:
    """Executes one kernel.

    Parameters
    ----------
    function : parser.Function
        A flat kernel.
    grid, block : tuple of three int
    decoder : callable
        ``decoder(machine)`` gives an object with ``step(instruction)`` and ``memory``.
    """

    MAX_LANES = 8192

    def __init__(self, function, grid, block, checks, copies, seed, counters, journal=None,
                 max_steps=MAX_STEPS, resident_blocks=None):
        self.function, self.grid, self.block = function, grid, block
        self.checks, self.copies, self.counters = checks, copies, counters
        self.journal = journal or Journal()
        self.random = None if seed is None else np.random.default_rng(seed)
        self.threads = block[0] * block[1] * block[2]
        self.warps_per_block = -(-self.threads // 32)
        padded = 32 * self.warps_per_block
        self.grid_blocks = grid[0] * grid[1] * grid[2]
        self.cooperative = any(i.opcode == "system.cudaCGSynchronize" for i in function.instructions)
        most = resident_blocks or (self.grid_blocks if self.cooperative else max(1, self.MAX_LANES // padded))
        self.batches = -(-self.grid_blocks // most)
        self.blocks = -(-self.grid_blocks // self.batches)
        self.lanes = self.blocks * padded
        lane = np.arange(self.lanes)
        self.padded = padded
        self.thread = lane % padded
        self.block_of = lane // padded
        self.lane_in_warp = lane & 31
        self.warp_in_block = self.thread >> 5
        self.warp_of = lane >> 5
        self.all_warps = np.arange(self.lanes // 32)
        self.real = self.thread < self.threads
        self.everyone = Active()
        self.block_id = np.zeros(self.blocks, np.int64)
        self.clocks, self.order = Clocks(self), Order(self)
        self.pc = np.zeros(self.lanes, np.int64)
        self.state = np.zeros(self.lanes, np.uint8)
        self.code = function.instructions
        self.leaders = set(function.labels.values()) | {0}
        self.segments = {}
        self.retired_segments = []
        self.batch_hooks, self.progress_hooks, self.exit_hooks = [], [], []
        self.parts = {}
        self.decoder = None
        self.turn = -1
        self.spinning = Spinning(self)
        self.watchdog = Watchdog(self, max_steps)

    # ---- names and errors
    def block_name(self, number):
        x, y, _ = self.grid
        return f"({number % x}, {number // x % y}, {number // (x * y)})"

    def thread_name(self, number):
        x, y, _ = self.block
        return f"({number % x}, {number // x % y}, {number // (x * y)})"

    def lane_name(self, lane):
        return f"block {self.block_name(int(self.block_id[self.block_of[lane]]))} " \
               f"thread {self.thread_name(int(self.thread[lane]))}"

    def fail(self, error, what, instruction, lane=None, count=1):
        """Raise ``error`` with thread, Python line and PTX line."""
        who = "" if lane is None else f"\n  by {self.lane_name(lane)}"
        if count > 1:
            who += f" and {count - 1} more"
        raise error(f"{what}{who}\n  at {place(instruction)}", instruction.line, instruction.source)

    # ---- running
    def run(self):
        with np.errstate(all="ignore"):
            for first in range(0, self.grid_blocks, self.blocks):
                self.batch(first)

    def batch(self, first):
        ids = first + np.arange(self.blocks)
        self.block_id[:] = ids
        present = ids < self.grid_blocks
        self.clocks.new_batch(ids)
        self.state[:] = np.where(self.real & present[self.block_of], RUNNING, EXITED)
        self.pc[:] = 0
        self.spinning.new_batch()
        self.watchdog.new_batch()
        for hook in self.batch_hooks:
            hook(ids)
        self.loop()

    def loop(self):
        current, active, horizon = self.schedule()
        budget = FAIRNESS
        while active is not None:
            segment = self.segments.get(current) or self.segment(current)
            try:
                for step in segment.steps:
                    step(active)
                following = segment.end
                if segment.control is not None:
                    following = segment.control(self, active, following)
            except Park as park:
                self.park(park, segment, active)
                current, active, horizon = self.schedule()
                continue
            self.count(segment, active)
            budget -= 1
            if not budget:
                self.watchdog.look(active, following)
                self.progress()
            if following is not None:
                gives_way = following <= current and (
                    horizon != FAR or self.progress_hooks) and self.spinning.gives_way(active)
                if following < horizon and budget and not gives_way:
                    current = following
                    continue
                if active.lanes is None:
                    self.pc[:] = following
                else:
                    self.pc[active.lanes] = following
            current, active, horizon = self.schedule(rotate=not budget)
            budget = budget or FAIRNESS

    def progress(self):
        """Let something happen that could have happened later still; False if there is nothing."""
        return any(hook() for hook in self.progress_hooks)

    def count(self, segment, active):
        segment.visits += 1
        if active.lanes is None:
            segment.lanes += self.lanes
            segment.warps += len(self.all_warps)
        else:
            segment.lanes += len(active.lanes)
            segment.warps += len(active.warps(self))

    def schedule(self, rotate=False):
        """The next group of lanes: (pc, active, smallest pc of the other groups)."""
        while True:
            running = self.state == RUNNING
            anyone = running.any()
            if anyone and not self.spinning.all_rest(running):
                break
            if not anyone and (self.state == EXITED).all():
                return 0, None, FAR
            if self.progress():
                continue
            if anyone:
                break
            self.deadlock()
        if self.random is not None:
            return self.schedule_randomly(running)
        if rotate:
            places = np.unique(self.pc[running])
            current = int(places[np.searchsorted(places, self.turn, side="right") % len(places)])
            self.turn = current
        else:
            current = int(self.pc[self.spinning.awake(running)].min())
        here = running & (self.pc == current)
        parked = (self.state == PARKED) & (self.pc == current)
        if parked.any():
            # Only threads of its own warp can complete a parked warp; woken by others it would park again.
            here |= parked & np.repeat(here.reshape(-1, 32).any(axis=1), 32)
        self.state[here] = RUNNING
        self.spinning.called(here)
        waiting = ((self.state == RUNNING) | (self.state == PARKED)) & ~here
        horizon = FAR
        if waiting.any():
            others = self.pc[waiting]
            ahead = others[others > current]
            horizon = current
            if rotate:
                horizon = FAR - 1
            elif len(ahead) == len(others) or self.spinning.any:
                horizon = int(ahead.min(initial=FAR - 1))
        if here.all():
            return current, self.everyone, FAR
        active = Active.of(here)
        if np.array_equal(here, self.state != EXITED):
            active.where = True
        return current, active, horizon

    def schedule_randomly(self, running):
        """A random place, and a random subset of the warps that are there; lanes of a warp still meet."""
        awake = self.spinning.awake_in_each_warp(running)
        pcs = np.where(awake, self.pc, FAR).reshape(-1, 32).min(axis=1)
        current = int(self.random.choice(np.unique(pcs[pcs < FAR])))
        there = np.flatnonzero(pcs == current)
        if self.random.random() < 0.5:
            there = there[self.random.random(len(there)) < 0.5] if len(there) > 1 else there
        if not len(there):
            there = self.random.choice(np.flatnonzero(pcs == current), 1)
        chosen = np.zeros(len(pcs), bool)
        chosen[there] = True
        here = np.repeat(chosen, 32) & (self.pc == current) & (running | (self.state == PARKED))
        self.state[here] = RUNNING
        self.spinning.called(here)
        return current, Active.of(here), current

    def park(self, park, segment, active):
        index = park.index
        done = Segment(segment.start, index, [], None)
        self.count(done, active)
        self.retired_segments.append(done)
        self.split_at(index)
        lanes = slice(None) if active.lanes is None else active.lanes
        # Lanes of a warp that came here earlier and found it incomplete try again together with these.
        earlier = (self.state == PARKED) & (self.pc == index)
        joined = np.repeat(earlier.reshape(-1, 32).any(axis=1), 32)
        self.pc[lanes] = index
        self.state[park.lanes] = np.where(joined[park.lanes], RUNNING, PARKED)
        if earlier.any():
            arrived = np.zeros(self.lanes, bool)
            arrived[park.lanes] = True
            self.state[earlier & np.repeat(arrived.reshape(-1, 32).any(axis=1), 32)] = RUNNING

    def split_at(self, index):
        if index in self.leaders:
            return
        self.leaders.add(index)
        for start in [s for s, segment in self.segments.items() if s < index < segment.end]:
            self.retired_segments.append(self.segments.pop(start))

    def set_pc(self, active, value):
        if active.lanes is None:
            self.pc[:] = value
        else:
            self.pc[active.lanes] = value

    def alive(self):
        return self.state != EXITED

    # ---- code
    def segment(self, start):
        """Straight-line code from ``start`` to the next label or control instruction, decoded once."""
        steps, control, index = [], None, start
        while index < len(self.code):
            step, ends = self.decoder.step(index)
            index += 1
            if ends:
                control = step
                break
            if step is not None:
                steps.append(step)
            if index in self.leaders:
                break
        else:
            if control is None:
                control = self.run_off
        made = self.segments[start] = Segment(start, index, steps, control)
        return made

    def run_off(self, machine, active, following):
        self.exit(active)

    def exit(self, active):
        lanes = slice(None) if active.lanes is None else active.lanes
        self.state[lanes] = EXITED
        parked = (self.state == PARKED).reshape(-1, 32)
        if parked.any():
            parked[np.setdiff1d(self.all_warps, active.warps(self))] = False
            self.state[parked.reshape(-1)] = RUNNING
        for hook in self.exit_hooks:
            hook(active)

    # ---- warps
    def whole_warps(self, active, instruction, mask=None, aligned=False):
        """Warps that execute a ``.sync`` instruction (None: all): every lane of their member mask must be
        here, and for an ``aligned`` one none may have exited."""
        if active.lanes is None and (mask is None or (mask == np.uint32(0xFFFFFFFF)).all()):
            return None
        warps = active.warps(self)
        if active.lanes is None:
            here = np.ones((len(warps), 32), bool)
        else:
            here = active.mask.reshape(-1, 32)[warps]
        alive = self.alive().reshape(-1, 32)[warps]
        if aligned and not alive.all():
            row = int(np.flatnonzero(~alive.all(axis=1))[0])
            self.fail(BarrierError, f"{instruction.parts[0]} in divergent code: it needs the 32 threads of the warp, "
                      f"of which {np.count_nonzero(~alive[row])} have exited or do not exist",
                      instruction, int(32 * warps[row] + np.flatnonzero(here[row])[0]))
        if mask is None:
            wanted = alive
        else:
            masks = np.broadcast_to(mask, self.lanes).reshape(-1, 32)[warps].astype(np.uint32)
            bits = (masks[:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
            outside = here & (bits[:, np.arange(32), np.arange(32)] == 0)
            if outside.any():
                row, column = np.argwhere(outside)[0].tolist()
                lane = int(32 * warps[row] + column)
                self.fail(BarrierError,
                          "a thread that is not in its own membermask executes a warp collective",
                          instruction, lane)
            named = (bits != 0) & here[:, :, None]
            mixed = named & here[:, None, :] & (masks[:, :, None] != masks[:, None, :])
            if mixed.any():
                row, column, other = np.argwhere(mixed)[0].tolist()
                self.fail(BarrierError, f"a warp collective with membermask {masks[row, column]:#x} names lane {other}, "
                          f"which executes it with {masks[row, other]:#x}", instruction, int(32 * warps[row] + column))
            wanted = named.any(axis=1) & alive
        missing = (wanted & ~here).any(axis=1)
        if missing.any():
            incomplete = warps[missing]
            lanes = (32 * incomplete[:, None] + np.arange(32))[here[missing]]
            raise Park(instruction.index, lanes)
        return None if active.lanes is None else warps

    # ---- deadlock
    def deadlock(self):
        parked = self.state == PARKED
        lines = []
        first = None
        for state in (AT_BARRIER, PARKED, AT_MBARRIER):
            for pc in np.unique(self.pc[self.state == state]).tolist():
                lanes = np.flatnonzero((self.state == state) & (self.pc == pc))
                instruction = self.code[min(pc - (state == AT_BARRIER), len(self.code) - 1)]
                first = first or instruction
                lines.append(
                    f"  {len(lanes)} threads {STATES[state]}, first {self.lane_name(int(lanes[0]))}\n"
                    f"    at {place(instruction)}")
        exited = int(((self.state == EXITED) & self.real).sum())
        if exited:
            lines.append(f"  {exited} threads have exited")
        report = "\n".join(lines)
        if parked.any():
            raise BarrierError(
                f"a warp collective in divergent code: the other threads of the warp never come\n{report}",
                first.line, first.source)
        divergent = self._several_barriers()
        if divergent:
            raise BarrierError(f"barriers in divergent code: {divergent}\n{report}", first.line, first.source)
        raise DeadlockError(f"deadlock: no thread can go on\n{report}", first.line, first.source)

    def _several_barriers(self):
        """Threads of one block that wait at different instructions for one and the same barrier."""
        waiting = self.state == AT_BARRIER
        barrier = self.parts.get("barriers")
        for block in np.unique(self.block_of[waiting]).tolist() if barrier else ():
            mine = waiting & (self.block_of == block)
            for number in np.unique(barrier.number[mine & (barrier.number >= 0)]).tolist():
                if len(np.unique(self.pc[mine & (barrier.number == number)])) > 1:
                    name = self.block_name(int(self.block_id[block]))
                    return f"threads of block {name} wait for barrier {number} at different places"
        return ""


__all__ = ["Machine", "Active", "Park", "EmulatorError", "UnknownInstruction"]
