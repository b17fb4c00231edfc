"""Who wrote and who read each granule, and whether anything orders two accesses (PTX ISA, Memory
Consistency Model).

Time counts synchronisation events of the launch. A *stamp* is one 64-bit word: time, block, an atomic flag,
thread of the block. For shared memory each warp has a vector clock, `Clocks.seen[block, warp, other]`: the
time up to which it knows what ``other`` did (Fidge and Mattern's clocks in the epoch form of FastTrack,
Flanagan and Freund 2009). A barrier joins the clocks of those who take part. Everything at or before
`Clocks.horizon` is known to the lane, so one comparison settles the usual case; only accesses that fail it
are looked at closely.
"""
from __future__ import annotations

import numpy as np

from .errors import RaceError

TIME_SHIFT, BLOCK_SHIFT, ATOMIC = 35, 11, np.uint64(1 << 10)
THREAD_MASK, BLOCK_MASK = np.uint64(1023), np.uint64((1 << 24) - 1)
UNALLOCATED = np.uint64(2**64 - 1)
UNINITIALIZED = np.uint64(2**64 - 2)
IN_FLIGHT_TIME = (1 << 29) - 2
IN_FLIGHT = np.uint64(IN_FLIGHT_TIME << TIME_SHIFT)
LAST_ORDINARY = np.uint64((IN_FLIGHT_TIME << TIME_SHIFT) - 1)
TIME_BITS, BLOCK_BITS = np.uint64(TIME_SHIFT), np.uint64(BLOCK_SHIFT)


def stamp_time(stamp):
    return (stamp >> TIME_BITS).astype(np.int64)


def stamp_block(stamp):
    return ((stamp >> BLOCK_BITS) & BLOCK_MASK).astype(np.int64)


def stamp_thread(stamp):
    return (stamp & THREAD_MASK).astype(np.int64)


class Clocks:
    """Vector clocks of the warps of a batch, and each lane's share of a stamp."""

    def __init__(self, machine):
        self.machine = machine
        self.time = 1
        self.warps = machine.warps_per_block
        self.seen = np.zeros((machine.blocks, self.warps, self.warps), np.int64)
        self.horizon = np.zeros(machine.lanes, np.uint64)
        self.who = np.zeros(machine.lanes, np.uint64)
        self.read_horizon = np.zeros(machine.lanes, np.int64)
        self._read_mark, self._read_time = np.zeros(machine.lanes, np.int64), -1

    def new_batch(self, block_ids):
        machine = self.machine
        self.who[:] = (block_ids[machine.block_of].astype(np.uint64) << BLOCK_BITS) | machine.thread.astype(
            np.uint64)
        self.time += 1
        self.seen[:] = self.time
        self.refresh()
        self.time += 1
        machine.order.new_batch()

    def refresh(self, blocks=slice(None)):
        """Recompute what every lane knows, after a change of `seen`."""
        machine = self.machine
        known = np.repeat(self.seen[blocks].min(axis=2), 32, axis=1)
        if self.enabled_races():
            self.horizon.reshape(machine.blocks, -1)[blocks] = \
                (known.astype(np.uint64) << TIME_BITS) | np.uint64((1 << TIME_SHIFT) - 1)
        else:
            self.horizon[:] = LAST_ORDINARY
        self.read_horizon.reshape(machine.blocks, -1)[blocks] = known << 5 | 31

    def enabled_races(self):
        return self.machine.checks.races

    def barrier_blocks(self, blocks=slice(None)):
        """All warps of ``blocks`` met: each knows everything the others did."""
        self.seen[blocks] = self.time
        self.refresh(blocks)
        self.time += 1
        order, warps = self.machine.order, range(self.warps)
        for block in np.arange(self.machine.blocks)[blocks].tolist() if order.possible else ():
            order.meet(block, warps, warps)

    def state(self):
        """All that is known now, for `release`."""
        return self.seen.copy(), self.time

    def release(self, block, warps, known=None):
        """What ``warps`` of ``block`` know now (or ``known``), themselves included: the clock a barrier or
        mbarrier collects."""
        seen, time = known or (self.seen, self.time)
        clock = seen[block, warps].max(axis=0)
        clock[warps] = time
        return clock

    def acquire(self, block, warps, clock):
        sources = np.flatnonzero(clock > self.seen[block, warps].min(axis=0))
        self.machine.order.meet(block, sources.tolist(), warps.tolist())
        self.seen[block, warps] = np.maximum(self.seen[block, warps], clock)
        self.refresh(np.array([block]))

    def tick(self):
        self.time += 1

    def warp_barrier(self, warps):
        """``bar.warp.sync``: lanes of each warp (batch numbers) know each other's accesses."""
        block, warp = np.divmod(warps, self.warps)
        self.seen[block, warp, warp] = self.time
        self.refresh(np.unique(block))
        self.time += 1

    def own(self):
        """The stamp of an access made now, per lane."""
        return self.who | np.uint64(self.time << TIME_SHIFT)

    def read_mark(self):
        if self._read_time != self.time:
            self._read_time = self.time
            self._read_mark = self.machine.lane_in_warp | self.time << 5
        return self._read_mark


