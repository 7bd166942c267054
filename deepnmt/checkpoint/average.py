"""Averaging checkpoints: choosing them, and computing the mean of their weights."""

from __future__ import annotations

import logging
import math
import os
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
    check_target,
    first_difference,
    list_checkpoints,
    load_state,
    read_scores,
    read_task_files,
    require_model,
    sorted_by_score,
    task_files,
    update_of,
    verify_files,
    weights_in,
    weights_of,
    write_checkpoint,
)
from deepnmt.checkpoint.retention import last_consecutive
from deepnmt.config import Fact, Model, Recipe, changed_settings, load_recipe
from deepnmt.errors import UserError
from deepnmt.folders import DamagedFolder, hash_of, original_name

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
        recipe: its `run` holds the checkpoints.
        last, best, updates, span, folders: at most one of these: the last n, the n with the best validation, a list of
            updates, all in a range of updates (both ends included), or checkpoint folders of any runs. By default the
            last `recipe.average_last`, or fewer if the run kept fewer.
        output: the folder of the average; by default `averaged` in the run folder.
        model: the model that the checkpoints must hold; None: any, but all the same.

    Returns:
        The folder written.

    Raises:
        UserError: several ways of choosing were given, there are no such checkpoints, or one is named twice; see also
            `save_average`.
    """
    ways = (last, best, updates, span, folders)
    if ways.count(None) < len(ways) - 1:
        raise UserError("checkpoints to average can be chosen in one way only; give last, best, updates, a range or "
                        "folders")
    checkpoints = Path(recipe.run) / "checkpoints"
    if folders is not None:
        chosen = [Path(folder) for folder in folders]
        if len(set(map(os.path.realpath, chosen))) < len(chosen):
            raise UserError(f"checkpoints {', '.join(map(str, chosen))} name one twice; give each once")
    elif ways.count(None) == len(ways):
        chosen = last_consecutive(checkpoints, recipe.average_last)
    else:
        chosen = choose_checkpoints(checkpoints, last, best, updates, span)
    if not chosen and updates is None and folders is None:
        raise UserError(f"there is no checkpoint in {checkpoints}; train first")
    if not chosen:
        raise UserError("the list of checkpoints to average is empty; name one or more")
    target = Path(recipe.run) / "averaged" if output is None else Path(output)
    return save_average(chosen, target, model)


# -- which checkpoints -------------------------------------------------------------------------------------------------


def choose_checkpoints(
    checkpoints: Path, last: int | None = None, best: int | None = None, updates: Sequence[int] | None = None,
    span: tuple[int, int] | None = None,
) -> list[Path]:
    """The checkpoints in a folder, chosen in one of the ways of `average_run`: `last` and `span` oldest first, `best`
    best first, `updates` in the order given.

    Raises:
        UserError: there are fewer than requested, or none; one is missing or named twice.
    """
    by_update = {update_of(path): path for path in list_checkpoints(checkpoints)}
    names = ", ".join(map(str, by_update)) or "none"
    if updates is not None:
        for update in updates:
            if update not in by_update:
                raise UserError(f"there is no checkpoint of update {update} in {checkpoints}; there are {names}")
        if len(set(updates)) < len(updates):
            raise UserError(f"updates {list(updates)} name one twice; give each once")
        return [by_update[update] for update in updates]
    if span is not None:
        begin, end = span
        chosen = [path for update, path in by_update.items() if begin <= update <= end]
        if not chosen:
            raise UserError(f"no checkpoint in {checkpoints} has an update from {begin} to {end}; there are {names}")
        return chosen
    paths = list(by_update.values())
    if last is not None:
        count, what = last, "checkpoints"
    else:
        count, what = best or 0, "validated checkpoints"
        paths = sorted_by_score(paths, read_scores(checkpoints))
    if not 1 <= count <= len(paths):
        hint = f"choose from 1 to {len(paths)}" if paths else "train longer first"
        raise UserError(f"{count} {what} in {checkpoints} were requested, but there are {len(paths)}; {hint}")
    if last is None:
        return paths[:count]
    chosen = last_consecutive(checkpoints, last)
    if len(chosen) < last:
        raise UserError(f"the last {last} checkpoints in {checkpoints} were requested, but one before the last "
                        f"{len(chosen)} was deleted or not written; choose {len(chosen)}, or name the others by their "
                        "updates")
    return chosen


# -- their mean --------------------------------------------------------------------------------------------------------


def save_average(checkpoints: Sequence[Path], target: Path, model: Model | None = None) -> Path:
    """Writes the average of checkpoints as a checkpoint without moments; one already at `target` is replaced.

    Recipe, vocabularies and position are those of the checkpoint with the most updates. `extra` of the state lists the
    averaged checkpoints, their updates, the updates of all checkpoints the run had then, and hashes of their
    weights.

    Raises:
        UserError: a checkpoint is damaged; they hold different models (the message names the first tensor, vocabulary
            or setting that differs), or another than `model`; `target` exists and is not a checkpoint.
        FolderWriteError: it cannot be written.
    """
    target = check_target(target, "the average")
    manifests = [verify_files(folder, {*REQUIRED, *task_files(folder)}) for folder in checkpoints]
    first = checkpoints[0]
    require_model(first, model)
    weights = average_weights(checkpoints)
    expected = load_recipe(first / RECIPE).model
    for folder, manifest in zip(checkpoints, manifests):
        for name in task_files(first):
            if manifest["files"].get(name) != manifests[0]["files"][name]:
                what = "vocabulary" if name in (SRC_VOCAB, TRG_VOCAB) else "file"
                raise _models_differ(first, folder, f"the {what} {name} differs")
        for change in changed_settings(expected, load_recipe(folder / RECIPE).model):
            if not Model.is_marked(change.key, Fact.TRAINING_ONLY):
                raise _models_differ(first, folder,
                                     f"model.{change.key} is {change.new} where {change.old} is expected")
    states = [load_state(folder) for folder in checkpoints]
    last, newest = max(zip(states, checkpoints), key=lambda pair: pair[0].update)
    beside = list_checkpoints(target.parent / "checkpoints")
    averaged = {"averaged": list(map(str, checkpoints)), "averaged_updates": [state.update for state in states],
                "updates_beside": list(map(update_of, beside)), "weights_beside": list(map(_weights_hash, beside))}
    state = replace(last, loss_scale=None, best={}, extra=averaged)
    recipe = (newest / RECIPE).read_text(encoding="utf-8")
    write_checkpoint(target, Contents(weights, None, state, recipe, read_task_files(newest)))
    return target


def average_weights(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each tensor over checkpoints, by name: summed in float64, rounded to fp32 once.

    Works tensor by tensor, so it needs about the memory of one model, whatever the number of checkpoints.

    Raises:
        UserError: the tensors differ in name or shape; the message names the first.
    """
    first, *others = [weights_in(checkpoint) for checkpoint in checkpoints]
    for folder, other in zip(checkpoints[1:], others, strict=True):
        difference = first_difference(first.shapes, other.shapes)
        if difference:
            raise _models_differ(checkpoints[0], folder, difference)
    sizes = [math.prod(shape) for shape in first.shapes.values()]
    # One buffer: tensors allocated one by one between short-lived ones would fragment as much memory again.
    buffers = torch.empty(sum(sizes)).split(sizes)
    scratch = torch.empty(max(sizes), dtype=torch.float64)
    averaged = {}
    for (name, shape), buffer in zip(first.shapes.items(), buffers, strict=True):
        mean = buffer.view(shape)
        total = scratch[: mean.numel()].view(shape).copy_(first(name))
        for other in others:
            total += other(name)
        averaged[name] = mean.copy_(total.div_(len(checkpoints)))
    return averaged


