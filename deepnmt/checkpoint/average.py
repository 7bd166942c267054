"""Averages of checkpoints: which ones, and the mean of their weights."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from deepnmt.checkpoint.checkpoint import (
    RECIPE,
    REQUIRED,
    SRC_VOCAB,
    TRG_VOCAB,
    Contents,
    best_first,
    check_target,
    first_difference,
    list_checkpoints,
    load_state,
    read_scores,
    require_model,
    shapes_in,
    task_files,
    update_of,
    verify_files,
    weights_in,
    write_checkpoint,
)
from deepnmt.config import Model, Recipe, changed_settings, load_recipe
from deepnmt.errors import UserError
from deepnmt.folders import original_name

# Settings of the model that training alone asks for. Under another of any other one, tensors of the same names and
# shapes are used otherwise.
_OF_TRAINING = ("dropout", "attention_dropout", "activation_dropout", "max_length", "encoder.init", "decoder.init")

log = logging.getLogger(__name__)


def average_run(
    recipe: Recipe,
    last: int | None = None,
    best: int | None = None,
    updates: Sequence[int] | None = None,
    span: tuple[int, int] | None = None,
    folders: Sequence[str | Path] | None = None,
    output: str | Path | None = None,
    model: Model | None = None,
) -> Path:
    """Averages checkpoints of a run.

    Args:
        recipe: whose `run` holds the checkpoints.
        last, best, updates, span, folders: at most one of these: the last n, the n with the best validation, a list of
            updates, all from one update to another, or checkpoint folders of any runs. Without, the last
            `recipe.average_last`, or fewer where no more of the last ones are kept.
        output: the folder of the average; without, `averaged` in the run folder.
        model: what the checkpoints must hold; without, any one model.

    Returns:
        The folder written.

    Raises:
        UserError: more than one way of choosing, no such checkpoints, or see `save_average`.
    """
    if sum(way is not None for way in (last, best, updates, span, folders)) > 1:
        raise UserError("checkpoints to average can be chosen in one way only: last, best, updates, a range or folders")
    checkpoints = Path(recipe.run) / "checkpoints"
    if folders is not None:
        chosen = [Path(folder) for folder in folders]
    elif last is None and best is None and updates is None and span is None:
        chosen = up_to_last(checkpoints, recipe.average_last)
    else:
        chosen = choose(checkpoints, last, best, updates, span)
    if not chosen:
        raise UserError(f"there is no checkpoint in {checkpoints}; train first")
    return save_average(chosen, Path(output) if output is not None else Path(recipe.run) / "averaged", model)


# -- which checkpoints -------------------------------------------------------------------------------------------------


def choose(
    checkpoints: Path, last: int | None = None, best: int | None = None, updates: Sequence[int] | None = None,
    span: tuple[int, int] | None = None,
) -> list[Path]:
    """The checkpoints of a folder, chosen in one of the ways of `average_run`: the last and those of a span oldest
    first, the best best first, those of `updates` in their order.

    Raises:
        UserError: there are fewer, or none; one is missing or named twice.
    """
    by_update = {update_of(path): path for path in list_checkpoints(checkpoints)}
    names = ", ".join(map(str, by_update)) or "none"
    if updates is not None:
        for update in updates:
            if update not in by_update:
                raise UserError(f"there is no checkpoint of update {update} in {checkpoints}; there are {names}")
        if len(set(updates)) < len(updates):
            raise UserError(f"updates {list(updates)} name one twice; name each once")
        return [by_update[update] for update in updates]
    if span is not None:
        chosen = [path for update, path in by_update.items() if span[0] <= update <= span[1]]
        if not chosen:
            raise UserError(f"no checkpoint in {checkpoints} is of an update from {span[0]} to {span[1]}; there are "
                            f"{names}")
        return chosen
    if last is not None:
        count, paths, what = last, list(by_update.values()), "checkpoints"
    else:
        count, what = best or 0, "validated checkpoints"
        paths = best_first(list(by_update.values()), read_scores(checkpoints))
    if not 1 <= count <= len(paths):
        raise UserError(f"{count} {what} in {checkpoints} were asked for, but there are {len(paths)}; ask for a number "
                        "from 1 to that")
    if last is None:
        return paths[:count]
    kept = up_to_last(checkpoints, last)
    if len(kept) < last:
        raise UserError(f"the last {last} checkpoints in {checkpoints} were asked for, but train.keep_last kept "
                        f"{len(kept)}; what is older was kept for its validation. Ask for {len(kept)}, or name the "
                        "others by their updates")
    return kept


def up_to_last(checkpoints: Path, count: int) -> list[Path]:
    """The last `count` checkpoints, oldest first, or fewer: none from behind a gap.

    A run keeps its last `train.keep_last` and the best. An older one that is there though that many came after it was
    kept for its validation, and others between may be deleted. Raises `UserError` for a damaged one.
    """
    paths = list_checkpoints(checkpoints)[-count:]
    for path in paths:
        verify_files(path, (RECIPE,))
    kept = [load_recipe(path / RECIPE).train.keep_last for path in paths]
    whole = (start for start in range(len(paths)) if all(n <= keep for n, keep in enumerate(kept[start:], 1)))
    return paths[next(whole, 0):]


def check_average_last(recipe: Recipe) -> None:
    """Raises `UserError` where a run of this recipe would keep fewer checkpoints than it is to average.

    For those who are about to train: a run that did keep fewer is read, resumed with `average_last` changed, and used.
    """
    if recipe.average_last > recipe.train.keep_last:
        raise UserError(f"average_last ({recipe.average_last}) must not be above train.keep_last "
                        f"({recipe.train.keep_last}), or fewer of the last checkpoints will be there; set average_last="
                        f"{recipe.train.keep_last}, or keep more")


# -- their mean --------------------------------------------------------------------------------------------------------


def save_average(checkpoints: Sequence[Path], target: Path, model: Model | None = None) -> Path:
    """Writes the average of whole checkpoints as a checkpoint without moments; one already at `target` is replaced.

    Recipe, vocabularies and position are those of the checkpoint with the most updates; `extra` of the state says what
    was averaged, and of which updates there were checkpoints beside it then. With `model` they must hold that one.

    Raises:
        UserError: a checkpoint is damaged; they are of different models (it names the first tensor, vocabulary or
            setting that differs), or of another than `model`; `target` is something else than a checkpoint.
        CheckpointWriteError: it cannot be written.
    """
    check_target(target, "the average")
    manifests = [verify_files(folder, {*REQUIRED, *task_files(folder)}) for folder in checkpoints]
    require_model(checkpoints[0], model)
    weights = average_weights(checkpoints)
    models = [load_recipe(folder / RECIPE).model for folder in checkpoints]
    for folder, manifest, other in zip(checkpoints, manifests, models):
        for name in task_files(checkpoints[0]):
            if manifest["files"].get(name) != manifests[0]["files"][name]:
                what = "vocabulary" if name in (SRC_VOCAB, TRG_VOCAB) else "file"
                raise _other_model(checkpoints[0], folder, f"the {what} {name} is another")
        for change in changed_settings(models[0], other):
            setting, ours, theirs = re.split(": | -> ", change)
            if setting not in _OF_TRAINING:
                raise _other_model(checkpoints[0], folder, f"model.{setting} is {theirs} where {ours} is expected")
    states = [load_state(folder) for folder in checkpoints]
    state, newest = max(zip(states, checkpoints), key=lambda each: each[0].update)
    beside = list_checkpoints(target.parent / "checkpoints")
    averaged = {"averaged": [str(folder) for folder in checkpoints], "averaged_updates": [s.update for s in states],
                "updates_beside": [update_of(path) for path in beside]}
    files = {name: (newest / name).read_bytes() for name in task_files(newest)}
    write_checkpoint(target, Contents(
        weights, None, replace(state, loss_scale=None, best={}, extra=averaged),
        (newest / RECIPE).read_text(encoding="utf-8"), files))
    return target


def average_weights(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """Name to the mean of a tensor over checkpoints: summed in float64, rounded to fp32 once.

    Tensor by tensor, so the memory is about that of one model, whatever the number of checkpoints.

    Raises:
        UserError: the tensors differ in name or shape; it names the first.
    """
    shapes, *others = map(shapes_in, checkpoints)
    for folder, theirs in zip(checkpoints[1:], others, strict=True):
        if difference := first_difference(shapes, theirs):
            raise _other_model(checkpoints[0], folder, difference)
    sizes = [math.prod(shape) for shape in shapes.values()]
    # One buffer: tensors allocated one by one between short-lived ones would leave as much memory again unusable.
    parts = torch.empty(sum(sizes)).split(sizes)
    averaged = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    scratch = torch.empty(max(sizes), dtype=torch.float64)
    sources = [weights_in(checkpoint) for checkpoint in checkpoints]
    for name, mean in averaged.items():
        total = scratch[: mean.numel()].view_as(mean).copy_(sources[0](name))
        for source in sources[1:]:
            total += source(name)
        mean.copy_(total.div_(len(sources)))
    return averaged


def _other_model(ours: Path, theirs: Path, difference: str) -> UserError:
    return UserError(f"{theirs} is another model than {ours}: {difference}; average checkpoints of one model")


def warn_if_outdated(folder: Path) -> None:
    """Warns where `folder` is the average of a run that has saved a newer checkpoint since; one process calls it.

    Newer is what was not there when it was averaged: a run that went back from a damaged checkpoint has a newer one of
    an earlier update. Averages of older versions do not say what was there; of them only what they hold is known.
    """
    beside = list_checkpoints(folder.parent / "checkpoints")
    if original_name(folder) != "averaged" or not beside:
        return
    newest, extra = beside[-1], load_state(folder).extra
    for key, fault in (("updates_beside", f"was averaged before {newest} was saved"),
                       ("averaged_updates", f"does not hold the newest checkpoint, {newest}")):
        if key in extra:
            if update_of(newest) not in extra[key]:
                log.warning("%s %s; average again to take that in, or name it with --checkpoint", folder, fault)
            return
