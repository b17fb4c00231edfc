"""Arithmetic and conversions of any operands, against rational numbers and Python integers.

Each example is one launch of a family with 32 operand tuples, drawn from all bit patterns and, more often,
from those where rounding, overflow, NaN, infinities, zeros and subnormal numbers meet.
"""
import pytest
import softfloat
from hypothesis import given, settings
from hypothesis import strategies as st
from opcodes import FAMILIES
from ptx_programs import SIZES, Program, operand_samples

NAMES = """integer s16; integer u32; integer s32; integer s64; carry u32; shift s64; bfe s64; bfi b32; prmt;
    funnel shift; arithmetic f32; arithmetic f64; quotients f32; quotients f64; signs f32; signs f64;
    arithmetic f16; arithmetic bf16x2; signs f16x2; from s64; from u32; integers from f32;
    integers from f64; integers from f16; floats from f32; floats from f64; pairs from f32; finite from f32;
    tf32; fp8 from f32; setp f32; combined setp f32"""
CHOSEN = [next(f for f in FAMILIES if f.name == name.strip()) for name in NAMES.split(";")]


def around(form):
    """Numbers of ordinary size, whose sums and products round."""
    one = softfloat.rounded(1, form)
    return st.builds(lambda offset, sign: one + offset | sign,
                     st.integers(-3 << form.fraction_bits, 3 << form.fraction_bits),
                     st.sampled_from((0, form.sign)))


def patterns(family, n):
    kind = family.kinds[n]
    choices = [st.sampled_from(family.samples.get(n) or operand_samples(kind)),
               st.integers(0, (1 << 8 * SIZES[kind]) - 1)]
    if kind in softfloat.FORMATS:
        choices.append(around(softfloat.FORMATS[kind]))
    return st.one_of(choices)


@pytest.mark.parametrize("family", CHOSEN, ids=lambda family: family.name.replace(" ", "_"))
@settings(max_examples=12)
@given(data=st.data())
def test_any_operands_give_what_the_isa_says(family, data):
    operands = st.tuples(*(patterns(family, n) for n in range(len(family.kinds))))
    rows = data.draw(st.lists(operands, min_size=1, max_size=32))
    rows += [rows[0]] * (32 - len(rows))
    results = family.launch_on(Program.emulate, rows)
    for instruction in family.instructions:
        family.verify(instruction, rows, results[instruction.opcode])
