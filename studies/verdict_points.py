"""One point of the verdict's grid: a small model, measured before training as the doctor measures, and trained.

All runs are of Adam with a linear decay, without dropout or label smoothing, on the toy task.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from deepnmt.batch import Batch
from deepnmt.config import Init, Precision, Recipe, check_recipe
from deepnmt.doctor.variants import fresh_model, initialisation
from deepnmt.doctor.verdict import (
    TRIAL,
    other_sources,
    precision_features,
    static_features,
    trial_features,
    trial_rates,
    update_features,
)
from deepnmt.model.transformer import Transformer
from deepnmt.optim import learning_rate
from deepnmt.parallel.local import LocalEngine
from studies.side_by_side import train_side_by_side
from studies.toy_task import ToyTask

Mark = Literal["source", "context"]

OPTIMIZER, SCHEDULE = "adam", "linear"  # of all runs
PROBE = 8  # sentences that models are measured on, whatever their runs' batches
_AVERAGED = 20  # updates at the end whose mean loss decides


@dataclass(frozen=True)
class Settings:
    """What all runs of a grid share: model width, heads and inner width, updates, those of a warm-up, the task."""

    width: int = 32
    heads: int = 4
    ffn: int = 64
    updates: int = 200
    warmup: int = 50
    task: ToyTask = field(default_factory=ToyTask)

    def as_dict(self) -> dict[str, Any]:
        """For the lines of the file; runs of other settings do not count as done."""
        task = {name: getattr(self.task, name) for name in ("symbols", "successors", "shortest", "longest", "seed")}
        return {**{k: v for k, v in asdict(self).items() if k != "task"}, "task": task}

    @classmethod
    def of(cls, said: dict[str, Any]) -> Settings:
        """Those that `as_dict` wrote."""
        return cls(**{**said, "task": ToyTask(**said["task"])})

    @property
    def bars(self) -> dict[Mark, float]:
        """The mean loss of the last 20 updates, nats a target token, under which a run counts as learned.

        source: less than any model can reach that does not read the source; it translates. context: less than any can
        reach that knows how often each symbol is and nothing else; it is not stuck, but may have lost the encoder.
        """
        return {"source": self.task.target_only, "context": self.task.frequencies_only}


@dataclass(frozen=True)
class Point:
    """One run: blocks of encoder and decoder, layers of each, peak rate, with or without warm-up, sentences of a batch,
    seed, precision, `init` of both stacks."""

    encoder: str
    decoder: str
    layers: int
    rate: float
    warmup: bool
    sentences: int = 8
    seed: int = 1
    precision: Precision = "fp32"
    init: Init = "auto"

    def as_dict(self) -> dict[str, Any]:
        """For the lines of the file; fp32 and auto go without saying there."""
        unsaid = {"precision": "fp32", "init": "auto"}
        return {name: value for name, value in asdict(self).items() if unsaid.get(name) != value}

    @property
    def name(self) -> str:
        """The blocks as one word: `admin`, or `post_ln/pre_ln` for a hybrid."""
        return self.encoder if self.encoder == self.decoder else f"{self.encoder}/{self.decoder}"

    @property
    def initialisation(self) -> str:
        """What `init` comes to in encoder and decoder, as in `xavier/depth_scaled`."""
        return "/".join(initialisation(block, self.init) for block in (self.encoder, self.decoder))


def run_points(points: list[Point], settings: Settings) -> list[dict[str, Any]]:
    """The records of runs that differ in rate and warm-up only: features before training, then the updates."""
    started = time.monotonic()
    task, size = settings.task, points[0].sentences
    recipes = [point_recipe(point, settings) for point in points]
    model = _fresh(points[0], settings)
    measured = measure_points(points, settings)
    updates = range(1, settings.updates + 1)
    losses = list(train_side_by_side(
        [model] * len(points), (task.batch(update, size) for update in updates),
        ([learning_rate(r.optimizer.lr, r.schedule, update, settings.updates) for r in recipes] for update in updates),
        recipes[0].optimizer, points[0].precision, recipes[0].loss_scale))
    seconds = (time.monotonic() - started) / len(points)
    return [_record(point, settings, values, [each[place] for each in losses], seconds)
            for place, (point, values) in enumerate(zip(points, measured, strict=True))]


def measure_points(points: list[Point], settings: Settings) -> list[dict[str, float]]:
    """The features of runs that differ in rate and warm-up only, measured in fp32 on a batch of `PROBE` sentences."""
    first, recipes = points[0], {point.rate: point_recipe(point, settings) for point in points}
    model, batch = _fresh(first, settings), settings.task.batch(0, PROBE)
    still = static_features(model, batch)
    update = {rate: update_features(model, batch, partial(one_update, model, recipe, batch))
              for rate, recipe in recipes.items()}
    rates = [[*trial_rates(point.rate, settings.warmup if point.warmup else 0), 0.0, 0.0] for point in points]
    losses = list(train_side_by_side([model] * len(points), [batch] * (TRIAL + 1) + [other_sources(batch)],
                                     zip(*rates, strict=True), recipes[first.rate].optimizer))
    return [{**still, **update[point.rate], **trial_features([each[place] for each in losses], batch),
             **point_features(point, settings)} for place, point in enumerate(points)]


def point_features(point: Point, settings: Settings) -> dict[str, float]:
    """Those features that the point alone settles, without a model."""
    return {"rate": math.log10(point.rate), "warmup": float(point.warmup),
            "tokens": math.log10(settings.task.batch(0, point.sentences).tokens),
            **precision_features(point.precision)}


def _fresh(point: Point, settings: Settings) -> Transformer:
    vocabulary = settings.task.vocabulary
    return fresh_model(point_recipe(point, settings).model, vocabulary, vocabulary, point.seed,
                       [settings.task.batch(0, point.sentences)])


def _record(point: Point, settings: Settings, values: dict[str, float], losses: list[float], seconds: float) -> Any:
    """A line of the file; `final` is the mean loss of the last updates, 1e9 where it is not finite."""
    final = sum(losses[-_AVERAGED:]) / len(losses[-_AVERAGED:])
    tens = [sum(losses[i:i + 10]) / len(losses[i:i + 10]) for i in range(0, len(losses), 10)]
    return marked({
        "point": point.as_dict(), "settings": settings.as_dict(), "features": values,
        "losses": [round(loss, 4) if math.isfinite(loss) else 1e9 for loss in tens],
        "final": final if math.isfinite(final) else 1e9, "seconds": round(seconds, 2),
    }, settings.bars["source"])


def marked(record: dict[str, Any], bar: float) -> dict[str, Any]:
    """The record with another bar."""
    return {**record, "bar": bar, "learned": record["final"] < bar}


def point_recipe(point: Point, settings: Settings) -> Recipe:
    """The recipe of a point; only its model, optimizer, schedule and training are used."""
    corpus = {"src": "-", "trg": "-"}
    stack = {"layers": point.layers, "init": point.init}
    return check_recipe({
        "run": "-", "seed": point.seed,
        "data": {"folder": "-", "src_lang": "src", "trg_lang": "trg", "train": corpus, "valid": corpus,
                 "filters": {"max_tokens": 60}},
        "batch": {"tokens": 64 * point.sentences},
        "model": {"width": settings.width, "heads": settings.heads, "ffn": settings.ffn, "dropout": 0.0,
                  "max_length": 64, "encoder": {**stack, "block": point.encoder},
                  "decoder": {**stack, "block": point.decoder}},
        "optimizer": {"name": OPTIMIZER, "lr": point.rate},
        "schedule": {"name": SCHEDULE, "warmup": settings.warmup if point.warmup else 0},
        "train": {"updates": settings.updates, "label_smoothing": 0.0, "clip": 0.0},
    }, "a point of the grid")


def one_update(model: Transformer, recipe: Recipe, batch: Batch) -> None:
    """One update by the recipe's optimizer, from moments of zero, at the peak rate."""
    LocalEngine(model, recipe, batch.device).train_step([batch], batch.tokens, recipe.optimizer.lr)
