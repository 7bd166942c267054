"""Fine-tuning: the weights of a trained model that a run begins with (`train.init_from`), in a deeper stack too
(`train.grow`), and the parts of a model that settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from deepnmt.checkpoint.average import warn_if_outdated
from deepnmt.checkpoint.checkpoint import (
    RECIPE,
    SRC_VOCAB,
    TRG_VOCAB,
    check_ramp,
    find_checkpoint,
    first_difference,
    load_state,
    model_in,
    read_task_files,
    shapes_by_name,
    verify_model,
)
from deepnmt.checkpoint.tensors import Renamed
from deepnmt.config import Fact, Model, Recipe, changed_settings, choices, load_recipe
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError, nearest
from deepnmt.files import sha256
from deepnmt.folders import MANIFEST
from deepnmt.model.blocks import BLOCKS
from deepnmt.model.transformer import Transformer
from deepnmt.optim.groups import is_in
from deepnmt.processes.handshake import agree
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status

Vocabs = tuple[Vocabulary, Vocabulary]


def trained_weights(recipe: Recipe, vocabs: Vocabs, ranks: Ranks) -> Renamed:
    """The weights of the model that `train.init_from` names, by the names of the recipe's model. Collective.

    Raises:
        UserError: on every process; there is no such model, it is damaged, it does not fit the recipe or the
            vocabularies of the data, or the machines see different ones.
    """
    folder = agree_on_trained(recipe, ranks)
    ranks.raise_everywhere(lambda: verify_model(folder) if ranks.local_rank == 0 else None)
    names = ranks.raise_everywhere(lambda: origins(recipe, vocabs, folder))
    if ranks.first:
        warn_if_outdated(folder)
        print_status(f"beginning with the weights of {folder}")
    return Renamed(model_in(folder), names)


def agree_on_trained(recipe: Recipe, ranks: Ranks) -> Path:
    """`find_trained` on every process. Raises `UserError` if they find different models. Collective."""
    folder = ranks.raise_everywhere(lambda: find_trained(recipe))
    agree(ranks, "the models to begin with", {"train.init_from's manifest": sha256(folder / MANIFEST)[:8]},
          "give all machines the same model")
    return folder


def find_trained(recipe: Recipe) -> Path:
    """The checkpoint that `train.init_from` names. Raises `UserError` if there is none."""
    try:
        return find_checkpoint(Path(str(recipe.train.init_from)))
    except UserError as fault:
        raise UserError(f"train.init_from: {fault}") from None


def origins(recipe: Recipe, vocabs: Vocabs, folder: Path) -> dict[str, str]:
    """Where each parameter of the recipe's model comes from: its name in the checkpoint `folder`.

    Raises:
        UserError: the models differ; the message names the first tensor that does, and the setting or vocabulary. Or
            see `check_ramp`.
    """
    old, shapes = load_recipe(folder / RECIPE).model, model_in(folder).shapes
    sizes = (vocabs[0].size, vocabs[1].size)
    expected = shapes_by_name(lambda after_build: Transformer(recipe.model, *sizes, 0, after_build=after_build))
    grown = _grown(recipe, old, folder)
    names = {name: _origin(name, grown, recipe.train.grow) for name in expected}
    actual = {name: shapes[origin] for name, origin in names.items() if origin in shapes}
    placed = set(names.values())
    actual |= {name: shape for name, shape in shapes.items() if name not in placed}
    difference = first_difference(expected, actual)
    for key, was, now in changed_settings(old, recipe.model):
        side, _, name = key.rpartition(".")
        if (Model.is_marked(key, Fact.TRAINING_ONLY) and not (name == "init" and "published" in (was, now))) or (
                name == "layers" and side in grown):
            continue
        first = next((parameter for parameter in expected if parameter.startswith(side)), side)
        deeper = ", or train.grow=stack" if name == "layers" and now > was > 0 else ""
        raise UserError(f"train.init_from names {folder}, which holds another model: "
                        f"{difference or f'{first} would mean something else'}, since model.{key} is {now} and was "
                        f"{was}; set model.{key}={was}{deeper}")
    trained = read_task_files(folder)
    for file, vocab in zip((SRC_VOCAB, TRG_VOCAB), vocabs, strict=True):
        if trained.get(file) != vocab.bytes:
            fault = difference or f"{next(iter(expected))} has rows of other pieces"
            raise UserError(f"train.init_from names {folder}, whose vocabulary {file} is not that of "
                            f"{recipe.data.folder}: {fault}; set vocab.model={recipe.train.init_from} and "
                            "data.folder to a new folder, and prepare the data")
    if difference:
        raise UserError(f"train.init_from names {folder}, which does not hold the model of its {RECIPE}: {difference}; "
                        "give a checkpoint as training wrote it")
    check_ramp(folder, old, load_state(folder).update)
    return names


def _grown(recipe: Recipe, old: Model, folder: Path) -> dict[str, tuple[int, int]]:
    """The layers before and now of each side that grows. Raises `UserError` if none is to, or its block does not offer
    it."""
    if recipe.train.grow is not None and old.depths == recipe.model.depths:
        raise UserError(f"train.grow ({recipe.train.grow}) has no effect, since {folder} is {old.depths}, as deep as "
                        "the recipe's model; set model.encoder.layers or model.decoder.layers higher, or remove it")
    grown: dict[str, tuple[int, int]] = {}
    for side in recipe.model.sides:
        was, now, block = old.stack(side).layers, recipe.model.stack(side).layers, recipe.model.stack(side).block
        if recipe.train.grow is None or now <= was or not was:
            continue
        if not BLOCKS[block].growable:
            offered = ", ".join(choices.BLOCKS.where(lambda row: row.growable))
            raise UserError(f"train.grow ({recipe.train.grow}) is offered for {offered}, but model.{side}.block is "
                            f"{block}; set model.{side}.layers={was}, as in {folder}")
        grown[side] = was, now
    return grown


def _origin(name: str, grown: Mapping[str, tuple[int, int]], how: str | None) -> str:
    """The name of the parameter in the trained model that this one begins with.

    `stack` repeats the whole stack (Gong et al. 2019, Efficient Training of BERT by Progressively Stacking),
    `interleave` each layer (Chang et al. 2018, Multi-level Residual Networks from Dynamical Systems View).
    """
    side, kind, *rest = name.split(".")
    if kind != "layers" or side not in grown:
        return name
    index, (was, now) = int(rest[0]), grown[side]
    return ".".join([side, kind, str(index % was if how == "stack" else index * was // now), *rest[1:]])


def check_parts(recipe: Recipe, build: Callable[[Recipe], nn.Module] | None = None) -> None:
    """Raises `UserError` if a part that `train.freeze` or `optimizer.lr_factors` names is not in the recipe's model, or
    nothing is left to train. `build`: builds a task's model; None: that of translation."""
    settings = {"train.freeze": recipe.train.freeze, "optimizer.lr_factors": list(recipe.optimizer.lr_factors)}
    if not any(settings.values()):
        return
    with torch.device("meta"):
        model = build(recipe) if build else Transformer(recipe.model, 8, 8, 0, after_build=lambda part: None)
        names = list(dict(model.named_parameters()))
    for setting, parts in settings.items():
        for part in parts:
            if not any(is_in(part, name) for name in names):
                known: dict[str, None] = {}  # the shortest first
                for cut in range(8, -1, -1):
                    known |= dict.fromkeys(name.rsplit(".", cut)[0] for name in names)
                near = nearest(part, known)
                hint = f"did you mean {near}?" if near else f"parts are {', '.join(list(known)[:9])} and so on"
                raise UserError(f"{setting} names {part!r}, but no parameter of the model has a name that is or begins "
                                f"so; {hint}")
    trained = [name for name in names if not any(is_in(part, name) for part in recipe.train.freeze)]
    if not trained:
        raise UserError(f"train.freeze ({', '.join(recipe.train.freeze)}) leaves nothing to train; remove a part")
