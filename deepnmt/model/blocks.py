"""The residual systems, one under the other: how a layer threads x through its sub-layers.

A rule owns a layer's LayerNorms and other extra parameters, the factors its paper puts on the initialisation, and what
stands on top of the stack. Notation: x the input of a sub-layer, F_i the i-th sub-layer after dropout (encoder:
self-attention, FFN; decoder: self-attention, cross-attention, FFN), K the number of sub-layers, LN LayerNorm (eps
1e-5), N encoder and M decoder layers, L the layers of the rule's own stack, D width.

Every branch output passes through `adds[i]`, so a forward hook on `encoder.layers.3.rule.adds.1` sees F_2 of layer 3.
docs/blocks.md has all of them in one table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from deepnmt.model.feedforward import ConcatenatedFeedForward, FeedForward, ShiftedFeedForward, ShiftedLinear
from deepnmt.model.history import Mixture, MixtureTop, Stream
from deepnmt.model.history import newest as newest
from deepnmt.model.norm import LayerNorm

Side = Literal["encoder", "decoder"]
Branch = Callable[[Tensor], Tensor]
Matrix = Literal["q", "k", "v", "out", "fc1", "fc2"]


@dataclass(frozen=True)
class Place:
    """Where a layer stands, which is all a rule may depend on."""

    side: Side
    index: int  # of the layer in its stack, from 0
    encoder_layers: int  # N
    decoder_layers: int  # M
    width: int  # D

    @property
    def branches(self) -> int:
        """Sub-layers of the layer: 2 in the encoder, 3 in the decoder."""
        return 2 if self.side == "encoder" else 3

    @property
    def depth(self) -> int:
        """Layers of the stack the layer stands in."""
        return self.encoder_layers if self.side == "encoder" else self.decoder_layers


class Rule(nn.Module):
    """What every rule has: one named add and, unless it does without, one LayerNorm for each sub-layer.

    Called with the layer's input [..., D] and its sub-layers, a rule gives the layer's output [..., D]; one that
    `needs_history` takes and gives a `Stream`.
    """

    layer_norms: ClassVar[bool] = True  # whether the sub-layers have LayerNorms
    final_norm: ClassVar[bool] = False  # whether the stack ends with a LayerNorm of its own
    needs_history: ClassVar[bool] = False  # whether a layer needs the outputs of all layers below, see `Stream`
    depth_scaled: ClassVar[bool] = False  # whether `init: auto` multiplies every matrix by L^-1/2
    fused: ClassVar[bool] = True  # whether `separate` changes any `matrix_gain`
    linear: ClassVar[type[nn.Linear]] = nn.Linear  # of the attentions
    feed_forward: ClassVar[type[FeedForward]] = FeedForward

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.norms = nn.ModuleList(LayerNorm(place.width) for _ in range(place.branches * self.layer_norms))
        self.adds = nn.ModuleList(nn.Identity() for _ in range(place.branches))

    @staticmethod
    def matrix_gain(place: Place, matrix: Matrix, separate: bool = False) -> float:
        """The factor on the Xavier bound of one of the layer's matrices: 1, and 1/√2 for query, key and value.

        1/√2 is Xavier's bound for a fused [3D, D] matrix, as the toolkit drew it that the Admin and B2T papers used;
        Admin's published profile follows from it. With 1 (`separate`) a deep profile runs 30 % above (docs/results.md).
        """
        return 2**-0.5 if matrix in ("q", "k", "v") and not separate else 1.0

    @classmethod
    def draw(cls, weight: Tensor, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        """Fills one matrix, in place: Xavier-uniform times `gain`."""
        nn.init.xavier_uniform_(weight, gain=gain, generator=generator)

    @staticmethod
    def embedding_gain(place: Place) -> float:
        """The factor on the table that the stack's input is looked up in."""
        return 1.0

    @classmethod
    def top(cls, place: Place) -> nn.Module:
        """What stands on the stack, new: it takes the last layer's `Stream` to the stack's output [..., D]."""
        return LayerNorm(place.width) if cls.final_norm else nn.Identity()


