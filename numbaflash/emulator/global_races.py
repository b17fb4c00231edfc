"""Races between blocks on global memory (PTX ISA 8.8 release and acquire patterns, 8.10).

The same stamps as for shared memory, for the launch as a whole: 0 is nobody. Blocks run in any order, so
what one wrote another may touch only atomically, or after a fence and an atomic have passed the word on.
"""
from __future__ import annotations

import numpy as np

from .errors import RaceError
from .races import (ATOMIC, BLOCK_BITS, BLOCK_MASK, IN_FLIGHT, THREAD_MASK, TIME_SHIFT, UNALLOCATED,
                    UNINITIALIZED, stamp_block, stamp_thread, stamp_time)


class GlobalOrder:
    """Which blocks know of which, through fences and atomics (PTX ISA 8.8, 8.10, release and acquire
    patterns).

    An atomic publishes what its block did before its last ``membar`` and takes over what earlier atomics on
    that address published.
    """

    FEW = 8

    def __init__(self):
        self.fenced, self.known, self.published = {}, {}, {}

    def fence(self, blocks, time):
        for block in blocks:
            self.fenced[block] = time

    def atomic(self, block, addresses):
        known = self.known.setdefault(block, {})
        for address in addresses:
            clock = self.published.setdefault(address, {})
            for other, time in clock.items():
                known[other] = max(known.get(other, -1), time)
            if block in self.fenced:
                clock[block] = self.fenced[block]
            for other, time in known.items():
                clock[other] = max(clock.get(other, -1), time)

    def synchronise(self, machine, lanes, places, releases):
        """A strong access of ``lanes``. A block that touches few places synchronises there; many are mere
        data."""
        if machine.grid_blocks == 1:
            return
        blocks = machine.block_id[machine.block_of[lanes]]
        for block in np.unique(blocks).tolist():
            mine = np.unique(places[blocks == block]).tolist()
            if len(mine) <= self.FEW:
                if releases:
                    self.fence([block], machine.clocks.time)
                self.atomic(block, mine)
        if releases:
            machine.clocks.tick()

    def knows(self, block, other, time):
        return self.known.get(block, {}).get(other, -1) >= time


