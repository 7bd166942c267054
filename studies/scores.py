"""BLEU of a study's runs from counts of each sentence, and which of several differences are more than chance.

The counts of a sentence are enough to score any selection of sentences again, so a line of a study holds them instead
of the translations: no text, about 4 KB for 1,000 sentences.

`N` sentences.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from itertools import product
from statistics import fmean, variance
from typing import Any

import numpy as np
from sacrebleu import BLEU
from sacrebleu.metrics.base import Metric

from deepnmt.evaluate.significance import TRIALS, Difference, ScoreOf, difference, shuffled_gains

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


def bleu(summed: Counts) -> float:
    """Corpus BLEU, 0 to 100, of counts summed over sentences, [10], by SacreBLEU's formula and default smoothing."""
    tokens, reference, *shared = map(int, summed)
    return float(BLEU.compute_bleu(shared[:ORDER], shared[ORDER:], tokens, reference, "exp").score)


def difference_of_runs(
    ours: Sequence[Counts], others: Sequence[Counts], score: ScoreOf, trials: int = TRIALS, seed: int = 12345
) -> Difference:
    """Compares two systems on one test set, by one run of each or by several.

    With one run of each, p speaks of these two runs: the sentences alone are chance. With several, the variance of the
    trials and that of the runs' scores are added, and p is that of Welch's t-test with this sum, and his degrees of
    freedom. Where one of the systems has a single run, it is taken to scatter as the other's do: of equal systems 6 to
    8 % then have p below 0.05 with three runs of the other, and 6 to 12 % with two.

    Args:
        ours, others: the statistics of each run, [N, S].
        seed: of the trials.
    """
    if len(ours) == len(others) == 1:
        return difference(ours[0], others[0], score, trials, seed)
    from scipy.stats import t  # in the extra `studies`

    scores = [[score(run.sum(0)) for run in runs] for runs in (ours, others)]
    value = fmean(scores[0]) - fmean(scores[1])
    by_sentences = fmean(gain**2 for gain in shuffled_gains(list(product(ours, others)), score, trials, seed))
    by_seeds = [(variance(runs) / len(runs), len(runs) - 1) for runs in scores if len(runs) > 1]
    if len(by_seeds) == 1:
        several = max(scores, key=len)
        by_seeds = [(variance(several) * (1 + 1 / len(several)), len(several) - 1)]
    total = by_sentences + sum(part for part, _ in by_seeds)
    if not total:
        return Difference(value, 0.0 if value else 1.0)
    freedom = total**2 / (sum(part**2 / free for part, free in by_seeds) + by_sentences**2 / trials)
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
