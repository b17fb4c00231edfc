"""Tile sizes by hand and by measurement: same results, honest winners, files that never hurt."""

import json
import threading

import numpy as np
import pytest

import numbaflash
from numbaflash import tuning
from numbaflash.cpu import backward as cpu_backward
from numbaflash.cpu import forward as cpu_forward
from numbaflash.options import Options
from numbaflash.problem import make_problem
from numbaflash.tuning import DEFAULT, CPUConfig


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBAFLASH_TUNING_DIR", str(tmp_path))
    tuning._forget()
    yield tmp_path
    tuning._forget()


def arrays(n_q=300, n_k=300, heads=2, dim=32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, heads, n, dim), dtype=np.float32) for n in (n_q, n_k, n_k)]


def where(direction="forward", n_q=300):
    return tuning.situation(direction, make_problem(*arrays(n_q), Options()), 2)


# -------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("bad, error", [(0, ValueError), (-3, ValueError), (5000, ValueError), (True, TypeError),
                                        (1.5, TypeError), ("64", TypeError)])
def test_a_config_checks_itself(bad, error):
    with pytest.raises(error, match="block_k must be"):
        CPUConfig(block_k=bad)


def test_a_config_cannot_change_and_compares_by_value():
    config = CPUConfig(block_q=32)
    with pytest.raises(AttributeError):
        config.block_q = 64
    assert {config: 1}[CPUConfig(block_q=32)] == 1 and config != DEFAULT


def test_other_backends_take_no_config():
    with pytest.raises(NotImplementedError, match="config"):
        numbaflash.attention(*arrays(), backend="emulator", config=DEFAULT)


@pytest.mark.parametrize("config", [CPUConfig(block_q=1, block_k=1), CPUConfig(block_q=200, block_k=333),
                                    CPUConfig(block_k=100, part_keys=1), CPUConfig(part_keys=1 << 40)])
@pytest.mark.parametrize("n_q", [2, 300])
def test_tile_sizes_change_nothing_but_rounding(config, n_q):
    q, k, v = arrays(n_q)
    expected = numbaflash.attention(q, k, v, causal=True, backend="cpu", config=DEFAULT)
    got = numbaflash.attention(q, k, v, causal=True, backend="cpu", config=config)
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("sizes", [(1, 1), (7, 200), (500, 33)])
def test_backward_tile_sizes_change_nothing_but_rounding(sizes):
    q, k, v = arrays()
    config = CPUConfig(backward_block_q=sizes[0], backward_block_k=sizes[1])
    results = []
    for choice in (DEFAULT, config):
        out, vjp = numbaflash.attention_vjp(q, k, v, causal=True, backend="cpu", config=choice)
        results.append(tuple(vjp(out)))
    for got, expected in zip(results[1], results[0]):
        np.testing.assert_allclose(got, expected, atol=1e-5)


# ------------------------------------------------------------------------------------------------- measuring


