"""Validation during training: the loss over the whole set, and BLEU of a greedy translation, shared among ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from deepnmt.config import Recipe, Translate
from deepnmt.data.alignments import Links
from deepnmt.data.batching import collate, plan_eval
from deepnmt.data.prepared import PreparedData, Split
from deepnmt.decode.align import align
from deepnmt.decode.translate import translate_shards
from deepnmt.device import release
from deepnmt.evaluate.metrics import make_scorers
from deepnmt.model.attention import layer_index
from deepnmt.model.dropout import evaluating
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.training.source_use import SourceUse, measure_validation_text

# Micro-batches passed to the engine in one call. P pipeline stages idle (P - 1) / (64 + P - 1) of the time, 5 % for 4;
# waiting micro-batches are integers, and a stage holds the activations of two.
BATCHES_PER_CALL = 64


@dataclass(frozen=True)
class Validation:
    """Figures of one validation. `loss`: label-smoothed, nats a target token; `perplexity`: e to the power of the
    plain loss; `alignment_error`: of the validation text's word alignments, 0 to 1; `corpora`: the same of each corpus,
    by name, if there are several; `bleu` is then their mean, and so are `alignment_error` and `source`. `source`: how
    much the model uses its source; None: not measured."""

    loss: float
    perplexity: float
    bleu: float | None = None
    signature: str | None = None
    alignment_error: float | None = None
    source: SourceUse | None = None
    corpora: Mapping[str, Validation] = field(default_factory=dict)


def look(recipe: Recipe, data: PreparedData, engine: Engine, ranks: Ranks) -> SourceUse | None:
    """A cheap look at a model that trains. Collective."""
    return SourceUse.mean(measure_validation_text(recipe, data, engine, ranks).values())


def validate(recipe: Recipe, data: PreparedData, engine: Engine, ranks: Ranks) -> Validation:
    """Validates; every rank returns the same figures. Collective."""
    split, text = data.split("valid"), recipe.data.valid
    links = Links(data, "valid") if "alignments" in data.manifest["splits"]["valid"] else None
    model = engine.gather_model() if recipe.train.valid_bleu or links else None
    uses = measure_validation_text(recipe, data, engine, ranks)
    sums, results, begin = np.zeros(3), {}, 0
    for name, size in data.corpora("valid").items():
        rows = range(begin, begin := begin + size)
        losses = ranks.sum(_losses(recipe, split.truncated(recipe.model.max_length), rows, engine, ranks))
        bleu: tuple[float | None, str | None] = (None, None)
        if model is not None and recipe.train.valid_bleu:
            lang = text.corpora.get(name, text).trg_lang or recipe.data.trg_lang
            bleu = _bleu(recipe, data, split, rows, lang, model, ranks)
        error = _alignment_error(recipe, data, links, rows, model, ranks) if model is not None and links else None
        if model is not None:
            release(ranks.device)  # what decoding kept, in shapes that training does not have
        results[name] = _figures(losses, *bleu, error, uses.get(name))
        sums += losses
    if len(results) == 1:
        return next(iter(results.values()))
    bleus, errors = ([value for value in values if value is not None] for values in
                     zip(*((result.bleu, result.alignment_error) for result in results.values()), strict=True))
    mean = _figures(sums.tolist(), _mean(bleus), next(iter(results.values())).signature, _mean(errors),
                    SourceUse.mean(uses.values()))
    return replace(mean, corpora=results)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _figures(
    sums: Sequence[float], bleu: float | None, signature: str | None, error: float | None, source: SourceUse | None
) -> Validation:
    loss, nll, tokens = map(float, sums)
    return Validation(loss / tokens, math.exp(min(nll / tokens, 50.0)), bleu, signature, error, source)


def _losses(recipe: Recipe, split: Split, rows: range, engine: Engine, ranks: Ranks) -> list[float]:
    """This process's share of the sums (loss, nll, target tokens) over these sentences."""
    plan = plan_eval(split.src_lengths[rows.start:rows.stop], split.trg_lengths[rows.start:rows.stop],
                     recipe.batch.tokens)
    totals = [0.0, 0.0, 0.0]
    rounds = math.ceil(len(plan) / engine.data_world)  # the same on all: ZeRO-3 gathers weights in every forward
    for first in range(0, rounds, BATCHES_PER_CALL):
        turns = range(first, min(first + BATCHES_PER_CALL, rounds))
        indices = [turn * engine.data_world + engine.data_rank for turn in turns]
        batches = [collate(split, rows.start + plan[index if index < len(plan) else 0], 0, ranks.device)
                   for index in indices]
        for index, batch, (loss, nll) in zip(indices, batches, engine.evaluate(batches), strict=True):
            if index < len(plan):
                totals = [totals[0] + loss, totals[1] + nll, totals[2] + batch.tokens]
    copies = ranks.world // engine.data_world  # the stages of a pipeline count the same tokens
    return [totals[0], totals[1], totals[2] / copies]


def _bleu(recipe: Recipe, data: PreparedData, split: Split, rows: range, lang: str, model: Transformer, ranks: Ranks
          ) -> tuple[float, str]:
    """BLEU of the first of these sentences, with its signature."""
    some = slice(rows.start, min(rows.stop, rows.start + (recipe.train.valid_sentences or len(rows))))
    sources, references = split.src_text()[some], split.trg_text()[some]
    settings = Translate(method="greedy", batch_tokens=recipe.translate.batch_tokens)
    # without warnings, which would repeat for the same lines at every validation
    translated = translate_shards(model, data.vocabs(), sources, settings, ranks, warn=False)
    hypotheses = [best[0].text for best in translated]
    score = b""
    if ranks.first:
        metric = make_scorers(lang)["bleu"]
        value = metric.corpus_score(hypotheses, [references]).score
        score = json.dumps([value, str(metric.get_signature())]).encode()
    value, signature = json.loads(ranks.broadcast_bytes(score))
    return value, signature


def _alignment_error(recipe: Recipe, data: PreparedData, links: Links, rows: range, model: Transformer, ranks: Ranks
                     ) -> float | None:
    """The alignment error rate of these sentences, 0 to 1, as `align` finds links in the guided layer; None if none has
    alignments. It is 1 - 2·|A∩G| / (|A| + |G|), A the links found and G the given ones (Och and Ney 2003, A Systematic
    Comparison of Various Statistical Alignment Models, eq. 21, where all given links are sure)."""
    split = data.split("valid").truncated(recipe.model.max_length)
    given = [row for row in rows if links.of(row)]
    plan = plan_eval(split.src_lengths[given], split.trg_lengths[given], recipe.batch.tokens)
    layer, vocabs = layer_index(recipe.train.guided_layer, len(model.decoder_layers)), data.vocabs()
    right = found = 0.0
    with evaluating(model), torch.inference_mode():
        for index in range(ranks.rank, len(plan), ranks.world):
            numbers = np.array(given)[plan[index]]
            batch = collate(split, numbers, 0, ranks.device)
            targets = [split.targets[row].tolist() for row in numbers]
            aligned = align(model, layer, batch["src"], batch["src_lengths"], batch["trg_in"], targets, vocabs)
            for row, own in zip(numbers, aligned, strict=True):
                gold = set(links.of(row))
                right, found = right + len(gold & set(own)), found + len(gold) + len(own)
    right, found = ranks.sum([right, found])
    return 1 - 2 * right / found if found else None
