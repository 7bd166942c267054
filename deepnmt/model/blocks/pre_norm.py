"""Blocks that norm a branch's input, and leave the residual as it is: x ← x + F_i(LN_i(x)) and its relatives. The
notation is that of `blocks/base.py`.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor, nn

from deepnmt.model.blocks.base import Block, Branch, LayerPosition, Matrix
from deepnmt.model.sublayers import FeedForward, NormedFeedForward, NormedSelfAttention, SelfAttention


class PreLN(Block):
    """x ← x + F_i(LN_i(x)), a LayerNorm on top of the stack. Xiong et al. 2020, On Layer Normalization, table 1."""

    final_norm = True

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norms[i](x))


class LNS(Block):
    """x ← x + F_i(LN_i(x) / √l), l the number of the layer from 1. Sun et al. 2025, The Curse of Depth, eq. 6.

    The final norm is not scaled. With γ and β of each LN_i divided by √l it is Pre-LN.
    """

    final_norm = True

    @classmethod
    def norm_factor(cls, position: LayerPosition) -> float:
        return (position.index + 1) ** -0.5

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.factor = self.norm_factor(position)

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norms[i](x) * self.factor)


class PeriLN(Block):
    """x ← x + LN'_i(F_i(LN_i(x))). Kim et al. 2025, Peri-LN, section 3; Ding et al. 2021, CogView (Sandwich-LN).

    F_i ends with its dropout, so LN'_i norms what is left; T5Gemma, which has this block in both stacks, drops after
    LN'_i.
    """

    final_norm = True

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.out_norms = nn.ModuleList(position.norm() for _ in range(position.branches))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + self.out_norms[i](f(self.norms[i](x)))


class MixLN(Block):
    """The lowest ⌊L/4⌋ layers x ← LN_i(x + F_i(x)), the others x ← x + F_i(LN_i(x)). Li et al. 2024, Mix-LN, eq. 6."""

    final_norm = True

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.post = position.index < position.depth // 4

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](x + f(x)) if self.post else x + f(self.norms[i](x))


class SubLN(Block):
    """x ← x + F_i(LN_i(x)), with one more LN inside self-attention (before out) and FFN (before fc2). Wang et al. 2022,
    Foundation Transformers (Magneto), figure 2.

    Value, out, fc1 and fc2 start γ times as large: encoder γ = √(ln(3M)·ln(2N) / 3), decoder γ = √ln(3M). As in the
    authors' code the cross-attention has neither LN nor γ. A stack by itself of L layers: γ = √ln(2L).
    """

    final_norm = True
    self_attention: ClassVar[type[SelfAttention]] = NormedSelfAttention
    feed_forward: ClassVar[type[FeedForward]] = NormedFeedForward

    @staticmethod
    def gain(position: LayerPosition) -> float:
        """γ of the stack."""
        if not position.encoder_layers or not position.decoder_layers:
            return math.sqrt(math.log(2 * position.depth))
        squared = math.log(3 * position.decoder_layers)
        if position.side == "encoder":
            squared *= math.log(2 * position.encoder_layers) / 3
        return math.sqrt(squared)

    @classmethod
    def sublayer_gain(cls, position: LayerPosition, sublayer: str, matrix: Matrix) -> float:
        return 1.0 if sublayer == "cross_attn" or matrix in ("q", "k") else cls.gain(position)

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norms[i](x))
