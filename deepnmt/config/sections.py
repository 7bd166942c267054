"""The recipe's sections: every setting with its type, its default and its checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Block = Literal["post_ln", "pre_ln", "admin", "admin_closed_form", "b2t", "b2t_no_ln", "deepnorm", "rezero",
                "rezero_post_ln", "fixup", "t_fixup", "looks_linear", "dlcl", "dlcl_post"]
# What a recipe is checked for, here again because a recipe is read without torch: see model/blocks.py.
HISTORY_BLOCKS = ("dlcl", "dlcl_post")  # `needs_history`
PROFILED_BLOCKS = ("admin",)  # `profiled`
Init = Literal["auto", "xavier", "xavier_separate", "depth_scaled"]
Precision = Literal["fp32", "bf16", "fp16"]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Folder = Annotated[str, Field(min_length=1)]
Files = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class Section(BaseModel):
    """A group of settings: unknown keys and wrong types are faults, values cannot change after checking."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def faults(self) -> Iterator[str]:
        """What does not go together, a sentence each; settings by their names below this section."""
        return iter(())

    @model_validator(mode="after")
    def _go_together(self) -> Section:
        if faults := list(self.faults()):
            raise ValueError("\n".join(faults))
        return self


class Corpus(Section):
    """A parallel corpus: `src` and `trg` files (plain or .gz) of equal length, or `tsv` files with two columns."""

    src: Files = Field(default_factory=list)
    trg: Files = Field(default_factory=list)
    tsv: Files = Field(default_factory=list)
    columns: list[Count] = Field(default=[1, 2], min_length=2, max_length=2)  # source, target; counted from 1

    def faults(self) -> Iterator[str]:
        if self.tsv and (self.src or self.trg):
            yield "give either 'tsv' or 'src' and 'trg', not both"
        elif not self.tsv and not (self.src and self.trg):
            yield "give 'src' and 'trg' files, or 'tsv' files"
        elif len(self.src) != len(self.trg):
            yield f"'src' names {len(self.src)} files and 'trg' {len(self.trg)}; they must pair up"


class Filters(Section):
    """Which training pairs are left out. Lengths are in subword tokens without bos and eos."""

    max_tokens: Count = 250
    max_ratio: Positive = 9.0
    drop_duplicates: bool = True
    drop_identical: bool = True


class Data(Section):
    """Texts, the folder they are prepared into, and how."""

    folder: Folder
    src_lang: str
    trg_lang: str
    train: Corpus
    valid: Corpus
    test: dict[str, Corpus] = Field(default_factory=dict)
    filters: Filters = Filters()
    workers: Annotated[int, Field(ge=0)] = 0  # 0: one per core
    subword_variants: Annotated[int, Field(ge=0)] = 0  # sampled segmentations of the training text, by turns
    subword_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1  # how far they stray from the best segmentation


class Vocab(Section):
    """SentencePiece; ids unk 0, bos 1, eos 2, pad 3."""

    kind: Literal["bpe", "unigram"] = "bpe"
    size: Annotated[int, Field(ge=8, le=65000)] = 8000
    shared: bool = True
    byte_fallback: bool = False
    character_coverage: Annotated[float, Field(gt=0.9, le=1.0)] = 1.0
    max_sentences: Count = 2_000_000


class Batch(Section):
    """`tokens`: positions of one micro-batch on its longer side, padding included. `accumulation`: micro-batches per
    process and update."""

    tokens: Count = 4096
    accumulation: Count = 1


class Stack(Section):
    """One side of the model. `init`: depth_scaled multiplies every matrix of the layers by layers^-1/2; auto does so
    for b2t and b2t_no_ln, as their published code does, and is xavier for the others; query, key and value have 1/√2
    of Xavier's bound, under xavier_separate the whole.
    `input_gain`: a trainable vector on the stack's input, 1 at first, which takes the first ω of a folded model."""

    block: Block = "admin"
    layers: Count = 6
    init: Init = "auto"
    input_gain: bool = False


