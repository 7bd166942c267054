"""Whether two systems differ by more than chance: the one test of `evaluate`, `report` and `compare-blocks`.

The test is approximate randomization (Noreen 1989; Riezler and Maxwell 2005). If two systems are equal, it does not
matter which of them gave which translation of a sentence. So in each trial every sentence's two translations change
places with probability 1/2, and p is the share of trials whose difference is at least as large as the measured one,
whichever system is ahead. `python -m studies equal-systems` measures how often equal systems get a p below 0.05.

`N` sentences, `S` numbers that SacreBLEU keeps of a sentence, `K` runs (seeds) of a system, `R` trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, variance
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Metric

TRIALS = 10_000
_AT_ONCE = 500  # trials
_TIE = 1e-9  # differences that differ by less, in points, are equal

Statistics = np.ndarray[Any, np.dtype[Any]]
ScoreOf = Callable[[Statistics], float]  # from an array [S], summed over sentences


@dataclass(frozen=True)
class Difference:
    """The mean score of a system's runs minus that of another's, and p: the probability of a difference as large, in
    either direction, between equal systems."""

    value: float
    p: float


def sentence_statistics(metric: Metric, lines: Sequence[str], references: Sequence[Sequence[str]]) -> Statistics:
    """What SacreBLEU counts in each sentence, [N, S]. The score of a text depends on the sum over its sentences."""
    return np.array(metric._extract_corpus_statistics(lines, references), np.float64)


def score_of(metric: Metric) -> ScoreOf:
    """The function from summed statistics to a metric's score."""
    return lambda summed: float(metric._compute_score_from_stats(summed.tolist()).score)


def difference(
    ours: Sequence[Statistics], others: Sequence[Statistics], score: ScoreOf, trials: int = TRIALS, seed: int = 12345
) -> Difference:
    """Compares two systems on one test set, by one run of each or by several.

    With one run of each, p speaks of these two runs: the sentences alone are chance. With several, the variance of the
    trials and that of the runs' scores are added, and p is that of Welch's t-test with this sum, and his degrees of
    freedom. In a trial with several runs every pair of runs changes the same sentences.

    Args:
        ours, others: the statistics of each run, [N, S].
        seed: of the trials.
    """
    pairs = list(product(ours, others))
    draw, shuffled = np.random.default_rng(seed), list[float]()
    while len(shuffled) < trials:
        count = min(_AT_ONCE, trials - len(shuffled))
        stay = draw.integers(0, 2, (count, len(ours[0]))).astype(np.float64)  # [R, N]
        gains = [[score(a) - score(b) for a, b in zip(stay @ (one - other) + other.sum(0),
                                                      stay @ (other - one) + one.sum(0), strict=True)]
                 for one, other in pairs]
        shuffled += np.mean(gains, axis=0).tolist()
    scores = [[score(run.sum(0)) for run in runs] for runs in (ours, others)]
    value = fmean(scores[0]) - fmean(scores[1])
    if len(pairs) == 1:
        return Difference(value, (1 + sum(abs(gain) >= abs(value) - _TIE for gain in shuffled)) / (trials + 1))
    return Difference(value, _p_with_seeds(value, fmean(gain**2 for gain in shuffled), trials, scores))


def _p_with_seeds(value: float, by_sentences: float, trials: int, scores: Sequence[Sequence[float]]) -> float:
    """The two-sided p of a difference, from the variance of the trials and the scores of both systems' runs."""
    from scipy.stats import t  # in the extra `studies`

    by_seeds = [variance(runs) / len(runs) if len(runs) > 1 else 0.0 for runs in scores]
    total = by_sentences + sum(by_seeds)
    if not total:
        return 0.0 if value else 1.0
    uncertain = sum(part**2 / (len(runs) - 1) for part, runs in zip(by_seeds, scores, strict=True) if part)
    return float(2 * t.sf(abs(value) / total**0.5, total**2 / (uncertain + by_sentences**2 / trials)))
