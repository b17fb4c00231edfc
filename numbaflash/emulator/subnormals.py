"""Where `.ftz` has something to flush: nearly never, so it pays to know (PTX ISA, subnormal numbers).

A register that only takes results of `.ftz` operations never holds a subnormal float32. One that is loaded
can hold one only if memory does, which is looked at when something is stored. Everything else is looked at
on every use.
"""
from __future__ import annotations

import numpy as np

from .values import immediate

FLUSHING = {
    "add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh",
    "abs", "neg", "min", "max"
}
COPIED = {"mov": slice(1, 2), "selp": slice(1, 3), "shfl": slice(1, 2), "slct": slice(1, 3)}
NEVER, LOADED, ALWAYS = range(3)


class Doubt:
    """Raised: operands may be subnormal."""

    __slots__ = ("raised",)

    def __init__(self, raised):
        self.raised = raised


def has_subnormal(words):
    """Some of the 32-bit words is a subnormal float32."""
    shifted = words + words
    shifted -= np.uint32(1)
    return bool(shifted.size) and bool(np.minimum.reduce(shifted, axis=None) < 0x00FFFFFF)


def literal_rank(text):
    value = immediate(text, np.float32)
    return ALWAYS if value is None or has_subnormal(np.atleast_1d(value).view(np.uint32)) else NEVER


class Subnormals:
    """What is known about the registers of a function."""

    def __init__(self, function):
        self.registers = function.registers
        self.memory, self.always = Doubt(False), Doubt(True)
        if "subnormals" not in function.facts:
            needed = any("ftz" in i.parts for i in function.instructions)
            function.facts["subnormals"] = needed, self._ranks(function) if needed else {}
        self.needed, self.ranks = function.facts["subnormals"]

    def _ranks(self, function):
        ranks, copies = {}, []
        for i in function.instructions:
            if not i.operands:
                continue
            written = i.operands[0]
            rank = self._rank(i)
            for name in written if isinstance(written, tuple) else str(written).split("|"):
                if name not in self.registers:
                    continue
                if rank is None:
                    copies.append((name, i.operands[COPIED[i.parts[0]]]))
                ranks[name] = max(ranks.get(name, NEVER), rank or NEVER)
        changed = True
        while changed:
            changed = False
            for name, sources in copies:
                rank = max(self._operand_rank(source, ranks) for source in sources)
                if rank > ranks[name]:
                    ranks[name], changed = rank, True
        return ranks

    def _operand_rank(self, operand, ranks):
        if not isinstance(operand, str):
            return ALWAYS
        return ranks.get(operand, NEVER) if operand in self.registers else literal_rank(operand)

    @staticmethod
    def _rank(i):
        """NEVER, LOADED or ALWAYS for what instruction ``i`` writes; None for a copy."""
        kind, last = i.parts[0], i.parts[-1]
        if kind in FLUSHING and "ftz" in i.parts and last == "f32":
            return NEVER
        if kind == "cvt" and len(i.parts) > 2 and i.parts[-2] == "f32" and last[0] in "us":
            return NEVER
        if kind == "ld" and last in ("f32", "b32", "u32", "s32"):
            return LOADED
        if kind in COPIED and last in ("f32", "b32"):
            return None
        return ALWAYS

    def doubt(self, operand):
        """The `Doubt` of an operand; None if it is never subnormal."""
        if operand in self.registers:
            return (None, self.memory, self.always)[self.ranks.get(operand, ALWAYS)]
        return None if literal_rank(operand) == NEVER else self.always

    def watch_store(self, sources, names):
        """A function to call before a store, or None if the stored values cannot matter."""
        if not self.needed:
            return None
        if any(getattr(s, "dtype", None) is None or s.dtype.itemsize < 4 for s in sources):
            self.memory.raised = True
            return None
        pairs = [(s, self.doubt(n)) for s, n in zip(sources, names)]
        pairs = [(np.atleast_1d(s), doubt) for s, doubt in pairs if doubt is not None]
        if not pairs:
            return None

        def note():
            if not self.memory.raised:
                for source, doubt in pairs:
                    if doubt.raised and has_subnormal(np.ascontiguousarray(source).view(np.uint32)):
                        self.memory.raised = True
        return note