class PostLN(Rule):
    """x ← LN_i(x + F_i(x)). Vaswani et al. 2017, Attention Is All You Need, section 3.1."""

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        for norm, add, branch in zip(self.norms, self.adds, branches, strict=True):
            x = norm(x + add(branch(x)))
        return x


class PreLN(Rule):
    """x ← x + F_i(LN_i(x)), a LayerNorm on top of the stack. Xiong et al. 2020, On Layer Normalization, table 1."""

    final_norm = True

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        for norm, add, branch in zip(self.norms, self.adds, branches, strict=True):
            x = x + add(branch(norm(x)))
        return x


class Admin(Rule):
    """x ← LN_i(ω_i ⊙ x + F_i(x)), ω_i a trainable vector. Liu et al. 2020, Understanding the Difficulty, section 4.3.

    ω is 1 until `set_omega` is given what a profile measured over the stack: ω_1 = 1, ω_i = sqrt(Σ_{j<i} Var[F_j])
    with Var[F_0] that of the stack's input, or 1 as in the paper (`admin.input_variance`).
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.omegas = nn.ParameterList(nn.Parameter(torch.ones(place.width)) for _ in range(place.branches))

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        for norm, add, branch, omega in zip(self.norms, self.adds, branches, self.omegas, strict=True):
            x = norm(omega * x + add(branch(x)))
        return x

    @torch.no_grad()
    def set_omega(self, values: Sequence[float]) -> None:
        """Fills ω_i with values[i], one number for each sub-layer. Raises ValueError if their number is wrong."""
        if len(values) != len(self.omegas):
            raise ValueError(f"the layer has {len(self.omegas)} sub-layers, but {len(values)} values of ω were given")
        for omega, value in zip(self.omegas, values, strict=True):
            omega.fill_(value)


class AdminClosedForm(Admin):
    """Admin with ω = sqrt((n+1)/ln(n+1) - 1) in all n = 2N or 3M sub-layers of a stack. Liu, the package admin-torch.

    No profile is needed: with branches of variance 1 the output change Σ β_ii² = n/(1 + ω²) is about ln(n+1), the
    O(log n) of Admin.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.set_omega([self.constant(place)] * place.branches)

    @staticmethod
    def constant(place: Place) -> float:
        """ω of every sub-layer of the stack."""
        n = place.branches * place.depth
        return math.sqrt((n + 1) / math.log(n + 1) - 1)


class B2T(Rule):
    """x ← LN_i(x + F_i(x)) for i < K; then LN_K(x_in + h + F_K(h)). Takase et al. 2023, On LNs and Residuals, eq. 5.

    x_in is the layer's input, h the input of the last sub-layer (the FFN).
    """

    depth_scaled = True  # the published code, not the paper

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        h = x
        for norm, add, branch in zip(self.norms[:-1], self.adds[:-1], branches[:-1], strict=True):
            h = norm(h + add(branch(h)))
        return self.norms[-1](x + h + self.adds[-1](branches[-1](h)))


class B2TNoLN(Rule):
    """h ← h + F_i(h) for i < K from h = x; then x ← α·x + β·(h + F_K(h)). Takase et al. 2023, appendix D, eq. 6 to 8.

    α = min(L/12, L^-0.15), β = D^-0.2; no LayerNorm. A layer multiplies x by about α + β: 0.94 at 18 layers of width
    512, 1.03 at width 128, so that narrow and deep stacks grow.
    """

    layer_norms = False
    depth_scaled = True  # the published code, not the paper

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.alpha, self.beta = self.constants(place)

    @staticmethod
    def constants(place: Place) -> tuple[float, float]:
        """α and β of the stack."""
        return min(place.depth / 12, place.depth**-0.15), place.width**-0.2

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        h = x
        for add, branch in zip(self.adds, branches, strict=True):
            h = h + add(branch(h))
        return self.alpha * x + self.beta * h


