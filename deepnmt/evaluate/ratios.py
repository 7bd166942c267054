"""Metrics that SacreBLEU lacks, in the form of its own: ROUGE, and the error rates of speech recognition.

Each is 100 times a ratio of two sums over the sentences, so that the tests of significance work with them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
from sacrebleu.metrics.base import Metric, Score, Signature

from deepnmt.config.choices import METRICS
from deepnmt.errors import UserError
from deepnmt.version import __version__

UNSPACED = ("zh", "ja", "th", "lo", "km", "my")  # languages that put no spaces between words


class RatioSignature(Signature):
    """SacreBLEU's, with what a metric's `facts` say and the version of the package that counts."""

    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__(args)
        self.info |= args["facts"]


class RatioMetric(Metric):
    """100 · Σ a / Σ b, over the sentences' statistics [a, b]. `kind` is a name of `METRICS`."""

    _SIGNATURE_TYPE = RatioSignature

    def __init__(self, kind: str, **facts: str) -> None:
        super().__init__()
        self.kind, self.facts = kind, facts

    def _aggregate_and_compute(self, stats: list[list[float]]) -> Score:
        return self._compute_score_from_stats(np.sum(stats, axis=0).tolist())

    def _compute_score_from_stats(self, stats: list[float]) -> Score:
        above, below = stats
        score = 100.0 * above / (below or above or 1.0)  # words where none should be: 100, as SacreBLEU's TER
        return Score(METRICS[self.kind].line, score)

    def _preprocess_segment(self, sent: str) -> str:
        return sent

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"references": list(refs)}


class UnicodeWords:
    """A tokenizer for rouge-score, whose own keeps nothing but a to z and digits: lower-case words of any script."""

    @staticmethod
    def tokenize(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())


class Rouge(RatioMetric):
    """The mean F1 of ROUGE (Lin 2004), by the package `rouge-score`. English words are stemmed, as ROUGE-1.5.5 does
    with -m. Of several references the best counts.

    Args:
        kind: of n-grams, or of the longest common subsequence.
        lang: of the texts.

    Raises:
        UserError: the package is not installed, or the language has no spaces between words.
    """

    def __init__(self, kind: Literal["rouge1", "rouge2", "rougeL"], lang: str) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError:
            raise UserError("ROUGE needs rouge-score, which is not installed: pip install 'deepnmt[rouge]'; or take "
                            "another metric") from None
        if lang in UNSPACED:
            raise UserError(f"ROUGE counts words, but data.trg_lang is {lang}, which has no spaces between them; take "
                            "another metric, such as chrf")
        if lang == "en":
            super().__init__(kind, stem="porter", tok="rouge-score", version=version("rouge-score"))
            self._scorer = RougeScorer([kind], use_stemmer=True)
        else:
            super().__init__(kind, stem="no", tok="unicode", version=version("rouge-score"))
            self._scorer = RougeScorer([kind], tokenizer=UnicodeWords())

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[float]:
        best = self._scorer.score_multi(ref_kwargs["references"], hypothesis)[self.kind]
        return [best.fmeasure, 1.0]


class ErrorRate(RatioMetric):
    """Edits between hypothesis and reference, of words (WER) or characters (CER), for each of the reference. Text is
    compared as it is but for the spaces at its ends; of several between words WER makes one, and CER counts each, as
    jiwer does. Of several references the nearest counts."""

    def __init__(self, kind: Literal["wer", "cer"]) -> None:
        super().__init__(kind, case="mixed", version=f"deepnmt-{__version__}")

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[float]:
        units = str.split if self.kind == "wer" else str.strip
        candidates = []
        for reference in map(units, ref_kwargs["references"]):
            candidates.append([float(edits(units(hypothesis), reference)), float(len(reference))])
        return min(candidates)


def edits(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """The least number of insertions, deletions and substitutions between two sequences (Levenshtein 1966)."""
    row = list(range(len(other) + 1))  # from what of `one` was read so far to each beginning of `other`
    for i, mine in enumerate(one, start=1):
        last, row = row, [i]
        for j, theirs in enumerate(other, start=1):
            if mine == theirs:
                row.append(last[j - 1])
            else:
                row.append(1 + min(last[j], row[j - 1], last[j - 1]))
    return row[-1]
