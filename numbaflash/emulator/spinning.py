"""Threads that go round a loop only to ask again let the others go first.

The group with the smallest program counter runs, and in a lock that is the loop of those who wait for it.
"""
from __future__ import annotations

import numpy as np


class Spinning:
    """Knows who waits in a loop: once round, something was asked of memory and nothing happened.

    Attributes
    ----------
    lanes : array of bool
        Those who have gone round in vain; they rest until all others have, too, or have stopped.
    any : bool
        Some do.
    asked, news : bool
        Since the last jump backwards: an atomic or a strong load has read; and memory was written, or the
        load saw something else than the last time.
    """

    def __init__(self, machine):
        self.lanes = np.zeros(machine.lanes, bool)
        self.any = self.asked = self.news = False

    def new_batch(self):
        self.rest_is_over()
        self.asked = self.news = False

    def rest_is_over(self):
        self.lanes[:] = False
        self.any = False

    def gives_way(self, active):
        """At a jump backwards: whether others should have their turn now."""
        in_vain = self.asked and not self.news
        self.asked = self.news = False
        if in_vain:
            self.lanes[slice(None) if active.lanes is None else active.lanes] = self.any = True
        return self.any

    def all_rest(self, running):
        """Whether all running lanes have gone round in vain; then their rest is over."""
        if not self.any or (running & ~self.lanes).any():
            return False
        self.rest_is_over()
        return True

    def awake(self, running):
        """Those of the running lanes that do not rest."""
        return running & ~self.lanes if self.any else running

    def awake_in_each_warp(self, running):
        """The same, for each warp by itself."""
        if not self.any:
            return running
        awake = running & ~self.lanes
        asleep = np.repeat(~awake.reshape(-1, 32).any(axis=1), 32)
        self.called(asleep)
        return awake | running & asleep

    def called(self, here):
        """Lanes whose turn has come."""
        if self.any:
            self.lanes[here] = False
            self.any = bool(self.lanes.any())

    def state(self):
        return self.lanes.tobytes(), self.asked, self.news