class DeepNorm(Rule):
    """x ← LN_i(α·x + F_i(x)), and β on FFN, value and output matrices. Wang et al. 2022, DeepNet, figure 2.

    Encoder α = 0.81 (N⁴M)^(1/16), β = 0.87 (N⁴M)^(-1/16); decoder α = (3M)^(1/4), β = (12M)^(-1/4).
    """

    fused = False  # 1 is the paper's

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.alpha = self.constants(place)[0]

    @staticmethod
    def constants(place: Place) -> tuple[float, float]:
        """α and β of the stack."""
        n, m = place.encoder_layers, place.decoder_layers
        if place.side == "encoder":
            return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
        return (3 * m) ** (1 / 4), (12 * m) ** (-1 / 4)

    @staticmethod
    def matrix_gain(place: Place, matrix: Matrix, separate: bool = False) -> float:
        """β, but 1 for query and key, separate or not."""
        return 1.0 if matrix in ("q", "k") else DeepNorm.constants(place)[1]

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        for norm, add, branch in zip(self.norms, self.adds, branches, strict=True):
            x = norm(self.alpha * x + add(branch(x)))
        return x


class ReZero(Rule):
    """x ← x + a·F_i(x), a one trainable scalar for each layer, 0 at first. Bachlechner et al. 2020, ReZero.

    No LayerNorm; every layer is the identity at first, so that its sub-layers get no gradient until a has moved.
    """

    layer_norms = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.a = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        for add, branch in zip(self.adds, branches, strict=True):
            x = x + self.a * add(branch(x))
        return x


class ReZeroPostLN(Rule):
    """x ← LN_i(x + a·F_i(x)), a as in ReZero, 0 at first. Liu et al. 2020, appendix E; Post-LN where a is 1."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.a = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        for norm, add, branch in zip(self.norms, self.adds, branches, strict=True):
            x = norm(x + self.a * add(branch(x)))
        return x


class Fixup(Rule):
    """x ← x + s_i·F_i(x), s_i a trainable scalar, 1 at first; no LayerNorm. Zhang et al. 2019, Fixup, section 3.

    A trainable scalar, 0 at first, is subtracted before each linear map and activation of F_i (`ShiftedLinear`,
    `ShiftedFeedForward`). Of the residual branches n = 2N + 3M and the m matrices of a branch each but the last is
    drawn n^(-1/(2m-2)) times as large: fc1 n^-1/2 (m = 2); q, k, v n^-1/6 (m = 4). The last, fc2 and out, is 0.
    """

    layer_norms = False
    linear = ShiftedLinear
    feed_forward = ShiftedFeedForward

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(place.branches))

    @staticmethod
    def matrix_gain(place: Place, matrix: Matrix, separate: bool = False) -> float:
        """n^-1/2 for fc1; n^-1/6 on the usual gain of query, key and value; 0 for out and fc2."""
        n = 2 * place.encoder_layers + 3 * place.decoder_layers
        own = {"fc1": n**-0.5, "fc2": 0.0, "out": 0.0}
        return own[matrix] if matrix in own else Rule.matrix_gain(place, matrix, separate) * n ** (-1 / 6)

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        for scale, add, branch in zip(self.scales, self.adds, branches, strict=True):
            x = x + scale * add(branch(x))
        return x


class TFixup(Rule):
    """x ← x + F_i(x), no LayerNorm, no warm-up needed. Huang et al. 2020, Improving Transformer Optimization.

    Value, output and FFN matrices are drawn 0.67·N^-1/4 times as large in the encoder, (9M)^-1/4 in the decoder; the
    source table (9N)^-1/4 times, the target's (9M)^-1/4.
    """

    layer_norms = False

    @staticmethod
    def matrix_gain(place: Place, matrix: Matrix, separate: bool = False) -> float:
        """The stack's factor for value, out, fc1 and fc2; the usual gain for query and key."""
        factor = 0.67 * place.depth**-0.25 if place.side == "encoder" else (9 * place.depth) ** -0.25
        return Rule.matrix_gain(place, matrix, separate) if matrix in ("q", "k") else factor

    @staticmethod
    def embedding_gain(place: Place) -> float:
        """(9L)^-1/4."""
        return (9 * place.depth) ** -0.25

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        for add, branch in zip(self.adds, branches, strict=True):
            x = x + add(branch(x))
        return x


