"""Blocks whose layers read the outputs of layers below. The notation is that of `blocks/base.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepnmt.model.blocks.base import Block, Branch, Gate, LayerPosition, Norm, Rule, Stream, stream_of, tensors


class Mixture(nn.Module):
    """Σ_{k≤l} w_k·y_k, y_0 the stack's input and y_k the output of the k-th of the l layers below, w trainable.

    Wang et al. 2019, Learning Deep Transformer Models for Machine Translation, section 3: w is row l of a triangular
    matrix, 1/(l+1) at first (`DLCL.initial_value`). Pre-norm form: each y_k is replaced by LN_k(y_k), computed once, in
    the first mixture above it. Post-norm form: LN_l(Σ w_k·y_k).

    Args:
        taken: how many y it sums: the last ones, l + 1 without a window.
        softmax: whether softmax(w) takes the place of w.
    """

    norm: nn.Module

    def __init__(self, taken: int, norm: Norm, pre_norm: bool, softmax: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(taken))
        self.norm = norm
        self.pre_norm, self.softmax = pre_norm, softmax

    def forward(self, x: Stream) -> tuple[Tensor, tuple[Tensor, ...]]:
        """From the stream of the layer below to the mixture [..., D] and the tensors kept for the layers above.

        Raises:
            ValueError: the stream does not hold one tensor for each weight.
        """
        kept = tensors(x)
        if self.pre_norm:
            kept = (*kept[:-1], self.norm(kept[-1]))
        mixed = torch.zeros_like(kept[0])
        weights = self.weights.softmax(0) if self.softmax else self.weights
        for weight, y in zip(weights.unbind(), kept, strict=True):
            mixed = torch.addcmul(mixed, weight, y)  # stores no product for the backward pass
        return (mixed if self.pre_norm else self.norm(mixed)), kept


class MixtureTop(nn.Module):
    """The output of a DLCL stack: the mixture of all its layers, followed by a LayerNorm in the pre-norm form."""

    def __init__(self, position: LayerPosition, taken: int, pre_norm: bool) -> None:
        super().__init__()
        self.mix = Mixture(taken, position.norm(), pre_norm, position.settings.history_softmax)
        self.norm = position.norm() if pre_norm else nn.Identity()

    def forward(self, x: Stream) -> Tensor:
        """From the last layer's stream to the stack's output [..., D]."""
        return self.norm(self.mix(x)[0])


class DLCL(Block):
    """Pre-LN whose layer l has the input Σ_{k≤l} W_{l,k}·LN_k(y_k), y_k the output of layer k, instead of y_l.

    Wang et al. 2019, Learning Deep Transformer Models for Machine Translation, section 3. W_{l,k} is 1/(l+1) at first.
    The stack ends with one more such sum and a LayerNorm. With a window w (`history_window`) a sum takes only the last
    w of its y, with W_{l,k} = 1/w at first; with `history_softmax` row l of W goes through a softmax.
    """

    pre_norm: ClassVar[bool] = True

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.window = self.window_of(position)
        self.mix = Mixture(self.carried(position), position.norm(), self.pre_norm, position.settings.history_softmax)

    @staticmethod
    def window_of(position: LayerPosition) -> int:
        """How many y a sum takes at most; 0: all."""
        return position.settings.history_window

    @classmethod
    def carried(cls, position: LayerPosition) -> int:
        below = position.index + 1
        return min(below, cls.window_of(position) or below)

    @classmethod
    def top(cls, position: LayerPosition) -> nn.Module:
        return MixtureTop(position, cls.carried(position), cls.pre_norm)

    @classmethod
    def initial_value(cls, position: LayerPosition, name: str) -> float | list[float]:
        return 1 / cls.carried(position) if name == "mix.weights" else super().initial_value(position, name)

    def forward(self, y: Stream, branches: Sequence[Branch]) -> Stream:
        x, kept = self.mix(y)
        return stream_of((*kept, super().forward(x, branches))[-self.window :])  # the window of the layer above; 0: all

    def skip(self, x: Stream, y: Stream) -> Stream:
        return stream_of((*tensors(y)[:-1], tensors(x)[-1]))

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norms[i](x))


class DLCLPost(DLCL):
    """Post-LN whose layer l has the input LN_l(Σ_{k≤l} W_{l,k}·y_k): the post-norm form of `DLCL`, same paper.

    The stack ends with one more such sum.
    """

    pre_norm = False

    def join(self, i: int, x: Tensor, f: Branch) -> Tensor:
        return self.norms[i](x + f(x))


class DepthGate(Gate):
    """The weights softmax_k(w·RMSNorm(v_k)) of the sources v_k. Kimi Team 2026, Attention Residuals, eq. 2 to 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        self.weight = nn.Parameter(torch.empty(width))  # of the RMSNorm

    def forward(self, sources: Stream) -> Tensor:
        """k tensors [..., D] to [..., k]. Nothing but the sources themselves is kept of their size for the backward
        pass: in a full stack they are read as often as there are sub-layers."""
        w = self.query * self.weight
        squares = [torch.linalg.vector_norm(v, dim=-1, dtype=torch.float32).square() for v in tensors(sources)]
        scores = [(v @ w) * (square / v.size(-1) + 1e-5).rsqrt() for v, square in zip(tensors(sources), squares)]
        return torch.stack(scores, dim=-1).softmax(-1)


