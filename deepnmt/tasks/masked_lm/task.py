"""The task: prepared sequences, an encoder with BERT's head, validation with a fixed mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deepnmt.data.batching import plan_eval
from deepnmt.data.examples import ExampleStream
from deepnmt.model.encoder import class_losses
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.masked_lm.data import MaskedText
from deepnmt.tasks.masked_lm.masking import MASK
from deepnmt.tasks.masked_lm.model import build_of
from deepnmt.tasks.masked_lm.prepare import PreparedText
from deepnmt.tasks.masked_lm.settings import MaskedRecipe
from deepnmt.training.encoders import check_encoder, evaluated, plan_encoder, start_encoder
from deepnmt.training.task import Task, Validation


def text_of(recipe: MaskedRecipe, data: PreparedText, split: str) -> MaskedText:
    """The sequences of train or valid, to be masked."""
    seed = recipe.seed if split == "train" else 0  # runs with several seeds are validated with one mask
    return MaskedText(split, data.sequences(split), recipe.masking, data.vocab.tags[MASK], data.vocab.size, seed)


def _stream(recipe: MaskedRecipe, data: PreparedText) -> ExampleStream:
    return ExampleStream(text_of(recipe, data, "train"), recipe.batch.tokens, recipe.seed)


def _start(recipe: MaskedRecipe, layout: Layout, data: PreparedText, ranks: Ranks, initialise: bool) -> Engine:
    return start_encoder(recipe, build_of(recipe, data.vocab.size), data.vocab, layout, ranks, initialise)


def validate(recipe: MaskedRecipe, data: PreparedText, engine: Engine, ranks: Ranks) -> Validation:
    """Loss and accuracy over the masked tokens of the whole validation text. Collective."""
    text = text_of(recipe, data, "valid")
    plan = plan_eval(text.src_lengths, text.trg_lengths, recipe.batch.tokens)
    smoothing, sums = recipe.train.label_smoothing, np.zeros(4)
    with evaluated(engine) as model:
        for index in range(ranks.rank, len(plan), ranks.world):
            logits, targets = model.predictions(text.fixed_batch(plan[index], ranks.device))
            losses = class_losses(logits, targets, smoothing)
            right = (logits.argmax(1) == targets).sum()
            sums += [*torch.stack([losses.loss, losses.nll, right]).tolist(), len(targets)]
    loss, nll, correct, tokens = ranks.sum(sums.tolist())
    return Validation.of_sums([loss, nll, tokens], {"accuracy": correct / tokens})


def _plan(recipe: MaskedRecipe, card: str | None) -> str:
    rows = {"data": "not prepared yet"}
    data, size = PreparedText.planned(recipe)
    if data is not None:
        stream = _stream(recipe, data)
        count = len(data.sequences("train").lengths)
        rows = {"data": f"{count:,} sequences, {stream.epoch_size(0):,} micro-batches an epoch "
                        f"(padding {100 * stream.waste(0):.1f} %)"}
    return plan_encoder(recipe, build_of(recipe, size), rows)


def _describe(record: Mapping[str, Any]) -> str:
    return f" accuracy {100 * record['accuracy']:.1f} % of masked tokens"


TASK = Task(
    check=lambda recipe: check_encoder(recipe, build_of(recipe, 8)), open=PreparedText.open,
    verify=PreparedText.verify, stream=_stream, start=_start, validate=validate,
    files=lambda data: data.vocab.files, prepare=PreparedText.prepare, plan=_plan, describe=_describe)
