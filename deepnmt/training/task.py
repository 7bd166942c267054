"""The task that is trained: data, model and validation, which the trainer knows nothing about. Here: translation.

Engines, trainer, checkpoints and schedules work with any task whose model is called as
`model(batch)` and returns `LossSums`. Pipelines, ω and decoding need translation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deepnmt.checkpoint.checkpoint import SRC_VOCAB, TRG_VOCAB
from deepnmt.config import Recipe
from deepnmt.config.plugins import Table
from deepnmt.data.batching import Stream
from deepnmt.data.mixing import training_stream
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.evaluate.metrics import make_scorers
from deepnmt.parallel.build import partition_of, start_engine
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.settings import Layout
from deepnmt.processes.ranks import Ranks
from deepnmt.training.fine_tuning import check_parts, trained_weights
from deepnmt.training.plan import check_memory
from deepnmt.training.profile import profile_for, save_profile
from deepnmt.training.source_use import SourceUse
from deepnmt.training.updates import Batches
from deepnmt.training.validate import Validation, look, validate
from deepnmt.visitors import visitor_modules


class Epochs(Batches, Protocol):
    """Micro-batches, epoch after epoch."""

    def epoch_size(self, epoch: int) -> int:
        """The number of micro-batches in an epoch."""

    def waste(self, epoch: int) -> float:
        """The share of padding in an epoch's tokens, 0 to 1."""


@dataclass(frozen=True)
class Task:
    """The functions that define a task. The data may be of any type; its `fingerprint` is the same for the same
    examples, and its `former_fingerprints`, if it has them, are those that older versions gave them.

    Attributes:
        check: (recipe) raises `UserError` for what would otherwise fail only hours later.
        open: (recipe, texts) returns the data; `texts`: whether the files it was made from must be unchanged.
        verify: (data) reads every byte and raises `UserError` if one has changed.
        stream: (recipe, data) returns the training micro-batches.
        start: (recipe, layout, data, ranks, initialise) returns the engine with the model; sets the initial weights if
            `initialise`, else the caller fills them. Collective.
        validate: (recipe, data, engine, ranks) returns the same figures on every process. Collective.
        files: (data) returns the task's files in a checkpoint, beside weights, moments, state and recipe: name to
            content.
        look: (recipe, data, engine, ranks) returns how much the model uses its source (None: not known), for an early
            update. Collective. Without it there is no such look.
    """

    check: Callable[[Recipe], None]
    open: Callable[[Recipe, bool], Any]
    verify: Callable[[Any], None]
    stream: Callable[[Recipe, Any], Epochs]
    start: Callable[[Recipe, Layout, Any, Ranks, bool], Engine]
    validate: Callable[[Recipe, Any, Engine, Ranks], Validation]
    files: Callable[[Any], dict[str, bytes]]
    look: Callable[[Recipe, Any, Engine, Ranks], SourceUse | None] | None = None


def _check(recipe: Recipe) -> None:
    check_parts(recipe)
    if recipe.train.valid_bleu:
        for corpus in (recipe.data.valid, *recipe.data.valid.corpora.values()):
            make_scorers(corpus.trg_lang or recipe.data.trg_lang)


def _stream(recipe: Recipe, data: PreparedData) -> Stream:
    kind: Callable[..., Stream] = Stream
    for visitor in visitor_modules("stream"):
        kind = visitor.around(kind, recipe, data)
    return training_stream(recipe, data, kind)


def _start(recipe: Recipe, layout: Layout, data: PreparedData, ranks: Ranks, initialise: bool) -> Engine:
    sizes = (data.vocabs()[0].size, data.vocabs()[1].size)
    ratio = data.split("train").source_per_target
    ranks.raise_everywhere(lambda: check_memory(recipe, layout, sizes, ratio, ranks))
    trained = trained_weights(recipe, data.vocabs(), ranks) if initialise and recipe.train.init_from else None
    fresh = initialise and trained is None
    profile = profile_for(recipe, data, ranks) if fresh else None
    if profile is not None:
        ranks.raise_everywhere(lambda: save_profile(profile, Path(recipe.run)) if ranks.first else None)
    if layout.stages and ranks.first:
        print(partition_of(recipe, *sizes, ratio).table(recipe.batch.accumulation), flush=True)
    engine = start_engine(recipe, layout, sizes, ranks, profile, ratio, fresh)
    if trained is not None:
        engine.fill(trained)
    return engine


def _files(data: PreparedData) -> dict[str, bytes]:
    """The vocabularies. To put another file into every checkpoint, add its name and bytes here: it is hashed and
    checked like the others, and copied into averages and folded models."""
    return {name: vocab.bytes for name, vocab in zip((SRC_VOCAB, TRG_VOCAB), data.vocabs(), strict=True)}


TRANSLATION = Task(_check, open_prepared, PreparedData.verify, _stream, _start, validate, _files, look)

TASKS: Table[Task] = Table(
    "TASKS", {"translation": TRANSLATION},
    lambda task: None if isinstance(task, Task) else f"is {task!r}, must be a deepnmt.training.task.Task")
