"""atom and red: read-modify-write, one lane after the other."""
from __future__ import annotations

import numpy as np

from .. import rounding
from ..memory import Access
from ..registry import opcode
from ..values import BITS, DTYPES, type_names
from .half import HALVES, decoded, encoded
from .loadstore import in_space, touched, vector_length
from .titles import SYNC


def increment(old, bound):
    """inc: old >= bound ? 0 : old + 1."""
    return np.where(old >= bound, old.dtype.type(0), old + old.dtype.type(1))


def decrement(old, bound):
    """dec: old == 0 or old > bound ? bound : old - 1."""
    return np.where((old == 0) | (old > bound), bound, old - old.dtype.type(1))


OPERATIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
              "xor": np.bitwise_xor, "exch": lambda old, b: b, "inc": increment, "dec": decrement,
              "cas": lambda old, b, c: np.where(old == b, c, old)}
COMMUTATIVE = ("add", "and", "or", "xor", "min", "max")


def operation(i, kind):
    name = next(p for p in i.parts[1:] if p in OPERATIONS)
    if kind in HALVES and name in ("add", "min", "max"):
        function = {"add": np.add, "min": np.fmin, "max": np.fmax}[name]

        def on_halves(old, b):
            x, y = (decoded(np.ascontiguousarray(v).view("u2"), kind).astype("f8") for v in (old, b))
            return encoded(function(x, y), kind).view(old.dtype)
        return name, on_halves
    if kind in ("f32", "f64") and name in ("min", "max"):
        return name, {"min": np.fmin, "max": np.fmax}[name]
    if kind in ("f32", "f64") and name == "add":
        def add(old, b):
            total = old + b
            rounding.settle(total, True)
            return total
        return name, add
    return name, OPERATIONS[name]


def apply(data, index, function, operands, old):
    """Lanes that meet at one address take their turns, in lane order; ``old`` receives what each lane saw.

    Returns whether a value has changed.
    """
    order = np.argsort(index, kind="stable")
    turn = np.empty(len(index), np.int64)
    ordered = index[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    start = np.flatnonzero(first)
    turn[order] = np.arange(len(index)) - start[np.cumsum(first) - 1]
    changed = False
    for number in range(int(turn.max()) + 1):
        now = turn == number
        places = index[now]
        before = data[places]
        if old is not None:
            old[now] = before
        after = function(before, *(o[now] for o in operands))
        data[places] = after
        changed = changed or not np.array_equal(after, before)
    return changed


def atomic(d, i, out_operand, address, operands):
    kind = type_names(i)[-1]
    dtype = np.dtype("u2") if kind in ("f16", "bf16") else DTYPES[kind]
    count = vector_length(i)
    name, function = operation(i, kind)
    machine, lanes, spinning = d.machine, d.machine.lanes, d.machine.spinning
    d.subnormals.memory.raised = True
    columns = [d.vector(o) for o in operands]
    sources = [[d.source(column[n], dtype) for column in columns] for n in range(count)]
    outs = None
    if out_operand is not None:
        outs = [d.target(n, dtype) for n in d.vector(out_operand)]
    shift = dtype.itemsize.bit_length() - 1
    nbytes = BITS[kind] // 8 * count

    def make(space, window):
        access = Access(d, i, space, address, nbytes, "atomic", window)
        data = space.views[dtype.itemsize].view(dtype)

        def step(active):
            index = access(active) >> shift
            where = np.arange(lanes) if active.lanes is None else active.lanes
            machine.order.strong(active, index << shift, i, space.name)
            spinning.asked |= outs is not None
            for n in range(count):
                values = [np.broadcast_to(s, lanes)[where] for s in sources[n]]
                old = np.empty(len(where), dtype) if outs is not None else None
                if old is None and name in COMMUTATIVE and dtype.kind in "iu" and kind not in HALVES:
                    OPERATIONS[name].at(data, index + n, values[0])
                    spinning.news = True
                else:
                    spinning.news |= apply(data, index + n, function, values, old)
                if outs is not None:
                    outs[n][where] = old
        return step

    return in_space(d, i, address, make)


@opcode("atom", section=SYNC + "atom", group="atomic", touches=touched)
def atom(d, i):
    """d = the old value at a; the value becomes op(old, b, c)."""
    return atomic(d, i, i.operands[0], i.operands[1], i.operands[2:])


@opcode("red", section=SYNC + "red", group="atomic", touches=touched)
def red(d, i):
    """The value at a becomes op(old, b)."""
    return atomic(d, i, None, i.operands[0], i.operands[1:])
