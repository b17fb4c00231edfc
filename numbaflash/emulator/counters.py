"""Counting: traffic, bank conflicts, floating point operations, instructions (CUDA C++ Best Practices,
Memory)."""
from __future__ import annotations

import re

import numpy as np

from .registry import lookup
from .report import LineCount, Report, SharedTraffic, Traffic

SECTOR = 5
FLOPS = {"add": 1, "sub": 1, "mul": 1, "fma": 2, "mad": 2}
SPECIAL = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "div", "sin", "cos", "tanh")
KIND = {"f16": ("f16", 1), "f16x2": ("f16", 2), "bf16": ("f16", 1), "bf16x2": ("f16", 2), "f32": ("f32", 1),
        "f64": ("f64", 1)}


def rows_by_warp(values, active, machine):
    """(warps, 32) of ``values``, -1 for lanes that do not take part."""
    if active.lanes is None:
        return values.reshape(-1, 32)
    full = np.full(machine.lanes, -1, np.int64)
    full[active.lanes] = values
    return full.reshape(-1, 32)[active.warps(machine)]


def sectors_of(rows):
    """Distinct 32-byte sectors of each warp, summed."""
    ordered = np.sort(rows, axis=1)
    return int(np.count_nonzero((ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0))
               + np.count_nonzero(ordered[:, 0] >= 0))


