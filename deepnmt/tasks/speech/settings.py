"""Recipes of speech recognition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from deepnmt.config import Fact, Recipe, Section
from deepnmt.config.choices import Use
from deepnmt.config.fields import Fault, For
from deepnmt.config.sections import SEARCHING, Batch, Cores, Count, Files, Folder, Length, Model, Rate, Stack, Train

SHORTER = 4  # frames of a position of the encoder: two convolutions of stride 2


class Audio(Section):
    """Lists of utterances, and the folder that they are prepared into. A line of a list is the path of an audio file
    (WAV, FLAC) or of an array of ready features (.npy), a tab, and the transcript. Paths are from the list's folder."""

    folder: Annotated[Folder, Fact.PATH]
    """The folder that `deepnmt prepare` writes and training reads."""
    train: Annotated[Files, Field(min_length=1)]
    """Lists of the utterances to train with. A folder is all files in it, a pattern such as `train-*.tsv` those that
    fit."""
    valid: Annotated[Files, Field(min_length=1)]
    """Lists of the utterances for the validations."""
    test: Annotated[dict[str, Files], For("evaluate")] = Field(default_factory=dict)
    """Lists by the name of a test set, for `deepnmt evaluate`."""
    sample_rate: Annotated[int, Field(ge=1000, le=384_000), Fact.FIXED, Fact.PREPARED] = 16_000
    """Samples a second that every audio file must have."""
    max_frames: Annotated[int, Field(ge=1, le=2**17), Fact.FIXED, Fact.PREPARED] = 3000
    """The longest utterance, in frames of 10 ms; one that is longer is refused."""
    max_tokens: Annotated[Count, Fact.FIXED, Fact.PREPARED] = 250
    """The longest transcript, in subword tokens; one that is longer is refused."""
    workers: Cores = 0
    """Threads that read audio; 0: one per core."""


class SpecAugment(Section):
    """Bands and stretches of the features that training hides, other ones in every epoch (Park et al. 2019,
    SpecAugment). The default is the paper's policy LD without time warping."""

    bands: Annotated[int, Field(ge=0, le=80)] = 2
    """Bands of neighbouring bins."""
    band_width: Annotated[int, Field(ge=0, le=80)] = 27
    """Bins of a band, at most."""
    stretches: Annotated[int, Field(ge=0, le=1000)] = 2
    """Stretches of time."""
    stretch_length: Annotated[int, Field(ge=0, le=2**17)] = 100
    """Frames of a stretch, at most."""
    stretch_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """A stretch is at most this share of the utterance."""


class FrameBatch(Batch):
    tokens: Annotated[Count, Fact.MICRO_BATCH] = 20_000
    """Size of a micro-batch in frames, and in tokens of its transcripts: its utterances times its longest, padding
    included; at least `data.max_frames`, rounded up to a multiple of 4, and above `data.max_tokens`."""


class SpeechModel(Model):
    """A Transformer in whose encoder two convolutions stand for the source's embeddings."""

    channels: Annotated[int, Field(ge=2, le=2**16, multiple_of=2)] = 1024
    """Channels of the first convolution, which its gate halves."""
    kernel: Annotated[int, Field(ge=1, le=99)] = 5
    """Frames that a convolution sees; odd."""
    tied: Literal["decoder", "none"] = "decoder"
    """Whether target and output are one table."""
    max_length: Annotated[Length, Fact.TRAINING_ONLY] = 1024
    """Positions of the encoder, a quarter of the frames, and tokens of a transcript, at most."""

    @property
    def tables(self) -> Mapping[Use, str]:
        return {use: table for use, table in super().tables.items() if use != "src"}

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.kernel % 2 == 0:
            yield Fault(("kernel",), f"kernel ({self.kernel}) must be odd, so that a position lies amid its frames")
        if len(self.sides) < 2:
            yield Fault(("encoder", "decoder"), "speech needs an encoder and a decoder; give both layers")
        for side in self.sides:
            if self.stack(side).facts.profiled:
                yield Fault((f"{side}.block",), f"{side}.block ({self.stack(side).block}) needs a profile, which is "
                            "measured in models that read text; set it to admin_closed_form")
        if self.tuned_at != self.default("tuned_at"):
            yield Fault(("tuned_at",), "tuned_at is for translation and language models, since it knows no rule for "
                        "convolutions; remove it")
        if self.encoder.word_dropout:
            yield Fault(("encoder.word_dropout",), f"encoder.word_dropout ({self.encoder.word_dropout:g}) has no words "
                        "to drop in speech; remove it, spec_augment hides frames")


