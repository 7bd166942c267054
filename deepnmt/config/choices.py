"""The names that settings and options may have: one row for each, with what all of deepnmt must know of it.

A name is declared here and nowhere else. Allowed values, the choices of the command line, the recipe page, tables in
the documentation and lists in tests come from these tables. What computes is in the file that a table's comment names:
a class or a function under the same name; `tests/config/test_choices.py` checks that each has one. To ask whether
something can be done with a block, ask for a fact of its row, not for its name. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

from deepnmt.visitors import task_lines


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A row.

    Attributes:
        line: what it is, in one line.
        paper: where it comes from.
        options: settings beside it that have an effect with it. Those in the `options` of some row have none with the
            others.
        needs: settings that it cannot do without, and what they are.
    """

    line: str
    paper: str = ""
    options: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)


Row = TypeVar("Row", bound=Choice)


class Choices(dict[str, Row], Generic[Row]):
    """The rows by name, in the order in which the documentation has them. As an annotation of a setting,
    `Annotated[str, NORMS]`, the names are the values it may have.

    Attributes:
        plugins: the name of the table in which plug-ins add to them; None: they cannot.
    """

    def __init__(self, rows: Mapping[str, Row], plugins: str | None = None) -> None:
        super().__init__(rows)
        self.plugins = plugins

    def where(self, is_so: Callable[[Row], Any]) -> tuple[str, ...]:
        """The names whose row is so, as in `BLOCKS.where(lambda block: block.growable)`."""
        return tuple(name for name, row in self.items() if is_so(row))

    def with_option(self, setting: str) -> tuple[str, ...]:
        """The names with which a setting beside them has an effect; none if it is no option of any."""
        return self.where(lambda row: setting in row.options or setting in row.needs)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return handler(source) if self.plugins else core_schema.literal_schema(list(self))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self)}, {"type": "string"}]} if self.plugins else handler(schema)

    def __hash__(self) -> int:  # type: ignore[override]  # as part of an annotation
        return id(self)


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlockFacts(Choice):
    """A residual block; `line` is its formula, in the notation of docs/reference/blocks.md.

    The class of a plug-in's block says of itself what differs from these defaults, as in `needs_history = True`.

    Attributes:
        needs_history: a layer needs the outputs of all layers below, see `blocks.Stream`; so no pipeline.
        profiled: its ω are measured before the first update (`model/admin.py`).
        growable: copies of its layers can begin a deeper stack.
        foldable: it is LN_i(ω_i ⊙ x + F_i(x)), ω a parameter or DeepNorm's α.
        rewritable: there is a Post-LN model with the same logits (`export/post_ln.py`).
        norm_free: it is x ← x + F_i(x), up to scalars that go into F_i.
        exported_as: what it is for other programs; a `norm_free` one a wider `pre_ln`.
        unstable_deep: in deep stacks it diverges easily, so that another block is recommended.
        made_for_depth: it is recommended then.
        learns_early: it is among those that learned soonest at every depth tried (studies/results/blocks.md).
        depth_scaled: `init: auto` multiplies every matrix by L^-1/2.
        fused_qkv: `init: xavier_separate` changes its matrices; DeepNorm's gain of query and key is 1 anyway.
        advice: why a new recipe would take it.
        published: `init: published` has other weights or parameters than `auto` (`model/published.py`).
        gated: there is a rule for its FFN with a gate.
        halves: its FFN's inner width must be even, since one half mirrors the other.
    """

    needs_history: bool = False
    profiled: bool = False
    growable: bool = False
    foldable: bool = False
    rewritable: bool = False
    norm_free: bool = False
    exported_as: Literal["post_ln", "pre_ln"] | None = None
    unstable_deep: bool = False
    made_for_depth: bool = False
    learns_early: bool = False
    advice: str = ""
    depth_scaled: bool = False
    fused_qkv: bool = True
    published: bool = False
    gated: bool = True
    halves: bool = False


_HISTORY = ("history_window", "history_softmax")

