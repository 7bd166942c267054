"""Averages of checkpoints: which ones, and the mean of their weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from deepnmt.checkpoint.checkpoint import (
    MODEL_FILES,
    RECIPE,
    SRC_VOCAB,
    TRG_VOCAB,
    WEIGHTS,
    Contents,
    best_first,
    first_difference,
    list_checkpoints,
    load_state,
    read_scores,
    require_model,
    update_of,
    verify_files,
    write_checkpoint,
)
from deepnmt.config import Model, Recipe, load_recipe
from deepnmt.errors import UserError
from deepnmt.folders import MANIFEST, own_name, sweep

log = logging.getLogger(__name__)

MAPPED_VALUES = 4_000_000  # of each checkpoint, read before its file is closed and opened again


def last(checkpoints: Path, count: int) -> list[Path]:
    """The last `count` checkpoints in a folder, oldest first. Raises `UserError` where there are fewer."""
    _enough(list_checkpoints(checkpoints), count, f"checkpoints in {checkpoints}")
    found = up_to_last(checkpoints, count)
    if len(found) < count:
        raise UserError(f"the last {count} checkpoints in {checkpoints} were asked for, but train.keep_last kept "
                        f"{len(found)}; what is older was kept for its validation. Ask for {len(found)}, or name the "
                        "others by their updates")
    return found


def require_kept(recipe: Recipe) -> None:
    """Raises `UserError` where a run of this recipe would keep fewer checkpoints than it is to average.

    For those who are about to train: a run that did keep fewer is read, resumed with `average_last` changed, and used.
    """
    if recipe.average_last > recipe.train.keep_last:
        raise UserError(f"average_last ({recipe.average_last}) must not be above train.keep_last "
                        f"({recipe.train.keep_last}), or fewer of the last checkpoints will be there; set average_last="
                        f"{recipe.train.keep_last}, or keep more")


def up_to_last(checkpoints: Path, count: int) -> list[Path]:
    """The last `count` checkpoints, oldest first, or fewer: none from behind a gap.

    A run keeps its last `train.keep_last` and the best. An older one that is there though that many came after it was
    kept for its validation, and others between may be deleted. Raises `UserError` for a damaged one.
    """
    found = list_checkpoints(checkpoints)[-count:]
    for path in found:
        verify_files(path, (RECIPE,))
    kept = [load_recipe(path / RECIPE).train.keep_last for path in found]
    whole = (start for start in range(len(found)) if all(n <= keep for n, keep in enumerate(kept[start:], 1)))
    return found[next(whole, 0):]


def best(checkpoints: Path, count: int) -> list[Path]:
    """The `count` checkpoints that validated best, best first. Raises `UserError` where fewer were validated."""
    scored = best_first(list_checkpoints(checkpoints), read_scores(checkpoints))
    return _enough(scored, count, f"validated checkpoints in {checkpoints}")


def listed(checkpoints: Path, updates: Sequence[int]) -> list[Path]:
    """The checkpoints of these updates. Raises `UserError` where one is missing or named twice."""
    found = {update_of(path): path for path in list_checkpoints(checkpoints)}
    for update in updates:
        if update not in found:
            raise UserError(f"there is no checkpoint of update {update} in {checkpoints}; there are {_names(found)}")
    if len(set(updates)) < len(updates):
        raise UserError(f"updates {list(updates)} name one twice; name each once")
    return [found[update] for update in updates]


def between(checkpoints: Path, low: int, high: int) -> list[Path]:
    """The checkpoints from update `low` to update `high`, both included. Raises `UserError` where there is none."""
    found = {update_of(path): path for path in list_checkpoints(checkpoints)}
    chosen = [path for update, path in found.items() if low <= update <= high]
    if not chosen:
        raise UserError(f"no checkpoint in {checkpoints} is of an update from {low} to {high}; there are "
                        f"{_names(found)}")
    return chosen


def _enough(found: list[Path], count: int, what: str) -> list[Path]:
    """The first `count`. Raises `UserError` where there are fewer."""
    if not 1 <= count <= len(found):
        raise UserError(f"{count} {what} were asked for, but there are {len(found)}; ask for a number from 1 to that")
    return found[:count]


def _names(found: dict[int, Path]) -> str:
    return ", ".join(map(str, found)) or "none"


def average_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Name to the mean of a tensor over checkpoints: summed in float64, rounded to fp32 once.

    Tensor by tensor, so the memory is about that of one model, whatever the number of checkpoints.

    Raises:
        UserError: the tensors differ in name or shape; it names the first.
    """
    shapes = [_shapes(folder) for folder in folders]
    for folder, others in zip(folders[1:], shapes[1:], strict=True):
        if difference := first_difference(shapes[0], others):
            raise _other_model(folders[0], folder, difference)
    averaged = _views_of_one_buffer(shapes[0])
    total = torch.empty(max(map(torch.Tensor.numel, averaged.values())), dtype=torch.float64)
    for names in _groups(shapes[0]):
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(folder / WEIGHTS, framework="pt")) for folder in folders]
            for name in names:
                averaged[name].copy_(_mean(files, name, total))
    return averaged