class SpeechTrain(Train):
    valid_bleu: Literal[False] = False
    """Speech has a word error rate instead, of `valid_sentences`."""
    best_by: Annotated[Literal["loss", "wer"], Fact.FIXED] = "loss"
    """What makes a validation the best: the lowest loss, or the lowest word error rate."""
    label_smoothing: Rate = 0.1
    """Probability mass that is spread over the vocabulary."""


class SpeechRecipe(Recipe):
    data: Audio  # type: ignore[assignment]
    """The utterances."""
    spec_augment: Annotated[SpecAugment, Fact.FIXED] = SpecAugment()
    """What training hides of them."""
    batch: FrameBatch = FrameBatch()
    """The micro-batches."""
    model: Annotated[SpeechModel, Fact.FIXED, For(*SEARCHING, "average")] = SpeechModel(
        encoder=Stack(block="pre_ln"), decoder=Stack(block="pre_ln"))
    """The Transformer."""
    train: SpeechTrain
    """Length of the run; what it logs, validates and saves."""

    def faults(self) -> Iterator[Fault]:
        yield from self._unknown_names()
        yield from self._faults_of_training()
        yield from self._faults_of_schedule()
        yield from self._faults_of_beginning()
        yield from self._without_effect("metrics")
        data, longest = self.data, self.model.max_length
        positions = -(-data.max_frames // SHORTER)
        if SHORTER * positions > self.batch.tokens:
            yield Fault(("batch.tokens", "data.max_frames"), f"batch.tokens ({self.batch.tokens}) must not be below "
                        f"data.max_frames ({data.max_frames}), rounded up to a multiple of {SHORTER}, to hold the "
                        "longest utterance")
        if data.max_tokens + 1 > self.batch.tokens:
            yield Fault(("batch.tokens", "data.max_tokens"), f"batch.tokens ({self.batch.tokens}) must be above "
                        f"data.max_tokens ({data.max_tokens}), to hold the longest transcript and eos")
        if positions > longest:
            yield Fault(("data.max_frames", "model.max_length"), f"data.max_frames ({data.max_frames}) must not be "
                        f"above {SHORTER} times model.max_length ({longest}), since {SHORTER} frames make a position")
        if data.max_tokens + 1 > longest:
            yield Fault(("data.max_tokens", "model.max_length"), f"data.max_tokens ({data.max_tokens}) must be below "
                        f"model.max_length ({longest}), to leave room for eos")
        stages = self.parallel.pipeline_stages
        if stages:
            yield Fault(("parallel.pipeline_stages",), f"parallel.pipeline_stages ({stages}) is not offered with task: "
                        "speech, whose first stage would have to send frames; set it to 0, and parallel.ds_config to "
                        "one of ZeRO 1 to 3")
        yield from self._not_offered("guided_alignment", "grow", "init_from")
        if self.translate.backend != "torch":
            yield Fault(("translate.backend",), f"translate.backend ({self.translate.backend}) translates text alone; "
                        "set it to torch")
        if self.translate.method == "mbr":
            yield Fault(("translate.method",), "translate.method (mbr) chooses among translations of text alone; set "
                        "it to beam, greedy or sample")
        if self.translate.choose != "score":
            yield Fault(("translate.choose",), f"translate.choose ({self.translate.choose}) chooses among translations "
                        "of text alone; remove it, and translate.candidates")
        if not self.vocab.shared or self.vocab.tags:
            yield Fault(("vocab.shared", "vocab.tags"), "vocab.shared: false and vocab.tags are of translation; remove "
                        "them, speech has the vocabulary of its transcripts")


RECIPE = SpeechRecipe
