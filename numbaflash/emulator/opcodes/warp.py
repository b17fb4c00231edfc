"""Warp collectives: shuffles, votes, match, reductions (the .sync instructions of the PTX ISA)."""
from __future__ import annotations

import numpy as np

from ..errors import EmulatorError
from ..registry import opcode
from ..values import DTYPES
from .barrier import member_mask
from .titles import MOVE, SYNC

LANE = np.arange(32)
BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)


def by_warp(machine, values, warps):
    """A register as (warps, 32)."""
    rows = np.broadcast_to(values, machine.lanes).reshape(-1, 32)
    return rows if warps is None else rows[warps]


def put(machine, active, out, warps, values):
    """Write (warps, 32) results to the active lanes."""
    if warps is None:
        out.reshape(-1, 32)[:] = values
        return
    full = np.zeros(machine.lanes, out.dtype)
    full.reshape(-1, 32)[warps] = values
    np.copyto(out, full, where=active.where)


def members(machine, active, mask, warps):
    """(warps, 32) flags: who takes part, and (warps, 32, 32): which lanes each lane's mask names."""
    count = len(machine.all_warps) if warps is None else len(warps)
    here = np.ones((count, 32), bool) if active.lanes is None else active.mask.reshape(-1, 32)[warps]
    if mask is None:
        return here, np.broadcast_to(here[:, None, :], (count, 32, 32))
    named = (by_warp(machine, mask, warps)[:, :, None] & BIT) != 0
    return here, named & here[:, None, :]


@opcode("shfl", section=MOVE + "shfl.sync", group="warp")
def shfl(d, i):
    """d = a of lane j = lane -/+/^ b or b, inside of segments given by c; p = j is in range, else d = a."""
    machine = d.machine
    mode = i.parts[2]
    pair = i.operands[0].split("|")
    out = d.target(pair[0], np.dtype("u4"))
    flag = d.target(pair[1], np.dtype(bool)) if len(pair) > 1 and pair[1] != "_" else None
    a, b, c = (d.source(o, "u4") for o in i.operands[1:4])
    mask = member_mask(d, i.operands[4]) if len(i.operands) > 4 else None
    constant = not isinstance(b, np.ndarray) and not isinstance(c, np.ndarray)
    table = lanes_of(mode, int(b), int(c)) if constant else None

    def step(active):
        warps = machine.whole_warps(active, i, mask)
        values = by_warp(machine, a, warps)
        if table is not None:
            source, valid = table
            result = values[:, source]
            valid = np.broadcast_to(valid, result.shape)
        else:
            source, valid = lanes_of(mode, by_warp(machine, b, warps), by_warp(machine, c, warps))
            result = np.take_along_axis(values, source, 1)
        if mask is not None:
            check_sources(active, warps, source)
        put(machine, active, out, warps, result)
        if flag is not None:
            put(machine, active, flag, warps, valid)

    def check_sources(active, warps, source):
        """Results are undefined where a thread reads from one that is not in membermask."""
        here, _ = members(machine, active, mask, warps)
        named = by_warp(machine, mask, warps) >> source.astype(np.uint32) & np.uint32(1)
        outside = np.argwhere(here & (named == 0))
        if len(outside):
            row, column = outside[0].tolist()
            lane = 32 * (row if warps is None else int(warps[row])) + column
            other = int(np.broadcast_to(source, here.shape)[row, column])
            machine.fail(EmulatorError, f"shfl.sync reads from lane {other}, which is not in the membermask",
                         i, lane, len(outside))
    return step


def lanes_of(mode, b, c):
    """The source lane of each lane, and whether it is in range (the ISA's pseudocode)."""
    b, c = (x.astype(np.int64) if isinstance(x, np.ndarray) else x for x in (b, c))
    value, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    largest = (LANE & segment) | (clamp & ~segment)
    smallest = LANE & segment
    source = {"up": LANE - value, "down": LANE + value, "bfly": LANE ^ value,
              "idx": smallest | (value & ~segment)}[mode]
    valid = source >= largest if mode == "up" else source <= largest
    return np.where(valid, source, LANE), valid


@opcode("vote", section=SYNC + "vote.sync", group="warp")
def vote(d, i):
    """all, any, uni or the ballot of a predicate over the lanes of membermask."""
    machine = d.machine
    mode = i.parts[2] if "sync" in i.parts else i.parts[1]
    out = d.target(i.operands[0], np.dtype("u4") if mode == "ballot" else np.dtype(bool))
    text = i.operands[1]
    predicate, inverted = d.source(text.lstrip("!"), bool), text.startswith("!")
    mask = member_mask(d, i.operands[2]) if len(i.operands) > 2 else None

    def step(active):
        warps = machine.whole_warps(active, i, mask)
        flags = by_warp(machine, predicate, warps) ^ inverted
        _, named = members(machine, active, mask, warps)
        yes, no = named & flags[:, None, :], named & ~flags[:, None, :]
        if mode == "ballot":
            result = (yes * BIT).sum(axis=2, dtype=np.uint32)
        elif mode == "any":
            result = yes.any(axis=2)
        elif mode == "all":
            result = ~no.any(axis=2)
        else:
            result = ~(yes.any(axis=2) & no.any(axis=2))
        put(machine, active, out, warps, result)
    return step


