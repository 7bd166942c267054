"""Checkpoints: what a run resumes from and a model is loaded from. The same for every layout; nothing is unpickled.

    update-00001000/
        weights.safetensors    fp32, each parameter once, under its canonical name
        moments.safetensors    NAME.exp_avg, NAME.exp_avg_sq (of SGD NAME.momentum_buffer); an average has none
                               (or both in shards, one a process, with an index.json: see `tensors.py`)
        state.json             TrainingState
        recipe.yaml            every setting
        src.spm, trg.spm       the vocabularies
        manifest.json          sizes and SHA-256 of the others, and of itself; written last (see `folders.py`)
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from deepnmt import folders
from deepnmt.checkpoint.state_types import StateTypes
from deepnmt.checkpoint.tensors import INDEX, Renamed, Tensors, kind_of, tensor_file
from deepnmt.config import Model, Recipe, changed_settings, load_recipe
from deepnmt.config.choices import TYINGS
from deepnmt.config.plugins import require_same
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError
from deepnmt.folders import MANIFEST, Buffer, DamagedFolder
from deepnmt.model.blocks import set_clock
from deepnmt.model.init import fill
from deepnmt.model.transformer import Transformer, fill_with_nan

WEIGHTS, MOMENTS, STATE, RECIPE = "weights.safetensors", "moments.safetensors", "state.json", "recipe.yaml"
SRC_VOCAB, TRG_VOCAB = "src.spm", "trg.spm"
REQUIRED = (WEIGHTS, STATE, RECIPE)  # in every checkpoint, whatever its task
# Any other file belongs to the task (training/task.py, `Task.files`); averages and folded models copy it.
MODEL_FILES = (*REQUIRED, SRC_VOCAB, TRG_VOCAB)  # what a translation model is loaded from

Which = Literal["auto", "averaged", "newest", "best"]
Module = TypeVar("Module", bound=nn.Module)
BuildModule = Callable[[Callable[[nn.Module], None]], nn.Module]  # with `after_build`, as a Transformer has it

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingState:
    """The progress of a run, as state.json holds it.

    Attributes:
        update: updates applied.
        epoch, micro_batch: position in the batch plan.
        optimizer_step: updates as the optimizer counts them.
        loss_scale: the fp16 loss scale, the last one if the run has left fp16, None if it never used fp16.
        best: the best validation.
        extra: anything JSON can hold. `validations`, if present, is a list of objects with `update` and `value`, where
            a lower value is a better model.
    """

    update: int
    epoch: int
    micro_batch: int
    optimizer_step: int
    loss_scale: dict[str, float | int] | None
    best: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """What goes into a checkpoint. Tensors are fp32 and whole; `moments` is None for an average; `files` are the
    task's, in translation the vocabularies."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor] | None
    state: TrainingState
    recipe_yaml: str
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class LoadedModel:
    """A model in fp32 and evaluation mode on the CPU, with its vocabularies, recipe and state, loaded from `folder`."""

    model: Transformer
    src_vocab: Vocabulary
    trg_vocab: Vocabulary
    recipe: Recipe
    state: TrainingState
    folder: Path

    @property
    def vocabs(self) -> tuple[Vocabulary, Vocabulary]:
        """Source and target."""
        return self.src_vocab, self.trg_vocab

    @property
    def files(self) -> dict[str, bytes]:
        """The task's files in the checkpoint: name to content."""
        return read_task_files(self.folder)


# -- writing -----------------------------------------------------------------------------------------------------------


