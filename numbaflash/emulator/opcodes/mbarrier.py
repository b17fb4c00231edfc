"""mbarrier: barriers that are objects in shared memory."""
from __future__ import annotations

from functools import partial

import numpy as np

from ..errors import BarrierError
from ..machine import AT_MBARRIER, RUNNING
from ..memory import Access
from ..registry import opcode
from .titles import SYNC


class Phase:
    """An mbarrier: expected arrivals, those pending in this phase, pending bytes, number of completed
    phases."""

    __slots__ = ("expected", "pending", "bytes", "phase", "clock", "released", "collected")

    def __init__(self, expected, warps):
        self.expected = self.pending = expected
        self.bytes = self.phase = 0
        self.collected = np.zeros(warps, np.int64)
        self.released = np.zeros(warps, np.int64)


# How often threads may ask in vain, with nothing happening in between, before that is a deadlock.
PATIENCE = 256


class Mbarriers:
    def __init__(self, machine):
        self.machine, self.objects = machine, {}
        self.answers = {}  # index of a waiting instruction -> its predicate
        self.changes = self.rounds = 0
        self.seen = None
        machine.batch_hooks.append(lambda ids: self.objects.clear())
        machine.progress_hooks.append(self.answer_no)

    def answer_no(self):
        """Nobody can go on, so threads that wait hear that their phase is not complete; False if that leads
        to nothing."""
        machine = self.machine
        waiting = machine.state == AT_MBARRIER
        if not waiting.any():
            return False
        situation = self.changes, machine.pc.tobytes(), machine.state.tobytes()
        self.rounds = self.rounds + 1 if situation == self.seen else 0
        self.seen = situation
        if self.rounds > PATIENCE:
            return False
        for index in np.unique(machine.pc[waiting]).tolist():
            lanes = waiting & (machine.pc == index)
            self.answers[index][lanes] = False
            machine.pc[lanes] = index + 1
            machine.state[lanes] = RUNNING
        return True

    def find(self, lane, address, instruction):
        key = int(self.machine.block_of[lane]), int(address)
        found = self.objects.get(key)
        if found is None:
            self.machine.fail(BarrierError, f"shared address {int(address):#x} holds no initialized mbarrier",
                              instruction, int(lane))
        return key, found

    def complete(self, key, barrier):
        """A phase ends when no arrivals and no bytes are pending."""
        while barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.expected
            barrier.released = barrier.collected.copy()
            machine = self.machine
            waiting = (machine.state == AT_MBARRIER) & (machine.block_of == key[0])
            machine.state[waiting] = RUNNING
            if barrier.expected == 0:
                break

    def arrive(self, lanes, addresses, count, instruction, known=None):
        """Arrivals; unless ``.relaxed`` they publish what their threads have done, ``known`` (by now)."""
        machine = self.machine
        known = known or machine.clocks.state()
        key = machine.block_of[lanes] << 32 | addresses
        for one in np.unique(key).tolist():
            chosen = key == one
            who = lanes[chosen]
            name, barrier = self.find(who[0], addresses[chosen][0], instruction)
            warps = np.unique(machine.warp_in_block[who])
            if "relaxed" not in instruction.parts:
                clock = machine.clocks.release(name[0], warps, known)
                barrier.collected = np.maximum(barrier.collected, clock)
            total = int(count[chosen].sum())
            if total > barrier.pending:
                machine.fail(
                    BarrierError, f"mbarrier at shared {name[1]:#x}: {total} arrivals, but this phase "
                    f"expects only {barrier.pending} more of {barrier.expected}", instruction, int(who[0]))
            barrier.pending -= total
        machine.clocks.tick()
        self.changes += 1
        for one in np.unique(key).tolist():
            name = one >> 32, one & 0xFFFFFFFF
            self.complete(name, self.objects[name])

    def acquire(self, lanes, barrier, block):
        warps = np.unique(self.machine.warp_in_block[lanes])
        self.machine.clocks.acquire(block, warps, barrier.released)


def mbarriers(machine):
    if "mbarriers" not in machine.parts:
        machine.parts["mbarriers"] = Mbarriers(machine)
    return machine.parts["mbarriers"]


