"""The models that a search or scoring computes with: one, or an ensemble of several with one vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from deepnmt import config
from deepnmt.checkpoint.average import warn_if_outdated
from deepnmt.checkpoint.checkpoint import LoadedModel, load_model, require_model
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.packed import pack
from deepnmt.decode.search import Searcher
from deepnmt.decode.steppers import Ensemble, MakeStepper, Mean, stepper_of
from deepnmt.errors import UserError
from deepnmt.model.transformer import Transformer
from deepnmt.processes.ranks import Ranks
from deepnmt.visitors import find

Folders = str | Path | Sequence[str | Path]  # of checkpoints or runs; several make an ensemble


@dataclass(frozen=True)
class Models:
    """Models of one vocabulary, as they were given.

    Attributes:
        members: at least one.
        mean: of an ensemble's probabilities.
        searcher: the search of `translate.backend`; None: deepnmt's own.
    """

    members: list[LoadedModel]
    mean: Mean
    searcher: Searcher | None = None

    @property
    def all(self) -> list[Transformer]:
        """The models; one that allows the shortest sentences is first, since the first one's limit holds."""
        return sorted((loaded.model for loaded in self.members), key=max_length)

    @property
    def vocabs(self) -> tuple[Vocabulary, Vocabulary]:
        """Source and target."""
        return self.members[0].vocabs

    @property
    def stepper(self) -> MakeStepper:
        """The way to compute the next logits, for the first of `all`."""
        if len(self.members) == 1:
            return stepper_of
        return partial(Ensemble, others=self.all[1:], mean=self.mean)


def load_models(
    folders: Folders, settings: config.Translate, ranks: Ranks, expected: config.Model | None = None,
    alone: bool = False,
) -> Models:
    """Loads one model or several, in the precision and on the device of a search; rank 0 warns of outdated averages.

    Raises:
        UserError: see `load_model`; a model is not the one `expected`; or vocabularies differ.
    """
    if isinstance(folders, (str, Path)):
        folders = [folders]
    members = []
    for folder in folders:
        loaded = load_model(Path(folder), alone=alone)
        require_model(loaded.folder, expected)
        if ranks.first:
            warn_if_outdated(loaded.folder)
        if settings.backend == "torch":
            pack(cast_weights(loaded.model, settings.precision).to(ranks.device))
        members.append(loaded)
    first = members[0]
    if settings.backend != "torch":
        if members[1:]:
            raise UserError(f"translate.backend is {settings.backend}, which knows no ensembles; give one checkpoint, "
                            "or set translate.backend=torch")
        return Models(members, settings.ensemble, load_searcher(first, settings, ranks.device))
    for other in members[1:]:
        if other.recipe.model.sides != first.recipe.model.sides:
            raise UserError(f"{other.folder} and {first.folder} are an encoder-decoder and a decoder alone; an "
                            "ensemble needs models of one kind")
        for side, ours, theirs in zip(("source", "target"), first.vocabs, other.vocabs, strict=True):
            if ours.fingerprint != theirs.fingerprint:
                raise UserError(f"{other.folder} has another {side} vocabulary than {first.folder}; an ensemble needs "
                                "models of one vocabulary, trained on data that were prepared with the same one")
    return Models(members, settings.ensemble)


def load_searcher(loaded: LoadedModel, settings: config.Translate, device: torch.device | str) -> Searcher:
    """The search of `translate.backend`, which a visitor brings. Raises `UserError` if none does, or it cannot search
    with this model."""
    load = find("searchers", settings.backend)
    if load is None:
        raise UserError(f"translate.backend is {settings.backend}, which this installation lacks; set "
                        "translate.backend=torch, or install all of deepnmt")
    searcher: Searcher = load(loaded, settings, device)
    return searcher


def cast_weights(model: Transformer, precision: str) -> Transformer:
    """Casts the model's weights to fp32 or bf16 in place and returns it. The position table stays fp32."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def max_length(model: Transformer) -> int:
    """The setting `model.max_length`, eos included."""
    return model.decoder.input.positions.size(0)


def longest_source(model: Transformer) -> int:
    """Tokens of the longest source that is read, eos included. A decoder by itself has source and translation within
    `model.max_length`, half of it for each."""
    if "encoder" in model.sides:
        return max_length(model)
    return max_length(model) // 2


def longest_translation(model: Transformer, source: int) -> int:
    """Tokens of the longest translation, eos included, of a source of so many, which take positions in a decoder by
    itself."""
    if "encoder" in model.sides:
        return max_length(model)
    return max_length(model) - source
