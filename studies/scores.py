"""BLEU of a study's runs from counts of each sentence, and whether blocks differ by more than chance.

The counts of a sentence are enough to score any selection of sentences again, so a line of a study holds them instead
of the translations: no text, about 4 KB for 1,000 sentences.

`N` sentences, `K` runs (seeds) of a block, `R` resamples.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

import numpy as np
from sacrebleu import BLEU
from sacrebleu.metrics.base import Metric

ORDER = 4  # longest n-grams of BLEU
Counts = np.ndarray[Any, np.dtype[np.int64]]


def sentence_counts(hypotheses: Sequence[str], references: Sequence[str], scorer: Metric) -> Counts:
    """For each sentence its tokens, its reference's tokens and the n-grams they share, n from 1 to 4: [N, 6].

    `scorer`: BLEU for the target language.
    """
    scores: list[Any] = [scorer.corpus_score([line], [[reference]])
                         for line, reference in zip(hypotheses, references, strict=True)]
    return np.array([[score.sys_len, score.ref_len, *score.counts] for score in scores], np.int64)


def pack(counts: Counts) -> str:
    """The counts as text for a line of JSON."""
    return base64.b64encode(zlib.compress(counts.T.astype("<u2").tobytes(), 9)).decode()


def unpack(text: str) -> Counts:
    """The counts of a packed text, [N, 6]."""
    packed = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u2")
    return packed.reshape(ORDER + 2, -1).T.astype(np.int64)


def with_totals(counts: Counts) -> Counts:
    """The counts of sentences, [N, 6], with the number of a sentence's n-grams of each length appended, [N, 10]."""
    return np.hstack([counts, np.maximum(counts[:, :1] - np.arange(ORDER), 0)])


def bleu(summed: Sequence[int]) -> float:
    """Corpus BLEU, 0 to 100, of counts summed over sentences, [10], by SacreBLEU's formula and default smoothing."""
    tokens, reference, *shared = map(int, summed)
    return float(BLEU.compute_bleu(shared[:ORDER], shared[ORDER:], tokens, reference, "exp").score)


@dataclass(frozen=True)
class Difference:
    """The mean BLEU of a block's runs minus that of another block's, and the probability of a difference as large
    between equal blocks."""

    value: float
    p: float


def difference(ours: Sequence[Counts], others: Sequence[Counts], resamples: int = 1000, seed: int = 1) -> Difference:
    """Compares two blocks on one test set.

    Two sources of chance are told apart and their variances added. Which sentences are in the test set: the variance of
    the difference over resamples of the sentences, the same ones for all runs (Koehn 2004, paired bootstrap). Which
    seeds were drawn: that of the runs' scores, as in Welch's t-test, with its degrees of freedom. A block with one run
    has no second part, so the answer is about that run alone.

    Args:
        ours, others: `sentence_counts` of each run, [N, 6].
    """
    from scipy.stats import t  # in the extra `studies`

    systems = [np.stack([with_totals(run) for run in runs]) for runs in (ours, others)]  # [K, N, 10]
    whole = [[bleu(run.sum(axis=0)) for run in runs] for runs in systems]
    value = fmean(whole[0]) - fmean(whole[1])
    sentences = systems[0].shape[1]
    drawn = np.random.default_rng(seed).multinomial(sentences, np.full(sentences, 1 / sentences), resamples)  # [R, N]
    means = [np.mean([[bleu(summed) for summed in drawn @ run] for run in runs], axis=0) for runs in systems]
    by_sentences = float(np.var(means[0] - means[1], ddof=1))
    by_seeds = [variance(scores) / len(scores) if len(scores) > 1 else 0.0 for scores in whole]
    total = by_sentences + sum(by_seeds)
    if not total:
        return Difference(value, 0.0 if value else 1.0)
    uncertain = sum(part**2 / (len(scores) - 1) for part, scores in zip(by_seeds, whole, strict=True) if part)
    freedom = total**2 / (uncertain + by_sentences**2 / (resamples - 1))
    return Difference(value, float(2 * t.sf(abs(value) / total**0.5, freedom)))


def surprising(values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of several p-values stand at a level that holds for all of them together (Holm 1979)."""
    order = sorted(range(len(values)), key=values.__getitem__)
    stand = [False] * len(values)
    for rank, index in enumerate(order):
        if values[index] * (len(values) - rank) >= level:
            break
        stand[index] = True
    return stand
