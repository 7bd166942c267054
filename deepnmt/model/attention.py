"""Multi-head attention (Vaswani et al. 2017, section 3.2) on PyTorch's fused kernel.

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H, `K` beams. A key mask is boolean
[B, 1, 1, S], false at padding, or is added to the scores, -inf at padding; None means that there is no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deepnmt import device
from deepnmt.model import ops
from deepnmt.model.positions import unrotated
from deepnmt.model.unfilled import unfilled


def key_mask(lengths: Tensor, size: int, dtype: torch.dtype) -> Tensor | None:
    """The key mask [B, 1, 1, size] of sentences with these lengths [B], or None if there is no padding.

    On a GPU it is never None, because the check would make the host wait for the GPU, and it is added to scores of
    `dtype`. Its rows begin at multiples of 8. So no layer has to convert it, which takes four kernels.
    """
    if device.on_gpu(lengths):
        kept = torch.arange(-(-size // 8) * 8, device=lengths.device) < lengths[:, None]
        return torch.where(kept, 0.0, -torch.inf).to(dtype)[:, None, None][..., :size]
    if bool((lengths == size).all()):
        return None
    return (torch.arange(size, device=lengths.device) < lengths[:, None])[:, None, None, :]


class SelfAttention(nn.Module):
    """Attention of a sequence to itself. `qkv` [3D, D] holds the query, key and value matrices in this order.

    `norm` makes a norm of a width; only a subclass has one.
    """

    def __init__(
        self, width: int, heads: int, dropout: float, linear: type[nn.Linear] = nn.Linear,
        rotate: ops.Rotate = unrotated, norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.rotate = rotate  # see `positions.Positions`
        self.qkv = unfilled(linear, width, 3 * width)
        self.out = unfilled(linear, width, width)

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """[B, T, D] to [B, T, D]; `causal`: position t attends to positions up to t, and `mask` must be None."""
        dropout = self.dropout if self.training else 0.0
        return self.put_out(ops.self_attention(self.qkv(x), self.heads, mask, dropout, causal, self.rotate))

    def put_out(self, heads: Tensor) -> Tensor:
        """What all heads found [B, T, D] to the output [B, T, D]."""
        return self.out(heads)

    def step(self, x: Tensor, past: Tensor, visible: Tensor | None, slots: slice) -> Tensor:
        """Decodes one position: x [B, K, D], the inputs of all hypotheses there, to [B, K, D].

        Args:
            x: may be [B, 1, D] as long as all hypotheses of a sentence are the same; its key and value then go into all
                slots of the position.
            past: keys and values [2, B, H, max_steps·K, d], of all hypotheses of a sentence: slot p·K + j is the j-th
                at position p. Those of this position are written.
            visible: [B, 1, K, slots.stop], added to the scores: 0 if a hypothesis continues that slot, else -inf. None
                if all slots are visible.
            slots: those of this position.
        """
        return self.put_out(ops.attend_step(self.qkv(x), self.heads, past, visible, slots, self.rotate))


class NormedSelfAttention(SelfAttention):
    """Norms what the heads have found, before `out` (`sub_ln`)."""

    def __init__(
        self, width: int, heads: int, dropout: float, linear: type[nn.Linear] = nn.Linear,
        rotate: ops.Rotate = unrotated, norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__(width, heads, dropout, linear, rotate)
        self.norm = norm(width)

    def put_out(self, heads: Tensor) -> Tensor:
        return self.out(self.norm(heads))


class CrossAttention(nn.Module):
    """Attention of target positions to the encoder's memory. `kv` [2D, M] holds the key and value matrices, M the width
    of the memory (`memory`; None: D)."""

    def __init__(
        self, width: int, heads: int, dropout: float, linear: type[nn.Linear] = nn.Linear, memory: int | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.q = unfilled(linear, width, width)
        self.kv = unfilled(linear, memory or width, 2 * width)
        self.out = unfilled(linear, width, width)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, d] of a memory [B, S, M]."""
        k, v = self.kv(memory).chunk(2, dim=-1)
        return ops.split_heads(k, self.heads), ops.split_heads(v, self.heads)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]. In decoding T is the K hypotheses of a sentence, which share keys and values."""
        q = ops.split_heads(self.q(x), self.heads)
        dropout = self.dropout if self.training else 0.0
        return self.out(ops.merge_heads(ops.attend(q, keys, values, mask, dropout)))


def attention_scores(q: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """The scores [B, H, T, S] of a cross-attention before the softmax, fp32 or wider.

    Args:
        q: [B, T, D].
        keys, mask: [B, H, S, d] and [B, 1, 1, S], as for `CrossAttention.forward`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = ops.split_heads(q, keys.size(1)).to(wide) @ keys.to(wide).transpose(2, 3) / keys.size(3) ** 0.5
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
