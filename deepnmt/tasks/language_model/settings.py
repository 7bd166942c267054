"""Recipes of language models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_serializer, model_validator

from deepnmt.config import Fact, Model, Recipe, Section
from deepnmt.config.fields import Fault, For
from deepnmt.config.sections import Folder, Length, Rate, ScoredCorpus, Side, Stack, Train

_OF_PAIRS = ("src", "trg", "trg_lang")


def _files_are_a_text(schema: dict[str, Any]) -> None:
    """Lets editors accept `train.gz` and `[a.gz, b.gz]`, and of a corpus's settings those that a text has."""
    schema["properties"] = {name: schema["properties"][name] for name in _OF_PAIRS}
    described = {"description": schema.pop("description")}
    whole = {name: schema.pop(name) for name in list(schema)}
    schema |= {**described, "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, whole]}


class TextFiles(ScoredCorpus):
    """A text: its files (plain, .gz, .xz, .zst or .bz2; a folder is all files in it, a pattern such as `news.*.gz`
    those that fit, in the order of their names). Or pairs to translate, `{src: FILES, trg: FILES}`, line by line."""

    model_config = ConfigDict(json_schema_extra=_files_are_a_text)

    @property
    def pairs(self) -> bool:
        """Whether it has two sides."""
        return bool(self.src)

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, tree: Any) -> Any:
        """`FILE` and `[FILE, ...]` are a text of one side."""
        return {"trg": tree} if isinstance(tree, (str, list)) else tree

    @model_serializer(mode="wrap")
    def _as_given(self, handler: Callable[[TextFiles], dict[str, Any]]) -> Any:
        return {name: value for name, value in handler(self).items() if name in _OF_PAIRS} if self.src else self.trg

    def faults(self) -> Iterator[Fault]:
        for name in type(self).model_fields:
            if name not in _OF_PAIRS and getattr(self, name) != self.default(name):
                yield Fault((name,), f"{name} is of task: translation; give files, or pairs as src and trg")
        if not self.trg:
            yield Fault(("trg",), "names no files; give some, or pairs as src and trg")
        elif self.src:
            yield from super().faults()


class Texts(Section):
    """Text files, and how they are read."""

    folder: Annotated[Folder, Fact.PATH]
    """The folder that `deepnmt prepare` writes and training reads."""
    src_lang: str = ""
    """Of pairs, the source language, such as `de`."""
    trg_lang: str = ""
    """Of pairs, the target language, such as `en`; it also decides how SacreBLEU tokenises."""
    train: Annotated[TextFiles, Fact.PATH]
    """The training text, files or pairs."""
    valid: Annotated[TextFiles, Fact.PATH]
    """The validation text. Of pairs the loss of the targets is measured."""
    test: Annotated[dict[str, TextFiles], Fact.PATH] = Field(default_factory=dict)
    """Test texts by name, for `deepnmt evaluate`."""
    documents: Annotated[bool, Fact.FIXED, Fact.PREPARED] = False
    """Whether empty lines separate documents, of which no block has two. Without, the text is one stream, and an empty
    line is a line like others. Every line ends with eos. Each pair is a document, a block by itself."""
    block: Annotated[Length, Field(ge=2), Fact.FIXED] = 512
    """Tokens of a block: what a sequence of training has, and a window of `deepnmt evaluate`. Of pairs, the most that
    source, separator, target and end may have."""

    @property
    def pairs(self) -> bool:
        """Whether the texts are pairs."""
        return self.train.pairs

    def faults(self) -> Iterator[Fault]:
        others = {"valid": self.valid, **{f"test.{name}": text for name, text in self.test.items()}}
        for name, text in others.items():
            if text.pairs != self.pairs:
                one, two = ("pairs", "files of one side") if self.pairs else ("files of one side", "pairs")
                yield Fault((name.partition(".")[0], "train"), f"train has {one}, but {name} {two}; give both alike")
        if self.pairs and self.documents:
            yield Fault(("documents", "train"), "documents: true has no effect on pairs, each of which is a document; "
                        "remove it")
        for name in ("src_lang", "trg_lang"):
            if bool(getattr(self, name)) != self.pairs:
                yield Fault((name, "train"), f"{name} is of pairs, {'which need' if self.pairs else 'src and trg'}"
                            f"{' it, such as de' if self.pairs else '; remove it'}")
        for name in self.test:
            if name == "valid":
                yield Fault(("test",), "test.valid: evaluate calls the validation text so; give the test another name")
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
    loss_on: Annotated[Literal["target", "both"], Fact.FIXED] = "target"
    """Of pairs, the tokens that have a loss: those of the target and its end, or those of the source and the separator
    too. Validation measures the target alone."""
    label_smoothing: Rate = 0.0
    """Probability mass that is spread over the vocabulary."""
    valid_bleu: Literal[False] = False
    """Only of translation."""


class LanguageRecipe(Recipe):
    data: Annotated[Texts, For("evaluate", "score")]  # type: ignore[assignment]
    """Texts, and how they are read."""
    model: Annotated[LanguageModel, Fact.FIXED, For("evaluate", "score", "average")] = LanguageModel()
    """The Transformer."""
    train: LanguageTrain
    """Length of the run; what it logs, validates and saves."""

    @property
    def translates(self) -> bool:
        return self.data.pairs

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
            value = getattr(self.train, name)
            if bands and value:
                yield Fault((f"train.{name}", "model.bands"), f"train.{name} ({value:g}) needs one softmax over the "
                            f"whole vocabulary, but model.bands ({bands}) divides it; set train.{name} to 0")
        if bands and self.train.objective != "cross_entropy":
            yield Fault(("train.objective", "model.bands"), f"train.objective ({self.train.objective}) needs one "
                        f"softmax over the whole vocabulary, but model.bands ({bands}) divides it; remove one of them")

    def _faults_of_translation(self) -> Iterator[Fault]:
        for name in ("guided_alignment", "guided_layer", "best_by"):
            value = getattr(self.train, name)
            if value != Train.default(name):
                yield Fault((f"train.{name}",), f"train.{name} ({value}) is of translation; remove it")
        if not self.vocab.shared:
            yield Fault(("vocab.shared",), "vocab.shared: false is of translation, which has two languages; remove it")
        if self.vocab.tags:
            yield Fault(("vocab.tags",), "vocab.tags are of translation; remove them")
        if self.data.pairs:
            yield from self._faults_of_metrics()
            if self.translate.backend != "torch":
                yield Fault(("translate.backend",), f"translate.backend ({self.translate.backend}) is of translation; "
                            "set translate.backend: torch")
        else:
            if self.translate != type(self).default("translate"):
                yield Fault(("translate",), "translate has no effect with task: language_model but on pairs; give "
                            "deepnmt sample options such as --temperature")
            yield from self._without_effect("metrics")
            if self.train.loss_on != "target":
                yield Fault(("train.loss_on", "data.train"), f"train.loss_on ({self.train.loss_on}) is of pairs, src "
                            "and trg; remove it")


RECIPE = LanguageRecipe
