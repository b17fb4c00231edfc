"""bench.py: every subcommand runs, says what it measured, and notices what is wrong."""

import json
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from numbaflash import reference
from numbaflash.bench import cases, cli, cpu, environment, machine, peaks, peers, plain, timing
from numbaflash.bench.resident import peak_growth
from numbaflash.cpu.config import machine as vector_machine

BENCH = Path(__file__).parents[1] / "bench.py"
SMALL = [cpu.clip(case, 40) for case in cases.CASES]


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCH), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def measured(tmp_path: Path, *arguments: str) -> tuple[str, list[dict]]:
    file = tmp_path / "result.json"
    done = run(*arguments, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    described = document["machine"]
    assert described["cpu"] in done.stdout and described["package"] in done.stdout
    assert f"{described['vector_bits']} bits" in done.stdout
    assert f"numpy {np.__version__}" in done.stdout
    assert f"numbaflash {described['threads']['numbaflash']}" in done.stdout
    return done.stdout, document["rows"]


# ------------------------------------------------------------------------------------------------ subcommands


@pytest.mark.parametrize("subcommand", cli.SUBCOMMANDS)
def test_help_explains_every_subcommand(subcommand, capsys):
    for arguments in (["--help"], [subcommand, "--help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"    {subcommand} " in text and "--json FILE" in text and "--avx2" in text


@pytest.mark.slow
def test_cpu_times_both_passes_beside_numpy(tmp_path):
    text, rows = measured(
        tmp_path,
        "cpu",
        "batch8*",
        "decode-float32",
        "--peers",
        "numpy",
        "--tokens",
        "64",
        "--seconds",
        "0.01",
    )
    found = {(row["case"], row["pass"], row["who"]) for row in rows}
    for case, which in (
        ("batch8-n64-d32", cases.FORWARD),
        ("batch8-n64-d32", cases.BOTH),
        ("decode-float32", cases.FORWARD),
    ):
        assert {(case, which, "numbaflash"), (case, which, "numpy")} <= found
    for row in rows:
        assert row["milliseconds"] > 0 and row["percent"] > 0
        assert (row["ratio"] is None) == (row["who"] == "numbaflash")
        assert row["difference"] is None or row["difference"] < 1e-5
    assert "peak" in text and "GFLOP/s" in text and "GB/s" in text


@pytest.mark.slow
def test_accuracy_reports_every_dtype_and_result(tmp_path):
    _, rows = measured(tmp_path, "accuracy", "--tokens", "40", "--seeds", "1", "--peers", "numpy")
    assert {(row["dtype"], row["what"]) for row in rows} == {
        (dtype, what)
        for dtype in ("float64", "float32", "float16", "bfloat16")
        for what in ("out", "dq", "dk", "dv")
    }
    for row in rows:
        assert (
            0
            < row["rms"]
            <= row["max"]
            < 20 * float(np.finfo(np.float32).eps if row["dtype"] == "float32" else 1)
        )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_the_square_of_the_length_for_numpy_alone(tmp_path):
    _, rows = measured(tmp_path, "memory", "--quick", "--tokens", "1024", "2048", "--peers", "numpy")
    peak = {(row["who"], row["pass"], row["tokens"]): row["mib"] for row in rows}
    for which, arrays in (("forward", 1), ("forward+backward", 2)):
        scores = 2048 * 2048 * 4 / 2**20
        assert arrays * scores < peak["numpy", which, 2048] < (arrays + 1) * scores
        assert peak["numbaflash", which, 2048] < 0.6 * scores
        assert 3 < peak["numpy", which, 2048] / peak["numpy", which, 1024] < 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu", "no-such-case"], "no case is called 'no-such-case'"),
        (["cpu", "--peers", "tensorflow"], "--peers has 'tensorflow'"),
        (["cpu", "--json", "no/such/folder/x.json"], "the folder of no/such/folder/x.json does not exist"),
        (["cpu", "--plot", "x.jpg"], "--plot writes PNG files"),
        (["memory", "--threads", "0"], "--threads must be at least 1"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(arguments, message, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.py: ") and error.count("\n") == 1 and message in error


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_pictures_are_png_files(tmp_path):
    cpu_rows = [
        {"case": "a", "pass": which, "who": who, "ratio": None if who == "numbaflash" else 1.5}
        for which in cases.PASSES
        for who in ("numbaflash", "torch")
    ]
    accuracy_rows = [
        {"dtype": "float32", "causal": True, "what": what, "who": "numbaflash", "max": 1e-7}
        for what in ("out", "dq")
    ]
    memory_rows = [
        {"layer": "one", "pass": cases.BOTH, "who": "numpy", "tokens": n, "mib": n / 64} for n in (512, 1024)
    ]
    from numbaflash.bench import accuracy, memory

    for module, rows in ((cpu, cpu_rows), (accuracy, accuracy_rows), (memory, memory_rows)):
        path = tmp_path / f"{module.__name__}.png"
        module.plot(rows, str(path))
        assert path.read_bytes().startswith(b"\x89PNG")


# --------------------------------------------------------------------------------------- machine and settings


def test_a_forced_blas_kernel_is_a_warning_unless_avx2_forced_it(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    assert any("OPENBLAS_CORETYPE=Nehalem" in text for text in machine.warnings(avx2=False))
    assert not any("OPENBLAS_CORETYPE" in text for text in machine.warnings(avx2=True))
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    assert not any("OPENBLAS_CORETYPE" in text for text in machine.warnings(avx2=False))


def test_avx2_and_threads_hold_a_fresh_process_to_what_was_asked():
    try:
        environment.avx2_variables()
    except environment.UsageError:
        pytest.skip("no AVX2 here")
    done = run("cpu", "--list", "--avx2", "--threads", "1", "tiny")
    assert done.returncode == 0, done.stderr
    assert "256 bits, 16 registers" in done.stdout and "numbaflash 1" in done.stdout
    assert "ATEN_CPU_CAPABILITY=avx2" in done.stdout and "NUMBAFLASH_VECTOR_BITS=256" in done.stdout


# -------------------------------------------------------------------------------------------------- measuring


def test_peak_growth_sees_memory_that_is_given_back_before_the_call_ends():
    def call() -> float:
        return float(np.ones(4 << 20).sum())

    grown = peak_growth(call)
    if grown is None:
        pytest.skip("the operating system does not tell")
    assert 30 << 20 < grown < 40 << 20


def test_contestants_take_turns_in_alternating_order():
    calls = []
    slow = {name: (lambda name=name: (calls.append(name), timing.time.sleep(3e-3))) for name in "ABC"}
    times = timing.interleave(slow, budget=0.0)
    assert "".join(calls) == "AABBCC" + "ABC" + "CBA" + "ABC"
    assert [len(samples) for samples in times.values()] == [3, 3, 3]
    assert all(t >= 3e-3 for samples in times.values() for t in samples)


def test_a_ratio_is_the_median_over_turns():
    assert timing.ratio({"peer": [2.0, 9.0, 6.0], "ours": [1.0, 3.0, 3.0]}, "peer", "ours") == 2.0


@pytest.mark.parametrize("case", [case for case in SMALL if case.lengths is None], ids=lambda case: case.name)
def test_pairs_counted_are_those_the_dense_mask_shows(case):
    inputs = cases.make_inputs(case)
    visible = cases.dense_visibility(case._replace(mask=False), inputs._replace(mask=None))
    shape = case.batch, 1, case.n_q, case.keys
    shown = np.ones(shape, bool) if visible is None else np.broadcast_to(visible, shape)
    assert cases.visible_pairs(case) == shown.sum()


def test_operations_follow_the_usual_formula():
    case = cases.Case("x", batch=2, heads=3, n_q=10, n_k=20, head_dim=16)
    assert cases.operations(case, cases.FORWARD) == 4 * 2 * 3 * 10 * 20 * 16
    assert cases.operations(case, cases.BOTH) == 3.5 * cases.operations(case, cases.FORWARD)


def test_peaks_are_measured():
    assert peaks.fma_peak(32) > 1e8
    assert peaks.read_bandwidth(1 << 20) > 1e7


@pytest.mark.parametrize("keys", [16, 5000])
def test_decoding_is_compared_with_reading_keys_and_values(keys):
    case = cases.Case("x", heads=2, n_q=1, n_k=keys, passes=(cases.FORWARD,))
    (row,) = cpu.measure(case, cases.FORWARD, [], 0.02, 1, peers.Omissions())
    assert 0 < row["percent"] < 200


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 assembly")
@pytest.mark.parametrize(("bits", "suffix"), [(32, "ps"), (64, "pd")])
def test_the_peak_is_that_of_independent_full_width_multiply_adds(bits, suffix):
    code = peaks.fma_assembly(bits)
    register = {512: "%zmm", 256: "%ymm", 128: "%xmm"}[vector_machine().vector_bits]
    adds = [line for line in code.splitlines() if "vfm" in line and suffix in line and register in line]
    assert len({line.split()[-1] for line in adds}) >= 12  # each its own accumulator


# ------------------------------------------------------------------------------------------------------ peers


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_peer_computes_the_same_thing(case):
    inputs = cases.make_inputs(case)
    for which in case.passes:
        _, expected = peers.Numbaflash().attempt(case, inputs, which)
        for kind in peers.ALL:
            if kind.lacking():
                continue
            try:
                _, result = kind().attempt(case, inputs, which)
            except peers.Unsupported:
                continue
            if not case.dropout:
                assert cpu.difference(result, expected) <= cpu.AGREEMENT[case.dtype], kind.name


def test_a_peer_with_another_result_is_shown_as_such(capsys):
    class Wrong(peers.PlainNumPy):
        def arrays(self, case, result):
            return [1.01 * array for array in super().arrays(case, result)]

    case = cases.Case("x", heads=1, n_q=16, head_dim=8)
    rows = cpu.measure(case, cases.FORWARD, [Wrong()], 0.0, 1, peers.Omissions())
    assert [row["agrees"] for row in rows] == [True, False]
    assert "numpy DISAGREES" in capsys.readouterr().out


def test_a_floor_is_missed_below_it_and_only_there():
    assert cpu.missed({"floor": 1.2, "ratio": 1.19})
    assert not cpu.missed({"floor": 1.2, "ratio": 1.2})
    assert not cpu.missed({"floor": None, "ratio": None})


def test_a_peer_that_breaks_is_left_out_with_its_reason(capsys):
    class Broken(peers.Peer):
        name = "broken"

        def prepare(self, case, inputs, which):
            raise MemoryError("too large\nfor me")

    omitted = peers.Omissions()
    rows = cpu.measure(
        cases.Case("x", heads=1, n_q=8, head_dim=8), cases.FORWARD, [Broken()], 0.0, 1, omitted
    )
    assert [row["who"] for row in rows] == ["numbaflash"]
    omitted.show()
    assert "broken: MemoryError: too large  [x]" in capsys.readouterr().out


@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_and_its_gradients_match_the_oracle(causal):
    dout, q, k, v = np.random.default_rng(0).standard_normal((4, 2, 3, 20, 8))
    visible = np.tri(20, dtype=bool) if causal else None
    out, *gradients = plain.attention_and_gradients(dout, q, k, v, visible=visible)
    exact = (
        reference.attention(q, k, v, causal=causal)[0],
        *reference.attention_backward(dout, q, k, v, causal=causal),
    )
    for ours, theirs in zip((out, *gradients), exact, strict=True):
        np.testing.assert_allclose(ours, theirs.astype(float), atol=1e-13)
