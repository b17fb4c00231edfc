"""Calls become inlined bodies, so that the machine sees one flat kernel (PTX ISA, Function Declarations
and Definitions; Control Flow Instructions: call).

Formal parameters are replaced by the caller's ``.param`` variables, which live in each thread's local memory.
"""
from __future__ import annotations

from .errors import UnknownInstruction
from .half_shims import shim
from .parser import Address, Function, Instruction, Module


def flatten(module: Module, entry: Function) -> Function:
    """The kernel with every call of a function of the module expanded in place."""
    flat = Function(entry.name, True, entry.parameters, directives=entry.directives)
    counter = [0]
    _append(module, flat, entry, {}, "", (entry.name,), counter)
    for index, instruction in enumerate(flat.instructions):
        instruction.index = index
    return flat


def _append(module, flat, function, formals, prefix, stack, counter):
    own = {name: prefix + name for name in (*function.registers, *function.variables, *function.labels)}
    own |= formals

    def rename(name):
        return own.get(name, name)

    flat.registers |= {rename(name): kind for name, kind in function.registers.items()}
    flat.variables |= {rename(name): v for name, v in function.variables.items()}
    flat.tables |= {rename(name): [rename(t) for t in targets] for name, targets in function.tables.items()}
    labels_at = {}
    for name, index in function.labels.items():
        labels_at.setdefault(index, []).append(rename(name))
    end = f"{prefix}return"
    for index, instruction in enumerate(function.instructions):
        for label in labels_at.get(index, ()):
            flat.labels[label] = len(flat.instructions)
        renamed = instruction.renamed(rename)
        if instruction.parts[0] == "call":
            _call(module, flat, renamed, stack, counter)
        elif instruction.parts[0] == "ret" and prefix:
            renamed.opcode, renamed.parts, renamed.operands = "bra", ("bra",), [end]
            flat.instructions.append(renamed)
        else:
            flat.instructions.append(renamed)
    for label in (*labels_at.get(len(function.instructions), ()), *([end] if prefix else ())):
        flat.labels[label] = len(flat.instructions)


def _call(module, flat, call, stack, counter):
    operands = list(call.operands)
    returned = operands.pop(0) if isinstance(operands[0], tuple) else ()
    name = operands.pop(0)
    given = operands.pop(0) if operands else ()
    if name == "vprintf":
        status = [Address(returned[0]), "0"]
        for opcode, operands in (("system.vprintf", list(given)), ("st.param.b32", status)):
            flat.instructions.append(Instruction(opcode, operands, call.guard, call.negated, call.line,
                                                 call.text, call.source, tuple(opcode.split("."))))
        return
    function = module.functions.get(name)
    if function is None or not function.defined:
        function = shim(name)
    if function is None:
        raise UnknownInstruction(f"PTX line {call.line}: call of {name}, which this PTX does not define",
                                 call.line, call.source)
    if name in stack:
        raise UnknownInstruction(f"PTX line {call.line}: recursive call of {name}", call.line, call.source)
    if len(given) != len(function.parameters) or len(returned) != len(function.returns):
        raise UnknownInstruction(f"PTX line {call.line}: call of {name} with {len(given)} parameters",
                                 call.line, call.source)
    counter[0] += 1
    prefix = f"{name}#{counter[0]}."
    skip = f"{prefix}skip"
    if call.guard:
        flat.instructions.append(
            Instruction("bra", [skip], call.guard, not call.negated, call.line, call.text, call.source,
                        ("bra",)))
    formals = dict(zip((p.name for p in (*function.parameters, *function.returns)), (*given, *returned)))
    _append(module, flat, function, formals, prefix, (*stack, name), counter)
    flat.labels[skip] = len(flat.instructions)
