"""Compiling without a GPU: right numbers, and a cache that never gives stale, foreign or damaged code."""
import dataclasses
import importlib.util
import os
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from numba import cuda, float32, types

from numbaflash.cuda import compile, fingerprint, ptx, store

sources_edited = fingerprint.sources_edited
VECTOR = (types.float32[::1],)
ARGUMENTS = {"signature": VECTOR, "arch": "sm_80"}


def make_scale(factor):
    def scale(x):
        i = cuda.grid(1)
        x[i] = x[i] * float32(factor)
    return scale


def divide(x):
    i = cuda.grid(1)
    x[i] = x[i] / x[i + 1]


def hungry(x):
    """More than 64 values that live at once."""
    a = cuda.local.array(64, float32)
    for i in range(64):
        a[i] = x[i]
    for _ in range(x.size):
        for i in range(64):
            a[i] = a[i] * a[(i + 1) % 64] + x[i]
    for i in range(64):
        x[i] = a[i]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty disk cache and an empty memory for every test."""
    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "_memory", {})
    monkeypatch.setattr(fingerprint, "sources_edited", lambda: False)     # by others meanwhile
    return tmp_path / "cache"


@pytest.fixture
def compiles(monkeypatch):
    """Names of what was really compiled, in order."""
    names = []
    for kind in ("_build_ptx", "_build_cubin"):
        def counted(request, identity, build=getattr(compile, kind)):
            names.append(request.kind)
            return build(request, identity)
        monkeypatch.setattr(compile, kind, counted)
    return names


def forget(monkeypatch):
    """As in another process: nothing in memory."""
    monkeypatch.setattr(compile, "_memory", {})


def files(directory):
    return [path for path in directory.rglob("*") if path.is_file()]


# --- architectures and results ------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_90a", "sm_120a"])
def test_ptx_is_for_the_architecture_asked_for(arch):
    assert f".target {arch}" in compile.compile_ptx(make_scale(2.0), VECTOR, arch)


@pytest.mark.parametrize("arch, name", [((8, 0), "sm_80"), ((9, 0, "a"), "sm_90a"), ("sm_120", "sm_120")])
def test_architectures_are_named_by_text_or_tuple(arch, name):
    assert compile.parse_arch(arch).name == name
    assert compile.parse_arch(compile.parse_arch(arch)).name == name


@pytest.mark.parametrize("arch", ["sm_70", "90", (9,), (7, 0), "", None])
def test_an_unknown_architecture_is_an_error_that_lists_the_known(arch):
    with pytest.raises(ValueError, match="arch must be one of sm_75, .*got"):
        compile.compile_ptx(make_scale(2.0), VECTOR, arch)


def test_line_info_points_to_the_python_source():
    text = compile.compile_ptx(make_scale(2.0), **ARGUMENTS, lineinfo=True)
    assert ".loc" in text and "test_compile.py" in text
    assert ".loc" not in compile.compile_ptx(make_scale(2.0), **ARGUMENTS)


def test_launch_bounds_reach_the_ptx():
    text = compile.compile_ptx(make_scale(2.0), **ARGUMENTS, launch_bounds=(128, 2))
    assert ".maxntid" in text and ".minnctapersm" in text


def test_a_dispatcher_is_as_good_as_its_function():
    assert compile.compile_ptx(cuda.jit(make_scale(2.0)), **ARGUMENTS).count(".entry") == 1


def test_cubin_is_an_elf_file_with_its_entry():
    cubin = compile.compile_cubin(make_scale(2.0), **ARGUMENTS)
    assert cubin.code[:4] == b"\x7fELF" and cubin.arch == "sm_80"
    assert cubin.entry.encode() in cubin.code


# --- resources ----------------------------------------------------------------------------------------


def test_resources_of_a_small_kernel():
    resources = compile.compile_cubin(make_scale(2.0), **ARGUMENTS).resources
    assert 4 <= resources.registers <= 16
    assert resources.stack == resources.spill_stores == resources.spill_loads == resources.static_shared == 0
    assert resources.warnings == ()


def test_static_shared_memory_and_barriers_are_counted():
    def kernel(x):
        tile = cuda.shared.array(100, float32)
        tile[cuda.threadIdx.x] = x[cuda.threadIdx.x]
        cuda.syncthreads()
        ptx.bar_sync(1, 64)
        x[cuda.threadIdx.x] = tile[99 - cuda.threadIdx.x]

    resources = compile.compile_cubin(kernel, **ARGUMENTS).resources
    assert resources.static_shared == 400 and resources.barriers == 2


def test_a_kernel_with_too_few_registers_reports_its_spills():
    tight = compile.compile_cubin(hungry, **ARGUMENTS, max_registers=32).resources
    assert tight.registers <= 32
    assert tight.spill_stores > 0 and tight.spill_loads > 0 and tight.stack > 0
    assert compile.compile_cubin(hungry, **ARGUMENTS).resources.spill_stores == 0


def test_an_ignored_register_budget_is_a_warning():
    def kernel(x):
        ptx.setmaxnreg_dec(80)
        x[0] = float32(1)

    assert any("C7508" in line for line in compile.compile_cubin(kernel, VECTOR, "sm_90a").resources.warnings)
    bounded = compile.compile_cubin(kernel, VECTOR, "sm_90a", launch_bounds=(128, 1))
    assert bounded.resources.warnings == ()


def test_line_info_reaches_the_machine_code():
    assert b".debug_line" in compile.compile_cubin(divide, **ARGUMENTS, lineinfo=True).code
    assert b".debug_line" not in compile.compile_cubin(divide, **ARGUMENTS).code


def test_launch_bounds_limit_the_registers():
    many = compile.compile_cubin(hungry, **ARGUMENTS, launch_bounds=128).resources
    few = compile.compile_cubin(hungry, **ARGUMENTS, launch_bounds=(1024, 2)).resources
    assert few.registers <= 32 < many.registers


def test_fast_math_reaches_the_machine_code():
    exact, fast = (compile.compile_cubin(divide, **ARGUMENTS, fastmath=fast) for fast in (False, True))
    assert len(fast.code) < len(exact.code)             # a division is one instruction instead of a function


def test_a_log_without_registers_is_not_believed():
    with pytest.raises(ValueError, match="does not report registers"):
        compile.parse_resources("ptxas info : 0 bytes gmem")


# --- the cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [compile.compile_ptx, compile.compile_cubin])
def test_second_call_comes_from_memory_and_a_second_process_from_disk(function, compiles, monkeypatch):
    first = function(make_scale(2.0), **ARGUMENTS)
    assert function(make_scale(2.0), **ARGUMENTS) is first
    forget(monkeypatch)
    assert function(make_scale(2.0), **ARGUMENTS) == first
    assert len(compiles) == 1


def test_a_kernel_of_the_same_text_hits_in_a_real_second_process(monkeypatch):
    monkeypatch.setattr(fingerprint, "sources", lambda: "same")
    script = ("from numbaflash.cuda import compile, fingerprint\n"
              "fingerprint.sources = lambda: 'same'\n"
              "compile._build_ptx = lambda request, identity: (_ for _ in ()).throw(SystemExit('compiled'))\n"
              f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
              "from test_compile import make_scale, ARGUMENTS\n"
              "print('.entry' in compile.compile_ptx(make_scale(2.0), **ARGUMENTS))")
    compile.compile_ptx(make_scale(2.0), **ARGUMENTS)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert result.stdout.strip() == "True", result.stderr


CONFIG = namedtuple("CONFIG", "factor")


def different_requests():
    def helper_kernel(helper):
        inner = cuda.jit(device=True, inline="always")(helper)

        def kernel(x):
            x[0] = inner(x[0])
        return kernel

    def of_config(config):
        factor, = config

        def kernel(x):
            x[0] = x[0] * config.factor + factor
        return kernel

    yield "base", make_scale(2.0), {}
    yield "closure value", make_scale(3.0), {}
    yield "closure type", make_scale(2), {}
    yield "signature", make_scale(2.0), {"signature": (types.float64[::1],)}
    yield "architecture", make_scale(2.0), {"arch": "sm_86"}
    yield "launch bounds", make_scale(2.0), {"launch_bounds": 128}
    yield "fast math", make_scale(2.0), {"fastmath": True}
    yield "line info", make_scale(2.0), {"lineinfo": True}
    yield "helper", helper_kernel(lambda value: value + float32(1)), {}
    yield "constant in a helper", helper_kernel(lambda value: value + float32(2)), {}
    yield "operation in a helper", helper_kernel(lambda value: value * float32(2)), {}
    yield "configuration", of_config(CONFIG(4)), {}
    yield "field of a configuration", of_config(CONFIG(5)), {}


def test_key_tells_apart_whatever_changes_the_code(compiles):
    requests = list(different_requests())
    for _, function, changes in requests:
        compile.compile_ptx(function, **{**ARGUMENTS, **changes})
    assert len(compiles) == len(requests)


GLOBAL_FACTOR = 2.0


def test_key_depends_on_the_globals_that_a_function_names(monkeypatch, compiles):
    def kernel(x):
        x[0] = x[0] * GLOBAL_FACTOR

    compile.compile_ptx(kernel, **ARGUMENTS)
    monkeypatch.setitem(globals(), "GLOBAL_FACTOR", 3.0)
    compile.compile_ptx(kernel, **ARGUMENTS)
    assert len(compiles) == 2


def test_changed_sources_and_another_toolchain_compile_again(monkeypatch, compiles):
    compile.compile_ptx(make_scale(2.0), **ARGUMENTS)
    for name in ("sources", "toolchain"):
        with monkeypatch.context() as patch:
            forget(patch)
            patch.setattr(fingerprint, name, lambda: "another")
            compile.compile_ptx(make_scale(2.0), **ARGUMENTS)
    assert len(compiles) == 3


def test_a_source_edited_after_the_import_is_not_cached_on_disk(monkeypatch, own_cache):
    monkeypatch.setattr(fingerprint, "sources_edited", sources_edited)
    monkeypatch.setattr(fingerprint, "IMPORTED", 0.0)
    compile.compile_ptx(make_scale(2.0), **ARGUMENTS)
    assert files(own_cache) == []


def test_a_kernel_that_names_what_cannot_be_described_is_kept_in_memory_only(compiles, own_cache):
    def kernel(x):
        x[0] = stat.S_IRUSR             # a module of which nothing is known: neither version nor sources

    with pytest.raises(fingerprint.Unstable, match="stat"):
        fingerprint.function_digest(kernel)
    first = compile.compile_ptx(kernel, **ARGUMENTS)
    assert compile.compile_ptx(kernel, **ARGUMENTS) is first
    assert compile.compile_cubin(kernel, **ARGUMENTS).identity == ""
    assert compiles == ["ptx", "cubin"] and files(own_cache) == []


def flip_a_byte(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]


@pytest.mark.parametrize("damage", [flip_a_byte, lambda content: content[:-1], lambda content: content[:10],
                                    lambda content: b"", lambda content: content + b"x"])
@pytest.mark.parametrize("function", [compile.compile_ptx, compile.compile_cubin])
def test_a_damaged_file_is_compiled_again_and_repaired(function, damage, own_cache, compiles, monkeypatch):
    first = function(make_scale(2.0), **ARGUMENTS)
    path, = files(own_cache)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    forget(monkeypatch)
    again = function(make_scale(2.0), **ARGUMENTS)
    assert len(compiles) == 2
    assert type(again) is type(first)
    path, = files(own_cache)
    store.unpack(path.read_bytes())


@pytest.mark.parametrize("blocked", ["file in the way", "read-only", "dangling"])
def test_without_a_writable_directory_compiling_still_works(blocked, tmp_path, monkeypatch, compiles):
    target = tmp_path / "blocked"
    if blocked == "file in the way":
        target.write_text("not a directory")
    elif blocked == "dangling":
        target.symlink_to(tmp_path / "nowhere" / "at" / "all")
    else:
        target.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        def refuse(*arguments, **options):      # the superuser may write anywhere
            raise PermissionError(13, "Permission denied")
        monkeypatch.setattr(store.tempfile, "mkstemp", refuse)
    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", str(target))
    first = compile.compile_ptx(make_scale(2.0), **ARGUMENTS)
    assert compile.compile_ptx(make_scale(2.0), **ARGUMENTS) is first
    assert len(compiles) == 1


# --- bundles ------------------------------------------------------------------------------------------


def test_a_bundle_brings_kernels_to_a_process_that_cannot_compile(tmp_path, monkeypatch, own_cache):
    made = [compile.compile_cubin(make_scale(factor), **ARGUMENTS) for factor in (2.0, 3.0)]
    compile.save_bundle(tmp_path / "kernels.bundle", made)
    forget(monkeypatch)
    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", "")
    monkeypatch.setattr(compile, "_build_cubin", None)
    monkeypatch.setattr(fingerprint, "toolchain", None)
    assert compile.load_bundle(tmp_path / "kernels.bundle") == made
    assert compile.compile_cubin(make_scale(3.0), **ARGUMENTS) == made[1]


def test_a_bundle_keeps_everything_that_is_known_of_a_kernel(tmp_path):
    def kernel(x):
        ptx.setmaxnreg_dec(80)
        x[0] = float32(1)

    cubin = compile.compile_cubin(kernel, VECTOR, "sm_90a")
    compile.save_bundle(tmp_path / "one", [cubin])
    loaded, = compile.load_bundle(tmp_path / "one")
    assert dataclasses.asdict(loaded) == dataclasses.asdict(cubin) and loaded.resources.warnings


def test_a_damaged_bundle_is_an_error(tmp_path):
    path = tmp_path / "bundle"
    compile.save_bundle(path, [compile.compile_cubin(make_scale(2.0), **ARGUMENTS)])
    path.write_bytes(flip_a_byte(path.read_bytes()))
    with pytest.raises(ValueError, match="path: .*damaged"):
        compile.load_bundle(path)


def test_a_bundle_of_another_version_is_an_error(tmp_path, monkeypatch):
    compile.save_bundle(tmp_path / "bundle", [])
    monkeypatch.setattr(fingerprint, "sources", lambda: "another")
    with pytest.raises(ValueError, match="path: .*another version"):
        compile.load_bundle(tmp_path / "bundle")


def test_a_kernel_that_no_other_process_can_ask_for_does_not_go_into_a_bundle(tmp_path):
    cubin = dataclasses.replace(compile.compile_cubin(make_scale(2.0), **ARGUMENTS), identity="")
    with pytest.raises(ValueError, match="entries: .*no other process"):
        compile.save_bundle(tmp_path / "bundle", [cubin])


# --- what must be installed ---------------------------------------------------------------------------


def test_without_numba_cuda_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"numba-cuda.*numbaflash\[cuda13\]"):
        compile.compile_ptx(make_scale(2.0), **ARGUMENTS)
