"""Races on global memory (PTX ISA, Memory Consistency Model: Conflict and Data-Races).

Two accesses to one place race if one of them is a write, nothing orders them, and one of them is weak.
Barriers order threads of a block; between blocks, which run in any order, only fences with strong accesses do
(`fences.Order`). Strong accesses (see there) do not race with each other, so a flag that other blocks poll
must be written and read by strong instructions; a plain read of what another thread adds to atomically is a
race, whichever comes first.

Stamps are those of `races`; 0 is nobody.
"""
from __future__ import annotations

import numpy as np

from .errors import RaceError
from .fences import is_strong
from .races import (ATOMIC, BLOCK_BITS, BLOCK_MASK, IN_FLIGHT, THREAD_MASK, TIME_SHIFT, UNALLOCATED,
                    UNINITIALIZED, stamp_block, stamp_thread, stamp_time)

SEVERAL = ATOMIC  # in the stamp of a reader: threads of several blocks have read
ROWS = 64


class GlobalShadow:
    """Last accesses of each kind to each granule of global memory.

    Of weak writes and of strong accesses the last one is enough: weak writes are ordered, or else one was
    reported; and who comes after an atomic comes after all that it has observed. Readers are concurrent, so
    there are two of them, of different threads: whichever thread writes, one of them is another one. Only
    where blocks can be ordered at all is there one per block.
    """

    def __init__(self, space, machine):
        self.space, self.machine, self.clocks = space, machine, machine.clocks
        size = (len(space.bytes) >> space.shift) + 16
        self.stamps = np.zeros(size, np.uint64)
        self.races = machine.checks.global_races
        self.readers, self.other_readers = (np.zeros(size if self.races else 0, np.uint64) for _ in range(2))
        strong = [i for i in machine.function.instructions if is_strong(i)] if self.races else []
        self.strong_writes = np.zeros(size, np.uint64) if any(i.parts[0] != "ld" for i in strong) else None
        self.strong_reads = np.zeros(size, np.uint64) if any(i.parts[0] == "ld" for i in strong) else None
        self.of_block = None
        if self.races and machine.order.possible and machine.grid_blocks > 1:
            self.of_block = np.zeros((min(machine.grid_blocks, ROWS), size), np.uint64)
        end = 0
        for start, nbytes, _, initialized in sorted(space.pieces, key=lambda piece: piece[0]):
            first, last = -(-start // space.granule), (start + nbytes) // space.granule
            self.stamps[end:first] = UNALLOCATED
            if isinstance(initialized, np.ndarray):
                whole = initialized[first * space.granule - start:last * space.granule - start]
                self.stamps[first:last][~whole.reshape(-1, space.granule).all(axis=1)] = UNINITIALIZED
            elif not initialized:
                self.stamps[first:last] = UNINITIALIZED
            end = last
        self.stamps[end:] = UNALLOCATED

    def initialized(self, granule):
        """Flags: the granule holds something."""
        return self.stamps[granule] < UNINITIALIZED

    # ---- accesses
    def load(self, granule, active, access, values):
        for step in access.steps:
            at = granule + step if step else granule
            stamp = self.stamps.take(at)
            if np.maximum.reduce(stamp):
                self.examine(at, stamp, active, access, "load", None)
            if not self.races:
                continue
            own = self.clocks.own()
            own = own if active.lanes is None else own[active.lanes]
            if access.strong:
                self.strong_reads[at] = own
                continue
            self.against(self.strong_writes, at, active, access, "written")
            self.note_readers(at, own, active)

    def note_readers(self, at, own, active):
        if self.of_block is not None:
            blocks = self.machine.block_id[self.machine.block_of]
            self.of_block[(blocks if active.lanes is None else blocks[active.lanes]) % ROWS, at] = own
        before = self.readers.take(at)
        if np.maximum.reduce(before):
            other = (before != 0) & (((before ^ own) >> BLOCK_BITS & BLOCK_MASK) != 0)
            several = other | ((before & SEVERAL) != 0)
            own = np.where(several, own | SEVERAL, own)
            changed = (before != 0) & (((before ^ own) & THREAD_MASK) != 0)
            if changed.any():
                self.other_readers[at[changed]] = before[changed]
        self.readers[at] = own
        winner = self.readers.take(at)
        lost = winner != own
        if np.count_nonzero(lost):
            self.readers_of_one_step(at[lost], own[lost], winner[lost])

    def readers_of_one_step(self, at, own, winner):
        """Several lanes read a granule in one step, and ``winner`` is noted as its reader."""
        self.other_readers[at] = own
        foreign = ((winner ^ own) >> BLOCK_BITS & BLOCK_MASK | (own & SEVERAL)) != 0
        if foreign.any():
            self.readers[at[foreign]] = winner[foreign] | SEVERAL

    def store(self, granule, active, access, values, kind="store"):
        own = self.clocks.own()
        own = own if active.lanes is None else own[active.lanes]
        copies = self.machine.parts.get("copies") if self.races else None
        if copies is not None and copies.queue:
            self.against_copies(copies, granule << self.space.shift, active, access)
        weak = not access.strong
        for step in access.steps:
            at = granule + step if step else granule
            stamp = self.stamps.take(at)
            if np.maximum.reduce(stamp):
                self.examine(at, stamp, active, access, kind, values if weak else None)
            if self.races:
                if weak:
                    self.against(self.strong_writes, at, active, access, "written")
                    self.against(self.strong_reads, at, active, access, "read")
                before = self.readers.take(at)
                if np.maximum.reduce(before):
                    self.examine_readers(at, before, active, access)
            if weak or not self.races:
                self.stamps[at] = own
            else:
                self.strong_writes[at] = own
                self.stamps[at[stamp == UNINITIALIZED]] = 0
            if weak and self.races:
                lost = self.stamps.take(at) != own
                if np.count_nonzero(lost):
                    self.collision(at, lost, active, access, values)

    def atomic(self, granule, active, access, values):
        self.store(granule, active, access, None, "atomic")

    # ---- the close look
    def examine(self, at, stamp, active, access, kind, values):
        """Granules that somebody has written to, or that nobody may use."""
        special = stamp >= IN_FLIGHT
        if special.any():
            index = at << self.space.shift
            unallocated = stamp == UNALLOCATED
            if unallocated.any():
                access.unallocated(index, active, unallocated)
            if kind != "store" and self.machine.checks.initialized:
                access.uninitialized(index, active, special)
        if not self.races:
            return
        if "nc" in access.instruction.parts:
            self.stale(at, (stamp != 0) & ~special, active, access)
        bad = self.unordered(stamp, (stamp != 0) & ~special, active)
        if bad.any() and values is not None:
            which = np.flatnonzero(bad)
            index = at[which] << self.space.shift
            data = values(which)
            if data.shape[1] == access.nbytes:
                old = self.space.bytes[index[:, None] + np.arange(data.shape[1])]
                bad[which[(old == data).all(axis=1)]] = False
        self.report(at, stamp, bad, active, access, "written")

    def stale(self, at, written, active, access):
        """Reads with ``.nc``, which no fence makes aware of what the launch itself has written (ld.global.nc)."""
        if not written.any():
            return
        which = int(np.flatnonzero(written)[0])
        place = self.space.describe((int(at[which]) << self.space.shift) + self.space.base)
        self.machine.fail(RaceError, f"non-coherent {access.verb()}, {place}, which the kernel has written: .nc is "
                          "for memory that nobody writes as long as the kernel runs", access.instruction,
                          which if active.lanes is None else int(active.lanes[which]),
                          int(np.count_nonzero(written)))

    def against(self, table, at, active, access, what):
        """A weak access to granules with strong ones in ``table``."""
        if table is None:
            return
        stamp = table.take(at)
        if np.maximum.reduce(stamp):
            self.report(at, stamp, self.unordered(stamp, stamp != 0, active), active, access, what)

    def against_copies(self, copies, index, active, access):
        """A write to what ``cp.async`` has still to read."""
        found = copies.reading(index, access.nbytes)
        if found is None:
            return
        flags, reader = found
        which = int(flags.argmax())
        lane = which if active.lanes is None else int(active.lanes[which])
        place = self.space.describe(int(index[which]) + self.space.base)
        self.machine.fail(RaceError, f"race on global memory: {access.verb()}, {place}, which an asynchronous copy "
                          f"of {self.machine.lane_name(reader)} still reads: wait for its group first",
                          access.instruction, lane, int(np.count_nonzero(flags)))

    def unordered(self, stamp, candidates, active):
        """Which of the candidates were another thread's, and nothing orders them before now."""
        machine = self.machine
        bad = np.zeros(len(stamp), bool)
        which = np.flatnonzero(candidates)
        if not len(which):
            return bad
        lanes = which if active.lanes is None else active.lanes[which]
        stamps = stamp[which]
        mine = (self.clocks.who[lanes] >> BLOCK_BITS & BLOCK_MASK).astype(np.int64)
        block, time, thread = stamp_block(stamps), stamp_time(stamps), stamp_thread(stamps)
        same = block == mine
        verdict = np.zeros(len(which), bool)
        if machine.checks.races:
            warp = thread[same] >> 5
            inside = lanes[same]
            known = self.clocks.seen[machine.block_of[inside], machine.warp_in_block[inside], warp]
            verdict[same] = (time[same] > known) & (thread[same] != machine.thread[inside])
        foreign = np.flatnonzero(~same)
        if len(foreign) and not machine.order.known:
            verdict[foreign] = True
        elif len(foreign):
            key = np.stack([machine.warp_of[lanes[foreign]], block[foreign], thread[foreign] >> 5,
                            time[foreign]])
            unique, inverse = np.unique(key, axis=1, return_inverse=True)
            order = np.array([not machine.order.knows(*one) for one in unique.T.tolist()])
            verdict[foreign] = order[inverse.reshape(-1)]
        bad[which] = verdict
        return bad

    def examine_readers(self, at, before, active, access):
        """A write, strong or weak, to granules that somebody has read by a weak access."""
        mine = self.clocks.who if active.lanes is None else self.clocks.who[active.lanes]
        several, other = (before & SEVERAL) != 0, self.other_readers.take(at)
        here = (other ^ mine) >> BLOCK_BITS & BLOCK_MASK == 0
        for stamp, candidates in (before, (before != 0) & ~several), (other, (other != 0) & here):
            bad = self.unordered(stamp, candidates, active)
            self.report(at, stamp, bad, active, access, "read")
        if self.of_block is None:
            away = (before ^ mine) >> BLOCK_BITS & BLOCK_MASK != 0
            self.report(at, np.where(away, before, other), several, active, access, "read")
            return
        for row in self.of_block if several.any() else ():
            stamp = row.take(at)
            foreign = (stamp ^ mine) >> BLOCK_BITS & BLOCK_MASK != 0
            bad = self.unordered(stamp, (stamp != 0) & foreign, active)
            self.report(at, stamp, bad, active, access, "read")

    def collision(self, at, lost, active, access, values):
        """Several lanes wrote one granule in one step: a race unless they wrote the same bytes."""
        machine = self.machine
        lanes = np.arange(machine.lanes) if active.lanes is None else active.lanes
        stamp = self.stamps.take(at)
        mine = self.clocks.who[lanes]
        if not machine.checks.races:
            lost = lost & (stamp_block(stamp) != stamp_block(mine))
        order = np.argsort(at, kind="stable")
        data = values(np.arange(len(lanes)))
        start = np.flatnonzero(np.r_[True, np.diff(at[order]) != 0])
        group = np.cumsum(np.r_[0, np.diff(at[order]) != 0])
        same = (data[order] == data[order][start][group]).all(axis=1)
        different = np.zeros(len(lanes), bool)
        mixed = np.bincount(group, ~same) > 0
        different[order] = mixed[group]
        self.report(at, stamp, lost & different, active, access, "written")

    def report(self, at, stamp, bad, active, access, what):
        """The error, if there is anything bad."""
        if not bad.any():
            return
        machine = self.machine
        which = int(np.flatnonzero(bad)[0])
        lane = which if active.lanes is None else int(active.lanes[which])
        place = self.space.describe((int(at[which]) << self.space.shift) + self.space.base)
        block = int(stamp_block(stamp[which:which + 1])[0])
        thread = int(stamp_thread(stamp[which:which + 1])[0])
        if block == int(stamp_block(self.clocks.who[lane:lane + 1])[0]):
            by = f"thread {machine.thread_name(thread)} of the same block"
            why = "no barrier orders the two accesses"
        else:
            by = f"block {machine.block_name(block)} thread {machine.thread_name(thread)}"
            why = "blocks run in any order, and no fence before an atomic of theirs and after one of ours " \
                "on the same address orders the two accesses"
        machine.fail(RaceError, f"race on global memory: {access.verb()}, {place}, {what} by {by}"
                     f"{machine.journal.find(self.space, int(at[which]), lane, thread, what, block)}; {why}",
                     access.instruction, lane, int(np.count_nonzero(bad)))
