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
            precision, recall = _overlap(grams[one], grams[other])
            sums[one] += copies[other] * _f_score(precision, recall)
            if other != one:
                sums[other] += copies[one] * _f_score(recall, precision)
    return [sums[text] / len(texts) for text in texts]


def chrf(text: str, reference: str) -> float:
    """The chrF of a text, 0 to 100."""
    return _f_score(*_overlap(_grams(text), _grams(reference)))


def _grams(text: str) -> list[Counter[str]]:
    """How often each n-gram of characters comes, for n from 1 on."""
    text = "".join(text.split())
    grams: list[Counter[str]] = []
    for n in range(1, ORDERS + 1):
        grams.append(Counter(text[i : i + n] for i in range(len(text) - n + 1)))
    return grams


def _overlap(hypothesis: Sequence[Counter[str]], reference: Sequence[Counter[str]]) -> tuple[float, float]:
    """Precision and recall of a hypothesis's n-grams, each the mean over n."""
    precisions, recalls = [], []
    for ours, theirs in zip(hypothesis, reference, strict=True):
        if ours and theirs:
            matches = (ours & theirs).total()
            precisions.append(matches / ours.total())
            recalls.append(matches / theirs.total())
    if not precisions:
        return 0.0, 0.0
    return sum(precisions) / len(precisions), sum(recalls) / len(recalls)


def _f_score(precision: float, recall: float) -> float:
    """chrF, 0 to 100."""
    if precision + recall == 0:
        return 0.0
    factor = BETA**2
    return 100 * (1 + factor) * precision * recall / (factor * precision + recall)
