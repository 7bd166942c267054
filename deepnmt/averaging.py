"""Averages of checkpoints: which ones, and the mean of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from deepnmt.checkpoint import (
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
    update_of,
    verify_files,
    write_checkpoint,
)
from deepnmt.commit import MANIFEST, sweep
from deepnmt.config import load_recipe
from deepnmt.errors import UserError


def last(checkpoints: Path, count: int) -> list[Path]:
    """The last `count` checkpoints in a folder, oldest first. Raises `UserError` where there are fewer."""
    return _enough(list_checkpoints(checkpoints)[-max(count, 1) :], count, f"checkpoints in {checkpoints}")


def best(checkpoints: Path, count: int) -> list[Path]:
    """The `count` checkpoints that validated best, best first. Raises `UserError` where fewer were validated."""
    scored = best_first(list_checkpoints(checkpoints), read_scores(checkpoints))
    return _enough(scored[: max(count, 1)], count, f"validated checkpoints in {checkpoints}")


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
    if not 1 <= count <= len(found):
        raise UserError(f"{count} {what} were asked for, but there are {len(found)}; ask for a number from 1 to that")
    return found


def _names(found: dict[int, Path]) -> str:
    return ", ".join(map(str, found)) or "none"


def average_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Name to the mean of a tensor over checkpoints: summed in float64, rounded to fp32 once.

    One tensor of one checkpoint is read at a time, so the memory is that of one model.

    Raises:
        UserError: the tensors differ in name or shape; it names the first.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(folder / WEIGHTS, framework="pt")) for folder in folders]
        shapes = [{name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} for file in files]  # noqa: SIM118
        for folder, others in zip(folders[1:], shapes[1:], strict=True):
            if difference := first_difference(shapes[0], others):
                raise _other_model(folders[0], folder, difference)
        return {name: _mean(files, name) for name in shapes[0]}


def _mean(files: Sequence[Any], name: str) -> Tensor:
    total = files[0].get_tensor(name).double()
    for file in files[1:]:
        total += file.get_tensor(name)
    return (total / len(files)).float()


def save_average(folders: Sequence[Path], target: Path) -> Path:
    """Writes the average of whole checkpoints as a checkpoint without moments; one already at `target` is replaced.

    Recipe, vocabularies and position are those of the checkpoint with the most updates; `extra` of the state says what
    was averaged.

    Raises:
        UserError: a checkpoint is damaged; they are of different models (it names the first tensor, vocabulary or
            setting that differs); `target` is something else than a checkpoint.
        CheckpointWriteError: it cannot be written.
    """
    if target.exists() and not (target / MANIFEST).is_file():
        raise UserError(f"{target} is there and is no checkpoint; give another folder for the average")
    manifests = [verify_files(folder, MODEL_FILES) for folder in folders]
    weights = average_weights(folders)
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        for name in (SRC_VOCAB, TRG_VOCAB):
            if manifest["files"][name] != manifests[0]["files"][name]:
                raise _other_model(folders[0], folder, f"the vocabulary {name} is another")
        _same_rules(folders[0], folder)
    states = [load_state(folder) for folder in folders]
    newest = max(range(len(folders)), key=lambda number: states[number].update)
    averaged = {"averaged": [str(folder) for folder in folders], "averaged_updates": [s.update for s in states]}
    state = replace(states[newest], loss_scale=None, best={}, extra=averaged)
    src_vocab, trg_vocab = ((folders[newest] / name).read_bytes() for name in (SRC_VOCAB, TRG_VOCAB))
    recipe = (folders[newest] / RECIPE).read_text(encoding="utf-8")
    sweep(target.parent, target.name)
    write_checkpoint(target, Contents(weights, None, state, recipe, src_vocab, trg_vocab))
    return target


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
