"""From instructions to closures: operands become array views once, before anything runs."""
from __future__ import annotations

import numpy as np

from . import opcodes as _opcodes  # noqa: F401  (fills the table)
from .errors import UnknownInstruction
from .global_races import GlobalShadow
from .journal import place
from .machine import Active
from .memory import (GUARD, LARGEST_GUARD, LOCAL_WINDOW, SHARED_START, SHARED_WINDOW, Allocation, LocalShadow, Space,
                     guard)
from .naming import shared_name
from .parser import Address
from .races import UNALLOCATED, UNINITIALIZED, SharedShadow
from .registry import lookup
from .subnormals import Subnormals, has_subnormal
from .values import Registers, immediate

ADDRESSED = ("global", "shared", "local", "const", "param")


def _granules(function):
    """The smallest access to each space, which is what its shadow resolves."""
    smallest = {"global": 16, "shared": 16, "local": 16}
    for instruction in function.instructions:
        entry = lookup(instruction)
        size = entry.touches(instruction) if entry is not None and entry.touches else None
        if not size:
            continue
        spaces = {part.split("::")[0] for part in instruction.parts[1:]} & set(ADDRESSED)
        spaces = {"global" if s == "const" else "local" if s == "param" else s
                  for s in spaces} or set(smallest)
        for space in spaces:
            smallest[space] = min(smallest[space], size)
    return smallest