# model/blocks.py, `BLOCKS`
BLOCKS = Choices({
    "post_ln": BlockFacts(
        line="x ← LN_i(x + F_i(x))", paper="Vaswani et al. 2017", exported_as="post_ln", unstable_deep=True),
    "pre_ln": BlockFacts(
        line="x ← x + F_i(LN_i(x))", paper="Xiong et al. 2020",
        exported_as="pre_ln", growable=True, made_for_depth=True),
    "admin": BlockFacts(
        line="x ← LN_i(ω_i ⊙ x + F_i(x)), ω_i a trainable vector", paper="Liu et al. 2020",
        profiled=True, growable=True, foldable=True, rewritable=True, made_for_depth=True,
        advice="Admin trains at any depth without other settings"),
    "admin_closed_form": BlockFacts(
        line="as `admin`", paper="Liu, the package admin-torch", options=("output_change",),
        foldable=True, rewritable=True, published=True),
    "b2t": BlockFacts(
        line="as `post_ln` for i < K; last: x ← LN_K(x_in + h + F_K(h))", paper="Takase et al. 2023, eq. 5",
        made_for_depth=True, depth_scaled=True, published=True),  # depth-scaled in the published code, not the paper
    "b2t_no_ln": BlockFacts(
        line="h ← h + F_i(h) for i < K; last: x ← αx + β(h + F_K(h))", paper="Takase et al. 2023, appendix D",
        depth_scaled=True, published=True),
    "deepnorm": BlockFacts(
        line="x ← LN_i(αx + F_i(x))", paper="Wang et al. 2022",
        growable=True, foldable=True, rewritable=True, made_for_depth=True, fused_qkv=False, published=True),
    "rezero": BlockFacts(
        line="x ← x + a·F_i(x), one trainable scalar a per layer", paper="Bachlechner et al. 2020",
        norm_free=True, exported_as="pre_ln", published=True),
    "rezero_post_ln": BlockFacts(
        line="x ← LN_i(x + a·F_i(x))", paper="Liu et al. 2020, appendix E", rewritable=True),
    "fixup": BlockFacts(
        line="x ← x + s_i·F_i(x), with scalar shifts inside F_i", paper="Zhang, Dauphin, Ma 2019",
        norm_free=True, exported_as="pre_ln", published=True, gated=False),
    "t_fixup": BlockFacts(
        line="x ← x + F_i(x)", paper="Huang et al. 2020",
        norm_free=True, exported_as="pre_ln", learns_early=True, published=True,
        advice="T-Fixup learns soonest from little text, see docs/guide/which_block.md"),
    "looks_linear": BlockFacts(
        line="as `post_ln`; FFN: fc2([f(h), f(−h)]), h = fc1(x) of width I/2", paper="Balduzzi et al. 2017",
        rewritable=True, published=True, gated=False, halves=True),
    "dlcl": BlockFacts(
        line="as `pre_ln`, but layer l starts from Σ_{k≤l} W_{l,k}·LN_k(y_k)", paper="Wang et al. 2019",
        options=_HISTORY, needs_history=True, published=True),
    "dlcl_post": BlockFacts(
        line="as `post_ln`, but layer l starts from LN_l(Σ_{k≤l} W_{l,k}·y_k)", paper="Wang et al. 2019",
        options=_HISTORY, needs_history=True, published=True),
}, plugins="BLOCKS")


def facts_of(block: str) -> BlockFacts:
    """The row of a block. Of a plug-in's block only its class can say more than the defaults, see
    `deepnmt.model.blocks.BLOCKS`; checking a recipe does not run it."""
    return BLOCKS.get(block, BlockFacts(line="in a plug-in"))


# model/init.py
INITS = Choices({
    "auto": Choice(line="`depth_scaled` or `xavier`, by the block"),
    "xavier": Choice(line="Xavier's bound, divided by √2 for query, key and value"),
    "xavier_separate": Choice(line="Xavier's bound for every matrix"),
    "depth_scaled": Choice(line="`xavier`, every matrix times layers^-1/2"),
    "published": Choice(line="as in the code of the block's authors"),
    "fairseq": Choice(line="as in fairseq 0.12.2"),
})



@dataclass(frozen=True, kw_only=True)
class NormFacts(Choice):
    """`centres`: it subtracts the mean, and has a bias."""

    centres: bool = True


# model/blocks.py, `NORMS`
NORMS = Choices({
    "layer_norm": NormFacts(line="LayerNorm", paper="Ba et al. 2016"),
    "rms_norm": NormFacts(line="RMSNorm", paper="Zhang and Sennrich 2019", centres=False),
})


