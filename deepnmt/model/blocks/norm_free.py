"""Blocks without norms: x ← x + s·F_i(x). The notation is that of `blocks/base.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepnmt.model.blocks.base import Block, Branch, LayerPosition, Matrix
from deepnmt.model.sublayers import FeedForward, ShiftedFeedForward, ShiftedLinear


class ReZero(Block):
    """x ← x + a·F_i(x), a one trainable scalar for each layer, 0 at first. Bachlechner et al. 2020, ReZero.

    No LayerNorm. Every layer is the identity at first, so its sub-layers get no gradient in the first update.
    """

    layer_norms = False
    initial_values: ClassVar[dict[str, float]] = {"a": 0.0}

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.a = nn.Parameter(torch.empty(1))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + self.a * f(x)


class Fixup(Block):
    """x ← x + s_i·F_i(x), s_i a trainable scalar, 1 at first; no LayerNorm. Zhang et al. 2019, Fixup, section 3.

    A trainable scalar, 0 at first, is subtracted before each linear map and activation of F_i (`ShiftedLinear`,
    `ShiftedFeedForward`). Initial matrices, with n = 2N + 3M residual branches and m matrices in a branch: the last one
    (fc2 or out) is 0, the others are multiplied by n^(-1/(2m-2)). That is n^-1/2 for fc1 (m = 2) and n^-1/6 for query,
    key and value (m = 4).
    """

    layer_norms = False
    initial_values: ClassVar[dict[str, float]] = {"scales": 1.0}
    linear: ClassVar[type[nn.Linear]] = ShiftedLinear
    feed_forward: ClassVar[type[FeedForward]] = ShiftedFeedForward

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.scales = nn.ParameterList(nn.Parameter(torch.empty(1)) for _ in range(position.branches))

    @staticmethod
    def matrix_gain(position: LayerPosition, matrix: Matrix) -> float:
        """n^-1/2 for fc1; n^-1/6 on the usual gain of query, key and value; 0 for out and fc2."""
        n = 2 * position.encoder_layers + (3 if position.encoder_layers else 2) * position.decoder_layers
        own = {"fc1": n**-0.5, "fc2": 0.0, "out": 0.0}
        return own[matrix] if matrix in own else Block.matrix_gain(position, matrix) * n ** (-1 / 6)

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + self.scales[i] * f(x)


class TFixup(Block):
    """x ← x + F_i(x), no LayerNorm, no warm-up needed. Huang et al. 2020, Improving Transformer Optimization.

    Initial value, output and FFN matrices are multiplied by 0.67·N^-1/4 in the encoder and (9M)^-1/4 in the decoder,
    the source embeddings by (9N)^-1/4 and the target embeddings by (9M)^-1/4. A decoder without cross-attention has the
    layers of an encoder, and so its factor: our reading, since the paper has none.
    """

    layer_norms = False

    @staticmethod
    def matrix_gain(position: LayerPosition, matrix: Matrix) -> float:
        """The stack's factor for value, out, fc1 and fc2; the usual gain for query and key."""
        factor = (9 * position.depth) ** -0.25 if position.crossing else 0.67 * position.depth**-0.25
        return Block.matrix_gain(position, matrix) if matrix in ("q", "k") else factor

    @staticmethod
    def embedding_gain(position: LayerPosition) -> float:
        """(9L)^-1/4."""
        return (9 * position.depth) ** -0.25

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + f(x)


class B2TNoLN(Block):
    """h ← h + F_i(h) for i < K from h = x; then x ← α·x + β·(h + F_K(h)). Takase et al. 2023, appendix D, eq. 6 to 8.

    α = min(L/12, L^-0.15), β = D^-0.2; no LayerNorm. A layer multiplies x by about α + β: 0.94 at 18 layers of width
    512, but 1.03 at width 128, so that activations grow in narrow, deep stacks.
    """

    layer_norms = False

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.alpha, self.beta = self.constants(position)

    @staticmethod
    def constants(position: LayerPosition) -> tuple[float, float]:
        """α and β of the stack."""
        return min(position.depth / 12, position.depth**-0.15), position.width**-0.2

    def forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        h = x
        for f in self.added(branches):
            h = h + f(h)
        return self.alpha * x + self.beta * h