class Decoder:
    """Gives opcode builders their operands.

    Attributes
    ----------
    machine : Machine
    spaces : dict
        "global", "shared", "local" -> `memory.Space`.
    """

    def __init__(self, machine, module_variables, parameters, arena, addresses, shared_bytes):
        self.machine, self.function = machine, machine.function
        self.parameters, self.shared_bytes = parameters, shared_bytes
        self.registers = Registers(machine.function.registers, machine.lanes)
        self.symbols = dict(addresses)
        self.scratch = {}
        self.carry = np.zeros(machine.lanes, bool)
        self.steps = {}
        self._specials = {}
        self.subnormals = Subnormals(machine.function)
        for instruction in machine.function.instructions:
            if lookup(instruction) is None:
                self._unknown(instruction)
        facts = machine.function.facts
        granules = facts["granules"] = facts.get("granules") or _granules(machine.function)
        arena.build(granules["global"])
        if self.subnormals.needed:
            floats = [p.name for p in machine.function.parameters if p.type in ("f32", "b32")]
            given = b"".join(parameters[name] for name in floats)
            self.subnormals.memory.raised = has_subnormal(arena.views[4]) or \
                has_subnormal(np.frombuffer(given, np.uint32))
        checks = machine.checks
        self.spaces = {"global": arena, "shared": self._shared(module_variables, granules["shared"]),
                       "local": self._local(granules["local"])}
        if checks.bounds or checks.initialized or checks.races:
            self.spaces["local"].shadow = self.local_shadow = LocalShadow(self.spaces["local"],
                                                                          checks.initialized)
            self.spaces["shared"].shadow = self.shared_shadow = SharedShadow(self.spaces["shared"], machine)
            self.local_layout = self._layout(self.spaces["local"], np.uint8(2), np.uint8(0), machine.lanes)
            self.shared_layout = self._layout(self.spaces["shared"], UNALLOCATED, UNINITIALIZED,
                                              machine.blocks)
        if checks.shadowed:
            arena.shadow = GlobalShadow(arena, machine)
        machine.batch_hooks.append(self.new_batch)

    # ---- spaces
    def _shared(self, module_variables, granule):
        """Static variables with guards between them, then the dynamic ones, which all begin at one place."""
        declared = module_variables | self.function.variables
        variables = {name: v for name, v in declared.items() if v.space == "shared"}
        top, allocations = SHARED_START, []
        for name, variable in variables.items():
            if variable.dynamic:
                continue
            align = max(variable.align, 16)
            top = -(-top // align) * align
            self.symbols[name] = top
            allocations.append(Allocation(shared_name(variable.name, self.function), top, variable.nbytes))
            top += variable.nbytes + guard(variable.nbytes, 128, LARGEST_GUARD)
        dynamic = [name for name, v in variables.items() if v.dynamic]
        align = max([16, *(variables[name].align for name in dynamic)])
        top = -(-top // align) * align
        for name in dynamic:
            self.symbols[name] = top
        if self.shared_bytes:
            allocations.append(Allocation("dynamic shared memory", top, self.shared_bytes))
        limit = top + self.shared_bytes + GUARD
        self.symbols_end = limit
        stride = 1 << (limit - 1).bit_length()
        space = Space("shared", stride * self.machine.blocks, limit, 0, granule, stride)
        space.allocations = allocations
        space.origin = self.machine.block_of * stride
        return space

    def _local(self, granule):
        top, allocations = GUARD, []
        for name, variable in self.function.variables.items():
            if variable.space in ("local", "param"):
                top = -(-top // max(variable.align, 16)) * max(variable.align, 16)
                self.symbols[name] = top
                allocations.append(Allocation(f"local {variable.name}", top, variable.nbytes))
                top += variable.nbytes + GUARD
        stride = 1 << (top - 1).bit_length()
        space = Space("local", stride * self.machine.lanes, stride, 0, granule, stride)
        space.allocations = allocations
        space.origin = np.arange(self.machine.lanes) * stride
        return space

    def _layout(self, space, outside, unwritten, copies):
        one = np.full(space.stride >> space.shift, outside)
        for allocation in space.allocations:
            first = -(-allocation.start // space.granule)
            one[first:(allocation.start + allocation.nbytes) // space.granule] = unwritten
        return np.tile(one, copies)

    def new_batch(self, ids):
        for array, values in self._specials.items():
            if array.startswith("%ctaid"):
                values[:] = self._ctaid(array[-1])
        if self.machine.checks.bounds or self.machine.checks.initialized or self.machine.checks.races:
            self.local_shadow.state[:len(self.local_layout)] = self.local_layout
            fill = np.full(len(self.shared_shadow.stamps), UNALLOCATED)
            fill[:len(self.shared_layout)] = self.shared_layout
            self.shared_shadow.new_batch(fill)

    # ---- operands
    def is_register(self, name):
        return name in self.registers

    def source(self, operand, dtype):
        """A register view, a special register, a symbol's address or an immediate, as ``dtype``."""
        if operand in self.registers:
            return self.registers.view(operand, dtype)
        dtype = np.dtype(dtype)
        value = immediate(operand, dtype)
        if value is not None:
            return value
        if operand[0] == "%":
            special = self.special(operand)
            if special is not None:
                same = special.dtype.itemsize == dtype.itemsize
                return special.view(dtype) if same else special.astype(dtype)
        address = self.symbol(operand)
        if address is not None:
            return np.array(address & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(dtype)[()]
        raise UnknownInstruction(f"operand {operand!r} is not known")

    def symbol(self, text):
        name, _, offset = text.partition("+")
        address = self.symbols.get(name.strip())
        return None if address is None else address + int(offset or "0", 0)

    def target(self, operand, dtype):
        """The array to write a result of ``dtype`` to; ``_`` discards it."""
        dtype = np.dtype(dtype)
        if operand == "_":
            return np.empty(self.machine.lanes, dtype)
        if operand not in self.registers:
            raise UnknownInstruction(f"destination {operand!r} is not a register")
        return self.registers.view(operand, dtype)

    def extending_target(self, operand, dtype):
        """Like `target`, but a wider register takes the value sign- or zero-extended (9.4.1, operand size
        rules)."""
        dtype = np.dtype(dtype)
        if operand == "_":
            return np.empty(self.machine.lanes, dtype)
        size = self.registers.arrays[operand].dtype.itemsize
        if size > dtype.itemsize and dtype.kind in "iu":
            return self.registers.view(operand, np.dtype(f"{dtype.kind}{size}"))
        return self.registers.view(operand, dtype)

    def vector(self, operand):
        return list(operand) if isinstance(operand, tuple) else [operand]

    def address_base(self, name):
        """An address operand's base: int64 or uint32 register view, or a number."""
        if name in self.registers:
            array = self.registers.arrays[name]
            return array.view(np.int64) if array.dtype.itemsize == 8 else array
        address = self.symbol(name)
        if address is None:
            value = immediate(name, np.int64)
            if value is None:
                raise UnknownInstruction(f"address base {name!r} is not known")
            address = int(value)
        return address

    def addresses(self, operand: Address):
        """``addresses(active)``: the address operand's value per active lane, int64."""
        base = self.address_base(operand.base)
        if not isinstance(base, np.ndarray):
            base = np.full(self.machine.lanes, base, np.int64)
        offset = np.int64(operand.offset)

        def compute(active):
            chosen = base if active.lanes is None else base[active.lanes]
            return chosen.astype(np.int64) + offset
        return compute

    # ---- special registers (10)
    def special(self, name):
        if name not in self._specials:
            made = self._make_special(name)
            if made is None:
                return None
            self._specials[name] = made
        return self._specials[name]

    def _ctaid(self, axis):
        x, y, _ = self.machine.grid
        number = self.machine.block_id[self.machine.block_of]
        return {"x": number % x, "y": number // x % y, "z": number // (x * y)}[axis]

    def _make_special(self, name):
        machine = self.machine
        head, _, axis = name.partition(".")
        at = "xyz".find(axis) if axis else -1
        lane = machine.lane_in_warp
        values = {
            "%laneid": lane, "%warpid": machine.warp_in_block, "%nwarpid": machine.warps_per_block,
            "%smid": machine.block_of, "%nsmid": 132, "%gridid": 1,
            "%dynamic_smem_size": self.shared_bytes, "%total_smem_size": self.symbols_end,
            "%aggr_smem_size": self.symbols_end,
            "%lanemask_eq": 1 << lane, "%lanemask_lt": (1 << lane) - 1, "%lanemask_le": (2 << lane) - 1,
            "%lanemask_gt": 0xFFFFFFFF & ~((2 << lane) - 1), "%lanemask_ge": 0xFFFFFFFF & ~((1 << lane) - 1),
            "%is_explicit_cluster": 0, "%cluster_ctarank": 0, "%cluster_nctarank": 1,
        }.get(name)
        if head == "%tid":
            x, y, _ = machine.block
            values = {"x": machine.thread % x, "y": machine.thread // x % y,
                      "z": machine.thread // (x * y)}[axis]
        elif head == "%ctaid":
            values = self._ctaid(axis)
        elif head in ("%ntid", "%nctaid", "%nclusterid"):
            values = (machine.block if head == "%ntid" else machine.grid)[at]
        elif head == "%clusterid":
            return self.special(f"%ctaid.{axis}")
        elif head in ("%cluster_ctaid", "%cluster_nctaid"):
            values = int(head == "%cluster_nctaid")
        elif values is None:
            return None
        array = np.empty(machine.lanes, np.uint32)
        array[:] = values
        return array

    # ---- steps
    def step(self, index):
        """``(closure, ends the segment)`` of one instruction, guard included."""
        if index not in self.steps:
            self.steps[index] = self._build(self.function.instructions[index])
        return self.steps[index]

    def _build(self, instruction):
        entry = lookup(instruction)
        try:
            step = entry.build(self, instruction)
        except UnknownInstruction as error:
            raise UnknownInstruction(f"{error}\n  at {place(instruction)}", instruction.line,
                                     instruction.source) from None
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise UnknownInstruction(
                f"{instruction.opcode} in this form is not known ({type(error).__name__}: {error})"
                f"\n  at {place(instruction)}", instruction.line, instruction.source) from error
        if entry.control or step is None or instruction.guard is None:
            return step, entry.control
        return self._guarded(step, instruction), False

    @staticmethod
    def _unknown(instruction):
        raise UnknownInstruction(f"unknown instruction {instruction.opcode}\n  at {place(instruction)}",
                                 instruction.line, instruction.source)

    def _guarded(self, step, instruction):
        """``@p`` and ``@!p``: lanes whose guard is false do nothing."""
        predicate, negated = self.registers.arrays[instruction.guard], instruction.negated
        counter = self.machine.counters.guarded(instruction)

        def run(active):
            flags = ~predicate if negated else predicate
            flags = flags.copy() if active.lanes is None else flags & active.mask
            count = np.count_nonzero(flags)
            if not count:
                return
            everyone = count == (len(flags) if active.lanes is None else len(active.lanes))
            chosen = active if everyone else Active.of(flags)
            counter(chosen)
            step(chosen)
        return run

    def guard(self, instruction):
        """For control instructions: ``flags(active)`` over all lanes, or None without a guard."""
        if instruction.guard is None:
            return None
        predicate, negated = self.registers.arrays[instruction.guard], instruction.negated
        return lambda: ~predicate if negated else predicate


__all__ = ["Decoder", "SHARED_WINDOW", "LOCAL_WINDOW"]
