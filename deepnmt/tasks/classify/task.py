"""The task: labelled examples, an encoder with BERT's head, validation by accuracy, F1 and Matthews' correlation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deepnmt.model.encoder import class_losses
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.classify.data import ClassifyData, LabelledStream, open_examples
from deepnmt.tasks.classify.metrics import count, scores
from deepnmt.tasks.classify.model import build_of
from deepnmt.tasks.classify.settings import ClassifyRecipe
from deepnmt.training.encoders import check_encoder, evaluated, plan_encoder, start_encoder
from deepnmt.training.task import Task, Validation


def _stream(recipe: ClassifyRecipe, data: ClassifyData) -> LabelledStream:
    return LabelledStream(data.train, recipe.batch.sentences, recipe.seed)


def _start(recipe: ClassifyRecipe, layout: Layout, data: ClassifyData, ranks: Ranks, initialise: bool) -> Engine:
    return start_encoder(recipe, build_of(recipe, data.vocab.size), data.vocab, layout, ranks, initialise)


def validate(recipe: ClassifyRecipe, data: ClassifyData, engine: Engine, ranks: Ranks) -> Validation:
    """Loss and scores over all validation examples. Collective."""
    labels, smoothing, by = len(recipe.data.labels), recipe.train.label_smoothing, recipe.train.best_by
    table, sums = np.zeros((labels, labels)), np.zeros(2)
    with evaluated(engine) as model:
        for rows in data.valid.plan(recipe.batch.sentences)[ranks.rank::ranks.world]:
            batch = data.valid.batch(rows, 0, ranks.device)
            logits, right = model.logits(batch), batch["labels"]
            losses = class_losses(logits, right, smoothing)
            sums += torch.stack([losses.loss, losses.nll]).tolist()
            table += count(right.cpu().numpy(), logits.argmax(1).cpu().numpy(), labels)
    loss, nll, *cells = ranks.sum([*sums.tolist(), *table.flatten().tolist()])
    figures = scores(np.array(cells).reshape(labels, labels))
    return Validation.of_sums([loss, nll, sum(cells)], figures, None if by == "loss" else -figures[by])


def _plan(recipe: ClassifyRecipe, card: str | None) -> str:
    data = open_examples(recipe)
    epoch = _stream(recipe, data).epoch_size(0)
    rows = {"data": f"{len(data.train):,} examples for training, {len(data.valid):,} for validation; an epoch is "
                    f"{epoch:,} micro-batches"}
    return plan_encoder(recipe, build_of(recipe, data.vocab.size), rows)


def _describe(record: Mapping[str, Any]) -> str:
    return f" accuracy {record['accuracy']:.3f} F1 {record['f1']:.3f} Matthews {record['matthews']:.3f}"


TASK = Task(
    check=lambda recipe: check_encoder(recipe, build_of(recipe, 8)),
    open=lambda recipe, texts: open_examples(recipe), verify=lambda data: None, stream=_stream, start=_start,
    validate=validate, files=lambda data: data.vocab.files, plan=_plan, describe=_describe)