def _weights_hash(checkpoint: Path) -> str:
    """A hash of a checkpoint's weights; "" if it is damaged."""
    try:
        return hash_of(weights_of(checkpoint))
    except DamagedFolder:
        return ""


def _models_differ(ours: Path, theirs: Path, difference: str) -> UserError:
    return UserError(f"{theirs} is another model than {ours}: {difference}; average checkpoints of one model")


def warn_if_outdated(folder: Path) -> None:
    """Warns if `folder` is the average of a run that has saved a checkpoint since. Called by one process.

    Any checkpoint that did not exist at the averaging counts, even one of an earlier update: a run that had to resume
    before a damaged checkpoint saves such. Averages of older versions did not record which existed, so for those only
    the averaged updates are compared.
    """
    beside = list_checkpoints(folder.parent / "checkpoints")
    if original_name(folder) != "averaged" or not beside:
        return
    newest, extra = beside[-1], load_state(folder).extra
    if "updates_beside" in extra:
        known, fault = extra["updates_beside"], f"was averaged before {newest} was saved"
    elif "averaged_updates" in extra:
        known, fault = extra["averaged_updates"], f"does not hold the newest checkpoint, {newest}"
    else:
        return
    # where the run was begun anew, a checkpoint of the same update has other weights
    begun_anew = _weights_hash(newest) not in extra.get("weights_beside", [_weights_hash(newest)])
    if update_of(newest) not in known or begun_anew:
        log.warning("%s %s; average again to include it, or choose it with --checkpoint", folder, fault)
