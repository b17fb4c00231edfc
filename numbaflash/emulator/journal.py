"""The history of one granule. A launch that finds a race runs again and writes down who touched that
place."""
from __future__ import annotations


class Journal:
    """Records nothing unless it is told what to watch.

    Parameters
    ----------
    watch : tuple of (str, int, int), optional
        Space, first byte and number of bytes, as flat indices of the space's buffer.
    """

    def __init__(self, watch=None):
        self.watch, self.entries, self.suspect = watch, [], None

    def record(self, machine, instruction, space, index, nbytes, active, kind):
        name, start, size = self.watch
        if name != space.name:
            return
        hit = (index < start + size) & (index + nbytes > start)
        for which in hit.nonzero()[0].tolist():
            lane = which if active.lanes is None else int(active.lanes[which])
            block = int(machine.block_id[machine.block_of[lane]])
            self.entries.append((block, int(machine.thread[lane]), kind, instruction))

    def find(self, space, granule, lane, thread, what, block=None):
        """Where the other access was, in words; remembers the place so that a second run can tell."""
        self.suspect = (space.name, granule << space.shift, space.granule)
        if self.watch is None:
            return ""
        wanted = ("load",) if what == "read" else ("store", "atomic")
        for owner, who, kind, instruction in reversed(self.entries):
            if who == thread and kind in wanted and (block is None or owner == block):
                return f" [{place(instruction)}]"
        return ""


def place(instruction):
    """``kernel.py:17, PTX line 123: st.shared.f32 [%r1], %f2``."""
    text = " ".join(instruction.text.split())
    text = text if len(text) <= 100 else text[:97] + "..."
    source = f"{instruction.source[0]}:{instruction.source[1]}, " if instruction.source else ""
    return f"{source}PTX line {instruction.line}: {text}"
