"""Validation during training: the loss over the whole set, and BLEU of a greedy translation, shared among ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from deepnmt.config import Recipe, Translate
from deepnmt.data.batching import collate, plan_eval
from deepnmt.data.prepared import PreparedData, Split
from deepnmt.decode.translate import translate_shards
from deepnmt.device import release
from deepnmt.evaluate.metrics import make_scorers
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import Engine
from deepnmt.ranks import Ranks

# Micro-batches passed to the engine in one call. P pipeline stages idle (P - 1) / (64 + P - 1) of the time, 5 % for 4;
# waiting micro-batches are integers, and a stage holds the activations of two.
BATCHES_PER_CALL = 64


@dataclass(frozen=True)
class Validation:
    """Figures of one validation. `loss`: label-smoothed, nats a target token; `perplexity`: e to the power of the
    plain loss; `corpora`: the same of each corpus, by name, if there are several; `bleu` is then their mean."""

    loss: float
    perplexity: float
    bleu: float | None = None
    signature: str | None = None
    corpora: Mapping[str, Validation] = field(default_factory=dict)


def validate(recipe: Recipe, data: PreparedData, engine: Engine, ranks: Ranks) -> Validation:
    """Validates; every rank returns the same figures. Collective."""
    split, text = data.split("valid"), recipe.data.valid
    model = engine.gather_model() if recipe.train.valid_bleu else None
    sums, results, begin = np.zeros(3), {}, 0
    for name, size in data.corpora("valid").items():
        rows = range(begin, begin := begin + size)
        losses = ranks.sum(_losses(recipe, split.truncated(recipe.model.max_length), rows, engine, ranks))
        bleu: tuple[float, str] | tuple[None, None] = (None, None)
        if model is not None:
            lang = text.corpora.get(name, text).trg_lang or recipe.data.trg_lang
            bleu = _bleu(recipe, data, split, rows, lang, model, ranks)
            release(ranks.device)  # what decoding kept, in shapes that training does not have
        results[name] = _figures(losses, *bleu)
        sums += losses
    if len(results) == 1:
        return next(iter(results.values()))
    scores = [result.bleu for result in results.values() if result.bleu is not None]
    mean = sum(scores) / len(scores) if scores else None
    return replace(_figures(sums.tolist(), mean, next(iter(results.values())).signature), corpora=results)


def _figures(sums: Sequence[float], bleu: float | None, signature: str | None) -> Validation:
    loss, nll, tokens = map(float, sums)
    return Validation(loss / tokens, math.exp(min(nll / tokens, 50.0)), bleu, signature)


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