class SharedShadow:
    """Last writer and the readers of each granule of shared memory."""

    def __init__(self, space, machine):
        self.space, self.machine, self.clocks = space, machine, machine.clocks
        self.size = (len(space.bytes) >> space.shift) + 16
        self.stamps = np.full(self.size, UNALLOCATED, np.uint64)
        self.readers = np.zeros(machine.warps_per_block * self.size, np.int64)
        self.other_readers = np.zeros_like(self.readers)
        self.reader_row = machine.warp_in_block * self.size
        self.races = machine.checks.races
        self.latest = np.zeros(self.size, np.int64) if machine.warps_per_block > 8 else None
        self.writers, self.where = {}, None
        self.layout = None

    def new_batch(self, layout):
        self.stamps[:] = layout
        self.readers[:] = self.other_readers[:] = 0
        if self.latest is not None:
            self.latest[:] = 0

    # ---- accesses
    def load(self, granule, active, access, values):
        lanes, clocks = active.lanes, self.clocks
        horizon = clocks.horizon if lanes is None else clocks.horizon[lanes]
        for step in access.steps:
            at = granule + step if step else granule
            stamp = self.stamps.take(at)
            late = stamp > horizon
            if np.count_nonzero(late):
                self.examine(at, stamp, late, active, access, "load", None)
            if self.races and not access.strong:
                self.mark_read(at, lanes)

    def mark_read(self, at, lanes):
        """Note the last reader of each warp, and the last one besides it: it may be the reader who writes next."""
        mark, horizon, place = self.clocks.read_mark(), self.clocks.read_horizon, at + (
            self.reader_row if lanes is None else self.reader_row[lanes])
        if lanes is not None:
            mark, horizon = mark[lanes], horizon[lanes]
        before = self.readers.take(place)
        again = before > horizon
        if np.count_nonzero(again):
            again &= ((before ^ mark) & 31) != 0
            self.other_readers[place[again]] = before[again]
        self.readers[place] = mark
        lost = self.readers.take(place) != mark
        if np.count_nonzero(lost):
            self.other_readers[place[lost]] = mark[lost]
        if self.latest is not None:
            self.latest[at] = self.clocks.time << 5 | 31

    def store(self, granule, active, access, values, kind="store"):
        lanes, clocks = active.lanes, self.clocks
        horizon = clocks.horizon if lanes is None else clocks.horizon[lanes]
        own = clocks.own()
        if access.strong:
            own |= ATOMIC
        own = own if lanes is None else own[lanes]
        for step in access.steps:
            at = granule + step if step else granule
            stamp = self.stamps.take(at)
            late = stamp > horizon
            if np.count_nonzero(late):
                late &= stamp != UNINITIALIZED
                if np.count_nonzero(late):
                    self.examine(at, stamp, late, active, access, kind, values)
            if self.races:
                self.check_readers(at, active, access)
            self.stamps[at] = own
            if self.races and kind == "store":
                lost = self.stamps.take(at) != own
                if np.count_nonzero(lost):
                    self.collision(at, lost, own, active, access, values)

    def atomic(self, granule, active, access, values):
        lanes = active.lanes
        horizon = self.clocks.horizon if lanes is None else self.clocks.horizon[lanes]
        for step in access.steps:
            stamp = self.stamps.take(granule + step)
            late = stamp > horizon
            if np.count_nonzero(late):
                self.examine(granule + step, stamp, late, active, access, "atomic", None)
        self.store(granule, active, access, None, "atomic")

    # ---- the close look
    def examine(self, at, stamp, late, active, access, kind, values):
        """Accesses whose granule was written at a time the lane does not know of as a whole."""
        shift = self.space.shift
        special = late & (stamp >= IN_FLIGHT)
        if special.any():
            unallocated = stamp == UNALLOCATED
            if unallocated.any():
                access.unallocated(at << shift, active, unallocated)
            uninitialized = stamp == UNINITIALIZED
            if uninitialized.any() and kind != "store" and self.machine.checks.initialized:
                access.uninitialized(at << shift, active, uninitialized)
            flying = (stamp >= IN_FLIGHT) & (stamp < UNINITIALIZED)
            if flying.any():
                if kind != "store" and self.machine.checks.initialized:
                    access.uninitialized(at << shift, active, flying, in_flight=True)
                if self.races:
                    self.race(access, active, at, flying, stamp, kind,
                              "an asynchronous copy still writes there")
            late = late & ~special
        if not self.races or not np.count_nonzero(late):
            return
        which = np.flatnonzero(late)
        lanes = which if active.lanes is None else active.lanes[which]
        stamps = stamp[which]
        machine = self.machine
        thread = stamp_thread(stamps)
        other = thread != machine.thread[lanes]
        known = self.clocks.seen[machine.block_of[lanes], machine.warp_in_block[lanes], thread >> 5]
        bad = other & (stamp_time(stamps) > known)
        if access.strong:
            bad &= (stamps & ATOMIC) == 0
        if bad.any() and kind == "store" and values is not None:
            bad &= ~self.same_value(access, active, which, at, values)
        if bad.any():
            flags = np.zeros(len(late), bool)
            flags[which[bad]] = True
            self.race(access, active, at, flags, stamp, kind)

    def check_readers(self, at, active, access):
        lanes, clocks, machine = active.lanes, self.clocks, self.machine
        horizon = clocks.read_horizon if lanes is None else clocks.read_horizon[lanes]
        if self.latest is not None:
            fresh = self.latest.take(at) > horizon
            if not fresh.any():
                return
        readers = self.readers.reshape(machine.warps_per_block, -1)
        others = self.other_readers.reshape(machine.warps_per_block, -1)
        for warp in range(machine.warps_per_block):
            mark = readers[warp].take(at)
            fresh = mark > horizon
            if not fresh.any():
                continue
            which = np.flatnonzero(fresh)
            mine = which if lanes is None else lanes[which]
            known = clocks.seen[machine.block_of[mine], machine.warp_in_block[mine], warp]
            mark, thread = mark[which], machine.thread[mine]
            mark = np.where((mark & 31) + 32 * warp == thread, others[warp].take(at[which]), mark)
            bad = ((mark >> 5) > known) & ((mark & 31) + 32 * warp != thread)
            if bad.any():
                flags = np.zeros(len(at), bool)
                flags[which[bad]] = True
                first = np.flatnonzero(flags)[0]
                thread = int(mark[bad][0] & 31) + 32 * warp
                self.report(access, active, at, first, thread, "read", flags)

    def same_value(self, access, active, which, at, values):
        """Lanes whose write leaves the bytes as they are: two writers of one value do not disturb each
        other."""
        data = values(which)
        index = (at[which] << self.space.shift)
        old = self.space.bytes[index[:, None] + np.arange(data.shape[1])]
        return (old == data).all(axis=1) if data.shape == old.shape else np.zeros(len(which), bool)

    def collision(self, at, lost, own, active, access, values):
        """Several lanes wrote one granule in one step: a race unless they wrote the same bytes."""
        machine = self.machine
        winner = stamp_thread(self.stamps.take(at))
        lanes = np.arange(machine.lanes) if active.lanes is None else active.lanes
        position = np.zeros(machine.lanes, np.int64)
        position[lanes] = np.arange(len(lanes))
        first_lane = lanes - machine.thread[lanes]
        winners = position[first_lane + winner]
        data = values(np.arange(len(lanes)))
        different = lost & (data != data[winners]).any(axis=1)
        if different.any():
            which = int(np.flatnonzero(different)[0])
            self.report(access, active, at, which, int(winner[which]), "written", different)

    # ---- messages
    def race(self, access, active, at, flags, stamp, kind, why=None):
        which = int(np.flatnonzero(flags)[0])
        if why is not None:
            self.report(access, active, at, which, None, why, flags)
        self.report(access, active, at, which, int(stamp_thread(stamp[which:which + 1])[0]), "written", flags)

    def report(self, access, active, at, which, thread, what, flags):
        machine = self.machine
        lane = which if active.lanes is None else int(active.lanes[which])
        address = (int(at[which]) << self.space.shift) - int(self.space.origin[lane])
        place = self.space.describe(address)
        if thread is None:
            message = f"race on shared memory: {access.verb()}, {place}; {what}"
        else:
            same_warp = thread >> 5 == machine.thread[lane] >> 5
            missing = "no bar.warp.sync" if same_warp else "no barrier"
            name = machine.thread_name(thread)
            message = (
                f"race on shared memory: {access.verb()}, {place}, {what} by thread {name} "
                f"of the same block{machine.journal.find(self.space, int(at[which]), lane, thread, what)}; "
                f"{missing} orders the two accesses")
        machine.fail(RaceError, message, access.instruction, lane, int(np.count_nonzero(flags)))
