"""mov, cvta, isspacep and other data movement without memory."""
from __future__ import annotations

import numpy as np

from ..memory import LOCAL_WINDOW, SHARED_WINDOW
from ..registry import opcode
from ..values import DTYPES
from .titles import MOVE

WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "global": 0, "const": 0, "param": LOCAL_WINDOW}
WINDOW_BITS = 32


@opcode("mov", section=MOVE + "mov", group="move")
def mov(d, i):
    """d = a; also packs {a, b, ...} into a wider register and unpacks one."""
    to, source = i.operands
    kind = i.parts[-1]
    if isinstance(source, tuple):
        return pack(d, to, source, kind)
    if isinstance(to, tuple):
        return unpack(d, to, source, kind)
    dtype = DTYPES[kind]
    out = d.target(to, dtype)
    if source in ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"):
        return clock(d, out, source)
    a = d.source(source, dtype)
    return lambda active: np.copyto(out, a, where=active.where)


def clock(d, out, name):
    """%clock counts synchronisation events and steps: it only ever grows."""
    ticks = [0]
    shift = 32 if name.endswith("_hi") else 0

    def step(active):
        ticks[0] += 16
        np.copyto(out, out.dtype.type((ticks[0] + d.machine.clocks.time) >> shift), where=active.where)
    return step


def pack(d, to, sources, kind):
    total = DTYPES[kind].itemsize
    size = total // len(sources)
    out = d.target(to, np.dtype(f"u{total}"))
    views = [d.source(s, f"u{size}") for s in sources]
    lanes = d.machine.lanes

    def step(active):
        value = np.empty((lanes, len(views)), f"u{size}")
        for n, view in enumerate(views):
            value[:, n] = view
        np.copyto(out, value.view(f"u{total}").reshape(-1), where=active.where)
    return step


def unpack(d, to, source, kind):
    total = DTYPES[kind].itemsize
    size = total // len(to)
    outs = [None if name == "_" else d.target(name, np.dtype(f"u{size}")) for name in to]
    a = d.source(source, f"u{total}")
    lanes = d.machine.lanes

    def step(active):
        value = np.empty(lanes, f"u{total}")
        value[:] = a
        pieces = value.view(f"u{size}").reshape(lanes, len(outs))
        for n, out in enumerate(outs):
            if out is not None:
                np.copyto(out, pieces[:, n], where=active.where)
    return step


@opcode("cvta", section=MOVE + "cvta", group="move")
def cvta(d, i):
    """An address of a state space as a generic address, or back (cvta.to)."""
    space = next(part.split("::")[0] for part in i.parts if part.split("::")[0] in WINDOWS)
    dtype = DTYPES[i.parts[-1]]
    window = WINDOWS[space]
    delta = dtype.type((-window if "to" in i.parts else window) & (1 << 8 * dtype.itemsize) - 1)
    out = d.target(i.operands[0], dtype)
    a = d.source(i.operands[1], dtype)
    return lambda active: np.add(a, delta, out=out, where=active.where)


@opcode("isspacep", section=MOVE + "isspacep", group="compare")
def isspacep(d, i):
    """p = the generic address a lies in the window of the space."""
    space = i.parts[1].split("::")[0]
    out = d.target(i.operands[0], np.dtype(bool))
    a = d.source(i.operands[1], "u8")

    def step(active):
        window = a >> np.uint64(WINDOW_BITS)
        if space in ("shared", "local", "param"):
            flags = window == np.uint64(WINDOWS[space] >> WINDOW_BITS)
        else:
            flags = (window != np.uint64(SHARED_WINDOW >> 32)) & (window != np.uint64(LOCAL_WINDOW >> 32))
            flags &= space == "global"
        np.copyto(out, flags, where=active.where)
    return step


@opcode("mapa", section=MOVE + "cvt.pack", group="move")
def mapa(d, i):
    """The address in another block of the cluster; a cluster here is one block, so the address itself."""
    dtype = DTYPES[i.parts[-1]]
    out = d.target(i.operands[0], dtype)
    a, rank = d.source(i.operands[1], dtype), d.source(i.operands[2], "u4")
    if isinstance(rank, np.ndarray) or int(rank):
        raise ValueError("only rank 0: clusters have one block here")
    return lambda active: np.copyto(out, a, where=active.where)
