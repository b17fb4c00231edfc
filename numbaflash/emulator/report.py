"""What a launch did, in numbers."""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traffic:
    """Global memory of one kind of access.

    ``requests`` are warp instructions, ``sectors`` the 32-byte sectors they touch one by one (what reaches
    L2), ``distinct_sectors`` those touched at all in the launch (what DRAM must move at least).
    """

    requests: int = 0
    bytes: int = 0
    sectors: int = 0
    distinct_sectors: int = 0

    def __add__(self, other):
        return Traffic(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))


@dataclass(frozen=True)
class SharedTraffic:
    """Shared memory of one kind of access; ``conflicts`` are the passes more than the ideal."""

    requests: int = 0
    bytes: int = 0
    wavefronts: int = 0
    ideal: int = 0

    @property
    def conflicts(self):
        return self.wavefronts - self.ideal

    def __add__(self, other):
        return SharedTraffic(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))


@dataclass(frozen=True)
class LineCount:
    """One PTX line: how often it ran and what it moved."""

    ptx_line: int
    text: str
    source: tuple | None
    warps: int
    threads: int
    bytes: int
    sectors: int
    wavefronts: int
    ideal: int
    flops: int


@dataclass(frozen=True)
class Report:
    """The counters of a launch (or, added up, of several).

    Attributes
    ----------
    warp_instructions, thread_instructions : int
    instructions : dict
        Warp instructions by class.
    flops : dict
        By kind: "f16", "f32", "f64" (a fused multiply-add is two), "special" functions, and "mma".
    tensor_ops : int
        Tensor-core instructions, one per warp.
    global_load, global_store, global_atomic : Traffic
        The distinct sectors of atomics count as both loads and stores.
    shared_load, shared_store, shared_atomic : SharedTraffic
    local_bytes : int
        Bytes of local memory read and written: spills and arrays that did not fit into registers.
    """

    kernel: str
    grid: tuple
    block: tuple
    seconds: float
    warp_instructions: int
    thread_instructions: int
    instructions: dict
    flops: dict
    tensor_ops: int
    global_load: Traffic
    global_store: Traffic
    global_atomic: Traffic
    shared_load: SharedTraffic
    shared_store: SharedTraffic
    shared_atomic: SharedTraffic
    local_bytes: int
    line_counts: tuple = field(repr=False, default=())

    @property
    def dram_bytes(self):
        """Lower bound of the bytes that DRAM moves: every sector touched, once."""
        return 32 * (self.global_load.distinct_sectors + self.global_store.distinct_sectors)

    @property
    def l2_bytes(self):
        """Bytes between the multiprocessors and L2, with nothing kept in L1."""
        return 32 * (self.global_load.sectors + self.global_store.sectors + self.global_atomic.sectors)

    def __add__(self, other):
        def merged(a, b):
            return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}

        summed = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("seconds", "warp_instructions", "thread_instructions", "tensor_ops", "global_load",
                         "global_store", "global_atomic", "shared_load", "shared_store", "shared_atomic",
                         "local_bytes", "line_counts")
        }
        return Report(kernel=f"{self.kernel}, {other.kernel}", grid=self.grid, block=self.block,
                      instructions=merged(self.instructions, other.instructions),
                      flops=merged(self.flops, other.flops), **summed)

    def lines(self, by="ptx"):
        """Counters per line, the most executed first.

        Parameters
        ----------
        by : {"ptx", "python"}
            Lines of the PTX text, or of the kernel's source (needs line information).

        Returns
        -------
        list of LineCount
        """
        if by == "ptx":
            return sorted(self.line_counts, key=lambda line: -line.warps)
        if by != "python":
            raise ValueError(f'by must be "ptx" or "python", not {by!r}')
        groups = {}
        for line in self.line_counts:
            groups.setdefault(line.source, []).append(line)
        summed = [LineCount(lines[0].ptx_line, _source_text(source), source, *(
            sum(getattr(line, name) for line in lines)
            for name in ("warps", "threads", "bytes", "sectors", "wavefronts", "ideal", "flops")))
            for source, lines in groups.items()]
        return sorted(summed, key=lambda line: -line.warps)

    def line_table(self, by="python", count=20):
        """`lines` as text: the ``count`` busiest."""
        rows = [("warps", "bytes", "sectors", "wavefronts", "ideal", "flops", "line")]
        for line in self.lines(by)[:count]:
            where = f"{line.ptx_line}: {line.text}"
            if by == "python":
                where = f"{line.source[1]}: {line.text}" if line.source and line.source[1] else "of no Python line"
            rows.append(
                (*(f"{n:,}"
                   for n in (line.warps, line.bytes, line.sectors, line.wavefronts, line.ideal, line.flops)),
                 where[:80]))
        widths = [max(len(row[n]) for row in rows) for n in range(6)]
        return "\n".join("  ".join([*(row[n].rjust(widths[n]) for n in range(6)), row[6]]) for row in rows)

    def __str__(self):
        rows = [("kernel", self.kernel[:60]), ("grid x block", f"{self.grid} x {self.block}"),
                ("emulated in", f"{self.seconds:.2f} s"),
                ("warp instructions", f"{self.warp_instructions:,}")]
        total = max(self.warp_instructions, 1)
        rows += [(f"  {name}", f"{count:,}  ({100 * count / total:.0f} %)")
                 for name, count in self.instructions.items()]
        rows += [(f"{kind} flops", f"{count:,}") for kind, count in self.flops.items() if count]
        if self.tensor_ops:
            rows.append(("tensor core operations", f"{self.tensor_ops:,}"))
        for name in ("load", "store", "atomic"):
            t = getattr(self, f"global_{name}")
            if t.requests:
                ideal = -(-t.bytes // 32)
                rows.append(
                    (f"global {name}", f"{t.bytes:,} bytes in {t.requests:,} requests, {t.sectors:,} sectors "
                     f"({t.sectors / max(ideal, 1):.2f} x ideal), {t.distinct_sectors:,} distinct"))
        for name in ("load", "store", "atomic"):
            s = getattr(self, f"shared_{name}")
            if s.requests:
                rows.append(
                    (f"shared {name}", f"{s.bytes:,} bytes in {s.requests:,} requests, {s.wavefronts:,} "
                     f"wavefronts, ideal {s.ideal:,}, conflicts {s.conflicts:,}"))
        if self.local_bytes:
            rows.append(("local memory", f"{self.local_bytes:,} bytes"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _source_text(source):
    import linecache
    return linecache.getline(*source).strip() if source else ""
