"""The programs of the opcode tests on the real thing.

Without a GPU every text is assembled, so that none of them is something NVIDIA's assembler does not take.
With one, ``pytest -m gpu tests/emulator`` runs each of them and compares with the emulator, bit for
bit where the ISA leaves no choice, and with the same model as the emulator everywhere.
"""
import numpy as np
import pytest
from opcodes import FAMILIES, PROGRAMS
from ptx_programs import family_results

from numbaflash.cuda.compile import parse_arch

TEXTS = [pytest.param(one.text, one.arch, id=one.name.replace(" ", "_")) for one in (*FAMILIES, *PROGRAMS)]


def assemble(text, arch):
    """Machine code for an architecture."""
    core = pytest.importorskip("cuda.core")
    linker = core.Linker(core.ObjectCode.from_ptx(text.encode()), options=core.LinkerOptions(arch=arch))
    return linker.link("cubin")


@pytest.mark.parametrize("text, arch", TEXTS)
def test_text_assembles(text, arch):
    assert assemble(text, arch).code


def on_gpu(program):
    """The arrays of a program after a launch on the current GPU."""
    from cuda.core import Device, LaunchConfig, launch
    from numba import cuda

    if not cuda.is_available():
        pytest.skip("needs a GPU")
    device = Device()
    device.set_current()
    capability = tuple(device.compute_capability)
    wanted = parse_arch(program.arch).capability
    specific = len(wanted) == 3
    if capability < wanted[:2] or (specific and capability != wanted[:2]):
        pytest.skip(f"needs a GPU of {program.arch}")
    arch = program.arch if specific else "sm_{}{}".format(*capability)
    kernel = assemble(program.text, arch).get_kernel("k")
    arrays = program.arguments()
    there = [cuda.to_device(array) for array in arrays]
    stream = device.create_stream()
    pointers = [np.uint64(array.__cuda_array_interface__["data"][0]) for array in there]
    launch(stream, LaunchConfig(grid=program.blocks, block=program.threads, shmem_size=program.shared_bytes),
           kernel, *pointers)
    stream.sync()
    return [array.copy_to_host() for array in there]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name.replace(" ", "_"))
def test_instructions_give_the_same_on_a_gpu(family):
    rows, emulated = family_results(family)
    results = family.launch_on(on_gpu, rows)
    for instruction in family.instructions:
        family.verify(instruction, rows, results[instruction.opcode])
        family.compare(instruction, rows, results[instruction.opcode], emulated[instruction.opcode])


@pytest.mark.gpu
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.on_gpu], ids=lambda p: p.name.replace(" ", "_"))
def test_program_does_the_same_on_a_gpu(program):
    arrays = on_gpu(program)
    program.check(arrays)
    if program.exact:
        for got, emulated in zip(arrays, program.emulate()):
            np.testing.assert_array_equal(got.view(np.uint8), emulated.view(np.uint8))
