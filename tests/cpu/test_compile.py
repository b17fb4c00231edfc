"""Compiling: constants as a type, few variants, a disk cache that hits and never hurts, machine code as intended."""

import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import pytest
from llvmlite import binding
from numba import types

import numbaflash
from numbaflash.cpu import attend, config, forward
from numbaflash.cpu import compile as cpu_compile
from numbaflash.cpu.compile import Kernel, Static
from numbaflash.cpu.gemm import UNROLL, gemm_add, gemm_max, gemm_rescale, gemm_set
from numbaflash.cpu.storage import CODES
from numbaflash.options import Options
from numbaflash.problem import make_problem


def process(script, **environment):
    """Run a script in a new process with this package on its path; its standard output."""
    package = str(Path(numbaflash.__file__).resolve().parent.parent)
    variables = os.environ | {"PYTHONPATH": package} | {k: str(v) for k, v in environment.items()}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# -------------------------------------------------------------------------------------------------- constants


def constant_branch(x, static):
    if static.flag:
        return x + static.number
    return x - static.number


def test_constants_reach_the_code_as_literals():
    kernel = Kernel(constant_branch)
    assert kernel.specialise((types.intp,), Static(flag=True, number=2))(5, None) == 7
    assert kernel.specialise((types.intp,), Static(flag=False, number=2))(5, None) == 3
    assert len(kernel.entries) == 2


def test_equal_constants_are_one_variant():
    kernel = Kernel(constant_branch)
    first = kernel.specialise((types.intp,), Static(flag=True, number=3))
    assert kernel.specialise((types.intp,), Static(number=3, flag=True)) is first
    assert Static(a=1) != Static(a=True) and Static(a=1).replace(a=2)["a"] == 2


def test_forward_has_two_variants_per_dtype_whatever_the_call():
    rng = np.random.default_rng(0)
    statics = set()
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        for n, m, d in [(1, 1, 1), (5, 9, 3), (70, 40, 64), (3, 200, 300)]:
            q, k, v = (rng.standard_normal((2, 2, rows, d)).astype(dtype) for rows in (n, m, m))
            options = [
                dict(), dict(causal=True), dict(window=(3, 2)), dict(sinks=np.zeros(2, np.float32)), dict(softcap=2.0),
                dict(bias=np.zeros((n, m), dtype)), dict(mask=np.ones((n, m), bool)), dict(alibi_slopes=[0.1, 0.2]),
                dict(dropout_p=0.5, seed=1), dict(out_dtype=np.float64),
                dict(softcap=1.0, bias=np.zeros((n, m)), dropout_p=0.1, seed=0),
            ]
            for option in options:
                problem = make_problem(q, k, v, Options(**option))
                statics.add(forward.forward_static(CODES[problem.q.dtype], forward.is_general(problem)))
    assert len(statics) == 8


# ------------------------------------------------------------------------------------------------------ cache

