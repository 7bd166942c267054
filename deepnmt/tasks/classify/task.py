"""The task: labelled examples, an encoder with BERT's head, validation by accuracy, F1 and Matthews' correlation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional as F

from deepnmt.config import Recipe
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.settings import Layout
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.classify.data import ClassifyData, LabelledStream, open_examples
from deepnmt.tasks.classify.metrics import count, scores
from deepnmt.tasks.classify.model import build_of
from deepnmt.tasks.classify.settings import ClassifyRecipe
from deepnmt.training.encoders import evaluated, plan_encoder, start_encoder, vocabulary_files_of
from deepnmt.training.task import Task, Validation


def _of(recipe: Recipe) -> ClassifyRecipe:
    return cast(ClassifyRecipe, recipe)


def _stream(recipe: Recipe, data: ClassifyData) -> LabelledStream:
    return LabelledStream(data.train, _of(recipe).batch.sentences, recipe.seed)


def _start(recipe: Recipe, layout: Layout, data: ClassifyData, ranks: Ranks, initialise: bool) -> Engine:
    return start_encoder(_of(recipe), build_of(_of(recipe), data.vocab.size), data.vocab, layout, ranks, initialise)


def validate(recipe: Recipe, data: ClassifyData, engine: Engine, ranks: Ranks) -> Validation:
    """Loss and scores over all validation examples. Collective."""
    settings, labels = _of(recipe), len(_of(recipe).data.labels)
    table, losses = np.zeros((labels, labels)), [0.0, 0.0]
    with evaluated(engine) as model:
        for rows in data.valid.plan(settings.batch.sentences)[ranks.rank::ranks.world]:
            batch = data.valid.batch(rows, 0, ranks.device)
            logits, right = model.logits(batch), batch["labels"]
            loss = F.cross_entropy(logits, right, reduction="sum", label_smoothing=settings.train.label_smoothing)
            found = torch.stack([loss, F.cross_entropy(logits, right, reduction="sum")]).tolist()
            losses = [losses[0] + found[0], losses[1] + found[1]]
            table += count(right.cpu().numpy(), logits.argmax(1).cpu().numpy(), labels)
    whole, plain, *cells = ranks.sum([*losses, *table.flatten().tolist()])
    table, total = np.array(cells).reshape(labels, labels), sum(cells)
    figures = scores(table)
    value = whole / total if settings.train.best_by == "loss" else -figures[settings.train.best_by]
    return Validation(whole / total, math.exp(min(plain / total, 50.0)), value, figures)


def _plan(recipe: Recipe, card: str | None) -> str:
    data = open_examples(_of(recipe))
    epoch = _stream(recipe, data).epoch_size(0)
    rows = {"data": f"{len(data.train):,} examples for training, {len(data.valid):,} for validation; an epoch is "
                    f"{epoch:,} micro-batches"}
    return plan_encoder(_of(recipe), build_of(_of(recipe), data.vocab.size), rows)


def _describe(record: Mapping[str, Any]) -> str:
    return f" accuracy {record['accuracy']:.3f} F1 {record['f1']:.3f} Matthews {record['matthews']:.3f}"


TASK = Task(
    check=lambda recipe: None, open=lambda recipe, texts: open_examples(_of(recipe)), verify=lambda data: None,
    stream=_stream, start=_start, validate=validate, files=lambda data: vocabulary_files_of(data.vocab), plan=_plan,
    describe=_describe)
