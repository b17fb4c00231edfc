"""Calls become inlined bodies, so that the machine sees one flat kernel (PTX ISA, Function Declarations
and Definitions; Control Flow Instructions: call).

Formal parameters are replaced by the caller's ``.param`` variables, which live in each thread's local memory.
Calls of the CUDA runtime become instructions of their own, ``system.*``.
"""
from __future__ import annotations

from .errors import UnknownInstruction
from .half_shims import shim
from .journal import place
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


SYSTEM_CALLS = {"vprintf": 0, "cudaCGGetIntrinsicHandle": 1, "cudaCGSynchronize": 0}   # name -> what it returns


def _call(module, flat, call, stack, counter):
    operands = list(call.operands)
    returned = operands.pop(0) if isinstance(operands[0], tuple) else ()
    name = operands.pop(0)
    given = operands.pop(0) if operands else ()
    counter[0] += 1
    prefix = f"{name}#{counter[0]}."
    skip = f"{prefix}skip"
    if call.guard:
        flat.instructions.append(
            Instruction("bra", [skip], call.guard, not call.negated, call.line, call.text, call.source,
                        ("bra",)))
    if name in SYSTEM_CALLS:
        _system(module, flat, call, name, given, returned)
    else:
        _inline(module, flat, call, name, given, returned, prefix, stack, counter)
    flat.labels[skip] = len(flat.instructions)


def _inline(module, flat, call, name, given, returned, prefix, stack, counter):
    function = module.functions.get(name)
    if function is None or not function.defined:
        function = shim(name)
    problem = None
    if function is None:
        problem = f"call of {name}, which this PTX does not define"
    elif name in stack:
        problem = f"recursive call of {name}, which the emulator cannot run"
    elif len(given) != len(function.parameters) or len(returned) != len(function.returns):
        problem = f"call of {name} with {len(given)} parameters"
    if problem:
        raise UnknownInstruction(f"{problem}\n  at {place(call)}", call.line, call.source)
    formals = dict(zip((p.name for p in (*function.parameters, *function.returns)), (*given, *returned)))
    _append(module, flat, function, formals, prefix, (*stack, name), counter)


def _system(module, flat, call, name, given, returned):
    steps = [(f"system.{name}", list(given))]
    for result in returned:
        size = 8 * flat.variables[result].nbytes
        steps.append((f"st.param.b{size}", [Address(result), str(SYSTEM_CALLS[name])]))
    for opcode, operands in steps:
        flat.instructions.append(Instruction(opcode, operands, None, False, call.line, call.text, call.source,
                                             tuple(opcode.split("."))))
