"""The dropout pattern: the published generator, and a pure function of the pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

import numbaflash
from numbaflash.dropout import dropout_word, keep_pattern, philox, threshold
from numbaflash.jit import compile_plain

PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]
"""Counter, key and result of Philox-4x32-7 in Random123's file of known answers, tests/kat_vectors."""

u64 = np.uint64


def words(text):
    return [u64(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize("counter, key, answer", PUBLISHED)
def test_the_generator_gives_the_published_answers(counter, key, answer):
    for function in (philox, compile_plain(philox, njit)):
        assert list(function(*words(counter), *words(key))) == words(answer)


def reference_keep(p, seed, sequence, head, i, j):
    """The pattern of the module's docstring, on Python integers."""
    c, k = [i & ~8, j // 2, head, sequence], [seed % 2**32, seed >> 32]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[(2 if i & 8 else 0) + j % 2] >= round(p * 2**32)


index = st.integers(0, 2**31 - 1)


@given(st.floats(0, 0.999), st.integers(0, 2**64 - 1), index, index, index, index)
def test_every_form_of_the_pattern_is_one_function(p, seed, sequence, head, i, j):
    kept = reference_keep(p, seed, sequence, head, i, j)
    assert keep_pattern(p, seed, sequence, head, np.array(i), np.array(j)) == kept
    assert (dropout_word(u64(seed), u64(sequence), u64(head), u64(i), u64(j)) >= threshold(p)) == kept


def test_the_compiled_word_is_the_plain_one():
    compiled = compile_plain(dropout_word, njit)
    for pair in np.ndindex(20, 4):
        arguments = [u64(x) for x in (2**63 + 12345, 3, 7, *pair)]
        assert compiled(*arguments) == dropout_word(*arguments)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_pairs_is_p_in_every_residue(p):
    keep = keep_pattern(p, 1, 0, 0, np.arange(512)[:, None], np.arange(512))
    sigma = np.sqrt(p * (1 - p) / (32 * 256))
    for i, j in np.ndindex(16, 2):
        assert abs(keep[i::16, j::2].mean() - (1 - p)) < 5 * sigma


def test_seeds_heads_and_sequences_draw_unrelated_patterns():
    i, j = np.arange(128)[:, None], np.arange(128)
    patterns = [
        keep_pattern(0.5, s, n, h, i, j)
        for s, n, h in [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    ]
    for a in range(len(patterns)):
        for b in range(a):
            assert abs((patterns[a] == patterns[b]).mean() - 0.5) < 5 * 0.5 / 128


def test_the_threshold_never_drops_everything():
    assert threshold(0.0) == 0
    assert threshold(np.nextafter(1.0, 0.0)) == 2**32 - 1
    assert threshold(0.25) == 2**30


@pytest.mark.emulated
@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_attention_drops_what_the_pattern_says(backend, seed):
    n, m = min(70, backend.rows), min(150, backend.rows)
    q, k = np.zeros((2, 3, n, 1), np.float32), np.zeros((2, 3, m, 1), np.float32)
    keep = np.stack(
        [
            [keep_pattern(0.4, seed, b, h, np.arange(n)[:, None], np.arange(m)) for h in range(3)]
            for b in range(2)
        ]
    )
    for keys in range(0, m, 32):
        v = np.zeros((2, 3, m, 32), np.float32)
        for key in range(keys, min(m, keys + 32)):
            v[:, :, key, key - keys] = m
        out = numbaflash.attention(q, k, v, dropout_p=0.4, seed=seed, backend=backend.name)
        width = min(m, keys + 32) - keys
        np.testing.assert_array_equal(out[..., :width] != 0, keep[..., keys : keys + width])
        np.testing.assert_allclose(out[out != 0], 1 / 0.6, rtol=1e-5)


def test_dropout_is_after_the_lse(backend):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 8), dtype=np.float32)
    _, lse = numbaflash.attention(q, k, v, return_lse=True, backend=backend.name)
    _, dropped = numbaflash.attention(q, k, v, dropout_p=0.5, seed=0, return_lse=True, backend=backend.name)
    np.testing.assert_allclose(dropped, lse, rtol=1e-6)


def test_a_seed_without_dropout_changes_nothing(backend):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 8), dtype=np.float32)
    with_seed = numbaflash.attention(q, k, v, seed=7, backend=backend.name)
    np.testing.assert_array_equal(with_seed, numbaflash.attention(q, k, v, backend=backend.name))
