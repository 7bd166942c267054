"""Recipes of masked language models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from deepnmt.config import Fact, Section
from deepnmt.config.encoders import EncoderRecipe
from deepnmt.config.fields import Fault
from deepnmt.config.sections import Files, Folder

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Texts(Section):
    """Text files and the folder they are prepared into."""

    folder: Annotated[Folder, Fact.PATH]
    """The folder that `deepnmt prepare` writes and training reads."""
    train: Annotated[Files, Field(min_length=1)]
    """Files of the training text; plain, .gz, .xz, .zst or .bz2. A folder is all files in it, a pattern such as
    `news.*.gz` those that fit."""
    valid: Annotated[Files, Field(min_length=1)]
    """Files of the validation text."""
    unit: Annotated[Literal["lines", "documents"], Fact.FIXED, Fact.PREPARED] = "lines"
    """What a sequence is taken from: each line by itself, or a document, whose lines run on to the next empty line or
    the end of the file. What is longer than `length` is cut into several sequences."""
    length: Annotated[int, Field(ge=3, le=2**17), Fact.FIXED, Fact.PREPARED] = 128
    """Tokens of a sequence at most, its marks bos and eos included; at most `model.max_length`."""
    lowercase: Annotated[bool, Fact.FIXED, Fact.PREPARED] = False
    """Read the text in lower case."""


class Masking(Section):
    """Which tokens are to be predicted, and what the encoder reads in their place. Devlin et al. 2019, section 3.1."""

    share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """The share of a sequence's tokens that are predicted, rounded, but at least one."""
    mask: Share = 0.8
    """The share of these that the piece `<mask>` stands for."""
    random: Share = 0.1
    """The share of these that a random piece stands for; the others stay."""

    def faults(self) -> Iterator[Fault]:
        if self.mask + self.random > 1.0 + 1e-9:
            yield Fault(("mask", "random"), f"mask ({self.mask:g}) and random ({self.random:g}) are more than 1 "
                        "together; lower one of them")


class MaskedRecipe(EncoderRecipe):
    data: Texts  # type: ignore[assignment]
    """The texts."""
    masking: Annotated[Masking, Fact.FIXED] = Masking()
    """Which tokens are predicted."""

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.train.best_by not in ("loss", "bleu"):  # of which `EncoderTrain` says more
            yield Fault(("train.best_by",), f"train.best_by: is {self.train.best_by!r}, must be loss")
        length = self.data.length
        if length > self.model.max_length:
            yield Fault(("data.length", "model.max_length"), f"data.length ({length}) must not be above "
                        f"model.max_length ({self.model.max_length})")
        if length > self.batch.tokens:
            yield Fault(("data.length", "batch.tokens"), f"batch.tokens ({self.batch.tokens}) must not be below "
                        f"data.length ({length}), to hold the longest sequence")


RECIPE = MaskedRecipe