CALL = """
import numpy as np
from numbaflash.cpu import attend, forward
from numbaflash.options import Options
from numbaflash.problem import make_problem
q = np.ones((1, 1, 4, 8), np.float32)
out, lse = forward.forward(make_problem(q, q, q, Options()))
assert np.allclose(out, 1)
stats = attend.kernel._dispatcher.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_the_cache_hits_in_the_next_process_and_survives_damage(tmp_path):
    assert process(CALL, NUMBA_CACHE_DIR=tmp_path).split() == ["0", "1"]
    assert process(CALL, NUMBA_CACHE_DIR=tmp_path).split() == ["1", "0"]
    for path in tmp_path.rglob("*.nb?"):
        path.write_bytes(b"not a cache file")
    process(CALL, NUMBA_CACHE_DIR=tmp_path)


def test_without_a_folder_to_write_to_kernels_compile_all_the_same(monkeypatch):
    real = numba.njit

    def njit(*arguments, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*arguments, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert Kernel(constant_branch).specialise((types.intp,), Static(flag=True, number=4))(5, None) == 9


def test_a_cache_that_fails_is_left_out(monkeypatch):
    class Broken:
        overloads = {}

        def compile(self, signature):
            raise OSError("disk full")

    monkeypatch.setattr(cpu_compile, "_cached_dispatcher", lambda function: Broken())
    assert Kernel(constant_branch).specialise((types.intp,), Static(flag=True, number=5))(5, None) == 10


def test_the_build_number_follows_the_sources(monkeypatch, tmp_path):
    package = tmp_path / "package"
    (package / "cpu").mkdir(parents=True)
    (package / "a.py").write_text("1")
    (package / "cpu" / "compile.py").write_text("2")
    monkeypatch.setattr(cpu_compile, "__file__", str(package / "cpu" / "compile.py"))
    numbers = {cpu_compile.build_id.__wrapped__()}
    (package / "a.py").write_text("3")
    numbers.add(cpu_compile.build_id.__wrapped__())
    (package / "cpu" / "b.py").write_text("")
    numbers.add(cpu_compile.build_id.__wrapped__())
    assert len(numbers) == 3 and all(0 <= number < 2**63 for number in numbers)


# ----------------------------------------------------------------------------------------------- machine code


def hot_loops(assembly, fma, count):
    """Instructions of each loop of one block with ``count`` full-width multiply-adds, nearly half of it or more.

    That is: of the products, not of the exponentials.
    """
    blocks, loops = {}, []
    label = None
    for line in assembly.splitlines():
        line = line.split("//")[0].split("#")[0] if not line.startswith("#") else ""
        if match := re.match(r"(\.?L\w+):", line):
            label = match[1]
            blocks[label] = []
        elif label and line.strip() and not line.strip().startswith("."):
            blocks[label].append(line.strip())
            if re.match(r"\s*(j\w+|b(\.\w+)?)\s+" + re.escape(label) + r"\s*$", line):
                found = sum(bool(re.search(fma, text)) for text in blocks[label])
                if found >= max(count, 0.45 * len(blocks[label])):
                    loops.append(list(blocks[label]))
    return loops


X86 = {
    "avx2": ("haswell", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2", r"vfmadd.*%ymm.*%ymm.*%ymm", 4),
    "avx512": (
        "skylake-avx512", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2,+avx512f,+avx512vl,+avx512dq,+avx512bw",
        r"vfmadd.*%zmm.*%zmm", 8,
    ),
}

FMLA = r"fmla\s+v\d+\.4s"
SPILL = r"\(%rsp|-\d+\(%rbp\)"
"""An operand in the stack frame; rbp with an index, or nothing taken off, is a pointer like any other."""


def spills(loop):
    """Vector operands of a loop that lie in the stack frame; where the loop moves rbp, it is no frame pointer."""
    moved = any(re.search(r",\s*%rbp$", line) for line in loop)
    pattern = r"\(%rsp" if moved else SPILL
    return [line for line in loop if re.search(pattern, line) and re.search("%[xyz]mm", line)]


ASSEMBLY = """
from numbaflash.cpu import attend, forward
print(attend.kernel.assembly(attend.ARGUMENTS, forward.forward_static({storage}, False)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("machine", X86)
def test_both_products_are_full_width_and_free_of_spills(machine, dtype):
    cpu, features, fma, rows = X86[machine]
    script = ASSEMBLY.format(storage=CODES[np.dtype(dtype)])
    assembly = process(script, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features, NUMBAFLASH_VECTOR_BITS="")
    loops = hot_loops(assembly, fma, UNROLL * 3 * rows)
    assert len(loops) >= 2
    for loop in loops:
        assert not spills(loop), "\n".join(loop)


GRADIENT_ASSEMBLY = """
from numbaflash.cpu import backward, differentiate
statics = backward.statics_of({storage}, False)
print(differentiate.kernel.assembly((*differentiate.ARGUMENTS, statics.wide, statics.narrow), statics.kernel))
"""
PRODUCTS = 2
"""``multiply`` and ``multiply_add`` of the backward pass, which all five of its products go through."""


@pytest.mark.slow
@pytest.mark.parametrize("machine", X86)
def test_all_products_of_the_backward_pass_are_full_width_and_free_of_spills(machine):
    cpu, features, fma, rows = X86[machine]
    script = GRADIENT_ASSEMBLY.format(storage=CODES[np.dtype(np.float32)])
    assembly = process(script, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features, NUMBAFLASH_VECTOR_BITS="")
    loops = hot_loops(assembly, fma, UNROLL * 3 * rows)  # as many accumulators as the forward pass, in two columns
    assert len(loops) >= PRODUCTS
    for loop in loops:
        assert not spills(loop), "\n".join(loop)


def products_of_both_passes(a, a_row, b, c, m, inner, extra, backward, static):
    width = static.panel * static.size
    gemm_max(static, a, a_row, static.size, b, width, c, width, m, inner, extra, b, width, width)
    gemm_rescale(static, a, static.size, a_row, b, width, c, width, m, inner, extra, 0, 0, 0)
    width = backward.panel * backward.size
    gemm_set(backward, a, a_row, static.size, b, width, c, width, m, inner, 0, b, width, width)
    gemm_add(backward, a, static.size, a_row, b, width, c, width, m, inner, 0, b, width, width)


def test_neon_products_are_full_width_and_free_of_spills():
    """Our LLVM code, handed to LLVM's AArch64 back end."""
    static = Static(bits=32, size=4, lanes=4, vectors=3, rows=6, panel=12)
    backward = Static(bits=32, size=4, lanes=4, vectors=2, rows=12, panel=8)
    signature = (types.intp,) * 7 + (backward, static)
    kernel = numba.njit(**cpu_compile.KERNEL_OPTIONS)(products_of_both_passes)
    kernel.compile(signature)
    text = kernel.overloads[signature].library.get_llvm_str()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    machine = binding.Target.from_triple(triple).create_target_machine(cpu="neoverse-n1", opt=3)
    text = re.sub(r'target (triple|datalayout) = "[^"]*"', "", text)
    text = re.sub(r'"(target-cpu|target-features|tune-cpu)"="[^"]*"', "", text)
    module = binding.parse_assembly(text)
    module.triple, module.data_layout = triple, str(machine.target_data)
    assembly = machine.emit_assembly(module)
    assert len(hot_loops(assembly, FMLA, 24)) >= 2  # of the backward pass
    loops = hot_loops(assembly, FMLA, 18)
    assert len(loops) >= 4
    for loop in loops:
        assert not [line for line in loop if re.search(r"\bq\d+, \[sp", line)], "\n".join(loop)


def test_the_vector_width_can_be_chosen(monkeypatch):
    for bits, lanes in [(128, 4), (256, 8), (512, 16)]:
        config.machine.cache_clear()
        monkeypatch.setenv("NUMBAFLASH_VECTOR_BITS", str(bits))
        assert config.vector_static(32)["lanes"] == lanes and config.vector_static(64)["lanes"] == lanes // 2
    config.machine.cache_clear()
    monkeypatch.setenv("NUMBAFLASH_VECTOR_BITS", "300")
    with pytest.raises(ValueError, match="NUMBAFLASH_VECTOR_BITS"):
        config.machine()
    monkeypatch.undo()
    config.machine.cache_clear()
    assert attend.kernel is not None
