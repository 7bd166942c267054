"""The metrics in a validation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from deepnmt.config import Recipe
from deepnmt.data.prepared import PreparedData
from deepnmt.errors import UserError
from deepnmt.extras.outside_metrics.scorers import scorer
from deepnmt.model.transformer import Transformer
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status


def measure(recipe: Recipe, data: PreparedData) -> Callable[..., dict[str, float | str]] | None:
    """What measures sentences of the validation text; None if no metric is for it."""
    names = [name for name, metric in recipe.metrics.items() if metric.in_validation]
    return partial(_measure, recipe, names) if names else None


def describe(record: Mapping[str, Any]) -> str:
    """What a progress line says of a record."""
    return "".join(f" {name} {record[name]:.4f}" for name in record.get("metrics", "").split())


def _measure(recipe: Recipe, names: list[str], rows: range, model: Transformer, ranks: Ranks, texts: Callable[[], Any]
             ) -> dict[str, float | str]:
    """The means over the sentences that are translated. A program that fails costs a sentence, and no training."""
    translated = texts()
    figures: dict[str, float | str] = {}
    if ranks.first:
        for name in names:
            try:
                figures[name] = scorer(recipe, name, translated.sources).corpus_score(
                    translated.hypotheses, [translated.references]).score
            except UserError as error:
                print_status(str(error))
        figures["metrics"] = " ".join(figures)
    figures = json.loads(ranks.broadcast_bytes(json.dumps(figures).encode()))
    return figures
