"""The settings of tasks whose model is an encoder alone, as BERT's (Devlin et al. 2019): `model.decoder: null`.

Such a task's recipe is a subclass of `EncoderRecipe`, with sections of its own in the place of `data` and others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from deepnmt.config.choices import ACTIVATIONS, BLOCKS
from deepnmt.config.fields import Fact, Fault, For
from deepnmt.config.sections import SEARCHING, Model, Positive, Rate, Recipe, Side, Stack, Train


class EncoderStack(Stack):
    block: Annotated[str, BLOCKS] = "post_ln"
    """The residual block of every layer; BERT has post_ln, and Xiong et al. 2020 compare it with pre_ln."""


class EncoderModel(Model):
    """Shapes, dropout and block of an encoder with BERT's input: the sum of three trained vectors, of a token, of its
    position and of its segment."""

    activation: Annotated[str, ACTIVATIONS, Fact.SEEN] = "gelu"
    """Activation of the feed-forward sub-layer."""
    positions: Literal["learned"] = "learned"
    """A trained vector for each of the `max_length` positions."""
    max_length: Annotated[int, Field(ge=3, le=2**17)] = 512
    """Positions: tokens of a sequence at most, its marks bos and eos included."""
    attention_dropout: Annotated[Rate, Fact.TRAINING_ONLY, Fact.SEEN] = 0.1
    """Dropout on the attention weights."""
    input_norm: Annotated[bool, Fact.SEEN] = True
    """A norm on the sum of the three vectors, as in BERT."""
    norm_eps: Annotated[Positive, Fact.SEEN] = 1e-12
    """What every norm adds to the variance, as in BERT."""
    initial_std: Annotated[Positive, Fact.SEEN] = 0.02
    """Standard deviation of the initial tables and matrices, drawn from a normal distribution without what is further
    away than two of them, as in BERT; matrices of the layers only with `init: auto`."""
    encoder: EncoderStack = EncoderStack()
    """The encoder."""
    decoder: Side = Stack(layers=0)
    """null: there is none."""

    def faults(self) -> Iterator[Fault]:
        if self.sides != ("encoder",):
            yield Fault(("encoder", "decoder"), "this task trains an encoder alone; set decoder: null, and "
                        "encoder.layers to 1 or more")
            return
        yield from self.of_layers._faults_of("encoder")
        yield from self._faults_of_bands()
        if self.encoder.facts.profiled:
            yield Fault(("encoder.block",), f"encoder.block ({self.encoder.block}) needs a profile, which is measured "
                        "in models that predict text; set it to admin_closed_form")
        if self.tied != self.default("tied"):
            yield Fault(("tied",), f"tied ({self.tied}) has no effect, since there is one table; remove it")
        if self.tuned_at != self.default("tuned_at"):
            yield Fault(("tuned_at",), "tuned_at is for translation and language models, whose tables it knows; remove "
                        "it")
        for name in ("width", "input_gain", "word_dropout"):
            if value := getattr(self.encoder, name):
                yield Fault((f"encoder.{name}",), f"encoder.{name} ({value}) has no effect with an encoder alone; "
                            f"{'set width instead' if name == 'width' else 'remove it'}")

    @property
    def of_layers(self) -> Model:
        """The same as layers know it, which themselves add no positions."""
        return self.model_copy(update={"positions": "sinusoidal"})


class EncoderTrain(Train):
    label_smoothing: Rate = 0.0
    """Probability mass that is spread over all classes."""
    valid_bleu: Literal[False] = False
    """Only of translation."""

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.best_by == "bleu":
            yield Fault(("best_by",), "best_by: bleu is of translation alone; set it to loss")


class EncoderRecipe(Recipe):
    model: Annotated[EncoderModel, Fact.FIXED, For(*SEARCHING, "average")] = EncoderModel()
    """The encoder."""
    train: EncoderTrain
    """Length of the run; what it logs, validates and saves."""

    def faults(self) -> Iterator[Fault]:
        yield from self._unknown_names()
        yield from self._faults_of_schedule()
        yield from self._faults_of_beginning()
        yield from self._without_effect("translate", "metrics")
        if not self.vocab.shared or self.vocab.tags:
            yield Fault(("vocab.shared", "vocab.tags"), "vocab.shared: false and vocab.tags are of translation and "
                        f"have no effect with task: {self.task}; remove them")
        if stages := self.parallel.pipeline_stages:
            yield Fault(("parallel.pipeline_stages",), f"parallel.pipeline_stages ({stages}) is not offered with task: "
                        f"{self.task}, whose first and last part share a table and more; set it to 0, and "
                        "parallel.ds_config to one of ZeRO 1 to 3")
        others = [name for name in self.train.visitors() if Train.is_marked(name, Fact.SEEN)]
        yield from self._not_offered("objective", "r_drop", "grow", *others)
        if self.batch.update_tokens is not None:
            yield Fault(("batch.update_tokens",), f"batch.update_tokens ({self.batch.update_tokens}) is not offered "
                        f"with task: {self.task}; set batch.accumulation instead")
        if self.parallel.compile:
            yield Fault(("parallel.compile",), f"parallel.compile is not offered with task: {self.task}; set it to "
                        "false")
