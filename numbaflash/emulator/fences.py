"""Order that fences and strong accesses make between threads (PTX ISA, Memory Consistency Model: Release and
Acquire Patterns, Observation Order, Causality Order).

An access is *strong* if it is atomic, ``.relaxed``, ``.acquire``, ``.release`` or ``.volatile``; all others
are *weak*. A fence followed by a strong write publishes, at that address, what the thread knows at the fence.
A strong read of that address hears of it, and knows it from its next fence on. ``.release`` and ``.acquire``
do without the fences. Barriers pass on what a thread knows, has heard, and has made ready to publish.

A *clock* says what is known: block -> times of its warps, as in `races.Clocks`. It is never changed in place.
"""
from __future__ import annotations

import numpy as np

STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}
ACQUIRES, RELEASES = {"acquire", "acq_rel"}, {"release", "acq_rel"}
WIDE = {"gl", "gpu", "sys", "cluster"}


def is_strong(instruction) -> bool:
    """Whether a memory instruction makes strong accesses (Operation Types)."""
    parts = instruction.parts
    return parts[0] in ("atom", "red") or parts[0] in ("ld", "st") and not STRONG.isdisjoint(parts)


def is_fence(instruction) -> bool:
    parts = instruction.parts
    return parts[0] in ("membar", "fence") and not any(part.startswith("proxy") for part in parts)


def joined(one, other):
    """What both clocks know together."""
    if not other or one is other:
        return one or {}
    if not one:
        return other
    both = dict(one)
    for block, times in other.items():
        mine = both.get(block)
        both[block] = times if mine is None else np.maximum(mine, times)
    return both


class Scope:
    """What travels between the threads of a scope: of a block, or of the whole grid."""

    def __init__(self):
        self.ready, self.heard, self.published = {}, {}, {}


class Order:
    """Who knows what another block has done.

    Attributes
    ----------
    possible : bool
        The kernel has an instruction that orders accesses of several blocks; without one nothing is recorded.
    """

    def __init__(self, machine):
        self.machine, self.warps = machine, machine.warps_per_block
        self.possible = machine.cooperative or any(
            is_fence(i) or is_strong(i) and not (ACQUIRES | RELEASES).isdisjoint(i.parts)
            for i in machine.function.instructions)
        self.known = {}                                 # (block, warp) -> clock of other blocks
        self.grid, self.block = Scope(), Scope()

    def new_batch(self):
        for table in (self.known, *self.tables()):
            table.clear()

    def tables(self):
        return self.grid.ready, self.grid.heard, self.block.ready, self.block.heard

    def key(self, warp):
        """(block, warp of the block) of a warp of the batch."""
        block, number = divmod(warp, self.warps)
        return int(self.machine.block_id[block]), number

    # ---- what a warp knows
    def everything(self, warp):
        """The clock of a warp now, its own accesses included."""
        local, number = divmod(warp, self.warps)
        clocks = self.machine.clocks
        own = clocks.seen[local, number].copy()
        own[number] = clocks.time
        key = self.key(warp)
        return {**self.known.get(key, {}), key[0]: own}

    def learn(self, warp, clock):
        if not clock:
            return
        local, number = divmod(warp, self.warps)
        key = self.key(warp)
        own = clock.get(key[0])
        if own is not None:
            seen = self.machine.clocks.seen
            seen[local, number] = np.maximum(seen[local, number], own)
            self.machine.clocks.refresh(np.array([local]))
        self.known[key] = joined(self.known.get(key), {b: t for b, t in clock.items() if b != key[0]})

    def knows(self, warp, block, other, time):
        times = self.known.get(self.key(warp), {}).get(block)
        return times is not None and times[other] >= time

    def everyone_knows(self, time):
        """All warps of the grid know what the others did up to ``time``."""
        clock = {number: np.full(self.warps, time) for number in self.machine.block_id.tolist()}
        for warp in self.machine.all_warps.tolist():
            self.known[self.key(warp)] = clock

    # ---- events
    def fence(self, active, wide):
        """Warps know what they have heard, and may publish what they know."""
        if not self.possible:
            return
        scopes = (self.grid, self.block) if wide else (self.block,)
        for warp in active.warps(self.machine).tolist():
            key = self.key(warp)
            for scope in scopes:
                self.learn(warp, scope.heard.pop(key, None))
            now = self.everything(warp)
            for scope in scopes:
                scope.ready[key] = now
        self.machine.clocks.tick()

    def strong(self, active, places, instruction, space):
        """A strong access at flat indices ``places`` of a space.

        Atomics prolong what was published at their address, stores replace it.
        """
        if not self.possible:
            return
        machine, parts = self.machine, set(instruction.parts)
        acquires, releases = not ACQUIRES.isdisjoint(parts), not RELEASES.isdisjoint(parts)
        reads, writes = instruction.parts[0] != "st", instruction.parts[0] != "ld"
        if not (releases or self.grid.published or self.block.published or self.block.ready):
            return
        lanes = np.arange(machine.lanes) if active.lanes is None else active.lanes
        for place, warp in np.unique(np.stack([places, machine.warp_of[lanes]]), axis=1).T.tolist():
            key = self.key(warp)
            local = space, place, key[0]
            for scope, name in (self.grid, local if space == "shared" else place), (self.block, local):
                news = scope.published.get(name)
                if reads and acquires:
                    self.learn(warp, news)
                elif reads and news:
                    scope.heard[key] = joined(scope.heard.get(key), news)
                if writes:
                    mine = self.everything(warp) if releases else scope.ready.get(key)
                    scope.published[name] = joined(mine, news) if reads else mine
        if releases:
            machine.clocks.tick()

    def meet(self, block, sources, targets):
        """A barrier: warps ``targets`` of a block of the batch take over what ``sources`` have."""
        number = int(self.machine.block_id[block])
        for table in (self.known, *self.tables()) if self.possible else ():
            total = None
            for warp in sources if table else ():
                total = joined(total, table.get((number, warp)))
            for warp in targets if total else ():
                table[number, warp] = joined(table.get((number, warp)), total)
