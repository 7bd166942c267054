"""Whether two systems differ by more than chance: the one test of `evaluate` and `report`. `compare-blocks` adds the
chance of seeds to it.

The test is approximate randomization (Noreen 1989; Riezler and Maxwell 2005). If two systems are equal, it does not
matter which of them gave which translation of a sentence. So in each trial every sentence's two translations change
places with probability 1/2, and p is the share of trials whose difference is at least as large as the measured one,
whichever system is ahead. `python -m studies equal-systems` measures how often equal systems get a p below 0.05.

`N` sentences, `S` numbers that SacreBLEU keeps of a sentence, `R` trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Metric

TRIALS = 10_000
_AT_ONCE = 500  # trials
_TIE = 1e-9  # differences that differ by less, in points, are equal

# Student's t, two-sided 95 %, by degrees of freedom; beyond the last one the normal distribution's 1.960 is near.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)

Statistics = np.ndarray[Any, np.dtype[Any]]
ScoreOf = Callable[[Statistics], float]  # from an array [S], summed over sentences


def student_t(freedom: int) -> float:
    """Student's t, two-sided 95 %, of so many degrees of freedom, one or more."""
    return _T[freedom - 1] if freedom <= len(_T) else 1.960


@dataclass(frozen=True)
class Difference:
    """The score of a system, or the mean of its runs, minus that of another; and p: the probability of a difference as
    large, in either direction, between equal systems."""

    value: float
    p: float


def sentence_statistics(metric: Metric, lines: Sequence[str], references: Sequence[Sequence[str]]) -> Statistics:
    """What SacreBLEU counts in each sentence, [N, S]. The score of a text depends on the sum over its sentences."""
    return np.array(metric._extract_corpus_statistics(lines, references), np.float64)


def score_of(metric: Metric) -> ScoreOf:
    """The function from summed statistics to a metric's score."""
    return lambda summed: float(metric._compute_score_from_stats(summed.tolist()).score)


def difference(one: Statistics, other: Statistics, score: ScoreOf, trials: int = TRIALS, seed: int = 12345
               ) -> Difference:
    """Compares two systems on one test set.

    Args:
        one, other: the statistics of each, [N, S].
        seed: of the trials.
    """
    value = score(one.sum(0)) - score(other.sum(0))
    gains = shuffled_gains([(one, other)], score, trials, seed)
    as_large = 1  # what was measured is one more
    for gain in gains:
        if abs(gain) >= abs(value) - _TIE:
            as_large += 1
    return Difference(value, as_large / (trials + 1))


def shuffled_gains(
    pairs: Sequence[tuple[Statistics, Statistics]], score: ScoreOf, trials: int, seed: int
) -> list[float]:
    """How far the first of each pair is ahead when translations change places at random, the mean over the pairs: one
    number a trial. In a trial all pairs change the same sentences."""
    draw = np.random.default_rng(seed)
    gains: list[float] = []
    while len(gains) < trials:
        count = min(_AT_ONCE, trials - len(gains))
        stay = draw.integers(0, 2, (count, len(pairs[0][0]))).astype(np.float64)  # [R, N]
        by_pair = []
        for one, other in pairs:
            first = stay @ (one - other) + other.sum(0)
            second = stay @ (other - one) + one.sum(0)
            by_pair.append([score(a) - score(b) for a, b in zip(first, second, strict=True)])
        gains += np.mean(by_pair, axis=0).tolist()
    return gains