def object_access(d, i, address, kind):
    """Bounds, alignment and race checks of the 8-byte object; using one is like a read, making one is a
    write."""
    return Access(d, i, d.spaces["shared"], address, 8, kind)


def lanes_of(machine, active):
    return np.arange(machine.lanes) if active.lanes is None else active.lanes


def checked(d, i, address, kind="load"):
    access = object_access(d, i, address, kind)
    origin = d.spaces["shared"].origin

    def addresses(active):
        index = access(active, lambda which: np.full((len(which), 8), 0xA5, np.uint8))
        return index - origin[lanes_of(d.machine, active)]
    return addresses


@opcode("mbarrier.init", section=SYNC + "mbarrier.init", group="synchronisation", touches=lambda i: 8)
def init(d, i):
    """Make an mbarrier that expects count arrivals per phase."""
    store, machine = mbarriers(d.machine), d.machine
    addresses = checked(d, i, i.operands[0], "store")
    count = d.source(i.operands[1], "u4")

    def step(active):
        lanes = lanes_of(machine, active)
        counts = np.broadcast_to(count, machine.lanes)[lanes]
        for lane, address, n in zip(lanes.tolist(), addresses(active).tolist(), counts.tolist()):
            store.objects[int(machine.block_of[lane]), address] = Phase(n, machine.warps_per_block)
    return step


@opcode("mbarrier.inval", section=SYNC + "mbarrier.inval", group="synchronisation", touches=lambda i: 8)
def inval(d, i):
    """The memory stops being an mbarrier."""
    store, machine = mbarriers(d.machine), d.machine
    addresses = checked(d, i, i.operands[0])

    def step(active):
        for lane, address in zip(lanes_of(machine, active).tolist(), addresses(active).tolist()):
            key, _ = store.find(lane, address, i)
            del store.objects[key]
    return step


@opcode("mbarrier.expect_tx", section=SYNC + "mbarrier.expect_tx", group="synchronisation",
        touches=lambda i: 8)
def expect_tx(d, i):
    """This phase also waits for txCount bytes."""
    store, machine = mbarriers(d.machine), d.machine
    addresses = checked(d, i, i.operands[0])
    amount = d.source(i.operands[1], "u4")

    def step(active):
        lanes = lanes_of(machine, active)
        amounts = np.broadcast_to(amount, machine.lanes)[lanes]
        for lane, address, n in zip(lanes.tolist(), addresses(active).tolist(), amounts.tolist()):
            store.find(lane, address, i)[1].bytes += n
    return step


@opcode("mbarrier.complete_tx", section=SYNC + "mbarrier.complete_tx", group="synchronisation",
        touches=lambda i: 8)
def complete_tx(d, i):
    """Simulates the arrival of txCount bytes."""
    store, machine = mbarriers(d.machine), d.machine
    addresses = checked(d, i, i.operands[0])
    amount = d.source(i.operands[1], "u4")

    def step(active):
        lanes = lanes_of(machine, active)
        amounts = np.broadcast_to(amount, machine.lanes)[lanes]
        for lane, address, n in zip(lanes.tolist(), addresses(active).tolist(), amounts.tolist()):
            key, barrier = store.find(lane, address, i)
            barrier.bytes -= n
            store.changes += 1
            store.complete(key, barrier)
    return step


@opcode("mbarrier.arrive", "mbarrier.arrive_drop", section=SYNC + "mbarrier.arrive, mbarrier.arrive_drop",
        group="synchronisation", touches=lambda i: 8)
