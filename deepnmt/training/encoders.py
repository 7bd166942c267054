"""What tasks with an encoder alone have in common: how a run starts, begins with a trained encoder, and is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepnmt.checkpoint.checkpoint import (
    RECIPE,
    SRC_VOCAB,
    check_ramp,
    load_state,
    load_weights_into,
    model_in,
    open_model,
    read_task_files,
    shapes_by_name,
    verify_files,
)
from deepnmt.config import Recipe, changed_settings, load_recipe
from deepnmt.config.encoders import EncoderModel, EncoderRecipe
from deepnmt.config.fields import Fact
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError
from deepnmt.model.encoder import Encoder, EncoderInitialiser
from deepnmt.model.init import Source
from deepnmt.parallel.build import build_engine
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from deepnmt.training.dry_run import plan_by_shapes
from deepnmt.training.fine_tuning import agree_on_trained, check_parts, find_trained

BuildEncoder = Callable[[Callable[[nn.Module], None]], Encoder]


def check_encoder(recipe: EncoderRecipe, build: BuildEncoder) -> None:
    """Raises `UserError` if a part that `train.freeze` or `optimizer.lr_factors` names is not in the model."""
    check_parts(recipe, lambda recipe: build(lambda part: None))


def start_encoder(
    recipe: EncoderRecipe, build: BuildEncoder, vocab: Vocabulary, layout: Layout, ranks: Ranks, initialise: bool
) -> Engine:
    """The engine of a task's model; with `initialise` its weights are the initial ones, and those of `train.init_from`
    where it has them. Collective.

    Raises:
        UserError: on every process; see `trained_encoder`.
    """
    engine = build_engine(build, recipe, layout, ranks)  # type: ignore[arg-type]
    if initialise:
        shapes = shapes_by_name(build)
        initial = EncoderInitialiser(recipe.model, shapes, recipe.seed)
        engine.fill(trained_encoder(recipe, shapes, vocab, initial, ranks) if recipe.train.init_from else initial)
    return engine


def trained_encoder(
    recipe: EncoderRecipe, shapes: Mapping[str, tuple[int, ...]], vocab: Vocabulary, initial: Source, ranks: Ranks
) -> Source:
    """The weights that `train.init_from` names; where that has none for a parameter of the head, the initial ones.
    Collective.

    Raises:
        UserError: on every process; there is no such model, it is damaged, or its encoder or vocabulary is another.
    """
    folder = agree_on_trained(recipe, ranks)
    ranks.raise_everywhere(lambda: check_trained(recipe, shapes, vocab, folder))
    if ranks.first:
        print_status(f"beginning with the encoder of {folder}")
    trained = model_in(folder)
    taken = {name for name, shape in shapes.items() if trained.shapes.get(name) == shape}

    def source(name: str) -> Tensor:
        return trained(name) if name in taken else initial(name)

    return source


def check_trained(
    recipe: EncoderRecipe, shapes: Mapping[str, tuple[int, ...]], vocab: Vocabulary, folder: Path
) -> None:
    """Raises `UserError` if a checkpoint does not hold the recipe's encoder with the same vocabulary."""
    verify_files(folder, None)
    where, theirs = f"train.init_from names {folder}", load_recipe(folder / RECIPE)
    if not isinstance(theirs.model, EncoderModel):
        raise UserError(f"{where}, a model of task: {theirs.task}; give one of an encoder alone")
    for key, was, now in changed_settings(theirs.model, recipe.model):
        if not EncoderModel.is_marked(key, Fact.TRAINING_ONLY) and key != "initial_std":
            raise UserError(f"{where}, which holds another encoder: model.{key} is {now} and was {was}; set "
                            f"model.{key}={was}")
    if read_task_files(folder).get(SRC_VOCAB) != vocab.bytes:
        raise UserError(f"{where}, whose vocabulary is not that of the data; set vocab.model={recipe.train.init_from}, "
                        "and where data are prepared data.folder to a new folder")
    stored = model_in(folder).shapes
    for name, shape in shapes.items():
        if not name.startswith("head.") and stored.get(name) != shape:
            raise UserError(f"{where}, which does not hold the model of its {RECIPE}: {name} is "
                            f"{list(stored.get(name, ())) or 'missing'}, not {list(shape)}; give a checkpoint as "
                            "training wrote it")
    check_ramp(folder, theirs.model, load_state(folder).update)


def load_encoder(folder: Path, build: Callable[[Recipe, int], BuildEncoder]) -> tuple[Encoder, Recipe, Vocabulary]:
    """A trained model in evaluation mode on the CPU, its recipe and its vocabulary.

    Args:
        folder: a checkpoint or the folder of a run.
        build: from a recipe and the size of its vocabulary.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    checkpoint, recipe = open_model(folder)
    vocab = Vocabulary.load(checkpoint / SRC_VOCAB)
    model, _ = load_weights_into(build(recipe, vocab.size), checkpoint)
    return model, recipe, vocab


@contextmanager
def evaluated(engine: Engine) -> Iterator[Any]:
    """The whole model on this process, without dropout or gradients. Collective."""
    model: Any = engine.gather_model()
    model.eval()
    with torch.no_grad():
        yield model


def plan_encoder(recipe: EncoderRecipe, build: BuildEncoder, data: Mapping[str, str]) -> str:
    """What `train --dry-run` prints: the recipe, and the figures of the run. `data`: lines about the data.

    Raises:
        UserError: training would reject the layout.
    """
    check_encoder(recipe, build)
    model, rows = recipe.model, dict(data)
    if recipe.train.init_from is not None:
        rows["begins with"] = f"the encoder of {find_trained(recipe)}"
    described = f"{model.encoder.layers}L encoder, {model.encoder.block}, width {model.width}"
    return plan_by_shapes(recipe, build, described, rows)
