"""The task that is trained: data, model and validation, which the trainer knows nothing about.

Engines, trainer, checkpoints and schedules work with any task whose model is called as `model(batch)` and returns
`LossSums`. A task is a folder of `deepnmt/tasks`, see `deepnmt.visitors`, or comes from a plug-in. Pipelines, ω and
decoding need a `Transformer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deepnmt.config import Recipe
from deepnmt.config.plugins import Table
from deepnmt.data.batching import Position
from deepnmt.errors import UserError
from deepnmt.model.loss import perplexity
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.training.updates import Batches
from deepnmt.visitors import task_module

Figures = Mapping[str, float | str]
OwnRecipe = Any  # a `Recipe`, of the class that the task has in its `settings`


class Epochs(Batches, Protocol):
    """Micro-batches, epoch after epoch."""

    def epoch_size(self, epoch: int) -> int:
        """The number of entries in an epoch, see `Stream.update`; it may be an estimate."""

    def passes(self, position: Position) -> float:
        """Epochs before a position."""

    def waste(self, epoch: int) -> float:
        """The share of padding in an epoch's tokens, 0 to 1."""


@dataclass(frozen=True)
class Validation:
    """Figures of one validation.

    Attributes:
        loss: what is minimised, in nats a target token.
        perplexity: e to the power of the plain loss.
        value: by which validations are compared, lower is better.
        figures: others by name; a text beside a figure says how it was measured.
        corpora: the same of each corpus, by name, if there are several; `figures` are then their means.
    """

    loss: float
    perplexity: float
    value: float
    figures: Figures = field(default_factory=dict)
    corpora: Mapping[str, Validation] = field(default_factory=dict)

    @classmethod
    def of_sums(cls, sums: Sequence[float], figures: Figures, value: float | None = None) -> Validation:
        """From the sums (loss, plain loss, target tokens) of all processes; `value` is the loss if it is None."""
        loss, nll, tokens = map(float, sums)
        mean = loss / tokens
        return cls(mean, perplexity(nll, tokens), mean if value is None else value, figures)


@dataclass(frozen=True)
class Look:
    """A cheap look at a model that trains, once, where the first validation may be thousands of updates later.

    Attributes:
        due: (recipe) returns the update from which it says something.
        measure: (recipe, data, engine, ranks) returns figures; none: not known. Collective.
    """

    due: Callable[[OwnRecipe], int]
    measure: Callable[[OwnRecipe, Any, Engine, Ranks], dict[str, float]]


@dataclass(frozen=True)
class Task:
    """The functions that define a task. The data may be of any type; its `fingerprint` is the same for the same
    examples, and its `former_fingerprints`, if it has them, are those that older versions gave them.

    Attributes:
        check: (recipe) raises `UserError` for what would otherwise fail only hours later.
        open: (recipe, texts) returns the data; `texts`: whether the files it was made from must be unchanged.
        verify: (data) reads every byte, now or before it is used, and raises `UserError` if one has changed.
        stream: (recipe, data) returns the training micro-batches.
        start: (recipe, layout, data, ranks, initialise) returns the engine with the model; sets the initial weights if
            `initialise`, else the caller fills them. Collective.
        validate: (recipe, data, engine, ranks) returns the same figures on every process. Collective.
        files: (data) returns the task's files in a checkpoint, beside weights, moments, state and recipe: name to
            content.
        prepare: (recipe, part) prepares the data for `open`, or a part of them such as "3/8" (empty: all), and returns
            their folder; None: there is nothing to prepare.
        plan: (recipe, card) returns what `train --dry-run` prints; `card`: for which GPU, see
            `training.dry_run.describe`.
        look: see `Look`.
        describe: (record of a validation or a look) returns what a progress line says of its figures, after a space.
        warn: (recipe, update, figures of a validation or a look) returns a sentence if training has gone wrong in a way
            that the loss does not show. It stands in STATUS.json as long as it is so.
        explain: (record of the last validation) returns what it says about a run that diverged after it.
    """

    check: Callable[[OwnRecipe], None]
    open: Callable[[OwnRecipe, bool], Any]
    verify: Callable[[Any], None]
    stream: Callable[[OwnRecipe, Any], Epochs]
    start: Callable[[OwnRecipe, Layout, Any, Ranks, bool], Engine]
    validate: Callable[[OwnRecipe, Any, Engine, Ranks], Validation]
    files: Callable[[Any], dict[str, bytes]]
    prepare: Callable[[OwnRecipe, str], Path] | None = None
    plan: Callable[[OwnRecipe, str | None], str] | None = None
    look: Look | None = None
    describe: Callable[[Mapping[str, Any]], str] = lambda record: ""
    warn: Callable[[OwnRecipe, int, Figures], str | None] = lambda recipe, update, figures: None
    explain: Callable[[Mapping[str, Any]], list[str]] = lambda record: []


TASKS: Table[Task] = Table(
    "TASKS", {}, lambda task: None if isinstance(task, Task) else f"is {task!r}, must be a deepnmt.training.task.Task")


def find_task(name: str) -> Task:
    """The task of a recipe: a folder of `deepnmt/tasks`, or a plug-in's. Raises `UserError` if neither has it."""
    module = task_module(name, "task")
    return TASKS[name] if module is None else module.TASK


def prepare(recipe: Recipe, part: str = "") -> Path:
    """Prepares a recipe's data, or a part of them, as its task does. Raises `UserError` if it has none to prepare."""
    task = find_task(recipe.task)
    if task.prepare is None:
        raise UserError(f"task: {recipe.task} has no data to prepare; run deepnmt train")
    return task.prepare(recipe, part)


def plan(recipe: Recipe, card: str | None) -> str:
    """What a run will be, as its task tells it. Raises `UserError` if the task does not."""
    task = find_task(recipe.task)
    if task.plan is None:
        raise UserError(f"task: {recipe.task} says nothing of a run beforehand; leave out --dry-run")
    return task.plan(recipe, card)
