"""A kernel that is wrong in one place is caught, also where its values come out right.

Each mutant differs from a correct kernel in one instruction of its PTX: a barrier, wait, commit or arrival
left out, a swizzle broken, a transposition or a shuffle changed.  Caught means: an error, or a wrong value.
"""
import re

import numpy as np
import pytest
from emulator_kernels.catalogue import CASES

from numbaflash import emulator

SYNCHRONISATION = (
    "bar.sync", "bar.arrive", "bar.warp.sync", "barrier.sync", "membar.gl",
    "cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all", "cp.async.mbarrier.arrive.noinc",
    "mbarrier.init", "mbarrier.arrive", "mbarrier.try_wait", "mbarrier.test_wait",
)
CHANGES = {                     # instruction, and what becomes of its text
    "swizzle xor to or": ("xor.b32", "xor.", "or."),
    "ldmatrix without trans": ("ldmatrix.sync.aligned.m8n8.x4.trans", ".trans", ""),
    "shuffle bfly to down": ("shfl.sync.bfly", "bfly", "down"),
    "shuffle bfly to idx": ("shfl.sync.bfly", "bfly", "idx"),
    "shuffle up to down": ("shfl.sync.up", "up", "down"),
}
CHANGED = ("scan", "matmul_mma", "flash_simt", "flash_mma")
LOCK_STEP = [name for name in CASES if "pipeline" not in name]


def instructions(text, *opcodes):
    """Numbers of the lines that hold one of these instructions."""
    pattern = rf"(?<![\w.])(?:{'|'.join(map(re.escape, opcodes))})(?!\w)"
    return [number for number, line in enumerate(text.splitlines())
            if re.search(pattern, line.partition("//")[0])]


def without_line(text, number):
    lines = text.splitlines()
    lines[number] = ""
    return "\n".join(lines)


def replaced(text, number, old, new):
    lines = text.splitlines()
    assert lines[number].count(old) == 1
    lines[number] = lines[number].replace(old, new)
    return "\n".join(lines)


def fate(case, text, **options):
    """What becomes of a changed kernel: the name of the error, 'wrong value', or 'survived'."""
    try:
        _, outputs = case.launch(emulator, text, **options)
    except emulator.EmulatorError as error:
        return type(error).__name__
    return "wrong value" if case.error(outputs) > case.tolerance else "survived"


def survivors(case, text, mutants, **options):
    """The lines of those of the mutants (line number -> text) that nobody would notice."""
    lines = text.splitlines()
    return [f"line {number + 1}: {lines[number].strip()}" for number, mutant in mutants.items()
            if fate(case, mutant, **options) == "survived"]


@pytest.mark.parametrize("name", CASES)
def test_every_synchronisation_left_out_is_caught(name):
    case = CASES[name](np.random.default_rng(5))
    text = case.ptx()
    assert fate(case, text) == "survived"
    mutants = {number: without_line(text, number) for number in instructions(text, *SYNCHRONISATION)}
    assert mutants and survivors(case, text, mutants) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CASES)
def test_every_synchronisation_left_out_is_caught_under_any_schedule(name, seed):
    case = CASES[name](np.random.default_rng(9))
    text = case.ptx()
    mutants = {number: without_line(text, number) for number in instructions(text, *SYNCHRONISATION)}
    assert survivors(case, text, mutants, seed=seed) == []


@pytest.mark.parametrize("name", LOCK_STEP)
def test_barriers_left_out_are_found_as_races_and_not_by_luck(name):
    case = CASES[name](np.random.default_rng(6))
    text = case.ptx()
    for number in instructions(text, "bar.sync"):
        assert fate(case, without_line(text, number)) != "wrong value"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["scan", "matmul_mma", *(pytest.param(n, marks=pytest.mark.slow)
                                                          for n in ("flash_simt", "flash_mma"))])
def test_every_wrong_instruction_is_caught(name, change):
    case = CASES[name](np.random.default_rng(7))
    text = case.ptx()
    opcode, old, new = CHANGES[change]
    mutants = {number: replaced(text, number, old, new) for number in instructions(text, opcode)}
    assert survivors(case, text, mutants) == []


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_applies_to_some_kernel(change):
    texts = [CASES[name](np.random.default_rng(0)).ptx() for name in CHANGED]
    assert any(instructions(text, CHANGES[change][0]) for text in texts)


def test_an_arrival_before_the_copy_is_complete_is_caught():
    case = CASES["async_pipeline"](np.random.default_rng(8))
    text = case.ptx()
    opcode = "cp.async.mbarrier.arrive.noinc.shared.b64"
    for number in instructions(text, opcode):
        early = replaced(text, number, opcode, "mbarrier.arrive.shared.b64 _,")
        assert fate(case, early) not in ("survived", "wrong value")


def test_a_wait_for_one_group_too_few_is_caught():
    case = CASES["flash_mma"](np.random.default_rng(8))
    text = case.ptx()
    number, = instructions(text, "cp.async.wait_group")
    assert fate(case, replaced(text, number, "wait_group 1", "wait_group 2")) != "survived"