@dataclass(frozen=True, kw_only=True)
class ActivationFacts(Choice):
    """`gated`: it takes two outputs of fc1 for each input of fc2. `kept`: the tensors of the FFN's inner width that
    autograd keeps."""

    gated: bool = False
    kept: int = 4


# model/feedforward.py, `ACTIVATIONS`
ACTIVATIONS = Choices({
    "relu": ActivationFacts(line="max(0, x)", kept=1),
    "gelu": ActivationFacts(line="x·Φ(x)", paper="Hendrycks and Gimpel 2016", kept=2),
    "silu": ActivationFacts(line="x·σ(x)", paper="Hendrycks and Gimpel 2016", kept=2),
    "reglu": ActivationFacts(line="relu with a gate", paper="Shazeer 2020", gated=True),
    "geglu": ActivationFacts(line="gelu with a gate", paper="Shazeer 2020", gated=True),
    "swiglu": ActivationFacts(line="silu with a gate", paper="Shazeer 2020", gated=True),
})


@dataclass(frozen=True, kw_only=True)
class PositionFacts(Choice):
    """`added`: to the embeddings; else queries and keys are rotated."""

    added: bool = True


# model/positions.py, `POSITIONS`
POSITIONS = Choices({
    "sinusoidal": PositionFacts(line="sines and cosines, added to the embeddings", paper="Vaswani et al. 2017"),
    "fairseq": PositionFacts(line="the sines and cosines of fairseq"),
    "rotary": PositionFacts(line="queries and keys rotated by their positions", paper="Su et al. 2021", added=False),
})

Use = Literal["src", "trg", "out"]


@dataclass(frozen=True, kw_only=True)
class TyingFacts(Choice):
    """`tables`: the name of the embedding table for each use. One table cannot serve two vocabularies or widths."""

    tables: Mapping[Use, str]

    @property
    def joint(self) -> bool:
        """Whether one table serves both languages."""
        return self.tables["src"] in (self.tables["trg"], self.tables["out"])


# The model builds the tables that are named here; there is nothing else to write.
TYINGS = Choices({
    "all": TyingFacts(line="source, target and output", tables={"src": "shared", "trg": "shared", "out": "shared"}),
    "decoder": TyingFacts(line="target and output", tables={"src": "src", "trg": "trg", "out": "trg"}),
    "none": TyingFacts(line="none", tables={"src": "src", "trg": "trg", "out": "out"}),
})

# -- data --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VocabFacts(Choice):
    """`model_type`: the number of the kind in SentencePiece's files."""

    model_type: int


# data/subwords.py, `SAMPLERS`; SentencePiece trains and segments
VOCAB_KINDS = Choices({
    "bpe": VocabFacts(line="byte-pair encoding", paper="Sennrich et al. 2016", model_type=2),
    "unigram": VocabFacts(line="the unigram model", paper="Kudo 2018", model_type=1),
})

# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts(Choice):
    """`moments`: what it keeps of each parameter, a `momentum_buffer` only with a momentum. `counts`: it counts its
    steps. `whole_matrices`: it cannot work on a part of one. `plain`: what it is without rectification."""

    moments: tuple[Literal["exp_avg", "exp_avg_sq", "momentum_buffer"], ...] = ("exp_avg", "exp_avg_sq")
    counts: bool = True
    whole_matrices: bool = False
    plain: str = ""


# optim/optimizers.py, `OPTIMIZERS`
OPTIMIZERS = Choices({
    "adam": OptimizerFacts(line="Adam", paper="Kingma and Ba 2015", options=("betas", "eps")),
    "adamw": OptimizerFacts(line="AdamW", paper="Loshchilov and Hutter 2019", options=("betas", "eps")),
    "radam": OptimizerFacts(
        line="RAdam", paper="Liu et al. 2020", options=("betas", "eps", "unrectified"), plain="adam"),
    "radamw": OptimizerFacts(
        line="RAdam with AdamW's weight decay", options=("betas", "eps", "unrectified"), plain="adamw"),
    "sgd": OptimizerFacts(line="SGD", options=("momentum",), moments=("momentum_buffer",), counts=False),
    "muon": OptimizerFacts(line="Muon for the matrices of the layers, AdamW for the rest", paper="Jordan et al. 2024",
                      options=("betas", "eps"), needs={"momentum": "such as 0.95"}, whole_matrices=True),
})


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts(Choice):
    """`until_end`: the rate falls from the end of the warm-up to the end of the run, so the one must be before the
    other."""

    until_end: bool = False


