"""Registers, immediates and the NumPy type of each PTX type (PTX ISA, Types; Constants)."""
from __future__ import annotations

import struct

import numpy as np

from .parser import BITS

DTYPES = {name: np.dtype({"b": "u", "u": "u", "s": "i", "f": "f"}[name[0]] + str(bits // 8))
          for name, bits in BITS.items() if name[1:].isdigit() and bits <= 64 and name != "f8"}
DTYPES |= {"pred": np.dtype(bool), "bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"),
           "tf32": np.dtype("u4")}
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def type_names(instruction):
    """The type suffixes of an opcode, in order: ``cvt.rn.f32.s64`` -> ``["f32", "s64"]``."""
    return [part for part in instruction.parts[1:] if part in DTYPES]


class Registers:
    """One array of ``lanes`` values per PTX register, in the unsigned type of its width."""

    def __init__(self, types: dict, lanes: int):
        by_size = {}
        for name, kind in types.items():
            dtype = DTYPES[kind] if kind == "pred" else UNSIGNED[BITS[kind] // 8]
            by_size.setdefault(dtype, []).append(name)
        self.arrays = {}
        for dtype, names in by_size.items():
            self.arrays |= zip(names, np.zeros((len(names), lanes), dtype))

    def __contains__(self, name):
        return name in self.arrays

    def view(self, name, dtype):
        """The register as ``dtype``; a narrower type sees the low bits."""
        array = self.arrays[name]
        if array.dtype == dtype:
            return array
        if array.dtype == bool or dtype == bool:
            return array.view(dtype)
        step = array.dtype.itemsize // np.dtype(dtype).itemsize
        if step == 0:
            raise ValueError(f"register {name} is narrower than {np.dtype(dtype).name}")
        return array.view(dtype)[::step]


def immediate(text: str, dtype):
    """A literal of PTX as a NumPy scalar of ``dtype``; None where ``text`` is not a literal."""
    dtype = np.dtype(dtype)
    if text in ("true", "false"):
        return np.bool_(text == "true")
    if text == "WARP_SZ":
        text = "32"
    head = text[:2].lower()
    if head in ("0f", "0d") and len(text) == (10 if head == "0f" else 18):
        bits = int(text[2:], 16)
        size = 4 if head == "0f" else 8
        raw = np.frombuffer(struct.pack("<Q", bits)[:size], f"u{size}")
        if dtype.itemsize == size:
            return raw.view(dtype)[0]
        with np.errstate(all="ignore"):
            return raw.view(f"f{size}")[0].astype(dtype if dtype.kind == "f" else f"f{size}").astype(dtype)
    digits = text.rstrip("U")
    if not digits.lstrip("+-")[:1].isdigit():
        return None
    if digits.lstrip("+-")[:1] == "0" and len(digits.lstrip("+-")) > 1 and digits.lstrip("+-")[1:].isdigit():
        value = int(digits, 8)
    else:
        try:
            value = int(digits, 0)
        except ValueError:
            value = float(digits)
    if dtype.kind == "f":
        return dtype.type(value)
    if dtype == bool:
        return np.bool_(bool(value))
    bits = 8 * dtype.itemsize
    return np.array(int(value) & (1 << bits) - 1, UNSIGNED[dtype.itemsize]).view(dtype)[()]