class GlobalShadow:
    """Last writer and reader of each granule of global memory; 0 is nobody in this launch."""

    def __init__(self, space, machine):
        self.space, self.machine, self.clocks = space, machine, machine.clocks
        size = (len(space.bytes) >> space.shift) + 16
        self.stamps = np.zeros(size, np.uint64)
        self.races = machine.checks.global_races
        # Two readers, of different threads: whichever thread writes, one of them is another one. A reader of
        # several blocks carries ATOMIC.
        self.readers = np.zeros(size if self.races else 0, np.uint64)
        self.other_readers = np.zeros(size if self.races else 0, np.uint64)
        self.order = GlobalOrder()
        self.strong = set()
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

    def load(self, granule, active, access, values):
        lanes = active.lanes
        for step in access.steps:
            at = granule + step if step else granule
            stamp = self.stamps.take(at)
            if np.maximum.reduce(stamp):
                self.examine(at, stamp, active, access, "load", None)
            if self.races:
                own = self.clocks.own()
                own = own if lanes is None else own[lanes]
                before = self.readers.take(at)
                if np.maximum.reduce(before):
                    other = (before != 0) & (((before ^ own) >> BLOCK_BITS & BLOCK_MASK) != 0)
                    several = other | ((before & ATOMIC) != 0)
                    own = np.where(several, own | ATOMIC, own)
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
        foreign = ((winner ^ own) >> BLOCK_BITS & BLOCK_MASK | (own & ATOMIC)) != 0
        if foreign.any():
            self.readers[at[foreign]] = winner[foreign] | ATOMIC

    def store(self, granule, active, access, values, kind="store", flag=None):
        lanes = active.lanes
        own = self.clocks.own()
        if flag is not None or id(access.instruction) in self.strong:
            own |= ATOMIC
        own = own if lanes is None else own[lanes]
        for step in access.steps:
            at = granule + step if step else granule
            stamp = self.stamps.take(at)
            if np.maximum.reduce(stamp):
                self.examine(at, stamp, active, access, kind, values)
            if self.races:
                before = self.readers.take(at)
                if np.maximum.reduce(before):
                    self.examine_readers(at, before, active, access)
                    self.examine_others(at, before, active, access)
            if kind == "store" and self.races:
                self.stamps[at] = own
                lost = self.stamps.take(at) != own
                if np.count_nonzero(lost):
                    self.collision(at, lost, active, access, values)
            else:
                self.stamps[at] = own

    def atomic(self, granule, active, access, values):
        self.store(granule, active, access, None, "atomic", ATOMIC)

    def examine(self, at, stamp, active, access, kind, values):
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
        bad = self.unordered(stamp, (stamp != 0) & ~special, active)
        if kind == "atomic" or id(access.instruction) in self.strong:
            bad &= (stamp & ATOMIC) == 0
        if bad.any() and values is not None:
            which = np.flatnonzero(bad)
            index = at[which] << self.space.shift
            data = values(which)
            if data.shape[1] == access.nbytes:
                old = self.space.bytes[index[:, None] + np.arange(data.shape[1])]
                bad[which[(old == data).all(axis=1)]] = False
        if bad.any():
            self.report(at, stamp, bad, active, access, "written")

    def unordered(self, stamp, candidates, active):
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
        if len(foreign):
            key = np.stack([mine[foreign], block[foreign], time[foreign]])
            unique, inverse = np.unique(key, axis=1, return_inverse=True)
            order = np.array([not self.order.knows(*one) for one in unique.T.tolist()])
            verdict[foreign] = order[inverse.reshape(-1)]
        bad[which] = verdict
        return bad

    def examine_readers(self, at, before, active, access):
        several = (before & ATOMIC) != 0
        bad = self.unordered(before, (before != 0) & ~several, active)
        if several.any() and self.order.known:
            lanes = np.flatnonzero(several) if active.lanes is None else active.lanes[np.flatnonzero(several)]
            mine = stamp_block(self.clocks.who[lanes])
            grid = self.machine.grid_blocks
            time = stamp_time(before[several])
            ordered = np.array([all(self.order.knows(b, q, t) for q in range(grid) if q != b)
                                for b, t in zip(mine.tolist(), time.tolist())])
            several[np.flatnonzero(several)[ordered]] = False
        bad |= several
        if access.kind == "atomic" or id(access.instruction) in self.strong:
            return
        if bad.any():
            self.report(at, before, bad, active, access, "read")

    def examine_others(self, at, before, active, access):
        """The second reader, where the last one is the writing thread itself."""
        if access.kind == "atomic" or id(access.instruction) in self.strong:
            return
        mine = self.clocks.who if active.lanes is None else self.clocks.who[active.lanes]
        stamp = self.other_readers.take(at)
        same_block = (stamp >> BLOCK_BITS & BLOCK_MASK) == (mine >> BLOCK_BITS & BLOCK_MASK)
        bad = self.unordered(stamp & ~ATOMIC, (before != 0) & (stamp != 0) & same_block, active)
        if bad.any():
            self.report(at, stamp, bad, active, access, "read")

    def collision(self, at, lost, active, access, values):
        """Lanes of several warps or blocks wrote different bytes to one granule in one step."""
        machine = self.machine
        lanes = np.arange(machine.lanes) if active.lanes is None else active.lanes
        stamp = self.stamps.take(at)
        mine = self.clocks.who[lanes]
        cross = lost & ((stamp ^ mine) & ~np.uint64(31) & np.uint64((1 << TIME_SHIFT) - 1) & ~ATOMIC != 0)
        if not cross.any() or id(access.instruction) in self.strong:
            return
        if not machine.checks.races:
            cross &= stamp_block(stamp) != stamp_block(mine)
        order = np.argsort(at, kind="stable")
        data = values(np.arange(len(lanes)))
        start = np.flatnonzero(np.r_[True, np.diff(at[order]) != 0])
        group = np.cumsum(np.r_[0, np.diff(at[order]) != 0])
        same = (data[order] == data[order][start][group]).all(axis=1)
        different = np.zeros(len(lanes), bool)
        mixed = np.bincount(group, ~same) > 0
        different[order] = mixed[group]
        if (cross & different).any():
            self.report(at, stamp, cross & different, active, access, "written")

    def report(self, at, stamp, bad, active, access, what):
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
            why = "blocks run in any order, and no fence with an atomic orders the two accesses"
        machine.fail(RaceError, f"race on global memory: {access.verb()}, {place}, {what} by {by}"
                     f"{machine.journal.find(self.space, int(at[which]), lane, thread, what, block)}; {why}",
                     access.instruction, lane, int(np.count_nonzero(bad)))
