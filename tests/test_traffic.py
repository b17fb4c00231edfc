"""Bytes that attention kernels move: counted in the emulator, equal to the formulas, and what follows."""

import numpy as np
import pytest

from numbaflash import reference
from numbaflash.bench import cli, ladder, movement, report, traffic

SHAPES = [(64, 32), (33, 8), (40, 72)]


def arrays(n: int, d: int) -> np.ndarray:
    """q, k, v and dout."""
    return np.random.default_rng(n + d).standard_normal((4, n, d), dtype=np.float32)


def one_head(*tensors: np.ndarray) -> list[np.ndarray]:
    return [tensor[None, None] for tensor in tensors]


def moved(work) -> movement.Moved:
    reports = ladder.count(work)
    total = sum(reports[1:], reports[0])
    return movement.Moved(total.global_load.bytes, total.global_store.bytes, total.dram_bytes)


@pytest.mark.parametrize("n, d", SHAPES)
def test_standard_attention_and_its_gradients_are_right_and_move_what_the_formulas_say(n, d):
    q, k, v, dout = arrays(n, d)
    out, dq, dk, dv = (np.full_like(q, np.nan) for _ in range(4))
    work = ladder.standard(q, k, v, out)
    found = moved(work)
    np.testing.assert_allclose(out, reference.attention(*one_head(q, k, v))[0][0, 0], atol=2e-6)
    gradients = ladder.standard_backward(q, k, v, dout, work[1].arguments[1], dq, dk, dv)
    found_backward = moved(gradients)
    exact = reference.attention_backward(*one_head(dout, q, k, v))
    for result, truth in zip((dq, dk, dv), exact):
        np.testing.assert_allclose(result, truth[0, 0], atol=5e-6)
    for counted, formula in (
        (found, movement.standard(n, d)),
        (found_backward, movement.standard_backward(n, d)),
    ):
        assert counted[:2] == formula[:2]
        if n % 8 == 0:
            assert counted == formula


@pytest.mark.parametrize("n, d", SHAPES)
def test_one_row_per_block_is_right_and_moves_what_the_formula_says(n, d):
    q, k, v, _ = arrays(n, d)
    out = np.full_like(q, np.nan)
    assert moved(ladder.one_row(q, k, v, out)) == movement.one_row(n, d)
    np.testing.assert_allclose(out, reference.attention(*one_head(q, k, v))[0][0, 0], atol=2e-6)


def test_without_rescaling_exactly_the_rows_whose_maximum_grows_later_are_wrong():
    q, k, v, _ = arrays(130, 16)
    out = np.full_like(q, np.nan)
    ladder.count(ladder.one_row(q, k, v, out, rescale=False))
    wrong = np.abs(out - reference.attention(*one_head(q, k, v))[0][0, 0]).max(axis=1) > 2e-6
    tops = (q @ k.T).reshape(130, 130)
    grows = tops[:, : ladder.KEYS].max(axis=1) < tops.max(axis=1)
    assert grows.any() and not grows.all()
    np.testing.assert_array_equal(wrong, grows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        traffic.Case("tiled", traffic.FORWARD, 128),
        traffic.Case("tiled", traffic.FORWARD, 128, tiles=(4, 8, 1)),
        traffic.Case("tiled", traffic.BACKWARD, 128, 32),
        traffic.Case("standard", traffic.BACKWARD, 64),
    ],
    ids=str,
)
def test_counters_equal_formulas_to_the_byte_and_stores_are_whole_sectors(case):
    row = traffic.measure(case)
    assert row["exact"] and row["verdict"] == "equal"
    assert row["store_excess"] <= traffic.STORE_EXCESS


def test_at_1024_flash_moves_sixteen_times_less_than_standard_attention():
    ours, theirs = movement.tiled(1024, 64), movement.standard(1024, 64)
    assert theirs.distinct >= 16 * ours.distinct
    assert (ours.distinct, theirs.distinct) == (1_052_736, 17_825_792), "as counted"
    assert movement.standard(4096, 64).distinct >= 64 * movement.tiled(4096, 64).distinct


def test_traffic_is_inversely_proportional_to_the_tile_of_queries():
    n, d = 4096, 64
    streamed = {movement.shape_of(tiles).rows: movement.tiled(n, d, tiles).loads for tiles in traffic.TILES}
    assert sorted(streamed) == [16, 32, 64, 128]
    assert streamed[16] / streamed[128] == pytest.approx(8, rel=0.02)


def a_row(kernel: str, **changes) -> dict:
    n, d = 1024, 64
    found = getattr(movement, kernel)(n, d)
    return {
        "kernel": kernel,
        "pass": traffic.FORWARD,
        "n": n,
        "d": d,
        "block_q": 64,
        **found._asdict(),
        "sectors": found.total,
        "store_excess": 1.0,
        "good": True,
        "exact": True,
    } | changes


def test_promises_are_kept_or_told(capsys):
    standard, tiled = a_row("standard"), a_row("tiled")
    assert traffic.headline([standard, tiled])
    assert "16.9x fewer" in capsys.readouterr().out
    assert not traffic.headline([standard, tiled | {"store_excess": 1.2}])
    assert "BROKEN PROMISE: stores" in capsys.readouterr().out
    assert not traffic.headline([standard, tiled | {"distinct": 2 * tiled["distinct"]}])
    assert "BROKEN PROMISE: at least 16x" in capsys.readouterr().out


def test_a_formula_that_does_not_hold_makes_the_command_fail(monkeypatch, capsys):
    def wrong(case):
        return a_row("tiled", good=False, exact=False)

    monkeypatch.setattr(traffic, "measure", wrong)
    arguments = cli.parser().parse_args(["traffic", "--quick"])
    _, good = traffic.run(arguments)
    assert not good and "DO NOT AGREE" in capsys.readouterr().out


def test_every_claim_is_answered_with_numbers(monkeypatch, capsys):
    monkeypatch.setattr(traffic, "measure", lambda case: a_row("tiled"))
    _, good = traffic.run(cli.parser().parse_args(["traffic", "--quick"]))
    text = capsys.readouterr().out
    assert good
    for words in ("O(N^2 D^2 / M)", "87%", "16.8 MB", "268.4 MB", "block_q", "64.7x fewer", "98.5% fewer"):
        assert words in text


def test_a_missing_compiler_is_told(monkeypatch):
    def missing():
        raise ImportError("needs numba-cuda")

    monkeypatch.setattr(traffic, "require_numba_cuda", missing)
    with pytest.raises(report.UsageError, match="numba-cuda"):
        traffic.run(cli.parser().parse_args(["traffic", "--quick"]))