def wavefronts_of(rows, nbytes):
    """Passes that shared memory needs: per phase, the most distinct words that fall into one of the 32 banks.

    Accesses of 8 and 16 bytes run in phases of 16 and 8 lanes. Returns (wavefronts, phases with a lane in
    them).
    """
    words = max(nbytes // 4, 1)
    rows = rows.reshape(-1, 32 // words)
    if words > 1:
        rows = np.where(rows[:, :, None] < 0, -1, rows[:, :, None] + np.arange(words)).reshape(len(rows), -1)
    ordered = np.sort(rows, axis=1)
    unique = ordered >= 0
    unique[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    group = np.arange(len(ordered))[:, None] * 32 + (ordered & 31)
    counts = np.bincount(group[unique], minlength=32 * len(ordered)).reshape(-1, 32)
    most = counts.max(axis=1)
    return int(most.sum()), int(np.count_nonzero(most))


class Tally:
    """The traffic of one memory instruction. Equal access patterns are counted once and remembered."""

    __slots__ = ("machine", "space", "kind", "nbytes", "instruction", "requests", "bytes", "units", "ideal",
                 "touched", "base", "pattern", "phase", "known_lanes", "known", "mask")

    def __init__(self, machine, instruction, space, kind, nbytes, touched):
        self.machine, self.instruction = machine, instruction
        self.space, self.kind, self.nbytes = space, kind, nbytes
        self.requests = self.bytes = self.units = self.ideal = 0
        self.touched = touched
        self.pattern, self.phase, self.known_lanes, self.known = (), 0, None, (0, 0)
        self.mask = 31 if space == "global" else 3

    def __call__(self, address, active):
        lanes = active.lanes
        self.bytes += self.nbytes * len(address)
        self.requests += len(active.warps(self.machine))
        if self.space == "local":
            return
        if self.touched is not None:
            self.touched.mark(address, self.kind)
        first = int(address[0])
        relative = address - first
        if not (first & self.mask == self.phase and len(relative) == len(self.pattern)
                and (lanes is self.known_lanes or (lanes is not None and self.known_lanes is not None
                                                   and np.array_equal(lanes, self.known_lanes)))
                and not np.count_nonzero(relative != self.pattern)):
            self.pattern, self.phase, self.known_lanes = relative, first & self.mask, lanes
            rows = rows_by_warp(address >> (SECTOR if self.space == "global" else 2), active, self.machine)
            self.known = (sectors_of(rows), 0) if self.space == "global" else wavefronts_of(rows, self.nbytes)
        self.units += self.known[0]
        self.ideal += self.known[1]


class Touched:
    """Which 32-byte sectors of global memory were read and written at all."""

    def __init__(self, size):
        self.maps = {kind: np.zeros((size >> SECTOR) + 2, bool) for kind in ("load", "store")}

    def mark(self, address, kind):
        if kind != "store":
            self.maps["load"][address >> SECTOR] = True
        if kind != "load":
            self.maps["store"][address >> SECTOR] = True


class Guarded:
    """Lanes and warps of a predicated instruction that did execute."""

    __slots__ = ("machine", "lanes", "warps")

    def __init__(self, machine):
        self.machine, self.lanes, self.warps = machine, 0, 0

    def __call__(self, active):
        self.lanes += self.machine.lanes if active.lanes is None else len(active.lanes)
        self.warps += len(active.warps(self.machine))


class Counters:
    """Collects while a machine runs; `report` adds up.

    Parameters
    ----------
    enabled : bool
        False: no memory traffic is counted (instructions always are, they cost nothing).
    """

    def __init__(self, enabled=True):
        self.enabled, self.machine, self.touched = enabled, None, None
        self.tallies, self.guards = {}, {}

    def attach(self, machine, arena_size):
        self.machine = machine
        self.touched = Touched(arena_size) if self.enabled else None

    def memory(self, instruction, space, kind, nbytes):
        if not self.enabled:
            return None
        key = instruction.index, space, kind
        if key not in self.tallies:
            touched = self.touched if space == "global" else None
            self.tallies[key] = Tally(self.machine, instruction, space, kind, nbytes, touched)
        return self.tallies[key]

    def guarded(self, instruction):
        made = self.guards[instruction.index] = Guarded(self.machine)
        return made

    def per_instruction(self):
        """(warps, lanes) of every instruction."""
        machine = self.machine
        warps, lanes = (np.zeros(len(machine.code) + 1, np.int64) for _ in range(2))
        for segment in (*machine.segments.values(), *machine.retired_segments):
            for total, amount in ((warps, segment.warps), (lanes, segment.lanes)):
                total[segment.start] += amount
                total[segment.end] -= amount
        warps, lanes = np.cumsum(warps), np.cumsum(lanes)
        for index, guard in self.guards.items():
            lanes[index] = guard.lanes
        return warps, lanes

    def report(self, name, seconds):
        warps, lanes = self.per_instruction()
        groups, flops, tensor, lines = {}, {"f16": 0, "f32": 0, "f64": 0, "special": 0, "mma": 0}, 0, []
        found_at = {}
        for (index, _, _), one in self.tallies.items():
            found_at.setdefault(index, []).append(one)
        for instruction in self.machine.code:
            executed, threads = int(warps[instruction.index]), int(lanes[instruction.index])
            if not executed:
                continue
            entry = lookup(instruction)
            group = entry.group if entry else "unknown"
            groups[group] = groups.get(group, 0) + executed
            kind, amount = self.flops_of(instruction)
            if kind == "mma":
                tensor += executed
                flops["mma"] += executed * amount
            elif kind:
                flops[kind] += threads * amount
            found = found_at.get(instruction.index, ())
            lines.append(LineCount(
                instruction.line, " ".join(instruction.text.split()), instruction.source, executed, threads,
                sum(t.bytes for t in found), sum(t.units for t in found if t.space == "global"),
                sum(t.units for t in found if t.space == "shared"), sum(t.ideal for t in found),
                amount * (executed if kind == "mma" else threads) if kind else 0))
        machine = self.machine
        return Report(kernel=name,
                      grid=machine.grid,
                      block=machine.block,
                      seconds=seconds,
                      warp_instructions=sum(groups.values()),
                      thread_instructions=int(lanes[:-1].sum()),
                      instructions=dict(sorted(groups.items(), key=lambda item: -item[1])),
                      flops=flops,
                      tensor_ops=tensor,
                      global_load=self.traffic("load"),
                      global_store=self.traffic("store"),
                      global_atomic=self.traffic("atomic"),
                      shared_load=self.shared("load"),
                      shared_store=self.shared("store"),
                      shared_atomic=self.shared("atomic"),
                      local_bytes=sum(t.bytes for t in self.tallies.values() if t.space == "local"),
                      line_counts=tuple(lines))

    def chosen(self, space, kind):
        return [t for t in self.tallies.values() if t.space == space and t.kind == kind]

    def traffic(self, kind):
        mine = self.chosen("global", kind)
        distinct = 0
        if self.touched is not None and kind in self.touched.maps:
            distinct = int(np.count_nonzero(self.touched.maps[kind]))
        return Traffic(sum(t.requests for t in mine), sum(t.bytes for t in mine), sum(t.units for t in mine),
                       distinct)

    def shared(self, kind):
        mine = self.chosen("shared", kind)
        return SharedTraffic(sum(t.requests for t in mine), sum(t.bytes for t in mine),
                             sum(t.units for t in mine), sum(t.ideal for t in mine))

    @staticmethod
    def flops_of(instruction):
        """(kind, operations per lane, or per warp for mma)."""
        parts = instruction.parts
        if parts[0] in ("mma", "wgmma"):
            shape = next((p for p in parts if re.fullmatch(r"m\d+n\d+k\d+", p)), None)
            if shape is None:
                return None, 0
            m, n, k = map(int, re.findall(r"\d+", shape))
            return "mma", 2 * m * n * k // (4 if parts[0] == "wgmma" else 1)
        if parts[-1] in KIND:
            kind, pairs = KIND[parts[-1]]
            if parts[0] in FLOPS:
                return kind, FLOPS[parts[0]] * pairs
            if parts[0] in SPECIAL:
                return "special", pairs
        return None, 0
