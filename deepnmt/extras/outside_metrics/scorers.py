"""A program as a metric of SacreBLEU, with its bootstrap: what it keeps of a sentence is (number, 1), and the score of
a text the mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics.base import Metric, Score, Signature

from deepnmt.config import Recipe
from deepnmt.extras.outside_metrics.program import Program


class Scorer(Metric):
    """Scores translations of `sources` by a program; only the first reference is given to it."""

    def __init__(self, program: Program, sources: Sequence[str]) -> None:
        super().__init__()
        self.program, self.sources, self.num_refs = program, sources, 1

    def _extract_corpus_statistics(self, hypotheses: Sequence[str], references: Any) -> list[list[float]]:
        texts = {"src": self.sources, "hyp": hypotheses, "ref": references[0] if references else []}
        return [[value, 1.0] for value in self.program.scores(texts)]

    def _aggregate_and_compute(self, stats: Sequence[Sequence[float]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])

    def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
        return Score(self.program.name, float(stats[0]) / float(stats[1]))

    def get_signature(self) -> Signature:
        signature = Signature({"num_refs": 1})
        signature.info = {"command": self.program.settings.command, "version": None}
        return signature

    def _preprocess_segment(self, sent: str) -> str:
        return sent

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[Any]:
        raise NotImplementedError  # a text is scored at once


class Judge:
    """What `translate.choose` names: a number for each translation."""

    def __init__(self, program: Program) -> None:
        self.command, self.lower_is_better = program.settings.command, program.settings.lower_is_better
        self._program = program

    def __call__(self, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
        """Raises `UserError`, see `Program.scores`."""
        return self._program.scores({"src": sources, "hyp": hypotheses, "ref": references}, cached=False)


def judge(recipe: Recipe) -> Judge:
    """The metric that chooses by the recipe. Raises `UserError`, see `Program`."""
    return Judge(Program(recipe, recipe.translate.choose))


def scorer(recipe: Recipe, name: str, sources: Sequence[str]) -> Scorer:
    """The scorer of one of a recipe's metrics. Raises `UserError`, see `Program`."""
    return Scorer(Program(recipe, name), sources)