class Stopwatch:
    """Time that passes only while a call runs."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def call(self, *seconds):
        """A call that takes these seconds, one after the other, again and again."""
        turns = iter(range(1 << 30))

        def work():
            self.now += seconds[next(turns) % len(seconds)]

        return work


FAST, SLOW = CPUConfig(block_q=1), CPUConfig(block_q=2)


def winner(default, fast, slow=(9.0,)):
    watch, steps = Stopwatch(), []
    calls = {DEFAULT: watch.call(*default), FAST: watch.call(*fast), SLOW: watch.call(*slow)}
    best = tuning.fastest(calls, 4, lambda: steps.append(1), watch)
    assert len(steps) == 12
    return best


def test_the_fastest_wins():
    assert winner([2.0], [1.0]) == FAST


def test_a_small_gain_leaves_the_default_in_place():
    assert winner([1.02], [1.0]) == DEFAULT


def test_luck_in_the_first_turns_does_not_win():
    assert winner([2.0], [1.0] * 4 + [2.5] * 8) == DEFAULT


def test_alternatives_are_valid_and_differ_from_the_default():
    for direction, few, default in [
        ("forward", False, dict(block_q=192, block_k=128)), ("forward", True, dict(block_k=48, part_keys=1 << 20)),
        ("backward", False, dict(backward_block_q=96, backward_block_k=1)),
    ]:
        found = list(tuning.candidates(direction, few, default))
        assert CPUConfig(**default) not in found and len(set(found)) == len(found) >= 5


# ------------------------------------------------------------------------------------------------- the files


def test_what_is_kept_is_found_again(folder):
    tuning.store(where(), FAST)
    assert tuning.load(where()) == FAST and tuning.load(where("backward")) is None
    tuning.store(where(), SLOW)
    assert tuning.load(where()) == SLOW
    assert all(path.suffix == ".json" for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", "7", '"text"', "\x00\xff", "[" * 100_000,
    json.dumps({"format": 0, "situation": list(where()), "config": {}}),
    json.dumps({"format": 1, "situation": list(where("backward")), "config": {}}),
    json.dumps({"format": 1, "situation": list(where()), "config": {"block_q": -1}}),
    json.dumps({"format": 1, "situation": list(where()), "config": {"block_z": 1}}),
    json.dumps({"format": 1, "situation": list(where()), "config": 3}),
])
def test_files_that_cannot_be_trusted_are_ignored(folder, text):
    tuning.store(where(), FAST)
    (path,) = folder.rglob("*.json")
    path.write_text(text, encoding="latin-1")
    assert tuning.load(where()) is None


def test_writers_and_readers_at_once_see_whole_files(folder):
    configs = [CPUConfig(block_q=size) for size in range(1, 5)]
    seen, failures = set(), []

    def work(config):
        try:
            for _ in range(40):
                tuning.store(where(), config)
                seen.add(tuning.load(where()))
        except Exception as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work, args=(config,)) for config in configs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures and seen <= set(configs)


def test_later_calls_take_the_winner(folder, monkeypatch):
    q, k, v = arrays()
    problem = make_problem(q, k, v, Options())

    def fastest(calls, turns, step):
        backward = any(config.backward_block_q for config in calls)
        return CPUConfig(backward_block_q=48) if backward else CPUConfig(block_k=48)

    monkeypatch.setattr(tuning, "fastest", fastest)
    numbaflash.attention(q, k, v, backend="cpu")
    config = numbaflash.autotune(q, k, v, backward=True, turns=3, progress=False)
    assert config == CPUConfig(block_k=48, backward_block_q=48)
    assert cpu_forward.tile_sizes(problem)["block_k"] == 48
    assert cpu_forward.prepare(problem).plan.block_k == 48
    assert cpu_backward.tile_sizes(problem)["backward_block_q"] == 48
    by_hand = make_problem(q, k, v, Options(config=CPUConfig(block_k=96)))
    assert cpu_forward.tile_sizes(by_hand)["block_k"] == 96


def test_autotune_measures_and_returns_a_config(folder, capsys):
    config = numbaflash.autotune(*arrays(40, 60), turns=3)
    assert isinstance(config, CPUConfig)
    assert "autotune" in capsys.readouterr().err
    assert len(list(folder.rglob("*.json"))) == 1


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBAFLASH_TUNING_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be kept"):
        numbaflash.autotune(*arrays(40, 60), turns=3, progress=False)


@pytest.mark.parametrize("turns", [2, 0, 1.5, None])
def test_autotune_wants_enough_turns(turns):
    with pytest.raises(ValueError, match="turns"):
        numbaflash.autotune(*arrays(), turns=turns)


# --------------------------------------------------------------------------------------------------- warmup


def test_warmup_compiles_what_calls_need():
    ready = numbaflash.warmup(["float32"], passes=("forward", "decode"))
    assert [(kernel.which, kernel.dtype, kernel.options) for kernel in ready] == [
        ("forward", "float32", False), ("decode", "float32", False)]
    assert max(kernel.seconds for kernel in numbaflash.warmup("float32", passes=["forward", "decode"])) < 0.1


@pytest.mark.parametrize("arguments, error, match", [
    (dict(dtypes="int32"), TypeError, "dtypes"), (dict(dtypes=[None]), TypeError, "dtypes"),
    (dict(passes="sideways"), ValueError, "passes"), (dict(options=1), TypeError, "options"),
])
def test_warmup_names_what_is_wrong(arguments, error, match):
    with pytest.raises(error, match=match):
        numbaflash.warmup(**arguments)