def arrive(d, i):
    """count (1) arrivals; .expect_tx first adds bytes; .noComplete must not end the phase; state = the
    phase."""
    store, machine = mbarriers(d.machine), d.machine
    at = next(n for n, o in enumerate(i.operands) if not isinstance(o, (str, tuple)))
    state = d.target(i.operands[0], np.dtype("u8")) if at else None
    addresses = checked(d, i, i.operands[at])
    extra = d.source(i.operands[at + 1], "u4") if len(i.operands) > at + 1 else None
    expect, drop = "expect_tx" in i.parts, "arrive_drop" in i.parts

    def step(active):
        lanes = lanes_of(machine, active)
        places = addresses(active)
        amount = None if extra is None else np.broadcast_to(extra, machine.lanes)[lanes].astype(np.int64)
        if state is not None:
            phases = [
                store.find(lane, place, i)[1].phase for lane, place in zip(lanes.tolist(), places.tolist())
            ]
            state[lanes] = phases
        if expect:
            for lane, place, n in zip(lanes.tolist(), places.tolist(), amount.tolist()):
                store.find(lane, place, i)[1].bytes += n
        if drop:
            for lane, place in zip(lanes.tolist(), places.tolist()):
                store.find(lane, place, i)[1].expected -= 1
        counts = np.ones(len(lanes), np.int64) if amount is None or expect else amount
        store.arrive(lanes, places, counts, i)
    return step


@opcode("cp.async.mbarrier.arrive", section=SYNC + "cp.async.mbarrier.arrive", group="synchronisation",
        touches=lambda i: 8)
def copies_arrive(d, i):
    """Arrive when all earlier cp.async of the thread are done (.noinc: the count includes this arrival)."""
    from .async_copy import copies
    store, machine, under_way = mbarriers(d.machine), d.machine, copies(d)
    addresses = checked(d, i, i.operands[0])

    def step(active):
        lanes, places = lanes_of(machine, active), addresses(active)
        if "noinc" not in i.parts:
            for lane, place in zip(lanes.tolist(), places.tolist()):
                store.find(lane, place, i)[1].pending += 1
        arrive = partial(store.arrive, lanes, places, np.ones(len(lanes), np.int64), i,
                         machine.clocks.state())
        if machine.copies == "late":
            under_way.arrive_later(lanes, arrive)
            machine.clocks.tick()
        else:
            arrive()
    return step


@opcode("mbarrier.test_wait", "mbarrier.try_wait", section=SYNC + "mbarrier.test_wait / mbarrier.try_wait",
        group="synchronisation", touches=lambda i: 8, control=True)
def wait(d, i):
    """p = the phase (given by its state, or by its parity) has completed.

    Both forms suspend the thread while others run, as if it had asked later, and answer False when nobody can
    go on.
    """
    store = mbarriers(d.machine)
    out = store.answers[i.index] = d.target(i.operands[0], np.dtype(bool))
    addresses = checked(d, i, i.operands[1])
    parity, acquires = "parity" in i.parts, "relaxed" not in i.parts
    wanted = d.source(i.operands[2], "u4" if parity else "u8")
    guard = d.guard(i)

    def control(machine, active, following):
        if guard is not None:
            flags = guard() if active.lanes is None else guard()[active.lanes]
            machine.set_pc(active, following)
            if not flags.any():
                return following
            active = active.subset(flags)
        lanes = lanes_of(machine, active)
        places = addresses(active)
        phases = np.broadcast_to(wanted, machine.lanes)[lanes].astype(np.int64)
        done = np.zeros(len(lanes), bool)
        key = machine.block_of[lanes] << 32 | places
        for one in np.unique(key).tolist():
            chosen = key == one
            name, barrier = store.find(lanes[chosen][0], places[chosen][0], i)
            late = barrier.phase - phases[chosen]
            stale = np.flatnonzero(late > 1)
            if len(stale) and not parity:
                machine.fail(
                    BarrierError,
                    f"the state of phase {barrier.phase - late[stale[0]]} tells nothing any more: "
                    f"the mbarrier is in phase {barrier.phase}", i, int(lanes[chosen][stale[0]]), len(stale))
            finished = (late & 1) != 0 if parity else late > 0
            done[chosen] = finished
            if finished.any() and acquires:
                store.acquire(lanes[chosen][finished], barrier, name[0])
        out[lanes[done]] = True
        if done.all() and guard is None:
            return following
        machine.pc[lanes] = np.where(done, following, i.index)
        machine.state[lanes[~done]] = AT_MBARRIER
        machine.split_at(i.index)
        return None

    return control