# optim/schedules.py, `SCHEDULES`
SCHEDULES = Choices({
    "inverse_sqrt": ScheduleFacts(line="falls as 1/sqrt(update)", paper="Vaswani et al. 2017", options=("count_from",)),
    "inverse_sqrt_decay": ScheduleFacts(
        line="falls as sqrt(P / (P + k)) after k updates", paper="Huang et al. 2020", options=("count_from",),
        needs={"decay_period": "the updates after which its rate is divided by sqrt(2)"}),
    "constant": ScheduleFacts(line="constant", options=("count_from",)),
    "linear": ScheduleFacts(line="a straight line", options=("final",), until_end=True),
    "step": ScheduleFacts(line="constant, then a drop",
                     options=("step_epoch", "step_update", "step_factor", "after_step")),
    "cosine": ScheduleFacts(
        line="half a cosine", paper="Loshchilov and Hutter 2017", options=("final",), until_end=True),
    "wsd": ScheduleFacts(line="warm-up, stable, decay", paper="Hu et al. 2024", options=("final",),
                    needs={"decay": "the updates in which the rate falls at the end"}),
    "plateau": ScheduleFacts(
        line="constant, with a drop when validations stop getting better", options=("count_from", "step_factor"),
        needs={"patience": "the validations in a row without a new best after which the rate drops"}),
}, plugins="SCHEDULES")

# model/objective.py, `OBJECTIVES`
OBJECTIVES = Choices({
    "cross_entropy": Choice(line="label-smoothed cross-entropy", paper="Szegedy et al. 2016"),
}, plugins="OBJECTIVES")

# tasks/NAME/task.py, `TASK`
TASKS = Choices({name: Choice(line=line) for name, line in task_lines().items()}, plugins="TASKS")

# -- translation and scores --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SearchFacts(Choice):
    """`width`: the setting that says how many hypotheses of a sentence there are at once. `most`: the one that `nbest`
    must not exceed; "" if `nbest` itself is searched for."""

    width: str
    most: str = ""


_SAMPLING = ("temperature", "top_k", "top_p", "epsilon")

# decode/translate.py, `_search`
SEARCHES = Choices({
    "beam": SearchFacts(line="beam search", options=("finish", "patience"), width="beam", most="beam"),
    "greedy": SearchFacts(line="the likeliest token each time", width="nbest"),
    "sample": SearchFacts(line="sampling", options=_SAMPLING, width="nbest"),
    "mbr": SearchFacts(
        line="minimum Bayes risk by chrF", paper="Eikema and Aziz 2022", options=_SAMPLING, width="samples",
        most="samples"),
})


@dataclass(frozen=True, kw_only=True)
class FormatFacts(Choice):
    """`many`: there is room for more than one translation of a line, and for what belongs to it."""

    many: bool = True


# decode/formats.py, `WRITERS`
FORMATS = Choices({
    "text": FormatFacts(line="one translation a line", many=False),
    "tsv": FormatFacts(line="columns: line, rank, score, text"),
    "jsonl": FormatFacts(line="an object a line"),
})


@dataclass(frozen=True, kw_only=True)
class MetricFacts(Choice):
    """`line`: its name in tables. `usual`: scored if nothing else is asked for. `lower_is_better`: as for errors."""

    usual: bool = False
    lower_is_better: bool = False


# evaluate/metrics.py, `SCORERS`
METRICS = Choices({
    "bleu": MetricFacts(line="BLEU", paper="Papineni et al. 2002", usual=True),
    "chrf": MetricFacts(line="chrF2", paper="Popović 2015", usual=True),
    "ter": MetricFacts(line="TER", paper="Snover et al. 2006", usual=True, lower_is_better=True),
    "chrf++": MetricFacts(line="chrF2++", paper="Popović 2017"),
    "flores101": MetricFacts(line="spBLEU (FLORES-101)", paper="Goyal et al. 2022"),
    "flores200": MetricFacts(line="spBLEU (FLORES-200)", paper="NLLB Team et al. 2022"),
})