def recover_checkpoints(checkpoints: Path) -> None:
    """Cleans up after a killed save or deletion: a checkpoint that was being replaced gets its name back. Raises
    `FolderWriteError` if that fails."""
    folders.recover_after_kill(checkpoints, "update-*")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one, damaged or not. Prepared data and exported models have a manifest, too."""
    return all((folder / name).is_file() for name in (MANIFEST, STATE))


def check_target(target: Path, what: str, replaces: bool = False) -> Path:
    """The folder that `what` is to be written to: `target`, or where it leads if it is a link, which stays. Raises
    `UserError` if it exists and is not a checkpoint; or is one from which training can resume, unless `what`
    `replaces` it."""
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    if target.exists() and not is_checkpoint(target):
        raise UserError(f"{target} exists and is not a checkpoint; give another folder for {what}")
    if not replaces and any(target.glob("*moments*")):  # a damaged one may be replaced
        raise UserError(f"{target} is a checkpoint from which training can resume, and {what} would replace it; give "
                        "another folder")
    return target


def write_checkpoint(target: Path, contents: Contents) -> None:
    """Writes a checkpoint folder under any name, replacing one that exists, after cleaning up after a killed write.
    Raises `FolderWriteError`."""
    folders.recover(target)
    groups = {WEIGHTS: contents.weights}
    if contents.moments is not None:
        groups[MOMENTS] = contents.moments
    files: dict[str, Iterable[Buffer]] = {}
    counts = {}
    for name, group in groups.items():
        files[name] = tensor_file(shapes_of(group), group.__getitem__)
        counts[name] = len(group)
    for name, text in texts_of(contents.state, contents.recipe_yaml, contents.files).items():
        files[name] = [text]
    folders.commit_folder(target, files, facts_of(contents.state.update, shapes_of(contents.weights), counts))


def texts_of(state: TrainingState, recipe_yaml: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a checkpoint beside its tensors, by name."""
    return {STATE: json.dumps(asdict(state), indent=1).encode(), RECIPE: recipe_yaml.encode(), **files}


def facts_of(update: int, shapes: Mapping[str, Iterable[int]], tensors: Mapping[str, int]) -> dict[str, Any]:
    """What the manifest says beside its files: `shapes` of the weights, number of `tensors` in each file."""
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return {"update": update, "parameters": parameters, "tensors": tensors, "metadata": {}}


# -- finding -----------------------------------------------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """The `update-*` folders in `folder`, lowest update first, damaged ones and ones a kill left renamed included."""
    paths = [*folder.glob("update-*"), *folders.displaced(folder, "update-*")]
    return sorted([path for path in paths if _is_update(path) and path.is_dir()], key=update_of)


def _is_update(path: Path) -> bool:
    return re.fullmatch(r"update-[0-9]{8,}", folders.original_name(path)) is not None


def update_of(checkpoint: Path) -> int:
    """The update in the name of an `update-*` folder."""
    return int(folders.original_name(checkpoint).removeprefix("update-"))


def _warn(damage: DamagedFolder) -> None:
    log.warning("skipped: %s", damage)


def newest_checkpoint(folder: Path, on_skip: Callable[[DamagedFolder], object] = _warn) -> Path | None:
    """The newest undamaged checkpoint in `folder`, every byte checked; calls `on_skip` for each damaged newer one."""
    for path in reversed(list_checkpoints(folder)):
        try:
            verify(path)
        except DamagedFolder as damage:
            on_skip(damage)
        else:
            return path
    return None


def read_scores(folder: Path) -> dict[int, float]:
    """Update to validation value (lower is better), collected from the checkpoints in `folder`."""
    scores: dict[int, float] = {}
    for path in list_checkpoints(folder):
        try:
            validations = load_state(path).extra.get("validations", [])
        except DamagedFolder as damage:
            _warn(damage)
            continue
        for entry in validations:
            scores[int(entry["update"])] = float(entry["value"])
    return scores


def sorted_by_score(checkpoints: list[Path], scores: Mapping[int, float]) -> list[Path]:
    """The checkpoints with a finite score, lowest (best) first; of equal scores the earlier update first."""
    finite = [path for path in checkpoints if math.isfinite(scores.get(update_of(path), math.nan))]
    return sorted(finite, key=lambda path: scores[update_of(path)])


