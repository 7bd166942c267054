"""Sampled segmentations against exact distributions by enumeration and against SentencePiece; reproducibility."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections import Counter
from typing import Literal

import pytest
import sentencepiece

from deepnmt import config
from deepnmt.data.subword_variants import SAMPLERS, BpeDropout, UnigramSampling
from deepnmt.data.vocab import SPACE, Vocabulary, train_vocabulary
from deepnmt.tokens import UNK

Kind = Literal["bpe", "unigram"]
KINDS = pytest.mark.parametrize("kind", ["bpe", "unigram"])
WORDS = ["".join(parts) for parts in itertools.product(("b", "kl", "st", "m", "tr"), ("an", "ei", "o", "u"),
                                                           ("da", "ten", "s", "", "ro"))]
LINES = [" ".join(WORDS[(i * step) % len(WORDS)] for step in (1, 7, 11, 5)) for i in range(1, 200)]


def _vocab(kind: Kind, size: int = 60, byte_fallback: bool = False) -> Vocabulary:
    return Vocabulary(train_vocabulary(LINES, config.Vocab(kind=kind, size=size, byte_fallback=byte_fallback)))


def _assert_distributed(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> None:
    """Every count is within 4.5 standard deviations of its expectation, and nothing impossible is counted."""
    total = sum(counts.values())
    assert set(counts) <= set(expected) and sum(expected.values()) == pytest.approx(1.0, abs=1e-9)
    for ids, p in expected.items():
        assert abs(counts[ids] - total * p) <= 4.5 * math.sqrt(total * p * (1 - p)) + 1


def _dropout_distribution(vocab: Vocabulary, word: str, alpha: float) -> dict[tuple[int, ...], float]:
    """BPE-dropout by its definition: follows both cases of every merge, skipped and not."""
    pieces = vocab.pieces()
    probabilities: Counter[tuple[int, ...]] = Counter()

    def follow(symbols: tuple[tuple[int, str], ...], skipped: frozenset[tuple[int, str, str]], p: float) -> None:
        pairs = [(-pieces[a + b].score, i, a, b) for (i, a), (_, b) in itertools.pairwise(symbols)
                 if a + b in pieces and (i, a, b) not in skipped]
        if not pairs:
            probabilities[tuple(i for _, s in symbols for i in vocab.ids(s))] += p  # type: ignore[assignment]
            return
        _, at, a, b = min(pairs)
        k = next(n for n, (i, _) in enumerate(symbols) if i == at)
        follow(symbols, skipped | {(at, a, b)}, p * alpha)
        follow((*symbols[:k], (at, a + b), *symbols[k + 2:]), skipped, p * (1 - alpha))

    follow(tuple(enumerate(word)), frozenset(), 1.0)
    return dict(probabilities)


def _unigram_distribution(vocab: Vocabulary, word: str, alpha: float) -> dict[tuple[int, ...], float]:
    """Every segmentation of the word, weighted by its probability to the power alpha."""
    pieces = vocab.pieces()
    weights = {}
    for cuts in itertools.product((False, True), repeat=len(word) - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(word)]
        parts = [word[a:b] for a, b in itertools.pairwise(bounds)]
        if all(part in pieces for part in parts):
            weights[tuple(pieces[p].id for p in parts)] = math.exp(alpha * sum(pieces[p].score for p in parts))
    total = sum(weights.values())
    return {ids: weight / total for ids, weight in weights.items()}


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_bpe_dropout_has_its_exact_distribution(alpha: float) -> None:
    vocab, generator = _vocab("bpe"), random.Random(1)
    sampler, word = BpeDropout(vocab, alpha), f"{SPACE}steiten"
    expected = _dropout_distribution(vocab, word, alpha)
    assert len(expected) >= 8
    _assert_distributed(Counter(tuple(sampler.sample(word, generator)) for _ in range(20000)), expected)


@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_unigram_sampling_has_its_exact_distribution(alpha: float) -> None:
    vocab, generator = _vocab("unigram"), random.Random(1)
    sampler, word = UnigramSampling(vocab, alpha), f"{SPACE}klantenstei"
    expected = _unigram_distribution(vocab, word, alpha)
    assert len(expected) >= 8
    _assert_distributed(Counter(tuple(sampler.sample(word, generator)) for _ in range(20000)), expected)


@KINDS
def test_lengths_agree_with_sentencepiece(kind: Kind) -> None:
    """The mean number of pieces agrees with SentencePiece's own sampling within 1 %, over 20 samples of every line."""
    vocab = _vocab(kind)
    control = sentencepiece.SentencePieceProcessor(model_proto=vocab.bytes)
    theirs = control.encode(LINES * 20, num_threads=1, enable_sampling=True, alpha=0.2, nbest_size=-1)
    ours = SAMPLERS[kind](vocab, 0.2).sample_batch(LINES * 20, seed=3)
    assert sum(map(len, ours)) == pytest.approx(sum(map(len, theirs)), rel=0.01)
    assert sum(map(len, ours)) > 1.1 * sum(len(vocab.encode(line)) for line in LINES * 20)


def test_bpe_dropout_of_0_gives_the_best_segmentation_and_of_1_single_characters() -> None:
    texts = [*LINES, "", "  ban   猫猫 stei", "猫 猫", f"ban{SPACE}{SPACE}o"]
    for byte_fallback in (False, True):
        vocab = _vocab("bpe", 330 if byte_fallback else 60, byte_fallback)
        assert BpeDropout(vocab, 0.0).sample_batch(texts, seed=1) == vocab.encode_batch(texts)
    characters = BpeDropout(vocab, 1.0).sample_batch(LINES, seed=1)
    assert [len(ids) for ids in characters] == [len(line) + 1 for line in LINES]  # one for the space put in front


def test_a_large_alpha_gives_the_best_unigram_segmentation() -> None:
    texts = [*LINES, "", "  ban   猫猫 stei"]
    vocab = _vocab("unigram")
    sampled, best = UnigramSampling(vocab, 400.0).sample_batch(texts, seed=1), vocab.encode_batch(texts)
    scores = {piece.id: piece.score for piece in vocab.pieces().values()} | {UNK: -99.0}
    for one, other in zip(sampled, best):  # equally good ones may differ
        assert sum(scores[i] for i in one) == pytest.approx(sum(scores[i] for i in other), abs=0.02)


@KINDS
def test_samples_decode_to_the_text(kind: Kind) -> None:
    vocab = _vocab(kind)
    assert [vocab.decode(ids) for ids in SAMPLERS[kind](vocab, 0.3).sample_batch(LINES, seed=2)] == LINES


@KINDS
def test_another_process_samples_the_same(kind: Kind, tmp_path) -> None:
    vocab = _vocab(kind)
    (tmp_path / "m.spm").write_bytes(vocab.bytes)
    code = ("from pathlib import Path; from deepnmt.data.vocab import Vocabulary\n"
            "from deepnmt.data.subword_variants import SAMPLERS\n"
            f"print(SAMPLERS[{kind!r}](Vocabulary.load(Path({str(tmp_path / 'm.spm')!r})), 0.2)"
            f".sample_batch({LINES[:50]!r}, 5))")
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    sampler = SAMPLERS[kind](vocab, 0.2)
    sampler.sample_batch(LINES, seed=9)  # earlier samples do not matter
    assert other.strip() == repr(sampler.sample_batch(LINES[:50], 5))
    assert sampler.sample_batch(LINES[:50], 5) != sampler.sample_batch(LINES[:50], 6)
