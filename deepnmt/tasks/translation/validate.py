"""Validation during training: the loss over the whole set, BLEU of a greedy translation, and what visitors measure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from deepnmt.batch import Batch
from deepnmt.config import Recipe, Translate
from deepnmt.data.arrays import Indices
from deepnmt.data.batching import collate, plan_eval
from deepnmt.data.prepared import PreparedData, Split
from deepnmt.decode.translate import translate_shards
from deepnmt.device import release
from deepnmt.evaluate.metrics import make_scorers
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.translation.source_use import measure_validation_text, rows_of_corpora
from deepnmt.training.task import Figures, Validation
from deepnmt.training.validation import sum_losses
from deepnmt.visitors import visitor_modules

WORST = sys.float_info.max  # of a validation whose figure could not be measured


def validate(recipe: Recipe, data: PreparedData, engine: Engine, ranks: Ranks) -> Validation:
    """Validates; every rank returns the same figures. Collective."""
    split, text = data.split("valid"), recipe.data.valid
    measures = []
    for visitor in visitor_modules("validation"):
        measure = visitor.measure(recipe, data)
        if measure:
            measures.append(measure)
    model = None
    if recipe.train.valid_bleu or measures:
        model = engine.gather_model()
    uses = measure_validation_text(recipe, data, engine, ranks)
    sums = np.zeros(3)
    results = {}
    for name, rows in rows_of_corpora(data).items():
        losses = ranks.sum(losses_of(recipe, split.truncated(recipe.model.max_length), rows, engine, ranks))
        figures: dict[str, float | str] = {}
        if model is not None:
            lang = text.corpora.get(name, text).trg_lang or recipe.data.trg_lang
            texts = cache(partial(translate_greedily, recipe, data, split, rows, model, ranks))
            if recipe.train.valid_bleu:
                figures["bleu"], figures["signature"] = bleu_of(texts(), lang, ranks)
            for measure in measures:
                figures |= measure(rows, model, ranks, texts)
            release(ranks.device)  # what decoding kept, in shapes that training does not have
        if name in uses:
            figures |= asdict(uses[name])
        results[name] = _validation(recipe, losses, figures)
        sums += losses
    if len(results) == 1:
        return next(iter(results.values()))
    means = _means([result.figures for result in results.values()])
    if any(recipe.train.best_by not in result.figures for result in results.values()):
        means.pop(recipe.train.best_by, None)  # a mean of some corpora is no measure of the whole
    return replace(_validation(recipe, sums.tolist(), means), corpora=results)


def _means(parts: Iterable[Figures]) -> dict[str, float | str]:
    """The mean of each figure over the parts that have it, and the first of each text."""
    values: dict[str, list[float | str]] = {}
    for figures in parts:
        for name, value in figures.items():
            values.setdefault(name, []).append(value)
    means: dict[str, float | str] = {}
    for name, all_values in values.items():
        numbers = [value for value in all_values if not isinstance(value, str)]
        means[name] = sum(numbers) / len(numbers) if numbers else all_values[0]
    return means


def _validation(recipe: Recipe, sums: Sequence[float], figures: Figures) -> Validation:
    """From the sums (loss, nll, target tokens) and the other figures."""
    by = recipe.train.best_by
    if by == "loss":
        return Validation.of_sums(sums, figures)
    if by not in figures:
        return Validation.of_sums(sums, figures, WORST)
    lower_is_better = by in recipe.metrics and recipe.metrics[by].lower_is_better
    value = float(figures[by])
    if not lower_is_better:
        value = -value
    return Validation.of_sums(sums, figures, value)


def losses_of(recipe: Recipe, split: Split, rows: range, engine: Engine, ranks: Ranks) -> list[float]:
    """This process's share of the sums (loss, nll, target tokens) over these sentences."""
    plan = plan_eval(split.src_lengths[rows.start:rows.stop], split.trg_lengths[rows.start:rows.stop],
                     recipe.batch.tokens)

    def batch(indices: Indices, device: torch.device) -> Batch:
        return collate(split, rows.start + indices, 0, device)

    return sum_losses(plan, batch, engine, ranks)


class Texts(NamedTuple):
    """Sentences of the validation text: sources, references, and translations, which rank 0 alone has."""

    sources: list[str]
    references: list[str]
    hypotheses: list[str]


def translate_greedily(recipe: Recipe, data: PreparedData, split: Split, rows: range, model: Transformer, ranks: Ranks
                       ) -> Texts:
    """Translates the first of these sentences. Collective."""
    count = min(recipe.train.valid_sentences or len(rows), len(rows))
    some = slice(rows.start, rows.start + count)
    sources, references = split.src_text()[some], split.trg_text()[some]
    settings = Translate(method="greedy", batch_tokens=recipe.translate.batch_tokens)
    # without warnings, which would repeat for the same lines at every validation
    translated = translate_shards(model, data.vocabs(), sources, settings, ranks, warn=False)
    return Texts(sources, references, [best[0].text for best in translated])


def bleu_of(texts: Texts, lang: str, ranks: Ranks) -> tuple[float, str]:
    """BLEU of translations, with its signature."""
    score = b""
    if ranks.first:
        metric = make_scorers(lang)["bleu"]
        value = metric.corpus_score(texts.hypotheses, [texts.references]).score
        score = json.dumps([value, str(metric.get_signature())]).encode()
    value, signature = json.loads(ranks.broadcast_bytes(score))
    return value, signature
