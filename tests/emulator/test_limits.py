"""Launches that no GPU takes are refused, by name and with the limit."""
import importlib.metadata
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, float32

from numbaflash import emulator
from numbaflash.emulator.limits import SHARED_KIB, shared_limits

EMPTY = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k()
{
    ret;
}
"""


@pytest.mark.parametrize("grid, block, message", [
    (1, (1, 1, 65), "block z is at most 64, not 65"),
    (1, 1025, "block x is at most 1024, not 1025"),
    ((1, 65536), 1, "grid y is at most 65535, not 65536"),
    ((1, 1, 65536), 1, "grid z is at most 65535, not 65536"),
    (2**31, 1, "grid x is at most 2147483647, not 2147483648"),
    (1, (32, 8, 8), "at most 1024 threads, not 2048"),
    (0, 1, "grid must be one to three positive ints"),
])
def test_sizes_beyond_those_of_any_gpu_are_refused(grid, block, message):
    with pytest.raises(ValueError, match=message):
        emulator.launch(EMPTY, grid, block)


@pytest.mark.parametrize("name, grid, block", [("grid", 2.7, 32), ("block", 1, 32.0), ("grid", (1, 1.5), 32),
                                               ("grid", "1", 32), ("block", 1, None)])
def test_sizes_that_are_no_integers_are_refused(name, grid, block):
    with pytest.raises(TypeError, match=f"{name} must be an int or a tuple"):
        emulator.launch(EMPTY, grid, block)


@pytest.mark.parametrize("block", [(1, 1, 64), (1024,), np.int64(32), np.array([4, 2, 2])])
def test_the_largest_blocks_and_numpy_integers_are_taken(block):
    emulator.launch(EMPTY, np.int32(2), block)


def shared_ptx(arch, nbytes, bound=""):
    return f""".version 8.0
.target {arch}
.address_size 64
.shared .align 4 .b8 tile[{nbytes}];
.visible .entry k() {bound}
{{
    ret;
}}
"""


USES_SHARED = """.version 9.0
.target TARGET
.address_size 64
.shared .align 4 .b8 tile[1000000];
.visible .entry k(.param .u64 out)
{
    .reg .b32 %r<2>; .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [out]; ld.shared.u32 %r1, [tile]; st.global.u32 [%rd1], %r1;
    ret;
}
"""


def installed(package, name):
    """A file of one of the CUDA wheels."""
    try:
        files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for path in files:
        if path.name == name:
            return Path(path.locate())
    pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("arch, static, dynamic, message", [
    ("sm_80", 49153, 0, "declares 49153 bytes of shared memory; sm_80 has at most 49152"),
    ("sm_80", 8, (163 << 10) - 7, "sm_80 has at most 166912 per block"),
    ("sm_86", 1024, 99 << 10, "sm_86 has at most 101376"),
    ("sm_90a", 4, 227 << 10, "sm_90a has at most 232448"),
    ("sm_90a", 232449, 0, "declares 232449 bytes of shared memory; sm_90a has at most 232448 of static"),
    ("sm_61", 48, 48 << 10, "sm_61 has at most 49152 per block"),
])
def test_more_shared_memory_than_the_architecture_has_is_refused(arch, static, dynamic, message):
    with pytest.raises(ValueError, match=message):
        emulator.launch(shared_ptx(arch, static), 1, 1, shared_bytes=dynamic)


@pytest.mark.parametrize("arch, static, dynamic", [
    ("sm_80", 49152, 0), ("sm_80", 1024, 162 << 10), ("sm_86", 0, 99 << 10), ("sm_90a", 1024, 226 << 10),
    ("sm_90a", 227 << 10, 0), ("sm_120f", 1024, 98 << 10), ("sm_61", 48 << 10, 0)])
def test_as_much_shared_memory_as_the_architecture_has_is_taken(arch, static, dynamic):
    emulator.launch(shared_ptx(arch, static), 1, 1, shared_bytes=dynamic)


@pytest.mark.parametrize("arch", ["sm_130", "sm_90x", "sm_35", "sm_9"])
def test_an_architecture_that_is_not_known_is_refused_by_name(arch):
    with pytest.raises(ValueError, match=f"for {arch}, an architecture that is not known.*: .*sm_90, "):
        emulator.launch(shared_ptx(arch, 4), 1, 1)


def test_limits_of_static_shared_memory_are_those_of_ptxas():
    command, limits = installed("nvidia-cuda-nvcc", "ptxas"), {}
    for target in [f"sm_{number}{suffix}" for number in SHARED_KIB for suffix in ("", "a", "f")]:
        result = subprocess.run([command, f"-arch={target}", "-o", os.devnull, "-"], text=True,
                                capture_output=True, input=USES_SHARED.replace("TARGET", target))
        found = re.search(r"too much shared data .* 0x([0-9a-f]+) max", result.stderr)
        if found is not None:                           # a ptxas knows old or new architectures, not all
            limits[target] = int(found[1], 16)
    assert len(limits) > 10
    assert limits == {target: shared_limits(target)[0] for target in limits}


def test_limits_of_all_shared_memory_are_those_of_the_cuda_headers():
    """arch_traits.h of CCCL, in the CUDA wheels, states them as kilobytes of a multiprocessor less one."""
    text, limits = installed("nvidia-cuda-cccl", "arch_traits.h").read_text(), {}
    function = r"arch_traits<arch_id::sm_(\d+)>\(\) noexcept\s*{(.*?)\n};?\n"
    for number, body in re.findall(function, text, re.S):
        like = re.search(r"arch_traits<arch_id::sm_(\d+)>\(\);", body)
        stated = re.search(r"per_block_optin\s*= (\d+) \* 1024", body)
        whole = re.search(r"shared_memory_per_multiprocessor = (\d+) \* 1024", body)
        if like and not whole:
            limits[number] = limits[like[1]]
        else:
            limits[number] = int(stated[1]) if stated else int(whole[1]) - (int(number) >= 80)
    known = {number: SHARED_KIB[int(number)] for number in limits if int(number) in SHARED_KIB}
    assert len(known) > 10
    assert known.items() <= limits.items()


def test_a_shared_array_that_is_too_large_is_refused_with_a_way_out():
    @cuda.jit
    def kernel(x):
        tile = cuda.shared.array(20_000, float32)
        tile[cuda.threadIdx.x] = 1
        cuda.syncthreads()
        x[0] = tile[x.size]

    with pytest.raises(ValueError, match="80000 bytes.*sm_80 .*49152.*shared_bytes"):
        emulator.launch(kernel, 1, 32, np.zeros(1, np.float32))


@pytest.mark.parametrize("bound, block, message", [
    (".maxntid 64, 1, 1", 65, "65 threads.*at most 64"), (".reqntid 64", 32, "32 threads.*exactly 64"),
    (".maxntid 64", 64, None), (".maxntid 8, 8", (4, 16), None), (".reqntid 64", 64, None)])
def test_launch_bounds_of_the_kernel_hold(bound, block, message):
    text = shared_ptx("sm_80", 4, bound)
    if message is None:
        emulator.launch(text, 1, block)
    else:
        with pytest.raises(ValueError, match=message):
            emulator.launch(text, 1, block)


@pytest.mark.parametrize("value", ["4", 2.0, True, [1]])
@pytest.mark.parametrize("option", ["shared_bytes", "max_steps", "resident_blocks"])
def test_counts_that_are_no_integers_are_refused_by_name(option, value):
    with pytest.raises(TypeError, match=f"{option} must be an integer"):
        emulator.launch(EMPTY, 1, 1, **{option: value})
