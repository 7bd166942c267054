"""Recipes of language models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from deepnmt.config import Fact, Model, Recipe, Section
from deepnmt.config.fields import Fault, For
from deepnmt.config.sections import Files, Folder, Length, Rate, Side, Stack, Train


class Texts(Section):
    """Text files, and how they are read."""

    folder: Annotated[Folder, Fact.PATH]
    """The folder that `deepnmt prepare` writes and training reads."""
    train: Annotated[Files, Field(min_length=1)]
    """Files of the training text; plain, .gz, .xz, .zst or .bz2. A folder is all files in it, a pattern such as
    `news.*.gz` those that fit, in the order of their names."""
    valid: Annotated[Files, Field(min_length=1)]
    """Files of the validation text."""
    test: dict[str, Files] = Field(default_factory=dict)
    """Test texts by name, for `deepnmt evaluate`."""
    documents: Annotated[bool, Fact.FIXED, Fact.PREPARED] = False
    """Whether empty lines separate documents, of which no block has two. Without, the text is one stream, and an empty
    line is a line like others. Every line ends with eos."""
    block: Annotated[Length, Field(ge=2), Fact.FIXED] = 512
    """Tokens of a block: what a sequence of training has, and a window of `deepnmt evaluate`."""

    def faults(self) -> Iterator[Fault]:
        for name in self.test:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                yield Fault(("test",), f"test.{name}: a test's name becomes part of file names; use letters, digits, "
                            "'_' and '-' only")


class LanguageModel(Model):
    """Shapes, dropout and blocks of a decoder without cross-attention."""

    encoder: Side = Stack(layers=0)
    """null: there is none."""

    def faults(self) -> Iterator[Fault]:
        if self.sides != ("decoder",):
            yield Fault(("encoder", "decoder"), "a language model is a decoder by itself; set encoder: null, and "
                        "decoder.layers to 1 or more")
            return
        yield from super().faults()


class LanguageTrain(Train):
    label_smoothing: Rate = 0.0
    """Probability mass that is spread over the vocabulary."""
    valid_bleu: Literal[False] = False
    """Only of translation."""


class LanguageRecipe(Recipe):
    data: Annotated[Texts, For("evaluate", "score", "sample")]  # type: ignore[assignment]
    """Texts, and how they are read."""
    model: Annotated[LanguageModel, Fact.FIXED, For("evaluate", "score", "sample", "average")] = LanguageModel()
    """The Transformer."""
    train: LanguageTrain
    """Length of the run; what it logs, validates and saves."""

    def _faults_of_sizes(self) -> Iterator[Fault]:
        block, bands = self.data.block, self.model.bands
        if block > self.model.max_length:
            yield Fault(("data.block", "model.max_length"), f"data.block ({block}) must not be above model.max_length "
                        f"({self.model.max_length})")
        if block > self.batch.tokens:
            yield Fault(("data.block", "batch.tokens"), f"data.block ({block}) must not be above batch.tokens "
                        f"({self.batch.tokens}), which holds at least one block")
        if bands and bands[-1] >= self.vocab.size and self.vocab.model is None:
            yield Fault(("model.bands", "vocab.size"), f"model.bands ({bands}) must be below vocab.size "
                        f"({self.vocab.size}), or the last band is empty")
        for name in ("label_smoothing", "r_drop"):
            if bands and (value := getattr(self.train, name)):
                yield Fault((f"train.{name}", "model.bands"), f"train.{name} ({value:g}) needs one softmax over the "
                            f"whole vocabulary, but model.bands ({bands}) divides it; set train.{name} to 0")
        if bands and self.train.objective != "cross_entropy":
            yield Fault(("train.objective", "model.bands"), f"train.objective ({self.train.objective}) needs one "
                        f"softmax over the whole vocabulary, but model.bands ({bands}) divides it; remove one of them")

    def _faults_of_translation(self) -> Iterator[Fault]:
        for name in ("guided_alignment", "guided_layer", "best_by"):
            if (value := getattr(self.train, name)) != Train.default(name):
                yield Fault((f"train.{name}",), f"train.{name} ({value}) is of translation; remove it")
        if not self.vocab.shared:
            yield Fault(("vocab.shared",), "vocab.shared: false is of translation, which has two languages; remove it")
        if self.vocab.tags:
            yield Fault(("vocab.tags",), "vocab.tags are of translation; remove them")
        if self.translate != type(self).default("translate"):
            yield Fault(("translate",), "translate has no effect with task: language_model; give deepnmt sample "
                        "options such as --temperature")


RECIPE = LanguageRecipe
