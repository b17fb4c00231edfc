"""bench.py gpu: its logic, on a pretended GPU with the CPU backend and a pretended clock."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import numbaflash
from numbaflash.bench import cli, contest, report
from numbaflash.bench.gpu import bench, bundle, cases, checks, device, measure, model, peers, steps
from numbaflash.cuda import variants

NAMES = [case.name for case in cases.CASES]


class FakeGpu(device.Gpu):
    """NumPy arrays, the CPU backend, and a clock that says how long each callable takes."""

    name, arch, backend, library = "pretended", "sm_90a", "cpu", "numpy"

    def __init__(self, clock=None):
        self.clock = clock or {}
        self.timed = []

    def upload(self, array):
        return array.copy()

    def host(self, array):
        return np.asarray(array)

    def synchronize(self):
        pass

    def seconds(self, call, repeats):
        self.timed.append(getattr(call, "who", "?"))
        return self.clock.get(getattr(call, "who", "?"), 1e-3)


class FakePeer(peers.Peer):
    """Dense attention in NumPy, off by a factor."""

    library, modules = "", ()

    def __init__(self, name, factor=1.0):
        self.name, self.factor = name, factor

    def prepare(self, case, arrays, direction, gpu):
        if case.packed:
            raise peers.Unsupported("no packed sequences")
        ours = peers.Numbaflash().prepare(case, arrays, direction, gpu)

        def call():
            result = ours()
            scaled = (
                tuple(x * self.factor for x in result) if isinstance(result, tuple) else result * self.factor
            )
            return scaled

        call.who = self.name
        return call


@pytest.fixture
def small(monkeypatch):
    """Cases of 64 tokens and 64 hidden columns."""
    for module in (cases, measure):
        monkeypatch.setattr(module, "TOKENS", 64)
        monkeypatch.setattr(module, "HIDDEN", 64)

    def attempt(self, case, arrays, direction, gpu, original=peers.Peer.attempt):
        call, result = original(self, case, arrays, direction, gpu)
        wrapped = lambda: call()  # noqa: E731
        wrapped.who = self.name
        return wrapped, result

    monkeypatch.setattr(peers.Peer, "attempt", attempt)


SMALL = cases.GpuCase("small", 32, 64, kind="float32")
FLOAT32 = checks.Check("one", "float32", 16, heads=2, kv_heads=1, n_q=20, n_k=30, options={"causal": True})


def run_of(gpu, *contestants, peak=2e12):
    pool = measure.Pool(gpu, np.random.default_rng(0), size=64 * 64)
    return measure.Run(gpu, list(contestants), pool, measure.Peaks(gpu, lambda gpu, kind: peak))


# --- cases ----------------------------------------------------------------------------------------


def test_cases_have_names_of_their_own_and_cover_what_is_asked_for():
    assert len(set(NAMES)) == len(NAMES)
    found = {(case.head_dim, case.causal, case.length) for case in cases.CASES if case.kind == "bfloat16"}
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    assert {(d, c, n) for d in (64, 128, 256) for c in (False, True) for n in lengths} <= found
    assert {case.kind for case in cases.CASES} == {"bfloat16", "float16", "tf32", "tf32x3", "float32"}
    for feature in ("packed", "window", "deterministic", "headline"):
        assert any(getattr(case, feature) for case in cases.CASES)
    assert any(case.group > 1 for case in cases.CASES)
    assert set(cases.QUICK) <= set(NAMES)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_case_has_16384_tokens_and_2048_columns(case):
    q, k, _, _ = case.shapes()
    assert np.prod(q) == 16384 * 2048 and np.prod(q) == case.group * np.prod(k)
    if case.packed:
        assert sum(case.lengths) == 16384 == case.offsets[-1] and min(case.lengths) > 0


def test_operations_follow_the_formula_of_the_papers():
    full = cases.GpuCase("", 128, 4096)
    assert full.flops("forward") == 4 * 4 * 16 * 4096**2 * 128
    assert full._replace(causal=True).flops("forward") == full.flops("forward") / 2
    assert full.flops("backward") == 2.5 * full.flops("forward")
    window = full._replace(causal=True, window=1024)
    assert window.flops("forward") == pytest.approx(full.flops("forward") * 1024 / 4096, rel=0.15)
    packed = full._replace(packed=True, length=2048)
    assert packed.flops("forward") == 4 * sum(n * n for n in packed.lengths) * 16 * 128


# --- measuring ------------------------------------------------------------------------------------


def test_contestants_take_turns_and_short_calls_are_repeated():
    gpu = FakeGpu({"a": 1e-3, "b": 1e-4})
    calls = {name: 0 for name in "ab"}

    def contestant(name):
        def call():
            calls[name] += 1

        call.who = name
        return call

    times = device.interleave(gpu, {name: contestant(name) for name in "ab"}, budget=0.0)
    assert gpu.timed == list("ababbaab")
    assert times == {"a": [1e-3] * 3, "b": [1e-4] * 3}
    assert device.ratio(times, "b", "a") == pytest.approx(0.1)


def test_a_case_gives_speed_share_of_peak_and_ratio_to_the_best_peer(small):
    gpu = FakeGpu({"numbaflash": 2e-3, "slow": 8e-3, "fast": 1e-3})
    run = run_of(gpu, FakePeer("slow"), FakePeer("fast"), peak=1e9)
    ours, slow, fast = run.measure(SMALL, "forward")
    flops = 4 * 2 * 64 * 64 * 32
    assert ours["who"] == "numbaflash" and ours["best"] == "fast" and ours["ratio"] == pytest.approx(0.5)
    assert ours["teraflops"] == pytest.approx(flops / 2e-3 / 1e12) and ours["percent"] == pytest.approx(
        100 * flops / 2e-3 / 1e9
    )
    assert slow["ratio"] is None and fast["difference"] == 0 and run.good


def test_backward_is_measured_with_the_saved_forward(small):
    rows = run_of(FakeGpu(), FakePeer("peer")).measure(SMALL, "backward")
    assert [row["direction"] for row in rows] == ["backward"] * 2 and rows[1]["difference"] == 0


def test_a_peer_alone_in_its_result_is_not_the_best(small):
    gpu = FakeGpu({"wrong": 1e-6})
    run = run_of(gpu, FakePeer("right"), FakePeer("wrong", 1.5))
    rows = {row["who"]: row for row in run.measure(SMALL, "forward")}
    assert rows["wrong"]["verdict"] == "DIFFERS" and rows["numbaflash"]["best"] == "right" and run.good


def test_when_nobody_agrees_with_us_we_are_wrong(small):
    run = run_of(FakeGpu(), FakePeer("one", 1.5), FakePeer("two", 1.5))
    assert run.measure(SMALL, "forward")[0]["verdict"] == "WRONG" and not run.good


def test_nan_in_a_result_is_a_difference():
    gpu, ones = FakeGpu(), np.ones(8)
    assert measure.difference(gpu, np.full(8, np.nan), ones) == float("inf")
    assert measure.difference(gpu, (ones, ones * 1.1), (ones, ones)) == pytest.approx(0.1)


def test_what_is_not_measured_is_named(small):
    run = run_of(FakeGpu(), FakePeer("peer"))
    run.measure(SMALL._replace(packed=True), "forward")
    run.all((SMALL,), budget=-1.0)
    assert run.omitted[("peer", "no packed sequences")] == ["small forward"]
    assert run.omitted[("everyone", "out of time")] == ["small forward", "small backward"]


def test_a_peer_that_compiles_for_long_leaves_time_to_the_others(small, monkeypatch):
    monkeypatch.setattr(measure, "PREPARE_SECONDS", 0.0)
    run = run_of(FakeGpu(), FakePeer("slow"))
    assert len(run.measure(SMALL, "forward")) == 2
    assert len(run.measure(SMALL, "forward")) == 1
    assert run.omitted == {("slow", "took too long to compile before"): ["small forward"]}


def test_a_case_that_we_cannot_run_is_a_failure(small, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(numbaflash, "attention", refuse)
    run = run_of(FakeGpu())
    assert run.measure(SMALL, "forward") == [] and not run.good
    assert run.omitted == {("numbaflash", "RuntimeError: no such kernel"): ["small forward"]}


def test_the_peak_is_measured_once_and_else_from_the_data_sheet():
    asked = []
    peaks = measure.Peaks(FakeGpu(), lambda gpu, kind: asked.append(kind))
    peak, source = peaks.of("bfloat16")
    assert peak == pytest.approx(613e12, rel=0.01) and source == "data sheet of H200"
    assert peaks.of("tf32x3") == peaks.of("tf32") == (pytest.approx(peak / 2), source)
    assert asked == ["bfloat16", "tf32"]
    unknown = FakeGpu()
    unknown.arch = "sm_121"
    assert measure.Peaks(unknown, lambda gpu, kind: None).of("bfloat16") == (None, "unknown")


def test_host_time_is_measured_for_everyone(small):
    rows = measure.host_overhead(FakeGpu(), [FakePeer("peer")], calls=2)
    assert [(row["direction"], row["who"]) for row in rows] == [
        (direction, who) for direction in cases.DIRECTIONS for who in ("numbaflash", "peer")
    ]
    assert all(row["microseconds"] > 0 for row in rows)


def test_peers_that_are_missing_are_named_with_what_they_need(monkeypatch):
    monkeypatch.setattr(contest, "find_spec", lambda name: None)
    present, missing = peers.find(FakeGpu())
    assert present == [] and set(missing) == {peer.name for peer in peers.PEERS}
    assert missing["flash-attn"] == "needs torch, flash_attn"


def test_peers_of_torch_need_tensors():
    assert "torch with CUDA" in peers.SdpaFlash().missing(
        FakeGpu()
    ) or "needs torch" in peers.SdpaFlash().missing(FakeGpu())


@pytest.fixture
def torch_on_the_host():
    pytest.importorskip("torch")

    class TorchHost(device.TorchGpu):
        device, backend = "cpu", "cpu"

        def synchronize(self):
            pass

        def seconds(self, call, repeats):
            call()
            return 1e-3

    return TorchHost("sm_90a")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_go_there_and_back_unchanged(torch_on_the_host, dtype):
    x = (
        np.random.default_rng(0)
        .standard_normal((3, 4))
        .astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    )
    there = torch_on_the_host.upload(x)
    assert str(there.dtype) == f"torch.{dtype}"
    np.testing.assert_array_equal(torch_on_the_host.host(there), x.astype(np.float32))


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"group": 2, "causal": True}], ids=str)
def test_torch_computes_the_same_cases(small, torch_on_the_host, direction, changes):
    case, gpu = SMALL._replace(**changes), torch_on_the_host
    pool = measure.Pool(gpu, np.random.default_rng(0), size=64 * 64)
    run = measure.Run(gpu, [peers.SdpaMath()], pool, measure.Peaks(gpu, lambda gpu, kind: 1e12))
    ours, theirs = run.measure(case, direction)
    assert run.good and theirs["who"] == "torch-math" and theirs["difference"] < 1e-5, run.omitted


@pytest.mark.parametrize(
    "check", [FLOAT32, FLOAT32._replace(options=checks.EVERYTHING)], ids=str
)
def test_checks_take_tensors(torch_on_the_host, check):
    row = checks.run_check(check, torch_on_the_host, np.random.default_rng())
    assert row["verdict"] == "ok"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"packed": True}, "no windows or packed"),
        ({"window": 3}, "no windows"),
        ({"kind": "float16"}, "not for float16"),
    ],
)
def test_a_peer_says_what_it_cannot_do(torch_on_the_host, changes, reason):
    with pytest.raises(peers.Unsupported, match=reason):
        peers.SdpaMath().attempt(SMALL._replace(**changes), (None,) * 4, "forward", torch_on_the_host)


def test_scores_that_fill_the_memory_are_not_tried(torch_on_the_host):
    with pytest.raises(peers.Unsupported, match="too many scores"):
        peers.SdpaMath().attempt(
            cases.GpuCase("", 64, 16384, kind="float32"), (None,) * 4, "forward", torch_on_the_host
        )


def test_the_peak_of_products_is_measured(torch_on_the_host):
    assert peers.matmul_peak(torch_on_the_host, "float32", size=16) == 2 * 16**3 / 1e-3
    assert peers.matmul_peak(FakeGpu(), "float32") is None


# --- checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "check",
    [
        FLOAT32,
        FLOAT32._replace(strided=True),
        FLOAT32._replace(packed=(5, 1, 9)),
        FLOAT32._replace(options=checks.EVERYTHING),
        FLOAT32._replace(kind="tf32"),
    ],
    ids=["causal", "strided", "packed", "everything", "tf32"],
)
def test_a_right_result_passes_its_check(check):
    row = checks.run_check(check, FakeGpu(), np.random.default_rng())
    assert row["verdict"] == "ok" and 0 <= row["used"] <= 1


def test_a_row_that_no_kernel_writes_is_noticed(monkeypatch):
    original = numbaflash.attention

    def lazy(*arguments, **options):
        out, lse = original(*arguments, **options)
        out[0, 0, 3] = np.nan
        return out, lse

    monkeypatch.setattr(numbaflash, "attention", lazy)
    row = checks.run_check(FLOAT32, FakeGpu(), np.random.default_rng())
    assert "out off by nan" in row["verdict"]


def test_an_error_beyond_the_rule_is_noticed(monkeypatch):
    original = numbaflash.attention_backward

    def wrong(*arguments, **options):
        gradients = original(*arguments, **options)
        gradients.dk[0, 0, 0, 0] += 1e-3
        return gradients

    monkeypatch.setattr(numbaflash, "attention_backward", wrong)
    verdict = checks.run_check(FLOAT32, FakeGpu(), np.random.default_rng())["verdict"]
    assert verdict.startswith("dk off by") and ";" not in verdict


def test_an_exception_is_a_verdict():
    row = checks.run_check(FLOAT32._replace(kv_heads=3), FakeGpu(), np.random.default_rng())
    assert row["verdict"].startswith("ValueError")


def test_poison_is_taken_away_again():
    from numbaflash.arrays import NUMPY

    x = np.ones((1, 1, 4, 4), np.float32)
    with device.poisoned(FakeGpu(), x):
        assert np.isnan(NUMPY.empty((3,), np.dtype(np.float32), x)[0]).all()
    assert "empty" not in vars(NUMPY)


def test_tf32_keeps_ten_bits():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    rounded = checks.to_tf32(x)
    assert not (rounded.view(np.uint32) & 0x1FFF).any()
    assert (np.abs(rounded - x) <= 2.0**-11 * np.abs(x) * (1 + 1e-6)).all()


def test_checks_are_of_every_kind():
    kinds = {check.kind for check in checks.CHECKS}
    assert kinds == {"bfloat16", "float16", "tf32", "tf32x3", "float32", "float64"}
    assert len({check.name for check in checks.CHECKS}) == len(checks.CHECKS)


# --- the command line -----------------------------------------------------------------------------


def parsed(*arguments):
    return cli.parser().parse_args(["gpu", *arguments])


def test_without_a_gpu_the_command_says_so_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(device, "gpu_is_usable", lambda: False)
    assert cli.main(["gpu"]) == 2
    error = capsys.readouterr().err
    assert "no NVIDIA GPU" in error and "--make-bundle" in error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--make-bundle", "x", "--arch", "sm_1"], "--arch knows sm_75"),
        (["--make-bundle", "no/such/folder/x"], "the folder of"),
        (["--make-bundle", "x", "nothing-like-this"], "no case has nothing-like-this"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, message, capsys):
    assert cli.main(["gpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_keeps_rows_seed_and_what_is_missing(small, tmp_path, monkeypatch, capsys):
    gpu = FakeGpu()
    monkeypatch.setattr("numbaflash.bench.gpu.prepare", lambda arguments, gpu: "as they are")
    monkeypatch.setattr(
        "numbaflash.bench.gpu._chosen", lambda arguments: (SMALL._replace(name="d32-full-64"),)
    )
    monkeypatch.setattr("numbaflash.bench.gpu._checks", lambda arguments: [FLOAT32])
    monkeypatch.setattr(measure, "CALLS", 2)
    pool = measure.Pool(gpu, np.random.default_rng(0), size=64 * 64)
    peaks = measure.Peaks(gpu, lambda gpu, kind: 1e12)
    rows, good = bench(parsed(), gpu, tmp_path, [FakePeer("peer")], peaks, pool)
    assert good
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["rows"] == rows and document["gpu"]["gpu"] == "pretended" and document["seed"] >= 0
    text = capsys.readouterr().out
    assert "TFLOP/s" in text and "d32-full-64" in text and "host time per call" in text


def test_a_failing_check_makes_the_run_fail(monkeypatch, tmp_path):
    monkeypatch.setattr("numbaflash.bench.gpu.prepare", lambda arguments, gpu: "")
    monkeypatch.setattr("numbaflash.bench.gpu._checks", lambda arguments: [FLOAT32._replace(kv_heads=3)])
    assert not bench(parsed("--checks", "all"), FakeGpu(), None, [])[1]


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    from numbaflash.bench.gpu import plot

    rows = [
        {
            "case": "d64-full-512",
            "kind": "bfloat16",
            "who": who,
            "length": n,
            "causal": causal,
            "direction": direction,
            "head_dim": 64,
            "teraflops": 100.0 + n,
        }
        for who in ("numbaflash", "torch-flash")
        for n in (512, 1024)
        for causal in (False, True)
        for direction in cases.DIRECTIONS
    ]
    plot(rows, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# --- all steps ------------------------------------------------------------------------------------


class Ended:
    def __init__(self, returncode):
        self.returncode = returncode


def test_steps_fit_into_six_minutes_and_name_what_they_lack(tmp_path, monkeypatch):
    monkeypatch.setattr(steps.shutil, "which", lambda name: None)
    wanted = steps.steps(tmp_path, "sm_90a", "kernels.bundle")
    made = steps.steps(tmp_path, "sm_90a")
    assert wanted[0].missing and made[0].missing == "" and str(tmp_path / "kernels.bundle") in made[0].command
    assert sum(step.seconds for step in wanted) < 360
    assert {step.name: step.missing for step in wanted if "check" in step.name} == {
        "memcheck": "needs compute-sanitizer",
        "racecheck": "needs compute-sanitizer",
    }
    assert any("kernels.bundle" in step.command for step in wanted)


@pytest.mark.parametrize(
    "status, verdict, good",
    [
        (0, "ok", True),
        (1, "FAILED: exit status 1; see one.log", False),
        (5, "left out: no tests selected", True),
    ],
)
def test_a_step_is_judged_by_its_exit_status(tmp_path, status, verdict, good):
    one = [steps.Step("one", ("pytest",), 5), steps.Step("two", (), 5, "needs luck")]
    rows, right = steps.run_all(tmp_path, one, lambda *a, **k: Ended(status))
    assert rows[0]["verdict"] == verdict and rows[1]["verdict"] == "left out: needs luck" and right == good
    assert json.loads((tmp_path / "checks.json").read_text())["good"] == good


def test_a_step_that_takes_too_long_fails_and_its_output_is_kept(tmp_path):
    script = "import time; print('here', flush=True); time.sleep(60)"
    slow = steps.Step("slow", (sys.executable, "-c", script), 1.5)
    rows, good = steps.run_all(tmp_path, [slow])
    assert not good and rows[0]["verdict"].startswith("FAILED: more than")
    assert (tmp_path / "slow.log").read_text() == "here\n"


def test_the_package_has_the_command_line_too():
    done = subprocess.run(
        [sys.executable, "-m", "numbaflash.bench", "gpu", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--make-bundle" in done.stdout


# --- kernels --------------------------------------------------------------------------------------


def test_kernels_are_planned_without_a_gpu_and_each_is_there_once():
    wanted = bundle.jobs(["sm_90a"], ["d64-full-512", "d64-full-1024", "float32-d64-full-4096"])
    specs = [bundle.plan_of(job.call, job.direction, job.arch).launches[job.launch].kernel for job in wanted]
    assert len({id(spec.function) for spec in specs}) == len(specs)
    names = " ".join(spec.name for spec in specs)
    assert (
        "forward_sm80_d64_bfloat16" in names and "forward_simt_float32" in names and "backward_keys" in names
    )


def test_a_case_is_planned_as_a_call_on_the_gpu_plans_it():
    """Uploaded arrays are contiguous; so are those that are planned here."""
    case = next(case for case in cases.CASES if case.packed)
    (launch,) = bundle.plan_of(case.name, "forward", "sm_90a").launches
    call = launch.arguments[0]
    assert call.q.row == 2048 * 2 and call.out.row == 2048 * 2
    assert ml_dtypes.bfloat16 == case.dtype


# --- model ----------------------------------------------------------------------------------------


def test_the_model_is_held_against_what_was_measured(monkeypatch):
    def measure_kernel(kernel):
        one = variants.VARIANTS[kernel.variant]
        known = {"arch": kernel.arch, "variant": kernel.variant, "direction": one.direction, "dim": one.dim}
        return known | {"style": one.style, "clocks": 826.0, "pairs": 128 * 64}

    monkeypatch.setattr(model.bounds, "measure", measure_kernel)
    row = {"case": "d64-full-16384", "direction": "forward", "who": "numbaflash", "teraflops": 306.5}
    (held,), reason = model.against_model("sm_90a", [row], cases.CASES)
    assert reason == "" and held["model"] == "tensor-forward-bfloat16-d64-plain"
    assert held["percent"] == pytest.approx(50, abs=0.1)
    assert model.against_model("sm_90a", [], cases.CASES) == ([], "none of its cases was measured")
    assert model.against_model("sm_121", [row], cases.CASES) == ([], "no rates are known for sm_121")


def test_every_kernel_of_the_model_but_one_has_a_case():
    named = {model.case_of(variants.VARIANTS[name]) for name in model.bounds.PATTERNS}
    assert named - set(NAMES) == {"deterministic-d128-full-16384"}


def test_without_a_disassembler_the_reason_is_told(monkeypatch):
    def refuse(kernel):
        raise report.UsageError("needs nvdisasm")

    monkeypatch.setattr(model.bounds, "measure", refuse)
    row = {"case": "d64-full-16384", "direction": "forward", "who": "numbaflash", "teraflops": 306.5}
    assert model.against_model("sm_90a", [row], cases.CASES) == ([], "needs nvdisasm")
