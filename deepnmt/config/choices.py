"""The names that settings and options may have: one row for each, with what all of deepnmt must know of it.

A name is declared here and nowhere else. Allowed values, the choices of the command line, the recipe page, tables in
the documentation and lists in tests come from these tables. What computes is in the file that a table's comment names:
a class or a function under the same name; `tests/config/test_choices.py` checks that each has one. To ask whether
something can be done with a block, ask for a fact of its row, not for its name. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        return {"anyOf": [{"enum": list(self)}, {"type": "string"}]} if self.plugins and self else handler(schema)

    def __hash__(self) -> int:  # type: ignore[override]  # as part of an annotation
        return id(self)


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlockFacts(Choice):
    """A residual block; `line` is its formula, in the notation of docs/reference/blocks.md.

    The class of a plug-in's block says of itself what differs from these defaults, as in `growable = True`.

    Attributes:
        profiled: its ω are measured before the first update (`model/admin_profile.py`).
        growable: copies of its layers can begin a deeper stack.
        norm_free: it is x ← x + F_i(x), up to scalars that go into F_i.
        exported_as: what it is for other programs; a `norm_free` one a wider `pre_ln`.
        unstable_deep: in deep stacks it diverges easily, so that another block is recommended.
        made_for_depth: it is recommended then.
        learns_early: it is among those that learned soonest at every depth tried (studies/results/blocks.md).
        depth_scaled: `init: auto` multiplies every matrix by L^-1/2.
        fused_qkv: `init: xavier_separate` changes its matrices; DeepNorm's gain of query and key is 1 anyway.
        advice: why a new recipe would take it.
        family: which blocks it is like; docs/reference/blocks.md lists them by this.
        start: the factors of its matrices and where its own parameters start, if there are any.
        cost: parameters and work of a layer beyond its sub-layers and K norms.
        claim: what its authors report; seen: what was seen with deepnmt; take: when to take it.
        published: `init: published` has other weights or parameters than `auto` (`model/published.py`).
        gated: there is a rule for its FFN with a gate.
        halves: its FFN's inner width must be even, since one half mirrors the other.
        branch_ends: the last parameters of its branches, which `model.tuned_at` scales by depth; none: it is unknown.
    """

    profiled: bool = False
    growable: bool = False
    norm_free: bool = False
    exported_as: Literal["post_ln", "pre_ln", "peri_ln"] | None = None
    unstable_deep: bool = False
    made_for_depth: bool = False
    learns_early: bool = False
    advice: str = ""
    family: str = ""
    start: str = ""
    cost: str = ""
    claim: str = ""
    seen: str = ""
    take: str = ""
    depth_scaled: bool = False
    fused_qkv: bool = True
    published: bool = False
    gated: bool = True
    halves: bool = False
    branch_ends: tuple[str, ...] = ()


_HISTORY = ("history_window", "history_softmax")
_POST, _PRE, _FREE = "the sum is normed", "the sub-layer's input is normed", "no norms"
_BELOW, _STREAMS = "layers read the layers below", "several streams"

# model/blocks/, `BLOCKS`
BLOCKS = Choices({
    "post_ln": BlockFacts(
        line="x ← LN_i(x + F_i(x))", paper="Vaswani et al. 2017", exported_as="post_ln", unstable_deep=True,
        family=_POST, claim="the Transformer of 2017; fails from 12L-12L on (Liu 2020)",
        seen="stuck at 18L-18L and 36L-36L", take="6L-6L and shallower"),
    "pre_ln": BlockFacts(
        line="x ← x + F_i(LN_i(x))", paper="Xiong et al. 2020",
        exported_as="pre_ln", growable=True, made_for_depth=True, branch_ends=("out", "fc2"),
        family=_PRE, cost="1 LN on the stack", claim="trains at any depth; below Post-LN where that trains",
        seen="never stuck; 39.3 BLEU at 18L-18L to its end", take="the safe choice; it exports everywhere"),
    "admin": BlockFacts(
        line="x ← LN_i(ω_i ⊙ x + F_i(x)), ω_i a trainable vector", paper="Liu et al. 2020",
        profiled=True, growable=True, made_for_depth=True,
        advice="Admin trains at any depth without other settings",
        family=_POST, start="ω_1 = 1, ω_i = sqrt(Σ_{j<i} Var[F_j]), measured in place by a profile",
        cost="KD; a profile before training", claim="29.03 BLEU at 18L-18L, 43.80 at 60L-12L En-Fr",
        seen="39.6 BLEU at 18L-18L to its end, its encoder's rate rising; in 1.3 epochs 21.0, at one rate 3.5",
        take="12L to 60L"),
    "admin_closed_form": BlockFacts(
        line="as `admin`", paper="Liu, the package admin-torch", options=("output_change",),
        published=True,
        family=_POST, start="ω = sqrt((n+1)/ln(n+1) − 1), n = KL", cost="KD", claim="as Admin, without a profile",
        seen="4.59 nats after 300 updates", take="Admin without a profile"),
    "b2t": BlockFacts(
        line="as `post_ln` for i < K; last: x ← LN_K(x_in + h + F_K(h))", paper="Takase et al. 2023, eq. 5",
        made_for_depth=True, depth_scaled=True, published=True,  # depth-scaled in the published code, not the paper
        family=_POST, start="all matrices × L^-1/2", cost="1 addition", claim="28.48 at 18L-18L, 28.82 at 60L-12L",
        seen="40.1 BLEU at 18L-18L to its end, its encoder's rate rising", take="12L to 60L"),
    "b2t_no_ln": BlockFacts(
        line="h ← h + F_i(h) for i < K; last: x ← αx + β(h + F_K(h))", paper="Takase et al. 2023, appendix D",
        depth_scaled=True, published=True,
        family=_FREE, start="all matrices × L^-1/2; α = min(L/12, L^-0.15), β = D^-0.2", cost="K LNs fewer",
        claim="a variant in its appendix", seen="4.30 nats after 300 updates; grows above 1 at small widths",
        take="its own question"),
    "deepnorm": BlockFacts(
        line="x ← LN_i(αx + F_i(x))", paper="Wang et al. 2022",
        growable=True, made_for_depth=True, fused_qkv=False, published=True,
        family=_POST,
        start=("v, out, fc1, fc2 × β, q, k × 1; encoder α = 0.81(N⁴M)^(1/16), β = 0.87(N⁴M)^(-1/16); "
              "decoder α = (3M)^(1/4), β = (12M)^(-1/4)"),
        claim="1,000 layers; BLEU on WMT'17 up to 100L-100L",
        seen="39.3 BLEU at 18L-18L to its end, its encoder's rate rising or low",
        take="12L and deeper; first from 50L on"),
    "rezero": BlockFacts(
        line="x ← x + a·F_i(x), one trainable scalar a per layer", paper="Bachlechner et al. 2020",
        norm_free=True, exported_as="pre_ln", published=True,
        family=_FREE, start="a = 0", cost="1 scalar; K LNs fewer", claim="faster at first, in 12-layer language models",
        seen="24.3 BLEU at 18L-18L in 1.3 epochs at a rate of 0.008, diverged at 0.016", take="rates are low"),
    "rezero_post_ln": BlockFacts(
        line="x ← LN_i(x + a·F_i(x))", paper="Liu et al. 2020, appendix E",
        family=_POST, start="a = 0", cost="1 scalar", claim="a comparison in Admin's paper",
        seen="4.70 nats after 300 updates", take="that comparison"),
    "fixup": BlockFacts(
        line="x ← x + s_i·F_i(x), with scalar shifts inside F_i", paper="Zhang, Dauphin, Ma 2019",
        norm_free=True, exported_as="pre_ln", published=True, gated=False,
        family=_FREE, start="fc1 × n^-1/2; q, k, v × n^-1/6; out, fc2 = 0; n = 2N + 3M; s = 1, shifts 0",
        cost="7 or 11 scalars; K LNs fewer", claim="as good as with norms", seen="4.16 nats after 300 updates",
        take="its own question"),
    "t_fixup": BlockFacts(
        line="x ← x + F_i(x)", paper="Huang et al. 2020",
        norm_free=True, exported_as="pre_ln", learns_early=True, published=True,
        advice="T-Fixup learns soonest from little text, see docs/guide/new_recipe.md",
        family=_FREE, start="v, out, fc1, fc2 (from 1) × 0.67·N^-1/4 or (9M)^-1/4; tables × (9N)^-1/4 or (9M)^-1/4",
        cost="K LNs fewer", claim="no warm-up; 27.71 at 18L-18L (Takase 2023)",
        seen="41.4 BLEU at 18L-18L to its end, the most of five blocks", take="little text"),
    "looks_linear": BlockFacts(
        line="as `post_ln`; FFN: fc2([f(h), f(−h)]), h = fc1(x) of width I/2", paper="Balduzzi et al. 2017",
        published=True, gated=False, halves=True,
        family=_POST, start="fc1 orthogonal; fc2 = [W, −W], W orthogonal", cost="(D + 1)·I/2 fewer",
        claim="a comparison in Admin's paper", seen="stuck at 18L-18L", take="that comparison"),
    "dlcl": BlockFacts(
        line="as `pre_ln`, but layer l starts from Σ_{k≤l} W_{l,k}·LN_k(y_k)", paper="Wang et al. 2019",
        options=_HISTORY, published=True,
        family=_BELOW, start="W_{l,k} = 1/(l+1)", cost="l + 1 weights and 1 LN; keeps every y_k",
        claim="27.97 at 18L-18L (Takase 2023)", seen="4.53 nats after 300 updates", take="depth with memory to spare"),
    "dlcl_post": BlockFacts(
        line="as `post_ln`, but layer l starts from LN_l(Σ_{k≤l} W_{l,k}·y_k)", paper="Wang et al. 2019",
        options=_HISTORY, published=True,
        family=_BELOW, start="W_{l,k} = 1/(l+1)", cost="as `dlcl`", claim="the post-norm form, same paper",
        seen="4.49 nats after 300 updates", take="as `dlcl`"),
    "peri_ln": BlockFacts(
        line="x ← x + LN'_i(F_i(LN_i(x)))", paper="Kim et al. 2025", exported_as="peri_ln", growable=True,
        branch_ends=("out_norms",),
        family=_PRE, cost="K LNs",
        claim="steadier than Pre-LN at 0.4B to 3.2B: 0 of 5 runs diverge; in Gemma 2, 3 and T5Gemma",
        seen="memory × 1.17, time × 1.3; 18.5 BLEU at 6L-6L, 13.7 at 18L-18L", take="fp16, or a Pre-LN that diverges"),
    "lns": BlockFacts(
        line="x ← x + F_i(LN_i(x)/√l), l from 1", paper="Sun et al. 2025", exported_as="pre_ln",
        family=_PRE,
        claim="perplexity 14.45 (Pre-LN 14.67) at 130M, 9.93 (10.32) at 1.3B; behind Peri-LN beyond 72 layers",
        seen="memory × 1.00, time × 1.0; 24.8 BLEU at 6L-6L, 24.4 at 18L-18L, 24.0 at "
             "36L-36L (Pre-LN 23.7, 20.5, 17.4)",
        take="Pre-LN to 48 layers: it exports like that"),
    "keel": BlockFacts(
        line="x ← LN'_i(αx + F_i(LN_i(x))), α = KL", paper="Chen et al. 2026",
        family=_POST, cost="K LNs",
        claim="60.9 (Pre-LN 57.9) mean score at 1,024 sub-layers; not for little data",
        seen="memory × 1.17, time × 1.2; 20 updates at 1,000L-1,000L; 23.5 BLEU at 6L-6L, 22.6 at "
             "18L-18L, 18.8 at 36L-36L",
        take="hundreds of layers, much text, high rates"),
    "siamese": BlockFacts(
        line="x ← LN_x(x); z = F_i(LN_i(x + LN_y(y))); x ← x + z/√(K(l+1)); y ← y + z", paper="arXiv 2602.08064",
        family=_STREAMS, start="x = y", cost="2K LNs; 2 streams",
        claim="perplexity 15.98 (Pre-LN 18.02) at 80 layers, 390M",
        seen="memory × 1.33, time × 1.4; 24.3 BLEU at 6L-6L, 21.4 at 18L-18L",
        take="depth; nobody but its authors has reported it"),
    "sub_ln": BlockFacts(
        line="as `pre_ln`, with one more LN inside self-attention and FFN", paper="Wang et al. 2022, Magneto",
        family=_PRE,
        start="v, out, fc1, fc2 × √ln(3M) (decoder), × √(ln(3M)·ln(2N)/3) (encoder); not in the cross-attention",
        cost="2 LNs, of D and I", claim="one block for text, vision and speech, better than the usual one of each",
        seen="memory × 1.33, time × 1.3; 17.5 BLEU at 6L-6L, 13.6 at 18L-18L",
        take="its constants are made for an encoder-decoder"),
    "mix_ln": BlockFacts(
        line="as `post_ln` in the lowest quarter of the layers, as `pre_ln` above", paper="Li et al. 2024",
        family=_PRE, claim="better than Pre-LN from 70M to 7B; at Keel's depths only at low rates",
        seen="memory × 1.00, time × 1.0; 21.6 BLEU at 6L-6L, 12.7 at 18L-18L",
        take="a baseline; its authors now propose `lns`"),
    "attn_res": BlockFacts(
        line="v_j = F_j(LN_j(Σ_i a_ij·v_i)), a_·j = softmax_i(w_j·RMSNorm(v_i))", paper="Kimi Team 2026",
        family=_BELOW, start="w = 0", cost="2KD; keeps every output",
        claim="the loss of 1.25 × the compute, up to 48B", seen="memory grows, time × 5.1",
        take="small depths; it reads all outputs in each sub-layer"),
    "block_attn_res": BlockFacts(
        line="as `attn_res`, over sums of ⌈KL/N⌉ sub-layers", paper="Kimi Team 2026", options=("residual_blocks",),
        family=_BELOW, start="w = 0", cost="2KD; keeps at most N + 1 tensors", claim="nearly as `attn_res`",
        seen="memory × 1.18, time × 2.9; 24.3 BLEU at 6L-6L, 23.8 at 18L-18L",
        take="depth beyond 20 layers of the same"),
    "hyper": BlockFacts(
        line="H ← A_rᵀH + Bᵀ F_i(LN_i(A_mᵀH)), n streams H", paper="Zhu et al. 2024", options=("streams",),
        family=_STREAMS, start="W = 0, s = 0.01, A_m = e_{k mod n}, A_r = I, B = 1",
        cost="K(n + 2)(D + n) + 2K and K LNs; n streams",
        claim="1.8 × faster to a loss in OLMoE; others saw it diverge at 3B",
        seen="memory × 3.18, time × 2.4",
        take="its own question"),
    "mhc": BlockFacts(
        line="H ← H_res·H + H_postᵀ F_i(LN_i(H_pre·H)), H_res doubly stochastic", paper="Xie et al. 2025",
        options=("streams", "mix"),
        family=_STREAMS,
        start=("φ = 0, a = 0.01; H_pre 1/2 for stream k mod n, 1/(2(n−1)) for the others; H_post = 1; "
              "logits of H_res 0 and −3"),
        cost="about K(n² + 2n)·n·D; n streams; 20 Sinkhorn rounds",
        claim="BBH 51.0 (43.8) at 27B; others: worse at 10M, better from 38M on",
        seen="memory × 3.44, time × 6.2",
        take="much text; `mix: identity` keeps most at less cost"),
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


# model/blocks/base.py, `NORMS`
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


# model/sublayers.py, `ACTIVATIONS`
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
    """`model_type`: the number of the kind in SentencePiece's files. `samples`: a text can be segmented in several ways
    (bpe only with an alpha above 0)."""

    model_type: int
    samples: bool = True


# SentencePiece trains and segments; `SAMPLERS` of data/subword_variants.py samples
VOCAB_KINDS = Choices({
    "bpe": VocabFacts(line="byte-pair encoding", paper="Sennrich et al. 2016", model_type=2),
    "unigram": VocabFacts(line="the unigram model", paper="Kudo 2018", model_type=1),
    "word": VocabFacts(line="whole words, the rarer ones unknown", model_type=3, samples=False),
})

# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts(Choice):
    """`moments`: what it keeps of each parameter, a `momentum_buffer` only with a momentum. `counts`: it counts its
    steps. `whole_matrices`: it cannot work on a part of one. `plain`: what it is without rectification. `scale_free`:
    its steps do not depend on the size of the gradients, from the first on."""

    moments: tuple[Literal["exp_avg", "exp_avg_sq", "momentum_buffer"], ...] = ("exp_avg", "exp_avg_sq")
    counts: bool = True
    whole_matrices: bool = False
    plain: str = ""
    scale_free: bool = False


# optim/optimizers.py, `OPTIMIZERS`
OPTIMIZERS = Choices({
    "adam": OptimizerFacts(line="Adam", paper="Kingma and Ba 2015", options=("betas", "eps"), scale_free=True),
    "adamw": OptimizerFacts(line="AdamW", paper="Loshchilov and Hutter 2019", options=("betas", "eps"),
                       scale_free=True),
    "radam": OptimizerFacts(
        line="RAdam", paper="Liu et al. 2020", options=("betas", "eps", "unrectified"), plain="adam"),
    "radamw": OptimizerFacts(
        line="RAdam with AdamW's weight decay", options=("betas", "eps", "unrectified"), plain="adamw"),
    "sgd": OptimizerFacts(line="SGD", options=("momentum",), moments=("momentum_buffer",), counts=False),
    "muon": OptimizerFacts(line="Muon for the matrices of the layers, AdamW for the rest", paper="Jordan et al. 2024",
                      options=("betas", "eps"), needs={"momentum": "such as 0.95"}, whole_matrices=True,
                      scale_free=True),
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

# data/filters.py, `LANGUAGE_IDS`; plug-ins have them all
LANGUAGE_IDS: Choices[Choice] = Choices({}, plugins="LANGUAGE_IDS")

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
        line="minimum Bayes risk by chrF", paper="Eikema and Aziz 2022", options=(*_SAMPLING, "samples"),
        width="samples", most="samples"),
})


@dataclass(frozen=True, kw_only=True)
class FormatFacts(Choice):
    """`line`: what `deepnmt translate` writes. `scores`: what `deepnmt score` writes. `many`: there is room for more
    than one translation of a line, and for what belongs to it."""

    scores: str
    many: bool = True


# decode/formats.py, `WRITERS`
FORMATS = Choices({
    "text": FormatFacts(
        line="the best translation of each line", scores="the log-probabilities of a line's translations", many=False),
    "tsv": FormatFacts(
        line="line, rank, score and translation", scores="line, number, log-probability, score and translation"),
    "jsonl": FormatFacts(line="an object a line", scores="an object a line"),
})


@dataclass(frozen=True, kw_only=True)
class MetricFacts(Choice):
    """`line`: its name in tables. `usual`: scored if nothing else is asked for. `lower_is_better`: as for errors.
    `family`: a name that stands for several."""

    usual: bool = False
    lower_is_better: bool = False
    family: str = ""


# evaluate/metrics.py, `SCORERS`
METRICS = Choices({
    "bleu": MetricFacts(line="BLEU", paper="Papineni et al. 2002", usual=True),
    "chrf": MetricFacts(line="chrF2", paper="Popović 2015", usual=True),
    "ter": MetricFacts(line="TER", paper="Snover et al. 2006", usual=True, lower_is_better=True),
    "chrf++": MetricFacts(line="chrF2++", paper="Popović 2017"),
    "flores101": MetricFacts(line="spBLEU (FLORES-101)", paper="Goyal et al. 2022"),
    "flores200": MetricFacts(line="spBLEU (FLORES-200)", paper="NLLB Team et al. 2022"),
    "rouge1": MetricFacts(line="ROUGE-1", paper="Lin 2004", family="rouge"),
    "rouge2": MetricFacts(line="ROUGE-2", paper="Lin 2004", family="rouge"),
    "rougeL": MetricFacts(line="ROUGE-L", paper="Lin 2004", family="rouge"),
    "wer": MetricFacts(line="WER", paper="Levenshtein 1966", lower_is_better=True),
    "cer": MetricFacts(line="CER", paper="Levenshtein 1966", lower_is_better=True),
})


METRIC_FAMILIES = tuple(dict.fromkeys(row.family for row in METRICS.values() if row.family))


def metrics_called(names: Sequence[str]) -> tuple[str, ...]:
    """The metrics of these names, some of which may be a family's; each once."""
    called = dict[str, None]()
    for name in names:
        family = [metric for metric, row in METRICS.items() if row.family == name]
        called |= dict.fromkeys(family or [name])
    return tuple(called)
