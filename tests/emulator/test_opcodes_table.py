"""Every instruction, from a minimal PTX text, gives what the PTX ISA says.

The tables are in tests/support/opcodes: each row names the section of the ISA it comes from, and a model of
the instruction in Python integers and rational numbers that knows nothing of the emulator.
"""
import pytest
from opcodes import FAMILIES, PROGRAMS
from ptx_programs import family_results

ROWS = [pytest.param(family, instruction, id=f"{family.name}-{instruction.opcode}".replace(" ", "_"))
        for family in FAMILIES for instruction in family.instructions]


@pytest.mark.parametrize("family, instruction", ROWS)
def test_results_are_those_of_the_isa(family, instruction):
    rows, results = family_results(family)
    family.verify(instruction, rows, results[instruction.opcode])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name.replace(" ", "_"))
def test_program_does_what_the_isa_says(program):
    program.check(program.emulate())