class Model(Section):
    """Shapes, dropout and blocks."""

    width: Count = 512
    heads: Count = 8
    ffn: Count = 2048
    activation: Literal["relu", "gelu"] = "relu"
    dropout: Rate = 0.1
    attention_dropout: Rate = 0.0
    activation_dropout: Rate = 0.0
    tied: Literal["all", "decoder", "none"] = "all"
    max_length: Count = 512
    encoder: Stack = Stack()
    decoder: Stack = Stack()

    def stack(self, side: Literal["encoder", "decoder"]) -> Stack:
        """One side of the model."""
        return self.encoder if side == "encoder" else self.decoder

    @property
    def profiled(self) -> bool:
        """Whether a stack's ω are measured before the first update, or read from a profile."""
        return self.encoder.block in PROFILED_BLOCKS or self.decoder.block in PROFILED_BLOCKS

    def faults(self) -> Iterator[str]:
        if self.width % self.heads:
            yield f"width ({self.width}) must be a multiple of heads ({self.heads})"
        if self.width % 2:
            yield f"width ({self.width}) must be even: positions are half sines, half cosines"
        if self.ffn % 2 and "looks_linear" in (self.encoder.block, self.decoder.block):
            yield f"ffn ({self.ffn}) must be even with block: looks_linear: half of it mirrors the other half"


class Admin(Section):
    """`profile`: a file of ω to start from (else the run profiles itself). `tokens`: size of the profiled batch."""

    profile: str | None = None
    tokens: Annotated[int, Field(ge=1, le=65536)] = 8192
    input_variance: Literal["measured", "one"] = "measured"  # Var[F_0] in ω_2, ω_3, ...; ω_1 is 1 either way


class Optimizer(Section):
    """PyTorch's Adam, RAdam or SGD. `weight_decay`: adamw and radamw shrink the weights themselves, the others add the
    weight times it to the gradient."""

    name: Literal["adam", "adamw", "radam", "radamw", "sgd"] = "adam"
    lr: Positive = 5e-4
    betas: list[Rate] = Field(default=[0.9, 0.98], min_length=2, max_length=2)  # not of sgd
    eps: Positive = 1e-9  # not of sgd
    momentum: Rate = 0.0  # of sgd
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    # Whether it is on vectors and single numbers too, or on matrices alone; to be said where there is any.
    decay_norms_and_biases: bool | None = None

    def faults(self) -> Iterator[str]:
        if self.momentum and self.name != "sgd":
            yield (f"momentum ({self.momentum:g}) is of sgd, but name is {self.name}, whose momentum is the "
                   "first of betas; remove momentum")
        if self.name == "sgd" and (self.betas, self.eps) != ([0.9, 0.98], 1e-9):
            yield f"betas ({self.betas}) and eps ({self.eps:g}) are not of name: sgd; remove them"
        if self.weight_decay and self.decay_norms_and_biases is None:
            yield (f"weight_decay ({self.weight_decay:g}) needs decay_norms_and_biases: true (every parameter) "
                   "or false (matrices alone)")
        if self.decay_norms_and_biases is False and not self.weight_decay:
            yield "decay_norms_and_biases: false goes with a weight_decay, which is 0; set it to null"