def find_checkpoint(folder: Path, which: Which = "auto") -> Path:
    """The checkpoint in `folder`, which is a checkpoint itself or a run.

    Args:
        folder: a checkpoint or run folder.
        which: of a run: `averaged`; `newest` undamaged; `best` by validation; `auto`: averaged if it exists, else
            newest.

    Raises:
        UserError: there is none.
    """
    folder = folders.locate(folder)
    if (folder / MANIFEST).is_file() and any((folder / name).is_file() for name in REQUIRED):
        return folder  # prepared data has none of them
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; train first, or give a checkpoint or the "
                        "folder of a run")
    averaged = folders.locate(folder / "averaged")
    checkpoints = folder / "checkpoints"
    if which == "averaged" or (which == "auto" and averaged.is_dir()):
        if not averaged.is_dir():
            raise UserError(f"{folder} holds no averaged/; average its checkpoints first, or take the newest")
        return averaged
    if which == "best":
        scored = sorted_by_score(list_checkpoints(checkpoints), read_scores(checkpoints))
        if not scored:
            raise UserError(f"no checkpoint in {checkpoints} was validated; take the newest")
        return scored[0]
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        raise UserError(f"{folder} is not a checkpoint and holds no whole one in checkpoints/; give a checkpoint or "
                        "the folder of a run that has saved one")
    return newest


# -- checking and reading ----------------------------------------------------------------------------------------------


def verify(folder: Path) -> None:
    """Compares every file with the manifest, byte for byte. Raises `DamagedFolder` at the first fault."""
    verify_files(folder, None)


def verify_files(folder: Path, files: Collection[str] | None) -> dict[str, Any]:
    """Compares these files of a checkpoint (None: all) with its manifest, and returns the manifest.

    Raises:
        DamagedFolder: see `folders.read_manifest` and `check_files`; or the manifest has another update than the
            folder's name.
    """
    manifest = folders.read_manifest(folder)
    required = _stored_as(manifest, {*REQUIRED, *(files or ())})
    checked = None if files is None else _stored_as(manifest, files)
    folders.check_files(folder, manifest, checked, required)
    if _is_update(folder) and manifest.get("update") != update_of(folder):
        raise DamagedFolder(folder, f"its {MANIFEST} is that of update {manifest.get('update')}")
    return manifest


