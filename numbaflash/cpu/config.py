"""The machine as the kernels see it: vector width, registers, caches, cores; and the tile sizes that follow."""

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from llvmlite import binding
from numba.core import config as numba_config

from ..tuning import CPUConfig
from .compile import Static

VECTOR_BITS = (128, 256, 512)


class Machine(NamedTuple):
    """What tile sizes depend on.

    Attributes
    ----------
    vector_bits : int
        Width of the vectors that kernels are written in.
    registers : int
        Vector registers of that width.
    l1, l2 : int
        Bytes of data cache per core.
    """

    vector_bits: int
    registers: int
    l1: int
    l2: int


@cache
def machine() -> Machine:
    """The machine that Numba compiles for. ``NUMBAFLASH_VECTOR_BITS`` (128, 256, 512) overrides the width."""
    features = _features()
    bits = 512 if "avx512f" in features else 256 if "avx2" in features else 128
    text = os.environ.get("NUMBAFLASH_VECTOR_BITS", "").strip()
    if text:
        if text not in map(str, VECTOR_BITS):
            raise ValueError(f"NUMBAFLASH_VECTOR_BITS must be one of {VECTOR_BITS}, not {text!r}")
        bits = int(text)
    # A narrower width than the machine's is a stand-in for the machine that has no more: use its register count.
    many = bits == 512 or ("neon" in features and bits == 128)
    return Machine(bits, 32 if many else 16, _cache_bytes(1, 32 << 10), _cache_bytes(2, 512 << 10))


def _features() -> set[str]:
    if numba_config.CPU_FEATURES is not None:
        return {flag[1:] for flag in numba_config.CPU_FEATURES.split(",") if flag.startswith("+")}
    return {name for name, present in binding.get_host_cpu_features().items() if present}


def _cache_bytes(level: int, default: int) -> int:
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (index / "level").read_text().strip() != str(level):
                continue
            if (index / "type").read_text().strip() == "Instruction":
                continue
            size = (index / "size").read_text().strip()
            return int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]
        except (OSError, ValueError, KeyError):
            continue
    return default


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def vector_static(bits: int) -> dict[str, int]:
    """The constants every kernel on floats of ``bits`` bits shares.

    ``lanes`` numbers make a vector and ``vectors`` vectors a panel; a microkernel holds ``rows`` x ``vectors``
    accumulators, which leaves registers for one row of B and one broadcast number of A (on ARM for several: there
    LLVM loads them well ahead).
    """
    m = machine()
    lanes = m.vector_bits // bits
    vectors = 3
    rows = 4 if m.registers < 32 else 8 if m.vector_bits == 512 else 6
    return {"bits": bits, "size": bits // 8, "lanes": lanes, "vectors": vectors, "rows": rows,
            "panel": vectors * lanes}



def few_queries_static(bits: int) -> dict[str, int]:
    """The constants of kernels for few queries: panels of 4 rows (2 in short vectors), ``wide`` lanes of head_dim."""
    wide = machine().vector_bits // bits
    rows = min(4, wide)
    return {"bits": bits, "size": bits // 8, "lanes": rows, "vectors": 1, "panel": rows, "wide": wide}


class KeyParts(NamedTuple):
    """Keys of a tile and of a part, of a call with few queries."""

    block_k: int
    part_keys: int

    def changed(self, config: CPUConfig) -> "KeyParts":
        """With the sizes that a configuration names, rounded up."""
        block_k = _round_up(config.block_k or self.block_k, 16)
        return KeyParts(block_k, _round_up(config.part_keys or self.part_keys, block_k))


MAX_FEW_ROWS = 16
"""Queries of a KV head that count as few: more are faster in the lanes of whole panels."""
_LEAST_PART = 192
_PARTS = 64


def key_parts(head_dim: int, value_dim: int, item_size: int, max_k: int, units: int) -> KeyParts:
    """How keys are split, from the shape alone: results must not depend on the number of threads.

    Parameters
    ----------
    head_dim, value_dim, item_size : int
    max_k : int
        The longest sequence of keys.
    units : int
        Sequences times KV heads.
    """
    # V is asked for while K is read: a tile of V must stay in L1 until its turn, beside the K that comes meanwhile.
    block_k = max(16, min(128, machine().l1 // 6 // max(1, value_dim * item_size)) & -16)
    part = max(_LEAST_PART, -(-max_k * units // _PARTS))
    return KeyParts(block_k, _round_up(part, block_k))


class ForwardTiles(NamedTuple):
    """Tile sizes of one forward call: ``panels`` panels of queries to a block, ``block_k`` keys to a tile."""

    panels: int
    block_k: int
    packed_heads: bool

    def changed(self, static: Static, config: CPUConfig) -> "ForwardTiles":
        """With the sizes that a configuration names, rounded up to whole panels and rows of the microkernel."""
        panels = self.panels if config.block_q is None else -(-config.block_q // static["panel"])
        block_k = self.block_k if config.block_k is None else _round_up(config.block_k, static["rows"])
        return self._replace(panels=panels, block_k=block_k)


MAX_PANELS = 4
MAX_BLOCK_K = 128
_JOBS_PER_THREAD = 4


def forward_tiles(
    static: Static, head_dim: int, value_dim: int, max_q: int, max_k: int, units: int, group: int, threads: int
) -> ForwardTiles:
    """Tile sizes from the caches and the shape of a call.

    Parameters
    ----------
    static : Static
        With the constants of :func:`vector_static`.
    head_dim, value_dim : int
    max_q, max_k : int
        Longest sequence of queries and of keys.
    units : int
        Sequences times query heads.
    group : int
        Query heads per KV head.
    threads : int
    """
    m = machine()
    panel, size, rows = static["panel"], static["size"], static["rows"]
    width = panel * size
    # Scores stay in L1 beside the numbers that stream through; the tiles of K and V, and the panels, in L2.
    block_k = min(MAX_BLOCK_K, m.l1 // 2 // width, m.l2 // 4 // max(1, (head_dim + value_dim) * size))
    block_k = max(rows, min(block_k, max_k + rows - 1) // rows * rows)
    apart, together = group * -(-max_q // panel), -(-group * max_q // panel)
    packed_heads = group > 1 and 4 * together <= 3 * apart
    if packed_heads:
        max_q, units = max_q * group, units // group
    panels = min(MAX_PANELS, m.l2 // 4 // max(1, (head_dim + value_dim) * width))
    panels = max(1, min(panels, -(-max_q // panel)))
    while panels > 1 and units * -(-max_q // (panels * panel)) < _JOBS_PER_THREAD * threads:
        panels -= 1
    # Blocks of one head alike: a last one of few rows would read all K and V for little.
    in_all = max(1, -(-max_q // panel))
    panels = -(-in_all // -(-in_all // panels))
    return ForwardTiles(panels, block_k, packed_heads)