def _views_of_one_buffer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Empty fp32 tensors; allocated one by one between short-lived ones, they would leave as much again unusable."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = torch.empty(sum(sizes)).split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)


def _groups(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Names in groups of some MAPPED_VALUES: an open file keeps in memory all that was read of it."""
    group, values = [], 0
    for name, shape in shapes.items():
        group.append(name)
        values += math.prod(shape)
        if values >= MAPPED_VALUES:
            yield group
            group, values = [], 0
    if group:
        yield group


def _mean(files: Sequence[Any], name: str, scratch: Tensor) -> Tensor:
    """In float64, in the memory of `scratch`."""
    first = files[0].get_tensor(name)
    total = scratch[: first.numel()].view_as(first).copy_(first)
    for file in files[1:]:
        total += file.get_tensor(name)
    return total.div_(len(files))


def save_average(folders: Sequence[Path], target: Path, model: Model | None = None) -> Path:
    """Writes the average of whole checkpoints as a checkpoint without moments; one already at `target` is replaced.

    Recipe, vocabularies and position are those of the checkpoint with the most updates; `extra` of the state says what
    was averaged, and of which updates there were checkpoints beside it then. With `model` they must hold that one.

    Raises:
        UserError: a checkpoint is damaged; they are of different models (it names the first tensor, vocabulary or
            setting that differs), or of another than `model`; `target` is something else than a checkpoint.
        CheckpointWriteError: it cannot be written.
    """
    if target.exists() and not (target / MANIFEST).is_file():
        raise UserError(f"{target} is there and is no checkpoint; give another folder for the average")
    manifests = [verify_files(folder, MODEL_FILES) for folder in folders]
    require_model(folders[0], model)
    weights = average_weights(folders)
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        for name in (SRC_VOCAB, TRG_VOCAB):
            if manifest["files"][name] != manifests[0]["files"][name]:
                raise _other_model(folders[0], folder, f"the vocabulary {name} is another")
        _same_rules(folders[0], folder)
    states = [load_state(folder) for folder in folders]
    newest = max(range(len(folders)), key=lambda number: states[number].update)
    beside = list_checkpoints(target.parent / "checkpoints")
    averaged = {"averaged": [str(folder) for folder in folders], "averaged_updates": [s.update for s in states],
                "updates_beside": [update_of(path) for path in beside]}
    state = replace(states[newest], loss_scale=None, best={}, extra=averaged)
    src_vocab, trg_vocab = ((folders[newest] / name).read_bytes() for name in (SRC_VOCAB, TRG_VOCAB))
    recipe = (folders[newest] / RECIPE).read_text(encoding="utf-8")
    sweep(target.parent, target.name)
    write_checkpoint(target, Contents(weights, None, state, recipe, src_vocab, trg_vocab))
    return target


def warn_if_outdated(folder: Path) -> None:
    """Warns where `folder` is the average of a run that has saved a newer checkpoint since; one process calls it.

    Newer is what was not there when it was averaged: a run that went back from a damaged checkpoint has a newer one of
    an earlier update. Averages of older versions do not say what was there; of them only what they hold is known.
    """
    found = list_checkpoints(folder.parent / "checkpoints")
    if own_name(folder) != "averaged" or not found:
        return
    newest, extra = found[-1], load_state(folder).extra
    for key, fault in (("updates_beside", f"was averaged before {newest} was saved"),
                       ("averaged_updates", f"does not hold the newest checkpoint, {newest}")):
        if key in extra:
            if update_of(newest) not in extra[key]:
                log.warning("%s %s; average again to take that in, or name it with --checkpoint", folder, fault)
            return


def _other_model(ours: Path, theirs: Path, difference: str) -> UserError:
    return UserError(f"{theirs} is another model than {ours}: {difference}; average checkpoints of one model")


def _same_rules(ours: Path, theirs: Path) -> None:
    """Refuses models whose tensors have the same names and shapes but are used otherwise."""
    here, there = _rules(ours), _rules(theirs)
    for setting, value in here.items():
        if there[setting] != value:
            raise _other_model(ours, theirs, f"{setting} is {there[setting]} where {value} is expected")


def _rules(folder: Path) -> dict[str, str | int]:
    model = load_recipe(folder / RECIPE).model
    return {"model.encoder.block": model.encoder.block, "model.decoder.block": model.decoder.block,
            "model.heads": model.heads, "model.activation": model.activation}
