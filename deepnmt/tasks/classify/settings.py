"""Recipes of classifiers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from deepnmt.config import Batch, Fact, Section
from deepnmt.config.encoders import EncoderRecipe, EncoderTrain
from deepnmt.config.fields import Fault
from deepnmt.config.sections import Count, Files, Rate

Column = Annotated[int, Field(ge=1)] | Annotated[str, Field(min_length=1)]


class Columns(Section):
    """Where the files have what, by number, from 1, or by name: in the first line of a text with tabs, or the key of an
    object of JSON lines (.jsonl)."""

    text: Column = 1
    """The sentence, or the first of a pair."""
    pair: Column | None = None
    """The second of a pair; null: there are no pairs."""
    label: Column = 2
    """The label."""

    def faults(self) -> Iterator[Fault]:
        columns = [column for column in (self.text, self.pair, self.label) if column is not None]
        if len({type(column) for column in columns}) > 1:
            yield Fault(("text", "pair", "label"), f"columns are {', '.join(map(repr, columns))}; give them all by "
                        "number, or all by name")
        elif len(set(columns)) < len(columns):
            yield Fault(("text", "pair", "label"), f"columns are {', '.join(map(repr, columns))}, one of them twice; "
                        "name different ones")


class Examples(Section):
    """Files of labelled sentences. Nothing is prepared: they are read and segmented when training begins."""

    train: Annotated[Files, Field(min_length=1)]
    """Files of the training examples: lines with tabs between columns, or JSON lines (.jsonl); plain or compressed."""
    valid: Annotated[Files, Field(min_length=1)]
    """Files of the validation examples."""
    labels: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2), Fact.FIXED]
    """All labels. Of two, the last one is the positive one of F1."""
    columns: Annotated[Columns, Fact.FIXED] = Columns()
    """Where the files have what."""
    lowercase: Annotated[bool, Fact.FIXED] = False
    """Read the text in lower case, as the encoder's."""
    too_long: Annotated[Literal["refuse", "cut"], Fact.FIXED] = "refuse"
    """What to do with an example of more than `model.max_length` tokens, its marks included: refuse it, or cut the end
    of the longer text of it."""

    @property
    def folder(self) -> str:
        """What stands in messages for a folder of prepared data."""
        return ", ".join(self.train)

    def faults(self) -> Iterator[Fault]:
        if len(set(self.labels)) < len(self.labels):
            yield Fault(("labels",), f"labels are {', '.join(self.labels)}, one of them twice; name each once")


class SentenceBatch(Batch):
    """The micro-batches."""

    sentences: Annotated[Count, Fact.FIXED] = 32
    """Examples of a micro-batch; the last one of an epoch may have fewer."""

    def faults(self) -> Iterator[Fault]:
        if self.tokens != self.default("tokens"):
            yield Fault(("tokens",), f"tokens ({self.tokens}) has no effect with task: classify; set sentences instead")


class ClassifyTrain(EncoderTrain):
    """How long a run is, and what it logs, validates and saves."""

    best_by: Annotated[
        Literal["loss", "accuracy", "f1", "matthews"], Fact.FIXED] = "accuracy"
    """What makes a validation the best: the lowest loss, or the highest of the others."""
    head_dropout: Annotated[Rate, Fact.SEEN] = 0.1
    """Dropout before the last matrix."""


class ClassifyRecipe(EncoderRecipe):
    data: Examples  # type: ignore[assignment]
    """The examples."""
    batch: SentenceBatch = SentenceBatch()
    """The micro-batches."""
    train: ClassifyTrain
    """Length of the run; what it logs, validates and saves."""

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.vocab.model is None and self.train.init_from is None:
            yield Fault(("vocab.model", "train.init_from"), "vocab.model is null, but a classifier trains no "
                        "vocabulary; name the run, or the SentencePiece file, whose vocabulary it has, or begin with a "
                        "run by train.init_from")


RECIPE = ClassifyRecipe