class Schedule(Section):
    """Learning rate over updates: `warmup` updates of linear rise to the peak `optimizer.lr`, then the named curve.

    step: constant until an epoch begins (counted from 1) or until an update; from there on times `step_factor`, and
    falling as `after_step` says. inverse_sqrt without warm-up falls from update 1 on, to 1 % of the peak at 10,000; a
    peak that holds to update n without a warm-up is step, warmup: 0, step_update: n, step_factor: 1.0.
    """

    name: Literal["inverse_sqrt", "constant", "linear", "step"] = "inverse_sqrt"
    warmup: Annotated[int, Field(ge=0)] = 4000
    final: Annotated[float, Field(ge=0.0)] = 0.0  # linear: the rate at the last update
    step_epoch: Annotated[int, Field(ge=2)] | None = None
    step_update: Annotated[int, Field(ge=2)] | None = None
    step_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    after_step: Literal["constant", "inverse_sqrt"] = "inverse_sqrt"

    def faults(self) -> Iterator[str]:
        given = [place for place in (self.step_epoch, self.step_update) if place is not None]
        if self.name == "step" and len(given) != 1:
            yield f"name: step needs step_epoch or step_update, one of the two; {len(given)} are given"
        if self.name != "step" and given:
            yield f"step_epoch and step_update are of name: step, but name is {self.name}; remove them"
        if self.name != "step" and (self.step_factor, self.after_step) != (0.1, "inverse_sqrt"):
            yield (f"step_factor ({self.step_factor:g}) and after_step ({self.after_step}) are of name: step, "
                   f"but name is {self.name}; remove them, or set them to 0.1 and inverse_sqrt")
        if self.final and self.name != "linear":
            yield f"final ({self.final:g}) is of name: linear, but name is {self.name}; remove final"
        if self.name == "step" and self.step_update is not None and self.step_update <= self.warmup:
            yield f"step_update ({self.step_update}) must be above warmup ({self.warmup})"


EARLY_ENDS = ("epochs", "max_seconds", "patience")  # settings of `Train` that can end a run before its last update


class Train(Section):
    """How long, how often."""

    updates: Count
    epochs: Count | None = None
    max_seconds: Positive | None = None  # of updates, after which the run ends; validations and checkpoints not counted
    label_smoothing: Rate = 0.1
    clip: Annotated[float, Field(ge=0.0)] = 0.0  # largest gradient norm; 0: no clipping
    log_every: Count = 50
    probe_every: Annotated[int, Field(ge=0)] = 0  # updates between probes of every layer, into TensorBoard; 0: none
    validate_every: Count = 1000
    save_every: Count = 1000
    keep_last: Count = 5
    keep_best: Annotated[int, Field(ge=0)] = 1
    best_by: Literal["loss", "bleu"] = "loss"
    patience: Annotated[int, Field(ge=0)] = 0  # validations without a new best before the run ends; 0: never
    valid_bleu: bool = True
    valid_sentences: Annotated[int, Field(ge=0)] = 500  # of the validation text, translated greedily; 0: all


class Parallel(Section):
    """`ds_config`: a DeepSpeed JSON; null runs the plain local engine (one process, fp32)."""

    ds_config: str | None = None
    precision: Precision = "fp32"  # of what is computed; weights and their sums of gradients are kept in fp32 too
    pipeline_stages: Annotated[int, Field(ge=0)] = 0  # the model cut into so many stages; 0: no pipeline
    recompute_layers: Annotated[int, Field(ge=0)] = 0  # in a group whose activations are computed twice; 0: all kept
    threads: Annotated[int, Field(ge=0)] = 0  # per process; 0: the machine's cores shared among its processes

    def faults(self) -> Iterator[str]:
        if self.ds_config is None and self.precision != "fp32":
            yield (f"precision ({self.precision}) needs a ds_config, but ds_config is null, which is plain "
                   "PyTorch in fp32; set ds_config: ds_configs/zero1.json, or precision: fp32")


class LossScale(Section):
    """Of fp16 alone. The loss is multiplied by 2^initial_power at first, by half of it after an overflow, never by less
    than `floor`, and by twice as much after `window` updates in a row without one."""

    initial_power: Annotated[int, Field(ge=0, le=32)] = 13
    window: Count = 256
    floor: Positive = 0.03125

    def faults(self) -> Iterator[str]:
        if self.floor > 2.0**self.initial_power:
            yield f"floor ({self.floor:g}) must not be above 2^initial_power ({2.0**self.initial_power:g})"


