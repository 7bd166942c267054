"""A task in several layouts: what its engines compute, on one process or several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warm import Warm

from deepnmt.config import Recipe, check_recipe
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.training.state import TrainState
from deepnmt.training.task import find_task
from deepnmt.training.updates import updates


def four_updates(warm: Warm, world: int, folder: Path, recipes: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Trains each recipe, as a tree, for four updates on `world` processes, one engine after the other.

    Returns:
        Of each, the losses of the updates, the norms of their gradients, then the loss and the figures of a validation.
    """
    (folder / "recipes.json").write_text(json.dumps(recipes), encoding="utf-8")
    warm.run(world, "task_layouts:train_all", folder)
    found: list[list[float]] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def train_all(folder: str) -> None:
    """Runs on each rank."""
    trees = json.loads(Path(folder, "recipes.json").read_text(encoding="utf-8"))
    with processes(1, group=trees[0]["parallel"]["ds_config"] is not None) as ranks:
        found = [train_one(check_recipe(tree, "test"), ranks) for tree in trees]
        if ranks.first:
            Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")


def train_one(recipe: Recipe, ranks: Ranks) -> list[float]:
    task = find_task(recipe.task)
    data = task.open(recipe, True)
    engine = task.start(recipe, layout_of(recipe, ranks.world), data, ranks, True)
    losses, norms = [], []
    for done in updates(engine, task.stream(recipe, data), recipe, TrainState(), ranks):
        losses.append(done.stats.loss / done.update.tokens)
        norms.append(done.stats.grad_norm)
        if done.number == 4:
            break
    result = task.validate(recipe, data, engine, ranks)
    engine.close()
    return [*losses, *norms, result.loss, *(float(value) for _, value in sorted(result.figures.items()))]
