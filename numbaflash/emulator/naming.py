"""Names for what Numba leaves nameless: shared arrays are ``_cudapy_smem_3`` in PTX."""
from __future__ import annotations

import linecache
import os
import re

from .parser import Address

NAMELESS = re.compile(r"_cudapy_smem_\d+$")
DEFINITION = re.compile(r"\s*(\w+)\s*=\s*[\w.]*shared\.array\(")


def shared_name(symbol: str, function) -> str:
    """``shared array tile (kernel.py:12)``, or where it is first used, or else what PTX calls it."""
    if not NAMELESS.match(symbol):
        return f"shared {symbol}"
    sources = [i.source for i in function.instructions if i.source and mentions(i.operands, symbol)]
    found = {}
    for path, line in sources:
        for name, where in arrays_of_line(path, line):
            found[name, path, where] = found.get((name, path, where), 0) + 1
    best = [key for key, count in found.items() if count == max(found.values())]
    if len(best) == 1:
        name, path, where = best[0]
        return f"shared array {name} ({os.path.basename(path)}:{where})"
    if sources:
        path, line = sources[0]
        return f"shared array used in {os.path.basename(path)}:{line}"
    return f"shared {symbol}"


def mentions(operands, symbol):
    for operand in operands:
        inside = operand.base if isinstance(operand, Address) else operand
        if isinstance(inside, tuple) and mentions(inside, symbol):
            return True
        if not isinstance(inside, tuple) and inside.partition("+")[0] == symbol:
            return True
    return False


def arrays_of_line(path, line):
    """Shared arrays that a line of Python mentions: (name, line of the nearest definition above)."""
    text = linecache.getlines(path)[:line]
    words = set(re.findall(r"\w+", text[-1])) if text else set()
    found = {}
    for number, above in enumerate(text, 1):
        match = DEFINITION.match(above)
        if match and match[1] in words:
            found[match[1]] = number
    return found.items()
