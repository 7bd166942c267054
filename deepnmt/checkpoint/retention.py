"""Which checkpoints of a run stay on the disk. No other file decides that.

To keep others, too: a row of `RULES` and a setting of `config.Train`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from deepnmt import folders
from deepnmt.checkpoint.checkpoint import RECIPE, list_checkpoints, sorted_by_score, update_of, verify_files
from deepnmt.config import Recipe, Train, load_recipe
from deepnmt.errors import UserError
from deepnmt.folders import FolderWriteError

log = logging.getLogger(__name__)

Scores = Mapping[int, float]  # update to validation value; lower is better


class Rule(NamedTuple):
    """A reason to keep checkpoints.

    Attributes:
        keeps: from the settings, all checkpoints (oldest first) and their scores to those that stay.
        most: from the settings to how many these are at the end of a run, at most.
        lasting: whether those that stay do so to the end of the run; a full disk takes them last.
    """

    keeps: Callable[[Train, list[Path], Scores], list[Path]]
    most: Callable[[Train], int]
    lasting: bool = False


def _keeps_every(train: Train, paths: list[Path], scores: Scores) -> list[Path]:
    if not train.keep_every:
        return []
    return [path for path in paths if update_of(path) % train.keep_every == 0]


RULES: dict[str, Rule] = {
    "keep_last": Rule(lambda train, paths, scores: paths[-train.keep_last:], lambda train: train.keep_last),
    "keep_best": Rule(lambda train, paths, scores: sorted_by_score(paths, scores)[:train.keep_best],
                      lambda train: train.keep_best),
    "keep_every": Rule(_keeps_every, lambda train: train.updates // train.keep_every if train.keep_every else 0,
                       lasting=True),
}


def prune(folder: Path, train: Train, scores: Scores) -> list[Path]:
    """Deletes all checkpoints that no rule keeps; returns their folders. Raises `FolderWriteError` if one cannot be
    deleted."""
    paths = list_checkpoints(folder)
    needed: set[Path] = set()
    for rule in RULES.values():
        needed.update(rule.keeps(train, paths, scores))
    deleted = [path for path in paths if path not in needed]
    for path in deleted:
        folders.delete(path)
    return deleted


def make_room(folder: Path, train: Train, scores: Scores, update: int) -> Path | None:
    """Deletes a checkpoint because the disk is full, and the run is at this update: one of a later update, from which
    it could not resume; else the oldest that is neither the newest nor the best, one that a lasting rule keeps only if
    there is no other. Returns its folder; None if there is no such checkpoint, or it cannot be deleted."""
    paths = list_checkpoints(folder)
    past = [path for path in paths if update_of(path) <= update]
    needed = {*past[-1:], *sorted_by_score(past, scores)[:1]}
    spare = [path for path in paths if path not in needed]
    lasting: set[Path] = set()
    for rule in RULES.values():
        if rule.lasting:
            lasting.update(rule.keeps(train, paths, scores))
    spare.sort(key=lambda path: (update_of(path) <= update, path in lasting))  # keeps the order of the others
    try:
        for path in spare[:1]:
            folders.delete(path)
            return path
    except FolderWriteError as fault:
        log.warning("%s", fault)
    return None


def most_at_once(train: Train) -> int:
    """How many checkpoints of a run are on the disk at a time, at most, with the one that is being written."""
    saves = -(-train.updates // train.save_every)  # rounded up
    saves += train.updates // train.validate_every  # the best of them are saved, too
    by_rules = sum(rule.most(train) for rule in RULES.values())
    return min(by_rules, saves) + 1


def last_consecutive(checkpoints: Path, count: int) -> list[Path]:
    """The last `count` checkpoints, oldest first; fewer if one between them was deleted or not written.

    Older ones may have been kept for their validation where those after them were not. A run saves at every multiple of
    `train.save_every`, so where such an update lies between two checkpoints, one is missing. Raises `UserError` for a
    damaged checkpoint.
    """
    paths = list_checkpoints(checkpoints)[-count:]
    for path in paths:
        verify_files(path, (RECIPE,))
    for number in range(len(paths) - 1, 0, -1):
        every = load_recipe(paths[number] / RECIPE).train.save_every
        due = (update_of(paths[number]) - 1) // every * every  # the last one before
        if update_of(paths[number - 1]) < due:
            return paths[number:]
    return paths


def check_average_last(recipe: Recipe) -> None:
    """Raises `UserError` if a run of this recipe would keep fewer checkpoints than `average_last`.

    Called only before training: a run that kept fewer can still be read, averaged and, with another `average_last`,
    resumed.
    """
    if recipe.average_last > recipe.train.keep_last:
        raise UserError(f"average_last ({recipe.average_last}) must not be above train.keep_last "
                        f"({recipe.train.keep_last}), the number of last checkpoints that are kept; set average_last="
                        f"{recipe.train.keep_last}, or keep more")
