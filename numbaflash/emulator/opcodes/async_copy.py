"""cp.async and its groups (PTX ISA, Asynchronous copy): copies that run on while the thread goes on.

With ``copies="late"`` the bytes arrive when the thread waits for them, or, if they arrive at an mbarrier,
when nobody can go on without; until then the destination counts as unwritten. With "early" they arrive at
once.
"""
from __future__ import annotations

import numpy as np

from ..errors import MemoryFault
from ..memory import Access
from ..races import IN_FLIGHT
from ..registry import opcode
from .titles import MOVE


class Copy:
    """One cp.async under way: its place in the order of issue, and for each of its lanes from where to where, how
    many bytes (None: all), and its group."""

    def __init__(self, number, lanes, to, source, size, group, nbytes, access):
        self.number, self.lanes, self.to, self.source, self.size, self.group = number, lanes, to, source, size, group
        self.nbytes, self.access = nbytes, access

    def of(self, chosen):
        """That of some of its lanes."""
        size = None if self.size is None else self.size[chosen]
        return Copy(self.number, self.lanes[chosen], self.to[chosen], self.source[chosen], size, self.group[chosen],
                    self.nbytes, self.access)


class Copies:
    """What is under way: per lane the number of its current group, the copies not yet delivered, and the
    arrivals at mbarriers that will happen when those before them are."""

    def __init__(self, machine, shared, arena):
        self.machine, self.shared, self.arena = machine, shared, arena
        self.group = np.zeros(machine.lanes, np.int64)
        self.queue, self.arrivals, self.issued = [], [], 0
        machine.batch_hooks.append(self.new_batch)
        machine.progress_hooks.insert(0, self.next_arrival)

    def new_batch(self, ids):
        self.group[:] = 0
        self.queue.clear()
        self.arrivals.clear()

    def complete(self, due, stamp=None):
        """Deliver the copies of the lanes that ``due(copy)`` flags."""
        left = []
        for copy in self.queue:
            flags = due(copy)
            if flags.all():
                self.deliver(copy, stamp)
            elif not flags.any():
                left.append(copy)
            else:
                self.deliver(copy.of(flags), stamp)
                left.append(copy.of(~flags))
        self.queue = left

    def arrive_later(self, lanes, arrive):
        """Call ``arrive`` when the copies that the lanes have issued so far are delivered."""
        before, stamp = self.issued, self.machine.clocks.own()
        chosen = np.zeros(self.machine.lanes, bool)
        chosen[lanes] = True
        self.arrivals.append((before, chosen, stamp, arrive))

    def next_arrival(self):
        if not self.arrivals:
            return False
        before, chosen, stamp, arrive = self.arrivals.pop(0)
        self.complete(lambda copy: chosen[copy.lanes] & (copy.number < before), stamp)
        arrive()
        return True

    def deliver(self, copy, stamp=None):
        """Move the bytes; ``stamp`` is whose access that is, and of when (now)."""
        lanes, to, source, size, nbytes = copy.lanes, copy.to, copy.source, copy.size, copy.nbytes
        unit = 4 if nbytes % 4 == 0 else 1
        step = np.arange(nbytes // unit)
        data = self.arena.views[unit].take((source // unit)[:, None] + step)
        if size is not None:
            data = data.view(np.uint8).reshape(len(to), nbytes)
            data[np.arange(nbytes) >= size[:, None]] = 0
            data = data.view(f"u{unit}")
        self.shared.views[unit][(to // unit)[:, None] + step] = data
        shadow = self.shared.shadow
        if shadow is not None:
            stamp = (self.machine.clocks.own() if stamp is None else stamp)[lanes]
            granule = to >> self.shared.shift
            for part in copy.access.steps:
                shadow.stamps[granule + part] = stamp

    def reading(self, index, nbytes):
        """Which bytes ``index`` .. ``index + nbytes`` of global memory copies under way still read: flags, and a
        lane that copies the first of them; None if there are none."""
        for copy in self.queue:
            lanes, source, size = copy.lanes, copy.source, copy.nbytes if copy.size is None else copy.size
            if index.max() + nbytes <= source.min() or index.min() >= source.max() + copy.nbytes:
                continue
            order = np.argsort(source)
            start, end = source[order], np.maximum.accumulate((source + size)[order])
            before = np.searchsorted(start, index + nbytes, side="left") - 1
            hit = (before >= 0) & (end[before] > index)
            if hit.any():
                return hit, int(lanes[order][before[hit.argmax()]])
        return None


def copies(d):
    machine = d.machine
    if "copies" not in machine.parts:
        machine.parts["copies"] = Copies(machine, d.spaces["shared"], d.spaces["global"])
    return machine.parts["copies"]


def copied(i):
    return int(i.operands[2], 0)


@opcode("cp.async.ca", "cp.async.cg", section=MOVE + "cp.async", group="memory", touches=copied)
def cp_async(d, i):
    """Copy cp-size bytes from global to shared; bytes past src-size, or all with ignore-src, become zero."""
    machine, store = d.machine, copies(d)
    nbytes = copied(i)
    if nbytes not in (4, 8, 16):
        raise ValueError(f"cp-size {nbytes}")
    shared, arena = d.spaces["shared"], d.spaces["global"]
    write = Access(d, i, shared, i.operands[0], nbytes, "store")
    read = Access(d, i, arena, i.operands[1], nbytes, "load")
    size, ignore = None, None
    if len(i.operands) > 3:
        if d.is_register(i.operands[3]) and d.registers.arrays[i.operands[3]].dtype == bool:
            ignore = d.source(i.operands[3], bool)
        else:
            size = d.source(i.operands[3], "u4")
    late = machine.copies == "late"

    def step(active):
        lanes = np.arange(machine.lanes) if active.lanes is None else active.lanes
        amount = None
        if size is not None or ignore is not None:
            amount = np.broadcast_to(size if size is not None else np.where(ignore, 0, nbytes), machine.lanes)
            amount = amount[lanes].astype(np.int64)
            if (amount > nbytes).any():
                machine.fail(MemoryFault, f"cp.async src-size {int(amount.max())} exceeds cp-size {nbytes}",
                             i, int(lanes[amount.argmax()]))
            if (amount == nbytes).all():
                amount = None
        if amount is None:
            source = read(active)
        else:
            source = np.zeros(len(lanes), np.int64)
            reading = amount > 0
            if reading.any():
                source[reading] = partial(active.subset(reading), amount[reading])
        to = write(active, no_values)
        copy = Copy(store.issued, lanes, to, source, amount, store.group[lanes], nbytes, write)
        store.issued += 1
        if not late:
            store.deliver(copy)
            return
        if shared.shadow is not None:
            granule = to >> shared.shift
            stamp = IN_FLIGHT | machine.clocks.who[lanes]
            for part in write.steps:
                shared.shadow.stamps[granule + part] = stamp
        store.queue.append(copy)

    def partial(active, amount):
        """Only ``amount`` bytes are read: the last of them is what must be in bounds."""
        whole = amount == nbytes
        if whole.all():
            return read(active)
        source = np.zeros(len(amount), np.int64)
        if whole.any():
            source[whole] = read(active.subset(whole))
        rest = active.subset(~whole)
        source[~whole] = short_read(rest, amount[~whole])
        return source

    def short_read(active, amount):
        """Reads that stop inside of a granule: checked byte by byte against the allocations."""
        address = read.base[active.lanes].astype(np.int64) + read.offset
        starts = np.array([a.start - arena.base for a in arena.allocations])
        ends = starts + np.array([a.nbytes for a in arena.allocations])
        owner = np.searchsorted(starts, address, side="right") - 1
        outside = (owner < 0) | (address + amount > ends[owner])
        if read.bounds and outside.any():
            read.outside(address, active.lanes, outside)
        return address

    return step


def no_values(which):
    """A copy's bytes are not known yet, so two copies to one place always differ."""
    return (np.arange(len(which), dtype=np.uint64)[:, None] + np.uint64(1)).view(np.uint8)


@opcode("cp.async.commit_group", section=MOVE + "cp.async.commit_group", group="memory")
def commit_group(d, i):
    """The copies since the last commit become one group."""
    store = copies(d)

    def step(active):
        store.group[slice(None) if active.lanes is None else active.lanes] += 1
    return step


@opcode("cp.async.wait_group", "cp.async.wait_all", section=MOVE + "cp.async.wait_group / cp.async.wait_all",
        group="memory")
def wait_group(d, i):
    """Wait until at most N groups of this thread are pending; wait_all: until nothing is."""
    store = copies(d)
    pending = int(d.source(i.operands[0], "i4")) if i.operands else None

    def step(active):
        def due(copy):
            flags = np.ones(len(copy.lanes), bool)
            if pending is not None:
                flags = copy.group < store.group[copy.lanes] - pending
            return flags if active.lanes is None else flags & active.mask[copy.lanes]
        store.complete(due)
    return step
