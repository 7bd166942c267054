"""Multi-head attention (Vaswani et al. 2017, section 3.2) on PyTorch's fused kernel.

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H, `K` beams. A key mask is boolean
[B, 1, 1, S], true where a key may be seen; `None` stands for "no padding".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init


def key_mask(lengths: Tensor, size: int) -> Tensor | None:
    """The key mask [B, 1, 1, size] of sentences with these lengths [B], or None if it would hide nothing.

    Whether it hides something is asked on the CPU only: on a GPU the question would make the host wait.
    """
    if lengths.device.type == "cpu" and bool((lengths == size).all()):
        return None
    return (torch.arange(size, device=lengths.device) < lengths[:, None])[:, None, None, :]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, D] to [B, H, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, d] to [B, T, D]."""
    return x.transpose(1, 2).flatten(2)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """softmax(q kᵀ / √d) v: q [B, H, T, d], keys and values [B, H, S, d] to [B, H, T, d].

    On a CPU the 16-bit kernel's backward takes six times its fp32 twin's time at sentence length
    (docs/results/log.md), so 16-bit inputs that need a gradient are attended in fp32 there.
    """
    if q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16) and q.requires_grad:
        attended = F.scaled_dot_product_attention(q.float(), keys.float(), values.float(), mask, dropout, causal)
        return attended.to(q.dtype)
    return F.scaled_dot_product_attention(q, keys, values, mask, dropout, causal)


class SelfAttention(nn.Module):
    """Attention of a sequence to itself. `qkv` [3D, D] holds the query, key and value matrices in this order."""

    def __init__(self, width: int, heads: int, dropout: float, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = skip_init(linear, width, 3 * width)
        self.out = skip_init(linear, width, width)

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """[B, T, D] to [B, T, D]; `causal`: position t sees positions up to t (then no mask may be given)."""
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        return self.out(merge_heads(attend(q, k, v, mask, dropout, causal)))

    def step(self, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, here: slice) -> Tensor:
        """One position further: x [B, K, D], the hypotheses' inputs there, to [B, K, D].

        `keys` and `values` [B, H, max_steps·K, d] hold all hypotheses of a sentence, slot p·K + j the j-th of position
        p; those of this position, `here`, are written. `seen` [B, 1, K, slots up to here], to be added to the scores,
        is 0 where a hypothesis goes on from a slot and -inf elsewhere; None: from all. If x is [B, 1, D], for
        hypotheses that are one as yet, its key and value go into all slots of the position.
        """
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        keys[:, :, here] = k
        values[:, :, here] = v
        attended = attend(q, keys[:, :, : here.stop], values[:, :, : here.stop], seen)
        return self.out(merge_heads(attended))


class CrossAttention(nn.Module):
    """Attention of target positions to the encoder's memory. `kv` [2D, D] holds the key and value matrices."""

    def __init__(self, width: int, heads: int, dropout: float, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.q = skip_init(linear, width, width)
        self.kv = skip_init(linear, width, 2 * width)
        self.out = skip_init(linear, width, width)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, d] of a memory [B, S, D]."""
        k, v = self.kv(memory).chunk(2, dim=-1)
        return split_heads(k, self.heads), split_heads(v, self.heads)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]. In decoding T counts the K hypotheses of a sentence, which share keys and values."""
        q = split_heads(self.q(x), self.heads)
        dropout = self.dropout if self.training else 0.0
        return self.out(merge_heads(attend(q, keys, values, mask, dropout)))
