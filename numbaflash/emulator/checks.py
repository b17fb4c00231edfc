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
        Conflicting accesses of threads of one block are ordered by a barrier.
    global_races : bool
        Conflicting accesses of several blocks to global memory are atomic or ordered.
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
