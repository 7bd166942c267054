"""Blocks that norm the sum of residual and branch: x ← LN_i(ω·x + F_i(x)) and its relatives. The notation is that of
`blocks/base.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepnmt.model.blocks.base import Block, Branch, LayerPosition, Matrix
from deepnmt.model.sublayers import ConcatenatedFeedForward


class PostLN(Block):
    """x ← LN_i(x + F_i(x)). Vaswani et al. 2017, Attention Is All You Need, section 3.1."""

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](x + f(x))


class Admin(Block):
    """x ← LN_i(ω_i ⊙ x + F_i(x)), ω_i a trainable vector. Liu et al. 2020, Understanding the Difficulty, section 4.3.

    Initial values come from a profile of the stack: ω_1 = 1, ω_i = sqrt(Σ_{j<i} Var[F_j]), where Var[F_0] is the
    variance of the stack's input, or 1 as in the paper (`admin.input_variance`). F_j is measured with the ω below it in
    place, or with all ω at 1 as in the paper (`admin.method`). Without a profile all ω are 1.
    """

    initial_values: ClassVar[dict[str, float]] = {"omegas": 1.0}

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.omegas = nn.ParameterList(nn.Parameter(torch.empty(position.width)) for _ in range(position.branches))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](self.omegas[i] * x + f(x))


class AdminClosedForm(Admin):
    """Admin with one ω in all n = 2N or 3M sub-layers of a stack. Liu, the package admin-torch.

    No profile is needed: with branches of variance 1 the output change is Σ β_ii² = n/(1 + ω²). `output_change` says
    how it grows with n: `log`, the O(log n) of Admin, with ω = sqrt((n+1)/ln(n+1) - 1); `constant` with ω = sqrt(n);
    `linear` with ω = 1, which is Post-LN's.
    """

    @classmethod
    def initial_value(cls, position: LayerPosition, name: str) -> float | list[float]:
        return cls.constant(position) if name.startswith("omegas") else super().initial_value(position, name)

    @staticmethod
    def constant(position: LayerPosition) -> float:
        """ω of every sub-layer of the stack."""
        n = position.branches * position.depth
        squares = {"log": (n + 1) / math.log(n + 1) - 1, "constant": float(n), "linear": 1.0}
        return math.sqrt(squares[position.settings.output_change])


class DeepNorm(Block):
    """x ← LN_i(α·x + F_i(x)), and β on FFN, value and output matrices. Wang et al. 2022, DeepNet, figure 2.

    Encoder α = 0.81 (N⁴M)^(1/16), β = 0.87 (N⁴M)^(-1/16); decoder α = (3M)^(1/4), β = (12M)^(-1/4). A stack by itself
    of L layers, encoder or decoder: α = (2L)^(1/4), β = (8L)^(-1/4).
    """

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.alpha = self.constants(position)[0]

    @staticmethod
    def constants(position: LayerPosition) -> tuple[float, float]:
        """α and β of the stack."""
        n, m = position.encoder_layers, position.decoder_layers
        if not n or not m:
            return (2 * position.depth) ** (1 / 4), (8 * position.depth) ** (-1 / 4)
        if position.side == "encoder":
            return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
        return (3 * m) ** (1 / 4), (12 * m) ** (-1 / 4)

    @staticmethod
    def matrix_gain(position: LayerPosition, matrix: Matrix) -> float:
        """β, but 1 for query and key."""
        return 1.0 if matrix in ("q", "k") else DeepNorm.constants(position)[1]

    @classmethod
    def fixed_omega(cls, position: LayerPosition) -> float | None:
        return cls.constants(position)[0]

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](self.alpha * x + f(x))


class ReZeroPostLN(Block):
    """x ← LN_i(x + a·F_i(x)), a as in ReZero, 0 at first. Liu et al. 2020, appendix E; Post-LN where a is 1."""

    initial_values: ClassVar[dict[str, float]] = {"a": 0.0}

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.a = nn.Parameter(torch.empty(1))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](x + self.a * f(x))


class B2T(Block):
    """x ← LN_i(x + F_i(x)) for i < K; then LN_K(x_in + h + F_K(h)). Takase et al. 2023, On LNs and Residuals, eq. 5.

    x_in is the layer's input, h the input of the last sub-layer (the FFN).
    """

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        *others, last = self.added(branches)
        h = x
        for norm, f in zip(self.norms, others):
            h = norm(h + f(h))
        return self.norms[-1](x + h + last(h))


class LooksLinear(PostLN):
    """Post-LN whose FFN is linear at first. Balduzzi et al. 2017, The Shattered Gradients Problem.

    The FFN is fc2((f(h), f(-h))) with h = fc1(x) (`ConcatenatedFeedForward`). At first fc1 is orthogonal and fc2 is
    [W, -W] with W orthogonal, so the FFN is W h. Attention has no activation and keeps its usual matrices.
    """

    feed_forward = ConcatenatedFeedForward

    @classmethod
    def init_matrix(cls, weight: Tensor, path: str, matrix: Matrix, gain: float, generator: torch.Generator) -> None:
        """fc1 orthogonal and fc2 = [W, -W] with W orthogonal, times `gain`; the others as usual."""
        if matrix not in ("fc1", "fc2"):
            super().init_matrix(weight, path, matrix, gain, generator)
            return
        rows, columns = weight.shape
        half = torch.empty(rows, columns if matrix == "fc1" else columns // 2, dtype=torch.float64)
        nn.init.orthogonal_(half, gain=gain, generator=generator)
        weight.copy_(half if matrix == "fc1" else torch.cat([half, -half], dim=1))


class Keel(Block):
    """x ← LN'_i(α·x + F_i(LN_i(x))), α = KL the sub-layers of the stack. Chen et al. 2026, Keel, eq. 8.

    The stack's first sub-layer is x ← x + F_1(LN_1(x)), and its second has α = 1 (figure 2). In a decoder that is the
    cross-attention: our reading, since the paper has decoders alone.
    """

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        first, count = position.index == 0, position.branches
        self.alphas = [1.0 if first and i < 2 else float(count * position.depth) for i in range(count)]
        self.out_norms = nn.ModuleList(
            nn.Identity() if first and i == 0 else position.norm() for i in range(count))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.out_norms[i](self.alphas[i] * x + f(self.norms[i](x)))
