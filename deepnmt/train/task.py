"""What is trained: all that the trainer does not know about its task. Translation is the first.

Engines, trainer, checkpoints and schedules take any task whose model is called `model(*batch.tensors, batch.key)` and
gives `LossSums`. Pipelines, ω, the doctor and decoding are translation's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deepnmt.checkpoint.checkpoint import SRC_VOCAB, TRG_VOCAB
from deepnmt.config import Recipe
from deepnmt.data.batching import Stream
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.evaluate.metrics import scorers
from deepnmt.parallel.build import partition_of, start_engine
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.settings import Layout
from deepnmt.ranks import Ranks
from deepnmt.train.profile import profile_for, save_profile
from deepnmt.train.updates import Batches
from deepnmt.train.validate import Validation, validate


class Epochs(Batches, Protocol):
    """Micro-batches of one epoch after the other."""

    def epoch_size(self, epoch: int) -> int:
        """Micro-batches in it."""

    def waste(self, epoch: int) -> float:
        """The share of padding in it, 0 to 1."""


@dataclass(frozen=True)
class Task:
    """One row of functions. `Data` is whatever `open` returns; it has a `fingerprint`, the same for the same examples.

    Attributes:
        check: (recipe) refuses what would else fail only hours later.
        open: (recipe, texts, verify) the data; `texts`: whether the files they were made from must still be the same;
            `verify`: whether every byte is checked.
        stream: (recipe, data) the training micro-batches.
        start: (recipe, layout, data, ranks, initialise) the engine with the model, its initial weights set if
            `initialise`, else to be filled. Collective.
        validate: (recipe, data, engine, ranks) the same figures on every process. Collective.
        files: (data) what a checkpoint carries beside weights, moments, state and recipe, by file name.
    """

    check: Callable[[Recipe], None]
    open: Callable[[Recipe, bool, bool], Any]
    stream: Callable[[Recipe, Any], Epochs]
    start: Callable[[Recipe, Layout, Any, Ranks, bool], Engine]
    validate: Callable[[Recipe, Any, Engine, Ranks], Validation]
    files: Callable[[Any], dict[str, bytes]]


def _check(recipe: Recipe) -> None:
    if recipe.train.valid_bleu:
        scorers(recipe.data.trg_lang)


def _stream(recipe: Recipe, data: PreparedData) -> Stream:
    return Stream(data.split("train"), recipe.batch.tokens, recipe.seed)


def _start(recipe: Recipe, layout: Layout, data: PreparedData, ranks: Ranks, initialise: bool) -> Engine:
    profile = profile_for(recipe, data, ranks) if initialise else None
    if profile is not None and ranks.first:
        save_profile(profile, Path(recipe.run))
    sizes = (data.vocabs()[0].size, data.vocabs()[1].size)
    ratio = data.split("train").source_per_target
    if layout.stages and ranks.first:
        print(partition_of(recipe, *sizes, ratio).table(recipe.batch.accumulation), flush=True)
    return start_engine(recipe, layout, sizes, ranks, profile, ratio, initialise)


def _files(data: PreparedData) -> dict[str, bytes]:
    """To put one more file into every checkpoint: its name and bytes here. It is hashed and checked like the others;
    averages and folded models carry it on."""
    return {name: vocab.bytes for name, vocab in zip((SRC_VOCAB, TRG_VOCAB), data.vocabs(), strict=True)}


TRANSLATION = Task(_check, open_prepared, _stream, _start, validate, _files)
