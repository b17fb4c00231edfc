"""System calls: ``print`` in a kernel becomes a call of ``vprintf(format, arguments)``."""
from __future__ import annotations

import re

import numpy as np

from ..memory import GLOBAL_BASE, LOCAL_WINDOW
from ..registry import opcode

DIRECTIVE = re.compile(rb"%([-+ #0]*\d*(?:\.\d+)?)(hh|h|ll|l|z)?([diouxXeEfFgGcsp%])")
INTEGERS, FLOATS = b"diouxXc", b"eEfFgG"


def text_at(arena, address):
    start = address - GLOBAL_BASE
    return bytes(arena.bytes[start:start + 4096]).partition(b"\0")[0]


def formatted(template, arguments, arena):
    """C's formatting: ints take 4 bytes (8 with ll, l or z), floats and pointers 8, each aligned."""
    position = 0

    def one(match):
        nonlocal position
        flags, length, kind = match.groups()
        if kind == b"%":
            return b"%"
        size = 8 if kind not in INTEGERS or length in (b"ll", b"l", b"z") else 4
        position = -(-position // size) * size
        raw = arguments[position:position + size]
        position += size
        if kind in FLOATS:
            value = np.frombuffer(raw, "f8")[0]
        elif kind == b"s":
            value = text_at(arena, int.from_bytes(raw, "little"))
        else:
            value = int.from_bytes(raw, "little", signed=kind in b"di")
        if kind == b"p":
            return hex(value).encode()
        return (b"%" + flags + {b"u": b"d", b"i": b"d"}.get(kind, kind)) % value
    return DIRECTIVE.sub(one, template).decode(errors="replace")


@opcode("system.vprintf", section="CUDA C++ Programming Guide, Formatted Output", group="control")
def vprintf(d, i):
    """Print the format, lane after lane."""
    machine, arena, local = d.machine, d.spaces["global"], d.spaces["local"]
    template_at, arguments_at = (d.symbol(name) for name in i.operands[:2])

    def word(lane, address):
        start = int(local.origin[lane]) + address
        return int.from_bytes(local.bytes[start:start + 8].tobytes(), "little")

    def step(active):
        lanes = range(machine.lanes) if active.lanes is None else active.lanes.tolist()
        for lane in lanes:
            start = word(lane, arguments_at)
            buffer = b""
            if start:
                first = int(local.origin[lane]) + start - LOCAL_WINDOW
                buffer = local.bytes[first:int(local.origin[lane]) + local.stride].tobytes()
            print(formatted(text_at(arena, word(lane, template_at)), buffer, arena), end="")
    return step
