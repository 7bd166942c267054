"""Guided alignment: the cross-attention of one decoder layer learns word alignments in training.

Chen et al. 2016, Guided Alignment Training for Topic-Aware Neural Machine Translation: cross-entropy is added to the
loss. As in Garg et al. 2019, Jointly Learning to Align and Translate with Transformer Models, it is that of one layer's
weights, averaged over heads, and a target with several links has the same share of each. Targets without links, eos
among them, add nothing.

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H, `L` links.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deepnmt.model.attention import CrossAttention
from deepnmt.model.loss import LossSums
from deepnmt.model.ops import split_heads
from deepnmt.model.transformer import Transformer


class GuidedSums(NamedTuple):
    """`LossSums` with guided alignment in its loss, and by itself, without its weight and without gradient."""

    loss: Tensor
    nll: Tensor
    alignment: Tensor


def guided(build: Callable[..., Transformer], layer: int, weight: float, after_build: Callable[[nn.Module], None]
           ) -> Transformer:
    """A model that `build(after_build)` makes, whose decoder layer `layer` (see `guided_index`) is guided."""
    model = build(after_build)
    Guide(weight).attach(model, guided_index(layer, len(model.decoder_layers)))
    return model


def guided_index(layer: int, layers: int) -> int:
    """The layer, from 0, that is number `layer` of `layers`, from 1; 0 stands for the last but one."""
    return layer - 1 if layer else max(0, layers - 2)


def attention_scores(q: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """The scores [B, H, T, S] of a cross-attention before the softmax, fp32 or wider.

    Args:
        q: [B, T, D].
        keys, mask: [B, H, S, d] and [B, 1, 1, S], as for `CrossAttention.forward`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = split_heads(q, keys.size(1)).to(wide) @ keys.to(wide).transpose(2, 3) / keys.size(3) ** 0.5
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


class AttentionHook:
    """Calls `see(scores)` with the scores [B, H, T, S] of every pass of a cross-attention for which `wanted` is true.

    It takes the queries from their projection and calls no module itself, because ZeRO-3 follows which are called.
    """

    def __init__(self, see: Callable[[Tensor], None], wanted: Callable[[nn.Module], bool] = lambda attention: True
                 ) -> None:
        self.see, self.wanted = see, wanted
        self._given: tuple[Tensor, Tensor | None] | None = None

    def attach(self, attention: CrossAttention) -> list[RemovableHandle]:
        """The handles of its hooks on an attention."""
        return [attention.register_forward_pre_hook(self._enter), attention.q.register_forward_hook(self._score)]

    def _enter(self, attention: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._given = (inputs[1], inputs[3]) if self.wanted(attention) else None

    def _score(self, _: nn.Module, __: tuple[Any, ...], q: Tensor) -> None:
        if self._given is not None:
            self.see(attention_scores(q, *self._given))
            self._given = None


def alignment_loss(scores: Tensor, links: Tensor, sentences: int) -> Tensor:
    """The sum over targets of the cross-entropy of attention from the links.

    Args:
        scores: [n·B, H, T, S], of n passes of the B = `sentences` sentences, whose mean it is.
        links: int64 [4, L]: sentence, position of the target, position of the source, links of that target.
    """
    sentence, target, source, count = links
    logs = scores.log_softmax(3).unflatten(0, (-1, sentences))[:, sentence, :, target, source]  # [L, n, H]
    return -((logs.logsumexp(2) - math.log(scores.size(1))).mean(1) / count).sum()


class Guide:
    """Takes the links out of what a model gets in training, and adds their loss to what it returns.

    It hangs on the model by hooks, so a model without it has nothing of it. With recomputation the layer runs again in
    the backward pass, and makes the same scores, which nobody takes then.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self._links: Tensor | None = None
        self._scores: Tensor | None = None

    def attach(self, model: Transformer, layer: int) -> None:
        """Guides a decoder layer, counted from 0."""
        model.register_forward_pre_hook(self._begin)
        AttentionHook(self._see, attrgetter("training")).attach(model.decoder_layers[layer].cross_attn)
        model.register_forward_hook(self._end)

    def _begin(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(inputs) < 6:  # without links
            return None
        *tensors, links, key = inputs
        self._links = links if model.training else None
        return (*tensors, key)

    def _see(self, scores: Tensor) -> None:
        self._scores = scores if self._links is not None else None

    def _end(self, _: nn.Module, inputs: tuple[Any, ...], sums: LossSums) -> GuidedSums | None:
        if self._links is None or self._scores is None:
            return None
        alignment = alignment_loss(self._scores, self._links, len(inputs[0]))
        self._links = self._scores = None
        return GuidedSums(sums.loss + self.weight * alignment, sums.nll, alignment.detach())
