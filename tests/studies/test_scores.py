"""BLEU from counts of sentences, and when two blocks are called different."""

from __future__ import annotations

import random

import numpy as np
import pytest
import sacrebleu

from studies.scores import Counts, bleu, difference_of_runs, pack, sentence_counts, surprising, unpack, with_totals

WORDS = ["a", "man", "in", "red", "shirt", "walks", "his", "dog", "along", "the", "beach", "while", "two", "girls"]


def texts(seed: int, count: int = 40) -> tuple[list[str], list[str]]:
    """References, and translations that drop or repeat some of their words."""
    draw = random.Random(seed)
    references = [" ".join(draw.choices(WORDS, k=draw.randint(1, 14))) for _ in range(count)]
    return [" ".join(word for word in line.split() for _ in range(draw.choice([0, 1, 1, 1, 1, 2])))
            for line in references], references


def test_counts_give_sacrebleus_score() -> None:
    scorer = sacrebleu.BLEU()
    for seed in range(5):
        translated, references = texts(seed)
        counts = sentence_counts(translated, references, scorer)
        assert (unpack(pack(counts)) == counts).all() and counts.shape == (40, 6)
        chosen = random.Random(seed).choices(range(40), k=40)
        for rows in (list(range(40)), chosen, chosen[:3]):
            expected = scorer.corpus_score([translated[i] for i in rows], [[references[i] for i in rows]]).score
            assert bleu(with_totals(counts)[rows].sum(axis=0)) == pytest.approx(expected, abs=1e-9)


def systems(draw: np.random.Generator, runs: int, hard: np.ndarray, quality: float, scatter: float) -> list[Counts]:
    """The counts with totals of several runs of a block: `hard` is the share of tokens that a typical run gets wrong in
    each sentence, `quality` what this block adds to the share it gets right, `scatter` the seeds' deviation."""
    lengths = 8 + np.arange(len(hard)) % 9
    made = []
    for _ in range(runs):
        right = np.clip(1 - hard + quality + scatter * draw.standard_normal(), 0.02, 0.98)
        shared = [draw.binomial(np.maximum(lengths - n, 0), right ** (n + 1)) for n in range(4)]
        made.append(with_totals(np.stack([lengths, lengths, *shared], axis=1)))
    return made


@pytest.mark.parametrize(("runs", "others"), [(2, 2), (3, 3), (5, 5), (3, 1), (1, 3)])
def test_equal_blocks_are_seldom_called_different(runs: int, others: int) -> None:
    """In fewer than 10 of 100 trials: the seeds' scatter counts, which is 1 to 2 BLEU here."""
    draw = np.random.default_rng(12)
    wrong = 0
    for _ in range(100):
        hard = draw.uniform(0.2, 0.6, 150)
        first, second = (systems(draw, count, hard, 0.0, 0.015) for count in (others, runs))
        wrong += difference_of_runs(second, first, bleu, trials=60).p < 0.05
    assert wrong < 10


def test_different_blocks_are_called_different() -> None:
    draw = np.random.default_rng(8)
    right = 0
    for _ in range(20):
        hard = draw.uniform(0.2, 0.6, 150)
        found = difference_of_runs(systems(draw, 3, hard, 0.08, 0.01), systems(draw, 3, hard, 0.0, 0.01), bleu,
                           trials=60)
        right += found.p < 0.05 and found.value > 0
    assert right > 16


def test_differences_in_special_cases() -> None:
    draw = np.random.default_rng(9)
    hard = draw.uniform(0.2, 0.6, 60)
    [one] = systems(draw, 1, hard, 0.0, 0.0)
    same = difference_of_runs([one], [one], bleu)
    assert (same.value, same.p) == (0.0, 1.0)
    [better] = systems(draw, 1, hard, 0.2, 0.0)  # one run each: the sentences alone are chance
    assert difference_of_runs([better], [one], bleu).p < 0.01
    assert difference_of_runs([better], [one], bleu).value == -difference_of_runs([one], [better], bleu).value


def test_holm() -> None:
    assert surprising([0.01, 0.04, 0.03]) == [True, False, False]
    assert surprising([0.01, 0.02, 0.03]) == [True, True, True]
    assert surprising([0.2, 0.001]) == [False, True]
    assert surprising([]) == []
