"""To look at what a cross-attention attends to: its scores, and a hook that gets them.

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deepnmt.model.sublayers import CrossAttention, split_heads


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


def layer_index(number: int, layers: int) -> int:
    """The layer, from 0, that is number `number` of `layers`, from 1; 0 stands for the last but one."""
    return number - 1 if number else max(0, layers - 2)
