"""ld and st in every space."""
from __future__ import annotations

import numpy as np

from ..fences import is_strong
from ..memory import LOCAL_WINDOW, SHARED_WINDOW, Access
from ..parser import Address
from ..registry import opcode
from ..values import BITS, DTYPES, type_names
from .titles import MOVE

SPACES = {"global": "global", "shared": "shared", "local": "local", "const": "global", "param": "local"}
WINDOW_OF = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "global": 0}


def vector_length(instruction):
    return next((int(p[1:]) for p in instruction.parts if p in ("v2", "v4", "v8")), 1)


def touched(instruction):
    """Bytes that one lane accesses at once."""
    return BITS[type_names(instruction)[-1]] // 8 * vector_length(instruction)


def space_of(instruction):
    """"global", "shared", "local", or None for a generic address."""
    for part in instruction.parts[1:]:
        space = SPACES.get(part.split("::")[0])
        if space is not None:
            return space
    return None


def in_space(d, instruction, address, make):
    """``make(space, window)`` of the instruction's space; for generic addresses one of each, chosen per lane
    (PTX ISA, Generic Addressing)."""
    name = space_of(instruction)
    if name is not None:
        return make(d.spaces[name], 0)
    steps = {window >> 32: make(d.spaces[name], window) for name, window in WINDOW_OF.items() if window}
    other = make(d.spaces["global"], 0)
    addresses = d.addresses(address)

    def step(active):
        windows = addresses(active) >> 32
        first = windows[0]
        if (windows == first).all():
            return steps.get(int(first), other)(active)
        for window in np.unique(windows).tolist():
            steps.get(window, other)(active.subset(windows == window))
    return step


@opcode("ld", section=MOVE + "ld", group="memory", touches=touched)
@opcode("ldu", section=MOVE + "ldu", group="memory", touches=touched)
def ld(d, i):
    """d = the value at address a; narrower values are sign- or zero-extended to the register."""
    kind = type_names(i)[-1]
    to, address = d.vector(i.operands[0]), i.operands[1]
    if "param" in i.parts and address.base in d.parameters:
        return load_parameter(d, to, address, kind)
    size = BITS[kind] // 8
    dtype = DTYPES[kind]
    raw = np.dtype(f"u{size}")
    outs = [d.extending_target(name, dtype if dtype.kind in "iu" else raw) for name in to]
    count, shift, strong = len(to), size.bit_length() - 1, is_strong(i)
    spinning = d.machine.spinning

    def make(space, window):
        access = Access(d, i, space, address, size * count, "load", window)
        data = space.views[size].view(dtype if dtype.kind == "i" else raw)

        def step(active):
            index = access(active) >> shift
            lanes = active.lanes
            if strong:
                d.machine.order.strong(active, index << shift, i, space.name)
                spinning.asked = True
            for n, out in enumerate(outs):
                value = data.take(index + n if n else index)
                if strong and not spinning.news:
                    spinning.news = not np.array_equal(value, out if lanes is None else out[lanes])
                if lanes is None:
                    out[:] = value
                else:
                    out[lanes] = value
        return step

    return in_space(d, i, address, make)


def load_parameter(d, to, address, kind):
    """Kernel parameters are one value for all threads."""
    size = BITS[kind] // 8
    dtype = DTYPES[kind]
    dtype = dtype if dtype.kind in "iu" else np.dtype(f"u{size}")
    data = d.parameters[address.base]
    pairs = []
    for n, name in enumerate(to):
        start = address.offset + n * size
        value = np.frombuffer(data[start:start + size], dtype)[0]
        pairs.append((d.extending_target(name, dtype), value))

    def step(active):
        for out, value in pairs:
            np.copyto(out, value, where=active.where)
    return step


@opcode("st", section=MOVE + "st", group="memory", touches=touched)
def st(d, i):
    """The value at address a = b."""
    kind = type_names(i)[-1]
    address: Address = i.operands[0]
    size = BITS[kind] // 8
    sources = [d.source(name, DTYPES[kind]) for name in d.vector(i.operands[1])]
    raw = np.dtype(f"u{size}")
    sources = [s.view(raw) for s in sources]
    shift, count, strong = size.bit_length() - 1, len(sources), is_strong(i)
    spinning = d.machine.spinning
    note = d.subnormals.watch_store(sources, d.vector(i.operands[1]))

    def make(space, window):
        access = Access(d, i, space, address, size * count, "store", window)
        data, seen_by_others = space.views[size], space.name != "local"

        def step(active):
            lanes = active.lanes
            if note is not None:
                note()

            def values(which):
                chosen = which if lanes is None else lanes[which]
                columns = [
                    np.full(len(which), s) if not isinstance(s, np.ndarray) else s[chosen] for s in sources
                ]
                return np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint8)

            index = access(active, values) >> shift
            if strong:
                d.machine.order.strong(active, index << shift, i, space.name)
            spinning.news |= seen_by_others
            for n, source in enumerate(sources):
                value = source if lanes is None or not isinstance(source, np.ndarray) else source[lanes]
                data[index + n if n else index] = value
        return step

    return in_space(d, i, address, make)
