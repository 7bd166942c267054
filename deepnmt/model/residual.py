"""The residual systems, one under the other: how a layer threads x through its sub-layers.

A rule owns a layer's LayerNorms, the factors its paper puts on the initialisation, and whether the stack needs a norm
on top. Notation: x the input of a sub-layer, F_i the i-th sub-layer after dropout (encoder: self-attention, FFN;
decoder: self-attention, cross-attention, FFN), K the number of sub-layers, LN LayerNorm (eps 1e-5), N encoder and
M decoder layers, D width.

Every branch output passes through `adds[i]`, so a forward hook on `encoder.layers.3.rule.adds.1` sees F_2 of layer 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

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
    """What every rule has: one LayerNorm and one named add for each sub-layer."""

    final_norm: ClassVar[bool] = False  # whether the stack ends with a LayerNorm of its own

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(place.width) for _ in range(place.branches))
        self.adds = nn.ModuleList(nn.Identity() for _ in range(place.branches))

    @staticmethod
    def matrix_gain(place: Place, matrix: Matrix) -> float:
        """The factor on the Xavier bound of one of the layer's matrices: 1, and 1/√2 for query, key and value.

        1/√2 is Xavier's bound for a fused [3D, D] matrix, as the toolkit drew it that the Admin and B2T papers used;
        Admin's published profile follows from it; with 1 a deep profile runs 30 % above (docs/results.md).
        """
        return 2**-0.5 if matrix in ("q", "k", "v") else 1.0

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        """x [..., D] through the sub-layers, to the layer's output [..., D]."""
        raise NotImplementedError


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

    ω is 1 until `set_omega` is given what a profile measured: ω_i = sqrt(1 + Σ_{j<i} Var[F_j]) over the stack.
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


class B2T(Rule):
    """x ← LN_i(x + F_i(x)) for i < K; then LN_K(x_in + h + F_K(h)). Takase et al. 2023, On LNs and Residuals, eq. 5.

    x_in is the layer's input, h the input of the last sub-layer (the FFN).
    """

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        h = x
        for norm, add, branch in zip(self.norms[:-1], self.adds[:-1], branches[:-1], strict=True):
            h = norm(h + add(branch(h)))
        return self.norms[-1](x + h + self.adds[-1](branches[-1](h)))


class DeepNorm(Rule):
    """x ← LN_i(α·x + F_i(x)), and β on FFN, value and output matrices. Wang et al. 2022, DeepNet, figure 2.

    Encoder α = 0.81 (N⁴M)^(1/16), β = 0.87 (N⁴M)^(-1/16); decoder α = (3M)^(1/4), β = (12M)^(-1/4).
    """

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
    def matrix_gain(place: Place, matrix: Matrix) -> float:
        """β, but 1 for query and key."""
        return 1.0 if matrix in ("q", "k") else DeepNorm.constants(place)[1]

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        for norm, add, branch in zip(self.norms, self.adds, branches, strict=True):
            x = norm(self.alpha * x + add(branch(x)))
        return x


RULES: dict[str, type[Rule]] = {
    "post_ln": PostLN,
    "pre_ln": PreLN,
    "admin": Admin,
    "b2t": B2T,
    "deepnorm": DeepNorm,
}
