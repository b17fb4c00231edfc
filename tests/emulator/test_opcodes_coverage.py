"""Nothing in the table of opcodes is without a test, and what ends a grid ends it."""
import pytest
from opcodes import FAMILIES, PROGRAMS
from ptx_programs import kernel

import numbaflash.emulator.opcodes  # noqa: F401  (fills the table)
from numbaflash import emulator
from numbaflash.emulator.registry import OPCODES


def keys(opcode):
    """Entries of the table that an opcode can be found under, longest first."""
    parts = opcode.split()[0].split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        yield from (f"{name}:{parts[-1]}", name)


def opcodes_in_the_table():
    opcodes = [c for family in FAMILIES for i in family.instructions for c in (i.covers or (i.opcode,))]
    opcodes += [c for program in PROGRAMS for c in program.covers]
    return {next((key for key in keys(opcode) if key in OPCODES), None) for opcode in opcodes}


COOPERATIVE = {"system.cudaCGGetIntrinsicHandle", "system.cudaCGSynchronize"}    # in test_grid_sync.py


def test_every_registered_opcode_has_a_case():
    assert sorted(set(OPCODES) - opcodes_in_the_table() - COOPERATIVE) == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name.replace(" ", "_"))
def test_the_text_of_a_program_contains_what_it_covers(program):
    missing = [opcode for opcode in program.covers if opcode.removeprefix("system.") not in program.text]
    assert not missing


@pytest.mark.parametrize("name", ["trap", "brkpt"])
def test_trap_and_brkpt_end_the_grid_and_name_the_thread(name):
    """Miscellaneous Instructions: trap, brkpt."""
    text = kernel(f"setp.eq.u32 %p1, %r0, 7; @%p1 {name};", 0)
    with pytest.raises(emulator.TrapError, match=rf"{name} executed\s+by .* thread \(7, 0, 0\)"):
        emulator.launch(text, 1, 32)


@pytest.mark.parametrize("code", ["frobnicate.b32 %r1, %r2;", "add.s32.sideways %r1, %r2, %r3;",
                                  "add.u8 %h1, %h2, %h3;", "shl.s32 %r1, %r2, 3;",
                                  "cvt.rni.s8.bf16 %r1, %h2;", "cvt.rni.u8.bf16 %r1, %h2;",
                                  "cvt.rn.bf16.s8 %h1, %r2;", "sub.u16x2 %r1, %r2, %r3;",
                                  "setp.lt.f16x2 %p1, %r2, %r3;"])
def test_what_the_isa_does_not_have_is_refused_by_name(code):
    with pytest.raises(emulator.UnknownInstruction, match=code.split()[0].replace(".", r"\.")):
        emulator.launch(kernel(code, 0), 1, 32)


def test_vprintf_formats_its_arguments(capsys):
    next(p for p in PROGRAMS if p.name == "vprintf").emulate()
    assert capsys.readouterr().out == "-5-5\n"
