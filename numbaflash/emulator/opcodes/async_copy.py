"""cp.async and its groups (PTX ISA, Asynchronous copy): copies that run on while the thread goes on.

With ``copies="late"`` the bytes arrive when the thread waits for them, and until then the destination counts
as unwritten; with "early" they arrive at once.
"""
from __future__ import annotations

import numpy as np

from ..errors import MemoryFault
from ..memory import Access
from ..races import IN_FLIGHT
from ..registry import opcode
from .titles import MOVE


class Copies:
    """What is under way: per lane the number of its current group, and the copies not yet delivered."""

    def __init__(self, machine, shared, arena):
        self.machine, self.shared, self.arena = machine, shared, arena
        self.group = np.zeros(machine.lanes, np.int64)
        self.queue = []
        machine.batch_hooks.append(self.new_batch)

    def new_batch(self, ids):
        self.group[:] = 0
        self.queue.clear()

    def deliver(self, job, keep=None):
        """Move the bytes of a job (``keep``: of some of its lanes)."""
        lanes, to, source, nbytes, size, _, instruction, access = job[:8]
        if keep is not None:
            lanes, to, source = lanes[keep], to[keep], source[keep]
            size = size if size is None else size[keep]
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
            stamp = self.machine.clocks.own()[lanes]
            granule = to >> self.shared.shift
            for part in access.steps:
                shadow.stamps[granule + part] = stamp


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
        job = (lanes, to, source, nbytes, amount, store.group[lanes], i, write)
        if not late:
            store.deliver(job)
            return
        if shared.shadow is not None:
            granule = to >> shared.shift
            stamp = IN_FLIGHT | machine.clocks.who[lanes]
            for part in write.steps:
                shared.shadow.stamps[granule + part] = stamp
        store.queue.append(job)

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
        left = []
        for job in store.queue:
            lanes, group = job[0], job[5]
            due = np.ones(len(lanes), bool) if pending is None else group < store.group[lanes] - pending
            if active.lanes is not None:
                due &= active.mask[lanes]
            if due.all():
                store.deliver(job)
            elif not due.any():
                left.append(job)
            else:
                store.deliver(job, due)
                keep = ~due
                left.append((*(x[keep] for x in job[:3]), job[3], None if job[4] is None else job[4][keep],
                             group[keep], *job[6:]))
        store.queue = left
    return step
