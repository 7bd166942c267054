"""Who the doctor examines: a fresh model of a recipe, or a checkpoint, with a batch of its text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import LoadedModel, load_model
from deepnmt.config import Recipe
from deepnmt.data.batching import Stream, collate
from deepnmt.data.prepared import PreparedData
from deepnmt.doctor.fresh import fresh_model
from deepnmt.errors import UserError
from deepnmt.model.admin import AdminProfile
from deepnmt.model.transformer import Transformer
from deepnmt.ranks import Ranks
from deepnmt.train.profile import profile_for


@dataclass(frozen=True)
class Patient:
    """What is examined: a model with its recipe and a batch, and what it came from: a checkpoint with how often its run
    had seen the training text and the loss scale that it had reached in fp16, or, of a fresh model, the mean target
    tokens of its run's micro-batches and, with Admin stacks, the profile."""

    recipe: Recipe
    model: Transformer
    batch: Batch
    vocabs: tuple[int, int]
    checkpoint: Path | None
    profile: AdminProfile | None = None
    passes: float = 0.0
    scale: float | None = None
    micro_batch: float = 0.0

    @property
    def tokens(self) -> int:
        """Target tokens of the batch."""
        return self.batch.tokens


def first_batch(recipe: Recipe, data: PreparedData, tokens: int, device: torch.device) -> Batch:
    """The run's first micro-batch, cut to as many sentences as have about so many target tokens, at least two.

    Raises:
        UserError: it has but one sentence.
    """
    stream = Stream(data.split("train"), recipe.batch.tokens, recipe.seed)
    split, indices = stream.split(0), stream.plan(0)[0]
    if len(indices) < 2:
        raise UserError(f"batch.tokens is {recipe.batch.tokens}, so that the first micro-batch has one sentence, but "
                        "sentences are compared with one another; give more, as in "
                        f"batch.tokens={2 * recipe.batch.tokens}")
    reached = split.trg_lengths[indices].cumsum()
    count = max(2, int((reached <= tokens).sum()))
    return collate(split, indices[:count], 0, device)


def patient_of(recipe: Recipe, data: PreparedData, batch: Batch, checkpoint: Path | None) -> Patient:
    """The fresh model of a recipe, or the one of a checkpoint (or run) under its own recipe, but for what a checkpoint
    does not settle.

    Raises:
        UserError: no such checkpoint, or one whose vocabularies are of other sizes than the data's.
    """
    source, target = data.vocabs()
    vocabs = (source.size, target.size)
    if checkpoint is None:
        profile = profile_for(recipe, data, Ranks(0, 1, 0, 1, batch.device))
        stream = Stream(data.split("train"), recipe.batch.tokens, recipe.seed)
        mean = float(stream.split(0).trg_lengths.sum()) / stream.epoch_size(0)
        return Patient(recipe, fresh(recipe, vocabs, batch, profile), batch, vocabs, None, profile, micro_batch=mean)
    loaded = load_model(checkpoint)
    if (loaded.src_vocab.size, loaded.trg_vocab.size) != vocabs:
        raise UserError(f"{loaded.folder} was trained with vocabularies of {loaded.src_vocab.size} and "
                        f"{loaded.trg_vocab.size} pieces, but {recipe.data.folder} has {vocabs[0]} and {vocabs[1]}; "
                        "give the recipe whose data it was trained on")
    model = loaded.model.to(batch.device)
    model.label_smoothing = loaded.recipe.train.label_smoothing
    given = {"run": recipe.run, "seed": recipe.seed, "data": recipe.data, "batch": recipe.batch,
             "parallel": recipe.parallel, "loss_scale": recipe.loss_scale}
    reached = loaded.state.loss_scale if recipe.loss_scale == loaded.recipe.loss_scale else None
    return Patient(loaded.recipe.model_copy(update=given), model, batch, vocabs, loaded.folder,
                   passes=_passes(loaded, data), scale=float(reached["scale"]) if reached else None)


def _passes(loaded: LoadedModel, data: PreparedData) -> float:
    """How often the run had seen the training text; only where its schedule asks, since an epoch is planned for it."""
    recipe, state = loaded.recipe, loaded.state
    if recipe.schedule.step_epoch is None:
        return 0.0
    stream = Stream(data.split("train"), recipe.batch.tokens, recipe.seed)
    return state.epoch + state.micro_batch / stream.epoch_size(state.epoch)


def fresh(
    recipe: Recipe, vocabs: tuple[int, int], batch: Batch, profile: AdminProfile | None = None
) -> Transformer:
    """The model as training would begin with it; Admin stacks are profiled on the batch where no profile is given."""
    return fresh_model(recipe.model, *vocabs, recipe.seed, [batch], label_smoothing=recipe.train.label_smoothing,
                       input_variance=recipe.admin.input_variance, profile=profile)
