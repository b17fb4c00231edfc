"""Which checks a launch makes."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Checks:
    """The checks of a launch; all on by default.

    Attributes
    ----------
    bounds : bool
        Accesses stay inside of an allocation.
    alignment : bool
        Addresses are multiples of the access size.
    initialized : bool
        Nothing is read before it is written, nor before an asynchronous copy has been waited for.
    races : bool
        Conflicting accesses of threads of one block are ordered, as a rule by a barrier.
    global_races : bool
        Conflicting accesses to global memory are ordered, or all of them atomic.

    Notes
    -----
    Races are those of the PTX memory model. Accesses conflict if they touch the same bytes and one of them
    writes. Atomic and volatile accesses (*strong* ones; also ``.relaxed``, ``.acquire``, ``.release``) may
    conflict with each other, but a plain access that conflicts with another thread's access of any kind must
    be ordered before or after it. So a plain read of a counter that other threads add to atomically is a
    race, and so is polling a flag with plain loads.

    Barriers order the threads of a block. Blocks are ordered by ``cuda.threadfence()`` on both sides: one
    between what a block writes and the atomic that announces it, another between the atomic that sees this
    and the reads. A thread that finds itself last at a counter (the ticket of a grid-wide reduction) needs
    both fences too. Two plain writes of the value that is already there do not count as a race.

    Numba fills ``cuda.local.array`` with zeros, so that a read of an element nobody has assigned is no
    uninitialized read there; ``cuda.shared.array`` and workspaces (see `emulator.uninitialized`) have no such
    luck.
    """

    bounds: bool = True
    alignment: bool = True
    initialized: bool = True
    races: bool = True
    global_races: bool = True

    @classmethod
    def of(cls, value) -> Checks:
        """True, False or a `Checks`."""
        if isinstance(value, cls):
            return value
        if isinstance(value, bool):
            return cls() if value else cls(False, False, False, False, False)
        raise TypeError(f"checks must be a bool or emulator.Checks, not {type(value).__name__}")

    @property
    def shadowed(self):
        return self.bounds or self.initialized or self.races or self.global_races
