"""The task: prepared sequences, an encoder with BERT's head, validation with a fixed mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import functional as F

from deepnmt.config import Recipe
from deepnmt.data.batching import plan_eval
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.settings import Layout
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.masked_lm.data import MaskedStream, MaskedText
from deepnmt.tasks.masked_lm.masking import MASK
from deepnmt.tasks.masked_lm.model import build_of
from deepnmt.tasks.masked_lm.prepare import PreparedText, open_text, prepare_text
from deepnmt.tasks.masked_lm.settings import MaskedRecipe
from deepnmt.training.encoders import evaluated, plan_encoder, start_encoder, vocabulary_files_of
from deepnmt.training.task import Task, Validation


def text_of(recipe: MaskedRecipe, data: PreparedText, split: str) -> MaskedText:
    """The sequences of train or valid, to be masked."""
    seed = recipe.seed if split == "train" else 0  # runs with several seeds are validated with one mask
    return MaskedText(split, data.sequences(split), recipe.masking, data.vocab.tags[MASK], data.vocab.size, seed)


def _stream(recipe: Recipe, data: PreparedText) -> MaskedStream:
    masked = cast(MaskedRecipe, recipe)
    return MaskedStream(text_of(masked, data, "train"), recipe.batch.tokens, recipe.seed)


def _start(recipe: Recipe, layout: Layout, data: PreparedText, ranks: Ranks, initialise: bool) -> Engine:
    masked = cast(MaskedRecipe, recipe)
    return start_encoder(masked, build_of(masked, data.vocab.size), data.vocab, layout, ranks, initialise)


def validate(recipe: Recipe, data: PreparedText, engine: Engine, ranks: Ranks) -> Validation:
    """Loss and accuracy over the masked tokens of the whole validation text. Collective."""
    text = text_of(cast(MaskedRecipe, recipe), data, "valid")
    plan = plan_eval(text.src_lengths, text.trg_lengths, recipe.batch.tokens)
    sums = [0.0, 0.0, 0.0, 0.0]
    with evaluated(engine) as model:
        for index in range(ranks.rank, len(plan), ranks.world):
            logits, targets = model.predictions(text.fixed_batch(plan[index], ranks.device))
            smoothing = recipe.train.label_smoothing
            loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
            nll = F.cross_entropy(logits, targets, reduction="sum")
            right = (logits.argmax(1) == targets).sum()
            found = torch.stack([loss, nll, right]).tolist()
            sums = [a + b for a, b in zip(sums, [*found, len(targets)], strict=True)]
    total, plain, hits, tokens = ranks.sum(sums)
    return Validation(total / tokens, math.exp(min(plain / tokens, 50.0)), total / tokens, {"accuracy": hits / tokens})


def _plan(recipe: Recipe, card: str | None) -> str:
    masked = cast(MaskedRecipe, recipe)
    size, rows = recipe.vocab.size, {"data": "not prepared yet"}
    if Path(recipe.data.folder).exists():
        data = open_text(masked)
        size = data.vocab.size
        stream = _stream(recipe, data)
        count = len(data.sequences("train").lengths)
        rows = {"data": f"{count:,} sequences, {stream.epoch_size(0):,} micro-batches an epoch "
                        f"(padding {100 * stream.waste(0):.1f} %)"}
    return plan_encoder(masked, build_of(masked, size), rows)


def _describe(record: Mapping[str, Any]) -> str:
    return f" accuracy {100 * record['accuracy']:.1f} % of masked tokens"


TASK = Task(
    check=lambda recipe: None, open=lambda recipe, texts: open_text(cast(MaskedRecipe, recipe), texts),
    verify=PreparedText.verify, stream=_stream, start=_start, validate=validate,
    files=lambda data: vocabulary_files_of(data.vocab),
    prepare=lambda recipe, part: prepare_text(cast(MaskedRecipe, recipe), part), plan=_plan, describe=_describe)
