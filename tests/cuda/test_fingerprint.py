"""Digests of functions: the same in every process, different for different code."""
import builtins
import math
import stat
import subprocess
import sys
from collections import namedtuple
from types import FunctionType

import numpy as np
import pytest
from numba import cuda, float32, types

from numbaflash.bench import ladder
from numbaflash.cuda import fingerprint, ptx
from numbaflash.cuda.forward_sm80 import ForwardConfig, make_forward
from numbaflash.visibility import tile_range

CONFIG = namedtuple("CONFIG", "factor")
GLOBAL_FACTOR = 2.0
digest = fingerprint.function_digest


def capturing(value):
    def kernel(x):
        x[0] = value
    return kernel


@pytest.mark.parametrize("one, other", [
    (1, 2), (1, 1.0), (1, True), (0.0, -0.0), ("a", b"a"), ((1, 2), [1, 2]), ((1, 2), (2, 1)),
    ((1,), ((1,),)), (CONFIG(1), (1,)), (CONFIG(1), CONFIG(2)), (None, ...), (float32, types.float64),
    (math.sin, math.cos), (np.float32(1), np.float64(1)), (np.zeros(2), np.zeros(3)),
    (np.zeros(2), np.ones(2)), (math, np),
    (ptx.ex2_approx, ptx.lg2_approx), ({"a": 1}, {"a": 2}), (frozenset("ab"), frozenset("ac")),
], ids=lambda value: type(value).__name__)  # a repr of a set differs between the workers of a run
def test_a_captured_value_counts_with_its_type(one, other):
    assert digest(capturing(one)) == digest(capturing(one))
    assert digest(capturing(one)) != digest(capturing(other))


def test_code_counts_but_not_its_place():
    def kernel(x):
        x[0] = 1
    first = digest(kernel), digest(kernel, lines=True)

    def kernel(x):
        x[0] = 1
    assert digest(kernel) == first[0] and digest(kernel, lines=True) != first[1]

    def kernel(x):
        x[0] += 1
    assert digest(kernel) != first[0]


def test_defaults_and_nested_functions_count():
    def make(default, inner_constant):
        def kernel(x, y=default):
            x[0] = (lambda z: z + y)(inner_constant)
        return kernel

    digests = {digest(make(a, b)) for a in (1, 2) for b in (3, 4)}
    assert len(digests) == 4


def test_globals_that_the_function_names_count(monkeypatch):
    def kernel(x):
        x[0] = GLOBAL_FACTOR

    before = digest(kernel)
    monkeypatch.setitem(globals(), "GLOBAL_FACTOR", 3.0)
    assert digest(kernel) != before


def test_a_copy_of_a_package_function_with_other_globals_is_another_function():
    def copy(**names):
        other = FunctionType(tile_range.__code__, {**tile_range.__globals__, **names}, "tile_range")
        other.__module__, other.__qualname__ = tile_range.__module__, tile_range.__qualname__
        return other

    name = next(name for name in tile_range.__code__.co_names if name in tile_range.__globals__
                or hasattr(builtins, name))
    assert digest(copy()) == digest(copy()) != digest(copy(**{name: 1}))


def test_options_of_a_dispatcher_count():
    def kernel(x):
        x[0] = 1

    assert digest(cuda.jit(kernel)) != digest(cuda.jit(kernel, fastmath=True))


def test_what_cannot_be_described_is_an_error_and_not_a_guess():
    for value in (object(), stat, pytest, lambda: stat):
        with pytest.raises(fingerprint.Unstable):
            digest(capturing(value))


def test_key_depends_on_every_source_file(tmp_path):
    (tmp_path / "package" / "deep").mkdir(parents=True)
    source = tmp_path / "package" / "deep" / "one.py"
    digests = set()
    for text in ("a = 1", "a = 2", "a = 22"):
        source.write_text(text)
        fingerprint.sources.cache_clear()
        digests.add(fingerprint.sources(str(tmp_path)))
    source.rename(source.with_name("two.py"))
    fingerprint.sources.cache_clear()
    digests.add(fingerprint.sources(str(tmp_path)))
    assert len(digests) == 4


def test_what_kernels_are_made_of_imports_nothing_whose_text_does_not_count():
    script = """if True:
        import importlib, sys
        from numbaflash.cuda import fingerprint
        for name in fingerprint._modules():
            importlib.import_module(name)
        print(sorted(name for name in sys.modules
                     if name.startswith("numbaflash.") and name not in fingerprint._modules()))
    """
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_a_kernel_beside_them_counts_by_its_code(monkeypatch):
    kernel = ladder.make_product()
    before = digest(kernel)
    monkeypatch.setattr(fingerprint, "_describe_code", lambda code, lines: "another")
    assert digest(kernel) != before


def test_kernels_of_this_package_have_a_digest_that_tells_configurations_apart():
    first, second = ForwardConfig(), ForwardConfig(block_k=32)
    digests = [fingerprint.function_digest(make_forward(config)) for config in (first, first, second)]
    assert digests[0] == digests[1] != digests[2]


def test_a_recursive_function_has_a_digest():
    def kernel(x):
        if x[0] > 0:
            kernel(x)

    assert fingerprint.function_digest(kernel) == fingerprint.function_digest(kernel)
