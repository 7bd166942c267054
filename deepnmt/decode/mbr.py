"""Minimum Bayes risk decoding (Kumar and Byrne 2004): the sample that is most like all samples.

Likeness is chrF (Popović 2015) with SacreBLEU's defaults: character 1- to 6-grams without spaces, recall counted β = 2
times as much as precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

ORDERS, BETA = 6, 2.0


def expected_chrf(texts: Sequence[str]) -> list[float]:
    """For each text its mean chrF, 0 to 100, against all of them, itself included: an estimate of its expected chrF
    under the distribution that they were sampled from."""
    copies = Counter(texts)
    grams = {text: _grams(text) for text in copies}
    sums = dict.fromkeys(copies, 0.0)
    distinct = list(copies)
    for i, one in enumerate(distinct):
        for other in distinct[i:]:
            matches = [(ours & theirs).total() for ours, theirs in zip(grams[one], grams[other], strict=True)]
            size, other_size = ([counts.total() for counts in grams[text]] for text in (one, other))
            sums[one] += copies[other] * _chrf(matches, size, other_size)
            if other != one:
                sums[other] += copies[one] * _chrf(matches, other_size, size)
    return [sums[text] / len(texts) for text in texts]


def chrf(text: str, reference: str) -> float:
    """The chrF of a text, 0 to 100."""
    ours, theirs = _grams(text), _grams(reference)
    matches = [(one & other).total() for one, other in zip(ours, theirs, strict=True)]
    return _chrf(matches, [counts.total() for counts in ours], [counts.total() for counts in theirs])


def _grams(text: str) -> list[Counter[str]]:
    """How often each n-gram of characters comes, for n from 1 on."""
    text = "".join(text.split())
    return [Counter(text[i : i + n] for i in range(len(text) - n + 1)) for n in range(1, ORDERS + 1)]


def _chrf(matches: Sequence[int], hypothesis: Sequence[int], reference: Sequence[int]) -> float:
    """chrF of a hypothesis, from the numbers of n-grams in both, in it and in the reference, for each n."""
    rates = [(m / h, m / r) for m, h, r in zip(matches, hypothesis, reference, strict=True) if h and r]
    precision, recall = (sum(column) / len(rates) for column in zip(*rates)) if rates else (0.0, 0.0)
    factor = BETA**2
    return 100 * (1 + factor) * precision * recall / (factor * precision + recall) if precision + recall else 0.0
