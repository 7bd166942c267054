"""Multi-head attention (Vaswani et al. 2017, section 3.2) on PyTorch's fused kernel.

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H, `K` beams. A key mask is boolean
[B, 1, 1, S], false at padding, or is added to the scores, -inf at padding; None means that there is no padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
    """Attention of a sequence to itself. `qkv` [3D, D] holds the query, key and value matrices in this order."""

    def __init__(
        self, width: int, heads: int, dropout: float, linear: type[nn.Linear] = nn.Linear,
        rotate: ops.Rotate = unrotated,
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
        return self.out(ops.self_attention(self.qkv(x), self.heads, mask, dropout, causal, self.rotate))

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
        return self.out(ops.attend_step(self.qkv(x), self.heads, past, visible, slots, self.rotate))


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