class Translate(Section):
    """Search. Length penalty over a score s and a length n: none s, average s / n^alpha, gnmt s / ((5+n)/6)^alpha."""

    method: Literal["beam", "greedy", "sample"] = "beam"
    beam: Count = 5
    length_penalty: Literal["none", "average", "gnmt"] = "average"
    alpha: Annotated[float, Field(ge=0.0)] = 1.0
    temperature: Positive = 1.0
    nbest: Count = 1
    # A sentence is done when patience × beam hypotheses have ended among its best; null: when none can be better still.
    patience: Positive | None = None
    max_ratio: Positive = 2.0  # longest output: max_ratio × source tokens + max_extra
    max_extra: Annotated[int, Field(ge=0)] = 20
    batch_tokens: Count = 4096
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16 is faster on a GPU and on a CPU with AMX, and slower without

    def faults(self) -> Iterator[str]:
        if self.method == "beam" and self.nbest > self.beam:
            yield f"nbest ({self.nbest}) cannot exceed beam ({self.beam})"
        if self.method == "greedy" and self.nbest > 1:
            yield f"nbest ({self.nbest}) needs method beam or sample"
        if self.temperature != 1.0 and self.method != "sample":
            yield (f"temperature ({self.temperature:g}) is of method sample, but method is {self.method}; "
                   "remove temperature, or set it to 1.0")
        if self.patience is not None and self.method != "beam":
            yield (f"patience ({self.patience:g}) is of method beam, but method is {self.method}; remove "
                   "patience, or set it to null")


class Recipe(Section):
    """A whole run."""

    run: Folder  # of the run
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    data: Data
    vocab: Vocab = Vocab()
    batch: Batch = Batch()
    model: Model = Model()
    admin: Admin = Admin()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    train: Train
    parallel: Parallel = Parallel()
    loss_scale: LossScale = LossScale()
    translate: Translate = Translate()
    average_last: Count = 5  # checkpoints averaged for the final score

    def faults(self) -> Iterator[str]:
        if self.model.tied == "all" and not self.vocab.shared:
            yield ("model.tied: all needs vocab.shared: true (one embedding cannot serve two vocabularies); "
                   "set model.tied: decoder")
        if self.data.filters.max_tokens + 1 > self.model.max_length:
            yield (f"data.filters.max_tokens ({self.data.filters.max_tokens}) must leave room for eos within "
                   f"model.max_length ({self.model.max_length})")
        if self.data.filters.max_tokens + 1 > self.batch.tokens:
            yield (f"batch.tokens ({self.batch.tokens}) cannot hold one sentence of data.filters.max_tokens "
                   f"({self.data.filters.max_tokens})")
        whole = [f"model.{side}.block: {stack.block}" for side, stack in
                 (("encoder", self.model.encoder), ("decoder", self.model.decoder)) if stack.block in HISTORY_BLOCKS]
        if self.parallel.pipeline_stages and whole:
            yield (f"parallel.pipeline_stages ({self.parallel.pipeline_stages}) cannot go with "
                   f"{' and '.join(whole)}: each of its layers needs the outputs of all layers below, and "
                   "stages hand on only the last; set parallel.pipeline_stages: 0, or take another block")
        if self.train.best_by == "bleu" and not self.train.valid_bleu:
            yield "train.best_by: bleu needs train.valid_bleu: true"
        if self.schedule.name == "linear" and self.schedule.warmup >= self.train.updates:
            yield (f"schedule.warmup ({self.schedule.warmup}) must be below train.updates "
                   f"({self.train.updates}) with schedule.name: linear")
        for step, end, unit in ((self.schedule.step_epoch, self.train.epochs, "epoch"),
                                (self.schedule.step_update, self.train.updates, "update")):
            if step is not None and end is not None and step > end:
                yield f"schedule.step_{unit} ({step}) must not be above train.{unit}s ({end}), the run's end"
        if self.admin.profile is not None and not self.model.profiled:
            yield (f"admin.profile ({self.admin.profile}) is of block: admin, but model.encoder.block is "
                   f"{self.model.encoder.block} and model.decoder.block {self.model.decoder.block}; remove it")
        if self.data.subword_variants and self.vocab.kind == "bpe" and self.data.subword_alpha == 0:
            yield ("data.subword_variants with vocab.kind: bpe and data.subword_alpha: 0 would prepare the same "
                   "text again; set data.subword_alpha to 0.1")
