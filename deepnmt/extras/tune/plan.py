"""What is tried: the points of the search, and how many trials each of its stages gets.

A point is a peak learning rate (`lr`, which is the rate of the embeddings), its factors for the layers of each side
(`encoder`, `decoder`), and the share of the updates that the rate rises (`warmup`). With `carried` it is for the deep
model, which `model.tuned_at` tells of the copy. Points are spread by a Sobol
sequence over the logarithms of a box; later ones lie around the best so far, and may leave the box with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from deepnmt.config import Recipe, Stage
from deepnmt.errors import UserError
from deepnmt.model.blocks import Side
from deepnmt.optim.groups import is_frozen, is_in
from deepnmt.tasks.translation.collapse import SLOW_ENCODER, SLOW_LAYERS

Point = Mapping[str, float]
Box = Mapping[str, tuple[float, float]]

FACTORS = {"encoder": (0.03, 1.0), "decoder": (0.1, 1.0)}
WARMUP = (0.05, 0.5)
RATES = (1 / 4, 4.0)  # times the recipe's
LONGEST_WARMUP = 4000  # updates, unless the recipe has more: the share of a long run would be longer than any needs
SHALLOW = 3  # the copy has this part of the layers
LEAST_LAYERS = 2  # of a side of the copy
COUNTS = ("schedule.decay", "schedule.decay_period", "schedule.step_update", "optimizer.lr_factors_until",
          "model.encoder.ramp", "model.decoder.ramp")
NEAR = 0.5  # of the box's width: how wide points lie around the best


@dataclass(frozen=True)
class Budget:
    """What a search may cost.

    Attributes:
        runs: trials in all.
        seconds: no trial begins that would end later.
        updates: of a full trial.
        seeds: of the best two on the small copy.
    """

    runs: int
    seconds: float
    updates: int
    seeds: int

    @property
    def half(self) -> int:
        """Updates of a first trial."""
        return self.updates // 2


@dataclass(frozen=True)
class Stages:
    """Trials of each stage: the first ones, of half length; the best of them at full length; the two best with other
    seeds; and those on the deep model, `depth` times as deep as the copy."""

    first: int
    again: int
    seeds: int
    deep: int
    depth: float

    @property
    def runs(self) -> int:
        """All trials."""
        return self.first + self.again + self.seeds + self.deep

    @property
    def cost(self) -> float:
        """All trials in units of a first one."""
        return self.first + 2 * (self.again + self.seeds + self.deep * self.depth)


def stages(runs: int, seeds: int, depth: float) -> Stages:
    """Shares out trials; `depth` 1: there is no deeper model to try."""
    deep = max(3, runs // 6) if depth > 1 else 0
    left = runs - deep
    repeated = min(2 * (seeds - 1), left // 4 // 2 * 2)
    again = max(2, left // 5)
    return Stages(left - repeated - again, again, repeated, deep, depth)


def fitting(budget: Budget, least: int, depth: float, seconds: float) -> Stages:
    """The most trials that fit into the budget, but `least`, if a first one takes so many seconds."""
    runs = budget.runs
    while runs > least and stages(runs, budget.seeds, depth).cost * seconds > budget.seconds:
        runs -= 1
    return stages(runs, budget.seeds, depth)


def small_layers(recipe: Recipe) -> dict[Side, int]:
    """The layers of the copy on each side: a third of the recipe's, but two, or all that there are."""
    layers = {side: recipe.model.stack(side).layers for side in recipe.model.sides}
    return {side: min(count, max(LEAST_LAYERS, round(count / SHALLOW))) for side, count in layers.items()}


