"""Validation during training: the loss over the whole set, and BLEU of a greedy translation, shared among ranks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from deepnmt.config import Recipe, Translate
from deepnmt.data.batching import collate, plan_eval
from deepnmt.data.prepared import PreparedData, Split
from deepnmt.decode.translate import translate_shards
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
    plain loss."""

    loss: float
    perplexity: float
    bleu: float | None = None
    signature: str | None = None


def validate(recipe: Recipe, data: PreparedData, engine: Engine, ranks: Ranks) -> Validation:
    """Validates; every rank returns the same figures. Collective."""
    split = data.split("valid")
    loss, nll, tokens = ranks.sum(_losses(recipe, split.truncated(recipe.model.max_length), engine, ranks))
    bleu = signature = None
    if recipe.train.valid_bleu:
        bleu, signature = _bleu(recipe, data, split, engine.gather_model(), ranks)
    return Validation(loss / tokens, math.exp(min(nll / tokens, 50.0)), bleu, signature)


def _losses(recipe: Recipe, split: Split, engine: Engine, ranks: Ranks) -> list[float]:
    """This process's share of the sums (loss, nll, target tokens) over the whole set."""
    plan = plan_eval(split.src_lengths, split.trg_lengths, recipe.batch.tokens)
    totals = [0.0, 0.0, 0.0]
    rounds = math.ceil(len(plan) / engine.data_world)  # the same on all: ZeRO-3 gathers weights in every forward
    for first in range(0, rounds, BATCHES_PER_CALL):
        turns = range(first, min(first + BATCHES_PER_CALL, rounds))
        indices = [turn * engine.data_world + engine.data_rank for turn in turns]
        batches = [collate(split, plan[index if index < len(plan) else 0], 0, ranks.device) for index in indices]
        for index, batch, (loss, nll) in zip(indices, batches, engine.evaluate(batches), strict=True):
            if index < len(plan):
                totals = [totals[0] + loss, totals[1] + nll, totals[2] + batch.tokens]
    copies = ranks.world // engine.data_world  # the stages of a pipeline count the same tokens
    return [totals[0], totals[1], totals[2] / copies]


def _bleu(recipe: Recipe, data: PreparedData, split: Split, model: Transformer, ranks: Ranks) -> tuple[float, str]:
    count = recipe.train.valid_sentences or len(split)
    sources, references = split.src_text()[:count], split.trg_text()[:count]
    settings = Translate(method="greedy", batch_tokens=recipe.translate.batch_tokens)
    # without warnings, which would repeat for the same lines at every validation
    translated = translate_shards(model, data.vocabs(), sources, settings, ranks, warn=False)
    hypotheses = [best[0].text for best in translated]
    score = b""
    if ranks.first:
        metric = make_scorers(recipe.data.trg_lang)["bleu"]
        value = metric.corpus_score(hypotheses, [references]).score
        score = json.dumps([value, str(metric.get_signature())]).encode()
    value, signature = json.loads(ranks.broadcast_bytes(score))
    return value, signature