@opcode("match", section=SYNC + "match.sync", group="warp")
def match(d, i):
    """any: mask of the lanes with the same value; all: membermask if all values are equal, else 0 (and p)."""
    machine = d.machine
    pair = i.operands[0].split("|")
    out = d.target(pair[0], np.dtype("u4"))
    flag = d.target(pair[1], np.dtype(bool)) if len(pair) > 1 else None
    a = d.source(i.operands[1], DTYPES[i.parts[-1]])
    mask = member_mask(d, i.operands[2])

    def step(active):
        warps = machine.whole_warps(active, i, mask)
        values = by_warp(machine, a, warps)
        _, named = members(machine, active, mask, warps)
        same = named & (values[:, :, None] == values[:, None, :])
        result = (same * BIT).sum(axis=2, dtype=np.uint32)
        if i.parts[1] == "all":
            everyone = (same == named).all(axis=2)
            result = np.where(everyone, result, np.uint32(0))
            if flag is not None:
                put(machine, active, flag, warps, everyone)
        put(machine, active, out, warps, result)
    return step


REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
          "xor": np.bitwise_xor}


@opcode("redux", section=SYNC + "redux.sync", group="warp")
def redux(d, i):
    """d = the reduction of a over the lanes of membermask."""
    if i.parts[-1] == "f32":
        return redux_f32(d, i)
    machine = d.machine
    function = REDUCE[i.parts[2]]
    dtype = DTYPES[i.parts[-1]]
    out = d.target(i.operands[0], dtype)
    a = d.source(i.operands[1], dtype)
    mask = member_mask(d, i.operands[2])
    neutral = {"add": 0, "or": 0, "xor": 0, "and": -1}.get(i.parts[2])

    def step(active):
        warps = machine.whole_warps(active, i, mask)
        values = by_warp(machine, a, warps)
        _, named = members(machine, active, mask, warps)
        if neutral is None:
            bounds = np.iinfo(dtype)
            empty = bounds.max if i.parts[2] == "min" else bounds.min
        else:
            empty = np.array(neutral).astype(dtype)
        spread = np.where(named, values[:, None, :], dtype.type(empty))
        put(machine, active, out, warps, function.reduce(spread, axis=2))
    return step


def in_order(bits):
    """float32 patterns as int32 that compare like the numbers, -0 below +0; its own inverse."""
    return np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def redux_f32(d, i):
    """The least or greatest number; NaN if there is none or, with .NaN, if one of the values is NaN."""
    machine = d.machine
    function, neutral = {"min": (np.minimum, 2**31 - 1), "max": (np.maximum, -2**31)}[i.parts[2]]
    out, a = d.target(i.operands[0], np.dtype("i4")), d.source(i.operands[1], "i4")
    mask = member_mask(d, i.operands[2])
    magnitudes, wins = "abs" in i.parts, "NaN" in i.parts

    def step(active):
        warps = machine.whole_warps(active, i, mask)
        bits = by_warp(machine, a, warps)
        if magnitudes:
            bits = bits & np.int32(0x7FFFFFFF)
        _, named = members(machine, active, mask, warps)
        nan = ((bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000))[:, None, :]
        spread = np.where(named & ~nan, in_order(bits)[:, None, :], np.int32(neutral))
        result = in_order(function.reduce(spread, axis=2))
        none = (named & nan).any(axis=2) if wins else ~(named & ~nan).any(axis=2)
        put(machine, active, out, warps, np.where(none, np.int32(0x7FFFFFFF), result))
    return step


@opcode("activemask", section=SYNC + "activemask", group="warp")
def activemask(d, i):
    """d = the lanes of the warp that execute this instruction together."""
    out = d.target(i.operands[0], np.dtype("u4"))

    def step(active):
        if active.lanes is None:
            out[:] = 0xFFFFFFFF
            return
        masks = (active.mask.reshape(-1, 32) * BIT).sum(axis=1, dtype=np.uint32)
        np.copyto(out, np.repeat(masks, 32), where=active.where)
    return step


@opcode("elect", section=SYNC + "elect.sync", group="warp")
def elect(d, i):
    """p = this lane is the elected leader of membermask, d = its number; the lowest lane is elected here."""
    machine = d.machine
    pair = i.operands[0].split("|")
    out = d.target(pair[0], np.dtype("u4"))
    flag = d.target(pair[1], np.dtype(bool))
    mask = member_mask(d, i.operands[1])

    def step(active):
        warps = machine.whole_warps(active, i, mask)
        _, named = members(machine, active, mask, warps)
        leader = named.argmax(axis=2)
        put(machine, active, out, warps, leader.astype("u4"))
        put(machine, active, flag, warps, leader == LANE)
    return step