def _stored_as(manifest: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """The files of these names, or what a checkpoint in shards has in their place."""
    if manifest["format"] != folders.SHARDED:
        return set(names)
    stored: set[str] = set()
    for name in names:
        if name in (WEIGHTS, MOMENTS):
            stored |= {INDEX, *(file for file in manifest["files"] if kind_of(file) == name)}
        else:
            stored.add(name)
    return stored


def task_files(folder: Path) -> list[str]:
    """The names of the task's files in a checkpoint. Raises `DamagedFolder`."""
    names = verify_files(folder, ())["files"]
    return [name for name in names if name not in (*REQUIRED, MOMENTS, INDEX) and not kind_of(name)]


def read_task_files(folder: Path) -> dict[str, bytes]:
    """The task's files in a checkpoint: name to content, compared with the manifest. Raises `DamagedFolder`."""
    names = task_files(folder)
    verify_files(folder, names)
    try:
        return {name: (folder / name).read_bytes() for name in names}
    except OSError as error:  # a run that still trains may delete its checkpoint
        raise DamagedFolder(folder, f"{error.filename} cannot be read ({error.strerror})") from None


def load_state(folder: Path) -> TrainingState:
    """The state in a checkpoint. Raises `DamagedFolder` if state.json is not what the manifest says, or no training
    state."""
    verify_files(folder, (STATE,))
    content = folders.read_json(folder, STATE)
    try:
        StateTypes.model_validate(content)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise DamagedFolder(folder, f"{STATE} is not a training state ({where}: {fault['msg']})") from None
    state = TrainingState(**content)
    if _is_update(folder) and state.update != update_of(folder):
        raise DamagedFolder(folder, f"its {STATE} is that of update {state.update}")
    return state


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Name to fp32 tensor on the CPU. Raises `DamagedFolder`."""
    verify_files(folder, (WEIGHTS,))
    return dict(weights_in(folder))


def weights_of(checkpoint: Path) -> dict[str, str]:
    """The hashes of a checkpoint's files of weights, by which its model is known elsewhere. Raises `DamagedFolder`."""
    files = folders.read_manifest(checkpoint)["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.startswith("weights")}


def weights_in(folder: Path) -> Tensors:
    """The weights of a verified checkpoint, read when asked for. Raises `DamagedFolder`."""
    return Tensors(folder, "weights")


def model_in(folder: Path) -> Tensors | Renamed:
    """The weights that a verified checkpoint is used with: their running average if it has one (`train.ema`), else
    `weights_in`. Raises `DamagedFolder`."""
    weights = weights_in(folder)
    if not has_average(folder):
        return weights
    return Renamed(moments_in(folder), {name: f"{name}.ema" for name in weights})


def has_average(folder: Path) -> bool:
    """Whether a checkpoint holds the running average of its weights."""
    return has_moments(folder) and load_recipe(folder / RECIPE).train.ema is not None


def moments_in(folder: Path) -> Tensors:
    """The fp32 moments (NAME.exp_avg and so on) of a verified checkpoint, read when asked for. Raises `UserError`."""
    if not has_moments(folder):
        raise UserError(f"{folder} holds no optimizer moments (an average has none), so training cannot resume from "
                        "it; give a checkpoint of a run")
    return Tensors(folder, "moments")


def has_moments(folder: Path) -> bool:
    """Whether a checkpoint holds the optimizer's moments. Raises `DamagedFolder`."""
    files = folders.read_manifest(folder)["files"]
    return any(name == MOMENTS or kind_of(name) == MOMENTS for name in files)


def first_difference(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> str | None:
    """A clause that describes the first tensor, in the order of `ours`, that differs in `theirs`; None if none does."""
    for name, shape in ours.items():
        if name not in theirs:
            return f"{name} {list(shape)} is missing"
        if theirs[name] != shape:
            return f"{name} is {list(theirs[name])} where {list(shape)} is expected"
    for name, shape in theirs.items():
        if name not in ours:
            return f"{name} {list(shape)} is not expected"
    return None


def verify_model(folder: Path) -> None:
    """Compares the files of a checkpoint that `load_model` reads with its manifest. Raises `DamagedFolder`."""
    verify_files(folder, {*MODEL_FILES, *task_files(folder)})
    if has_average(folder):
        verify_files(folder, (MOMENTS,))


def open_model(folder: Path, which: Which = "auto", task: str | None = None) -> tuple[Path, Recipe]:
    """The checkpoint of a folder or a run (see `find_checkpoint`), whose model is undamaged, and its recipe.

    Raises:
        UserError: there is none, it is damaged, needs another plug-in than there is, or is of another than `task`.
    """
    checkpoint = find_checkpoint(folder, which)
    verify_model(checkpoint)
    recipe = load_recipe(checkpoint / RECIPE)
    if recipe.model_has_plugins:
        require_same(recipe.plugins, checkpoint)
    if task is not None and recipe.task != task:
        raise _of_another_task(checkpoint, recipe, task, "give another checkpoint")
    return checkpoint, recipe


def _of_another_task(checkpoint: Path, recipe: Recipe, task: str, way: str) -> UserError:
    return UserError(f"{checkpoint} holds a model of the task {recipe.task}, must be one of {task}; {way}")


def load_weights_into(build: Callable[[Callable[[nn.Module], None]], Module], checkpoint: Path
                      ) -> tuple[Module, TrainingState]:
    """The model that `build` makes, with the weights and at the update of a checkpoint, in evaluation mode on the CPU;
    and what else the checkpoint holds of training."""
    model, state = build(fill_with_nan), load_state(checkpoint)
    fill(model, model_in(checkpoint))
    set_clock(model, state.update)
    return model.eval(), state


def load_model(folder: Path, which: Which = "auto", alone: bool = False) -> LoadedModel:
    """Loads the model of a checkpoint, or of a run (see `find_checkpoint`).

    Args:
        alone: whether it may be a decoder by itself that translates, too.

    Raises:
        UserError: there is no checkpoint, it is damaged or of another task, or its weights do not fit its recipe (the
            message names the first such tensor).
    """
    checkpoint, recipe = open_model(folder, which)
    task = Recipe.default("task")
    if recipe.task != task and not (alone and recipe.translates):
        way = "give another checkpoint"
        if recipe.translates:
            way = "deepnmt translate and deepnmt evaluate use it as it is, for all else give a model with an encoder"
        raise _of_another_task(checkpoint, recipe, task, way)
    src_vocab, trg_vocab = Vocabulary.load(checkpoint / SRC_VOCAB), Vocabulary.load(checkpoint / TRG_VOCAB)
    require_shapes(checkpoint, recipe.model, src_vocab.size, trg_vocab.size)
    model, state = load_weights_into(lambda after_build: Transformer(
        recipe.model, src_vocab.size, trg_vocab.size, recipe.seed, after_build=after_build), checkpoint)
    return LoadedModel(model, src_vocab, trg_vocab, recipe, state, checkpoint)


def require_shapes(checkpoint: Path, model: Model, src_vocab: int, trg_vocab: int) -> None:
    """Raises `UserError` if the weights of a checkpoint are not those of this model; the message names the first such
    tensor."""
    if difference := shapes_differ(model, src_vocab, trg_vocab, model_in(checkpoint).shapes):
        raise UserError(f"{checkpoint} does not hold the model of its {RECIPE}: in {WEIGHTS}, {difference}; give a "
                        "checkpoint as training wrote it")


def shapes_differ(model: Model, src_vocab: int, trg_vocab: int, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """A clause on how these shapes differ from those of a model, which takes no more time or memory than they."""
    for side in model.sides:
        if f"{side}.layers.{model.stack(side).layers - 1}.ffn.fc2.weight" not in shapes:
            return f"the {side} has other than {model.stack(side).layers} layers"
    if TYINGS[model.tied].joint and src_vocab != trg_vocab:
        return f"{SRC_VOCAB} has {src_vocab} pieces and {TRG_VOCAB} {trg_vocab}, but model.tied is {model.tied}"
    return first_difference(shapes_by_name(
        lambda after_build: Transformer(model, src_vocab, trg_vocab, 0, after_build=after_build)), shapes)


def check_ramp(folder: Path, model: Model, update: int) -> None:
    """Raises `UserError` if a layer of the model of this update, in `folder`, does not yet have the full weight of its
    sub-layers (`Block.clock`), so that it is another one where no update is counted."""
    for side in model.sides:
        stack = model.stack(side)
        needed = stack.ramp * stack.layers
        if update < needed:
            raise UserError(f"model.{side}.ramp is {stack.ramp}, so its {stack.layers} layers are whole from update "
                            f"{needed:,} on, but {folder} is of update {update:,}; take a later checkpoint, or train "
                            "that run further")


def require_model(folder: Path, expected: Model | None) -> None:
    """Raises `UserError` if an undamaged checkpoint holds another model than `expected`; None accepts any."""
    if expected is None:
        return
    old = load_recipe(folder / RECIPE)
    changes = changed_settings(old, old.model_copy(update={"model": expected}))
    if changes:
        listed = "\n  ".join(map(str, changes))
        raise UserError(f"{folder} holds another model than requested:\n  {listed}\nthese settings of a trained model "
                        "cannot change; remove them, or give its run folder in place of the recipe")


def shapes_by_name(build: BuildModule) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, which take no memory."""
    with torch.device("meta"):
        return shapes_of(dict(build(lambda part: None).named_parameters()))


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Name to shape."""
    if isinstance(tensors, Tensors | Renamed):
        return tensors.shapes
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
