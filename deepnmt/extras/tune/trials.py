"""Trials: short runs of a recipe or of its small copy, each a line of `trials.jsonl`.

A trial is known by its whole recipe and its data. So the same command goes on where it was stopped, and a changed
recipe begins anew beside the old lines.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepnmt.api import read_recipe, run_training
from deepnmt.checkpoint.checkpoint import load_state, newest_checkpoint
from deepnmt.checkpoint.retention import RULES
from deepnmt.config import Fact, Recipe, flatten
from deepnmt.extras.tune.plan import Budget, Point, Stages, settings_of, shortened, words
from deepnmt.files import drop_partial_line, read_log, read_numbered_log, reporting
from deepnmt.progress import print_status
from deepnmt.tasks.translation.collapse import has_collapsed
from deepnmt.tasks.translation.source_use import SourceUse
from deepnmt.training.divergence import Diverged
from deepnmt.training.reporters import clock

Record = Mapping[str, Any]
AGAIN = "free disk space, and repeat the command, which takes up its trials"  # where nothing can be written
LEAST_WORTH = 0.01  # nats a target token; a source that is worth less is not used


class TimeIsOver(Exception):  # noqa: N818 (an end, not an error)
    """The next trial would end after the budget's seconds."""


@dataclass
class Trials:
    """The trials of one search.

    Attributes:
        recipe: the deep one.
        small: its small copy.
        folder: of `trials.jsonl`.
        data: the fingerprint of the data.
        processes: data-parallel processes whose updates a trial's have the size of.
        stages: how many trials are planned; None: not known yet.
        done: the records of this search so far, in their order.
    """

    recipe: Recipe
    small: Recipe
    folder: Path
    data: str
    budget: Budget
    processes: int
    stages: Stages | None = None
    done: list[Record] = field(default_factory=list)
    _known: dict[str, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        drop_partial_line(self.file)
        for _, record in read_numbered_log(self.file):
            if isinstance(record, dict) and "key" in record:
                self._known[record["key"]] = record

    @property
    def file(self) -> Path:
        """Of the records."""
        return self.folder / "trials.jsonl"

    def run(self, stage: str, point: Point, updates: int, seed: int, deep: bool = False) -> Record:
        """The record of a trial, which is trained if there is none.

        Raises:
            TimeIsOver: there is no time left for it.
            UserError: the recipe cannot be trained with these settings.
        """
        base = self.recipe if deep else self.small
        recipe = read_recipe(base, {
            **_alone(self.recipe, updates, self.processes), **settings_of(base, point, updates),
            "seed": seed, "run": "trial"})
        key = hashlib.sha256(f"{json.dumps(recipe.model_dump())}{self.data}".encode()).hexdigest()[:16]
        cost = updates / self.budget.half * (layers_of(base) / layers_of(self.small))
        if key not in self._known:
            if self.done and self._spent() + cost * self._seconds() > self.budget.seconds:
                raise TimeIsOver
            model = "-".join(f"{recipe.model.stack(side).layers}L" for side in recipe.model.sides)
            print_status(f"{self._progress()}: {words(point)} ({model}, {updates:,} updates, seed {seed})")
            self._clear(f"trial-{key}")
            folder = self.folder / f"trial-{key}"
            stopped = newest_checkpoint(folder / "checkpoints")  # Ctrl-C has left it
            earlier = load_state(stopped).extra["seconds"] if stopped else 0.0
            begun = time.monotonic()
            figures = _train(read_recipe(recipe, {"run": str(folder)}), self.folder / "training.log")
            record = {"key": key, "stage": stage, "point": dict(point), "model": model, "updates": updates,
                      "seed": seed, "cost": cost, **figures, "seconds": round(earlier + time.monotonic() - begun, 1)}
            with reporting(str(self.file), AGAIN), open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            shutil.rmtree(folder, ignore_errors=True)
            print_status(f"  {result(record)} ({record['seconds']:.0f} s)")
            self._known[key] = record
        record = {**self._known[key], "stage": stage}  # a trial may serve two stages
        self.done.append(record)
        return record

    def _clear(self, present: str) -> None:
        """Removes what stopped calls have left of trials, but of the present one, which goes on."""
        for folder in self.folder.glob("trial-*"):
            if folder.name != present:
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def by_source(self) -> bool:
        """Whether the source's worth is known, by which trials are compared; else by the loss."""
        return any(record["source_gain"] is not None for record in self.done)

    def worth(self, records: Sequence[Record]) -> tuple[bool, float]:
        """By which trials with one point and several seeds are compared: whether all use their source, and the mean of
        what it is worth, or of the loss, negative."""
        good, total = True, 0.0
        for record in records:
            if record["diverged"]:
                good, total = False, -math.inf
            elif self.by_source:
                good = good and alive(record)
                total += record["source_gain"]
            else:
                total -= record["loss"]
        return good, total / len(records)

    def _spent(self) -> float:
        return float(sum({record["key"]: record["seconds"] for record in self.done}.values()))

    def _cost(self) -> float:
        return float(sum({record["key"]: record["cost"] for record in self.done}.values()))

    def _seconds(self) -> float:
        """Of a first trial."""
        return self._spent() / self._cost()

    def _progress(self) -> str:
        number = len(self.done) + 1
        if self.stages is None:
            return f"trial {number}"
        left = (self.stages.cost - self._cost()) * self._seconds()
        left = max(0.0, min(left, self.budget.seconds - self._spent()))
        return f"trial {number} of {self.stages.runs}, about {clock(left)} left"


def alive(record: Record) -> bool:
    """Whether a trial's model uses its source: neither diverged nor collapsed."""
    return not record["diverged"] and not record["collapsed"] and record["source_gain"] > LEAST_WORTH


def result(record: Record) -> str:
    """What came of a trial, in a few words."""
    if record["diverged"]:
        return "diverged"
    text = f"loss {record['loss']:.3f}"
    if record["source_gain"] is not None:
        text = f"source {record['source_gain']:+.3f}, {text}, one vector {record['encoder_common']:.2f}"
    if record["collapsed"]:
        text += ": collapsed"
    return text


def _train(recipe: Recipe, log: Path) -> dict[str, Any]:
    """Trains a trial to its end and returns its figures."""
    figures: dict[str, Any] = {"diverged": True, "loss": None, "source_gain": None, "encoder_common": None,
                               "collapsed": False}
    with reporting(str(log), AGAIN), open(log, "w", encoding="utf-8") as file, redirect_stderr(file), redirect_stdout(
            file):
        try:
            run_training(recipe)
        except Diverged:
            return figures
    valid = [record for record in read_log(Path(recipe.run) / "log.jsonl") if record["type"] == "valid"][-1]
    loss = float(valid["loss"])
    use = SourceUse.of(valid)  # None: the task does not measure it
    if use is not None:
        # A nat worse than a guess among all tokens: what another source costs then means nothing.
        wild = float(valid["perplexity"]) > math.e * recipe.vocab.size
        if wild or not math.isfinite(use.source_gain):
            return figures
    if not math.isfinite(loss):
        return figures
    figures |= {"diverged": False, "loss": round(loss, 4)}
    if use is not None:
        figures |= {"source_gain": round(use.source_gain, 4), "encoder_common": round(use.encoder_common, 3),
                    "collapsed": has_collapsed(use)}
    return figures


def layers_of(recipe: Recipe) -> int:
    """The layers of all its stacks."""
    return sum(recipe.model.stack(side).layers for side in recipe.model.sides)


def _alone(recipe: Recipe, updates: int, processes: int) -> dict[str, Any]:
    """The settings of a trial that are no subject of the search: it validates and saves at its end alone, and does
    nothing that the choice does not need."""
    neither = (*Recipe.marked(Fact.ENDS), *(f"train.{rule}" for rule in RULES))  # ends sooner, nor keeps checkpoints
    changes: dict[str, Any] = {name: Recipe.default(name) for name in neither}
    changes |= {
        "train.updates": updates, "train.validate_every": updates, "train.save_every": updates, "train.keep_last": 1,
        "train.keep_best": 0, "train.ema": None, "train.valid_bleu": False, "train.best_by": "loss",
        "train.trackers": [], "train.probe_every": 0, "train.log_every": max(1, updates // 10),
        "parallel.pipeline_stages": 0, "metrics": {}, "translate.choose": "score", "average_last": 1,
    }
    changes |= shortened(recipe, updates)
    if recipe.batch.update_tokens is None:
        changes["batch.accumulation"] = processes * recipe.batch.accumulation
    known = flatten(recipe.model_dump())
    if recipe.metrics:
        known["metrics"] = recipe.metrics
    return {name: value for name, value in changes.items() if name in known}
