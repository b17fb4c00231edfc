"""State spaces: where bytes live, what addresses mean, and the checks on every access (PTX ISA, State
Spaces).

A space is one byte buffer shared by all lanes of a batch. ``origin`` maps a lane's address 0 to its place in
it. The shadow of a space has one entry per *granule*, the smallest access that the program makes to it, so a
check costs as many look-ups as there are granules in the access.
"""
from __future__ import annotations

import numpy as np

from .errors import MemoryFault, UninitializedRead
from .fences import is_strong

GLOBAL_BASE = 0x7F10_0000_0000
SHARED_WINDOW = 0x7F01_0000_0000
LOCAL_WINDOW = 0x7F02_0000_0000
SHARED_START = 1024
GUARD, LARGEST_GUARD = 32, 1024
ARENA_GUARD, LARGEST_ARENA_GUARD = 4096, 1 << 18
ARENA_ALIGN = 256


def guard(nbytes, least, most):
    """Room that nobody may touch behind a variable, as large as itself: one row too far is not in the next."""
    return max(least, min(-(-nbytes // 128) * 128, most))


class Allocation:
    """A named stretch of a space; ``array`` is what it was made from, if it was an array."""

    __slots__ = ("name", "start", "nbytes", "array")

    def __init__(self, name, start, nbytes, array=None):
        self.name, self.start, self.nbytes, self.array = name, start, nbytes, array


class Space:
    """One state space of a batch of blocks.

    Parameters
    ----------
    name : str
        "global", "shared" or "local".
    nbytes : int
        Size of the whole buffer.
    limit : int
        Addresses of a lane are below this.
    base : int
        Address of byte 0.
    granule : int
        Bytes per shadow entry: 1, 2, 4, 8 or 16.
    """

    def __init__(self, name, nbytes, limit, base=0, granule=1, stride=0):
        self.name, self.limit, self.base, self.granule, self.stride = name, limit, base, granule, stride
        self.reach = stride if stride & stride - 1 == 0 else 0
        self.bytes = np.zeros(-(-nbytes // 16) * 16, np.uint8)
        self.views = {size: self.bytes.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.shift = granule.bit_length() - 1
        self.origin = None
        self.allocations = []
        self.read_only = []
        self.shadow = None

    def describe(self, address):
        """An address in words: the allocation it falls in or is near to, and by how much."""
        if not self.allocations:
            return f"{self.name} address {address:#x}"
        for one in self.allocations:
            if one.start <= address < one.start + one.nbytes:
                byte = f"byte {address - one.start} of {one.nbytes}"
                return f"{one.name} at {byte}{self._element(one, address)}"
        nearest = min(self.allocations, key=lambda a: max(a.start - address, address - a.start - a.nbytes))
        gap = address - nearest.start - nearest.nbytes
        if gap >= 0:
            where = f"{gap} bytes past the end of" if gap else "just past the end of"
            return f"{self.name} address {address:#x}, {where} {nearest.name} ({nearest.nbytes} bytes)" + \
                self._element(nearest, address)
        return f"{self.name} address {address:#x}, {nearest.start - address} bytes before {nearest.name}"

    @staticmethod
    def _element(one, address):
        array = one.array
        if array is None or not array.ndim:
            return ""
        offset = address - one.start
        if not array.flags.c_contiguous:
            return f" (element {offset // array.itemsize} of its memory)"
        if array.ndim == 1 or not 0 <= offset < array.nbytes:
            return f" (element {offset // array.itemsize})"
        index = np.unravel_index(offset // array.itemsize, array.shape)
        return f" (element [{', '.join(map(str, index))}])"


class Access:
    """The address computation and all checks of one load, store or atomic; calling it gives flat byte
    indices.

    Parameters
    ----------
    build : Decoder
    space : Space
    address : parser.Address
    nbytes : int
        Bytes moved per lane, all vector elements together.
    kind : {"load", "store", "atomic"}
    window : int
        Subtracted from the address: the base of the space in the generic address space.
    """

    def __init__(self, build, instruction, space, address, nbytes, kind, window=0):
        self.machine, self.instruction, self.space = build.machine, instruction, space
        self.nbytes, self.kind, self.strong = nbytes, kind, is_strong(instruction)
        base = build.address_base(address.base)
        self.offset = np.int64(address.offset - window - space.base)
        if not isinstance(base, np.ndarray):
            base = np.full(build.machine.lanes, int(base), np.int64)
        self.base = base
        checks = build.machine.checks
        self.alignment = nbytes - 1 if checks.alignment else 0
        self.bounds = checks.bounds
        self.checked = self.bounds or checks.alignment
        self.limit = np.uint64(max(space.limit - nbytes, 0))
        # Addresses below a power of two stay in the lane's stretch, whose rest the shadow knows about.
        self.inside = space.reach - 1 if space.reach and space.shadow is not None else int(self.limit)
        self.scratch = np.empty(build.machine.lanes, np.int64)
        self.shadow = space.shadow
        self.steps = range(max(nbytes >> space.shift, 1))
        self.tally = build.machine.counters.memory(instruction, space.name, kind, nbytes)
        self.shift = space.shift
        self.read_only = space.read_only if kind != "load" and self.bounds else ()
        self.journal = build.machine.journal if build.machine.journal.watch else None

    def __call__(self, active, values=None):
        lanes = active.lanes
        if lanes is None:
            address = np.add(self.base, self.offset, out=self.scratch)
        else:
            address = self.base.take(lanes) + self.offset
        if self.checked:
            together = int(np.bitwise_or.reduce(address))
            if together & self.alignment:
                self.misaligned(address, lanes)
            if not 0 <= together <= self.inside and self.bounds:
                outside = address.view(np.uint64) > self.limit
                if outside.any():
                    self.outside(address, lanes, outside)
            for start, end in self.read_only:
                inside = (address < end) & (address + self.nbytes > start)
                if inside.any():
                    self.fail(MemoryFault, f"{self.verb()} to read-only memory", address, lanes, inside)
        if self.tally is not None:
            self.tally(address, active)
        origin = self.space.origin
        index = address if origin is None else address + (origin if lanes is None else origin.take(lanes))
        if self.shadow is not None:
            getattr(self.shadow, self.kind)(index >> self.shift, active, self, values)
        if self.journal is not None:
            self.journal.record(self.machine, self.instruction, self.space, index, self.nbytes, active,
                                self.kind)
        return index

    # ---- messages
    def misaligned(self, address, lanes):
        bad = (address & self.alignment) != 0
        self.fail(MemoryFault, f"misaligned {self.verb()}", address, lanes, bad,
                  f"the address must be a multiple of {self.nbytes}")

    def outside(self, address, lanes, bad):
        self.fail(MemoryFault, f"out-of-bounds {self.verb()}", address, lanes, bad)

    def unallocated(self, index, active, bad):
        self.fail(MemoryFault, f"out-of-bounds {self.verb()}", self.address_of(index, active), active.lanes,
                  bad)

    def uninitialized(self, index, active, bad, in_flight=False):
        why = "an asynchronous copy has not delivered it: wait for its group" if in_flight else \
            "nothing has been written there"
        self.fail(UninitializedRead, f"{self.verb()} of uninitialized memory", self.address_of(index, active),
                  active.lanes, bad, why)

    def address_of(self, index, active):
        origin = self.space.origin
        if origin is None:
            return index
        return index - (origin if active.lanes is None else origin[active.lanes])

    def verb(self):
        noun = {"load": "read", "store": "write", "atomic": "atomic"}[self.kind]
        return f"{noun} of {self.nbytes} bytes"

    def fail(self, error, what, address, lanes, bad, why=""):
        which = int(np.flatnonzero(bad)[0])
        lane = which if lanes is None else int(lanes[which])
        place = self.space.describe(int(address[which]) + self.space.base)
        count = int(np.count_nonzero(bad))
        self.machine.fail(error, f"{what}: {place}" + (f"; {why}" if why else ""), self.instruction, lane,
                          count)


class LocalShadow:
    """Initialisation of each thread's own memory: 0 never written, 1 written, 2 not part of any variable."""

    def __init__(self, space, initialized=True):
        self.state = np.zeros((len(space.bytes) >> space.shift) + 16, np.uint8)
        self.space, self.initialized = space, initialized

    def load(self, granule, active, access, values):
        for step in access.steps:
            state = self.state.take(granule + step if step else granule)
            if (state != 1).any():
                self.complain(state, granule, active, access)

    def store(self, granule, active, access, values):
        for step in access.steps:
            at = granule + step if step else granule
            state = self.state.take(at)
            if (state == 2).any():
                access.unallocated(granule << self.space.shift, active, state == 2)
            self.state[at] = 1

    atomic = store

    def complain(self, state, granule, active, access):
        index = granule << self.space.shift
        if (state == 2).any():
            access.unallocated(index, active, state == 2)
        if self.initialized:
            access.uninitialized(index, active, state == 0)


class Arena(Space):
    """Global memory: copies of the argument arrays and the module's variables between guard zones.

    Arrays that overlap in memory share bytes here too (see `arguments.Memory`, which copies them in and out).
    """

    def __init__(self):
        self.allocations, self.pieces, self.size = [], [], ARENA_GUARD
        self.read_only = []

    def reserve(self, name, nbytes, data=None, initialized=True, array=None, offset=0, writable=True):
        """Room for ``nbytes``, ``offset`` bytes after a multiple of `ARENA_ALIGN`; returns its address."""
        start = -(-self.size // ARENA_ALIGN) * ARENA_ALIGN + offset
        self.size = start + nbytes + guard(nbytes, ARENA_GUARD, LARGEST_ARENA_GUARD)
        if not writable:
            self.read_only.append((start, start + nbytes))
        self.allocations.append(Allocation(name, GLOBAL_BASE + start, nbytes, array))
        self.pieces.append((start, nbytes, data, initialized))
        return GLOBAL_BASE + start

    def build(self, granule):
        size, allocations, read_only = -(-self.size // 256) * 256, self.allocations, self.read_only
        Space.__init__(self, "global", size, size, GLOBAL_BASE, granule)
        self.allocations, self.read_only = allocations, read_only
        for start, nbytes, data, _ in self.pieces:
            if data is not None:
                data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
                self.bytes[start:start + nbytes] = data

    def note_written(self):
        """Tell every partly initialized piece (a byte map) what the launch has written."""
        if self.shadow is None:
            return
        for start, nbytes, _, initialized in self.pieces:
            if isinstance(initialized, np.ndarray):
                granule = np.arange(start, start + nbytes) >> self.shift
                initialized |= self.shadow.initialized(granule)