class LooksLinear(PostLN):
    """Post-LN whose FFN is linear at first. Balduzzi et al. 2017, The Shattered Gradients Problem.

    The FFN is fc2((f(h), f(-h))), h = fc1(x) (`ConcatenatedFeedForward`), fc1 orthogonal, fc2 = [W, -W] with W
    orthogonal: W h at first. Attention has no rectifier to mirror and keeps its usual matrices.
    """

    feed_forward = ConcatenatedFeedForward

    @classmethod
    def draw(cls, weight: Tensor, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        """fc1 orthogonal and fc2 mirrored orthogonal, times `gain`; the others as usual."""
        if matrix not in ("fc1", "fc2"):
            super().draw(weight, matrix, gain, generator)
            return
        rows, columns = weight.shape
        half = torch.empty(rows, columns if matrix == "fc1" else columns // 2, dtype=torch.float64)
        nn.init.orthogonal_(half, gain=gain, generator=generator)
        weight.copy_(half if matrix == "fc1" else torch.cat([half, -half], dim=1))


class DLCL(Rule):
    """Pre-LN whose layer l starts from Σ_{k≤l} W_{l,k}·LN_k(y_k), y_k the output of layer k, instead of y_l alone.

    Wang et al. 2019, Learning Deep Transformer Models for Machine Translation, section 3. W_{l,k} is 1/(l+1) at first.
    The stack ends with one more such sum and a LayerNorm.
    """

    needs_history = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.mix = Mixture(place.index, place.width, pre_norm=True)

    @classmethod
    def top(cls, place: Place) -> nn.Module:
        return MixtureTop(place.depth, place.width, pre_norm=True)

    def forward(self, y: Stream, branches: Sequence[Branch]) -> Stream:
        x, kept = self.mix(y)
        for norm, add, branch in zip(self.norms, self.adds, branches, strict=True):
            x = x + add(branch(norm(x)))
        return (*kept, x)


class DLCLPost(Rule):
    """Post-LN whose layer l starts from LN_l(Σ_{k≤l} W_{l,k}·y_k). As DLCL, the paper's post-norm form.

    The stack ends with one more such sum.
    """

    needs_history = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.mix = Mixture(place.index, place.width, pre_norm=False)

    @classmethod
    def top(cls, place: Place) -> nn.Module:
        return MixtureTop(place.depth, place.width, pre_norm=False)

    def forward(self, y: Stream, branches: Sequence[Branch]) -> Stream:
        x, kept = self.mix(y)
        for norm, add, branch in zip(self.norms, self.adds, branches, strict=True):
            x = norm(x + add(branch(x)))
        return (*kept, x)


RULES: dict[str, type[Rule]] = {
    "post_ln": PostLN,
    "pre_ln": PreLN,
    "admin": Admin,
    "admin_closed_form": AdminClosedForm,
    "b2t": B2T,
    "b2t_no_ln": B2TNoLN,
    "deepnorm": DeepNorm,
    "rezero": ReZero,
    "rezero_post_ln": ReZeroPostLN,
    "fixup": Fixup,
    "t_fixup": TFixup,
    "looks_linear": LooksLinear,
    "dlcl": DLCL,
    "dlcl_post": DLCLPost,
}