class DepthAttention(nn.Module):
    """Σ_k a_k·v_k with the weights a of `DepthGate`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = DepthGate(width)

    def forward(self, sources: Stream) -> Tensor:
        """k tensors [..., D] to [..., D]."""
        first = tensors(sources)[0]
        weights = self.gate(sources).to(first.dtype)
        mixed = torch.zeros_like(first)
        for weight, v in zip(weights.split(1, dim=-1), tensors(sources), strict=True):
            mixed = torch.addcmul(mixed, weight, v)
        return mixed


class DepthAttentionTop(nn.Module):
    """The output of a stack: one more attention over all sources, and a norm."""

    def __init__(self, position: LayerPosition) -> None:
        super().__init__()
        self.mix, self.norm = DepthAttention(position.width), position.norm()

    def forward(self, sources: Stream) -> Tensor:
        """From the last layer's stream to the stack's output [..., D]."""
        return self.norm(self.mix(sources))


class AttnRes(Block):
    """v_j = F_j(LN_j(Σ_i a_ij·v_i)), a_·j = softmax_i(w_j·RMSNorm_j(v_i)), v_0 the input: each sub-layer attends
    to the outputs of all below, and there is no sum. Kimi Team 2026, Attention Residuals, section 3 and figure 2.

    w_j = 0 at first, so it begins with the mean, and is not decayed. The cross-attention is one more sub-layer (our
    reading). A layer that LayerDrop passes by puts out zeros.
    """

    initial_values: ClassVar[dict[str, float]] = {"query": 0.0}

    def __init__(self, position: LayerPosition) -> None:
        super().__init__(position)
        self.group, self.first = self.group_size(position), position.index * position.branches
        self.mixes = nn.ModuleList(  # the stack's first sub-layer has one source
            DepthAttention(position.width) if self.first + i else nn.Identity() for i in range(position.branches))

    @classmethod
    def group_size(cls, position: LayerPosition) -> int:
        """Sub-layers whose outputs are added to one source."""
        return 1

    @classmethod
    def carried(cls, position: LayerPosition) -> int:
        return 1 + -(-position.index * position.branches // cls.group_size(position))

    @classmethod
    def value(cls, x: Stream) -> Tensor:
        """The mean of the sources, which is what the next sub-layer reads at first."""
        return torch.stack(tensors(x)).mean(0)

    def skip(self, x: Stream, y: Stream) -> Stream:
        kept = tensors(x)
        return stream_of([*kept, *(torch.zeros_like(each) for each in tensors(y)[len(kept) :])])

    @classmethod
    def parameter_rule(cls, name: str) -> Rule:
        return Rule(decayed=False if name.endswith(".query") else None)

    def join(self, i: int, x: Stream, f: Branch) -> Stream:
        z, sources = f(self.norms[i](self.mixes[i](x))), tensors(x)
        if (self.first + i) % self.group == 0:
            return (*sources, z)
        return (*sources[:-1], sources[-1] + z)

    @classmethod
    def top(cls, position: LayerPosition) -> nn.Module:
        return DepthAttentionTop(position)


class BlockAttnRes(AttnRes):
    """As `AttnRes`, but with at most N sources (`residual_blocks`) beside the stack's input: the outputs of ⌈KL/N⌉
    sub-layers in a row are one sum, also while it is unfinished. Same paper, section 3.2."""

    @classmethod
    def group_size(cls, position: LayerPosition) -> int:
        return -(-position.branches * position.depth // position.settings.residual_blocks)