def at_height(recipe: Recipe, part: str) -> str:
    """The part of the copy for one of the recipe: a layer becomes the one at the same height."""
    small = small_layers(recipe)
    side = next((side for side in small if part.startswith(f"{side}.")), max(small, key=small.__getitem__))
    layers = recipe.model.stack(side).layers
    return re.sub(r"(?<=layers\.)\d+(?![^.])", lambda number: str(int(number[0]) * small[side] // layers), part)


def tuned_at(recipe: Recipe) -> dict[str, int]:
    """The settings that tell the deep model of the copy."""
    return {f"model.tuned_at.{side}_layers": layers for side, layers in small_layers(recipe).items()}


def own_point(recipe: Recipe) -> Point:
    """The point that the recipe is."""
    point = {"lr": recipe.optimizer.lr}
    for side in recipe.model.sides:
        if not is_frozen(side, recipe.train.freeze):
            point[side] = recipe.optimizer.lr_factors.get(side, 1.0)
    return point | {"warmup": recipe.schedule.warmup / recipe.train.updates}


def anchors(recipe: Recipe) -> list[Point]:
    """The points that are tried first: the recipe's, and this one with slower sides."""
    points = [own_point(recipe)]
    if "encoder" in points[0]:
        for slow in (SLOW_ENCODER, SLOW_LAYERS):
            point = dict(points[0])
            for side, factor in slow.items():
                if side in point:
                    point[side] = factor
            points.append(point)
    return points


def box_of(recipe: Recipe) -> Box:
    """Where points are spread."""
    low, high = RATES
    box = {"lr": (low * recipe.optimizer.lr, high * recipe.optimizer.lr)}
    for name in own_point(recipe):
        if name in FACTORS:
            box[name] = FACTORS[name]
    box["warmup"] = WARMUP
    return box


def spread(box: Box, number: int, centre: Point | None = None) -> Point:
    """The point of this number in the box; with a `centre`, in a smaller one around that."""
    places = torch.quasirandom.SobolEngine(len(box), scramble=True, seed=1).draw(number + 1)[number].tolist()
    point = {}
    for place, (name, (low, high)) in zip(places, box.items(), strict=True):
        width = math.log(high / low)
        value = low * math.exp(place * width)
        if centre is not None:
            value = (centre[name] or low) * math.exp((place - 0.5) * NEAR * width)
        if name != "lr":
            value = min(value, high)
        point[name] = float(f"{value:.2g}")
    return point


def settings_of(recipe: Recipe, point: Point, updates: int) -> dict[str, Any]:
    """The settings of the recipe that a point stands for, in a run of so many updates."""
    optimizer, schedule = recipe.optimizer, recipe.schedule
    new: dict[str, float] = {}
    factors = dict(optimizer.lr_factors)
    for side in FACTORS:
        if side not in point:
            continue
        own = factors.get(side, 1.0)
        if own and point[side] != own:  # its parts that have a factor of their own change with it
            for part, factor in factors.items():
                if is_in(side, part):
                    factors[part] = float(f"{factor * point[side] / own:.3g}")
        if side in factors:
            factors[side] = point[side]
        elif point[side] != 1.0:
            new[side] = point[side]
    settings: dict[str, Any] = {"optimizer.lr": point["lr"],
                                "optimizer.lr_factors": {**new, **factors}}  # where several fit, the last counts
    settings["schedule.warmup"] = schedule.warmup
    if point["warmup"] != own_point(recipe)["warmup"] or updates != recipe.train.updates:
        settings["schedule.warmup"] = warmup_of(recipe, point["warmup"], updates)
    if "carried" in point:
        settings |= tuned_at(recipe)
    if schedule.start:
        settings["schedule.start"] = float(f"{schedule.start * point['lr'] / optimizer.lr:.3g}")
    return settings


def shortened(recipe: Recipe, updates: int) -> dict[str, Any]:
    """What the recipe counts in updates beside the warm-up, in a run of so many; by setting."""

    def of_trial(count: int) -> int:
        return max(min(2, count), count * updates // recipe.train.updates)

    settings: dict[str, Any] = {}
    for setting in COUNTS:
        count = attrgetter(setting)(recipe)
        if count:
            settings[setting] = of_trial(count)
    stages = [stage.model_dump() for stage in stages_of_data(recipe)]
    for stage in stages:
        count = stage["until"]["updates"]
        if count:
            stage["until"]["updates"] = of_trial(count)
    if stages:
        settings["data.stages"] = stages
    return settings


def stages_of_data(recipe: Recipe) -> Sequence[Stage]:
    """The stages of the training text, which not every task has."""
    stages: Sequence[Stage] = getattr(recipe.data, "stages", ())
    return stages


def check_stages(recipe: Recipe) -> None:
    """Raises `UserError` if a stage of the text may end by what a trial has not its share of."""
    for number, stage in enumerate(stages_of_data(recipe)):
        for name in ("epochs", "patience"):
            count = getattr(stage.until, name)
            if count:
                raise UserError(f"data.stages.{number}.until.{name} is {count}, but the trials of tune are shorter "
                                "than the run and shorten its stages by their updates; give the stage's end as until: "
                                "{updates: N} alone while you tune")


def warmup_of(recipe: Recipe, share: float, updates: int) -> int:
    """Updates of a warm-up that is this share of a run, as far as the rest of the schedule leaves room."""
    if not share:
        return 0
    counts = shortened(recipe, updates)
    room = min(updates - counts.get("schedule.decay", 1), counts.get("schedule.step_update", updates) - 1)
    longest = max(0, min(LONGEST_WARMUP, room))
    if share >= 1:
        longest = max(LONGEST_WARMUP, recipe.schedule.warmup)
    return min(longest, max(1, round(share * updates)))


def words(point: Point) -> str:
    """A point in a few words."""
    texts = [f"rate {point['lr']:.2g}"]
    texts += [f"{side} x {point[side]:g}" for side in FACTORS if side in point]
    texts.append(f"warm-up {100 * point['warmup']:.2g} %")
    if "carried" in point:
        texts.append("model.tuned_at")
    return ", ".join(texts)
