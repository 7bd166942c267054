"""Multi-head attention (Vaswani et al. 2017, section 3.2) on PyTorch's fused kernel.

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H, `K` beams. A key mask is boolean
[B, 1, 1, S], false at padding, or is added to the scores, -inf at padding; None means that there is no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt import device
from deepnmt.model import fused
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

    On a CPU, 16-bit inputs that need a gradient are computed in fp32: the backward pass of PyTorch's 16-bit kernel
    takes six times as long as that in fp32 at sentence length (studies/results/log.md).
    """
    if not device.on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16) and q.requires_grad:
        attended = F.scaled_dot_product_attention(q.float(), keys.float(), values.float(), mask, dropout, causal)
        return attended.to(q.dtype)
    return F.scaled_dot_product_attention(q, keys, values, mask, dropout, causal)


# `attend` of the queries, keys and values in [B, T, 3D] with a mask that is added, by the kernel that PyTorch takes on
# a GPU for such a mask. Its backward pass writes the three gradients beside each other, so that nothing has to be put
# together for the matrix product below.
_library = torch.library.Library("deepnmt", "FRAGMENT")
_library.define("packed_attention(Tensor packed, Tensor mask, int heads, float dropout) -> (Tensor, Tensor, Tensor, "
                "Tensor)", tags=(torch.Tag.nondeterministic_seeded,))
_library.define("packed_attention_backward(Tensor grad, Tensor packed, Tensor mask, int heads, float dropout, "
                "Tensor out, Tensor lse, Tensor seed, Tensor offset) -> Tensor")


def _parted(packed: Tensor, mask: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value [B, T, H, d], and the mask [B, H, T, T]."""
    q, k, v = packed.unflatten(-1, (3, heads, -1)).unbind(2)
    return q, k, v, mask.expand(-1, heads, packed.size(1), -1)


def _packed_attention(packed: Tensor, mask: Tensor, heads: int, dropout: float) -> tuple[Tensor, ...]:
    out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
        *_parted(packed, mask, heads), None, None, None, None, dropout, 0, compute_log_sumexp=True)
    return out.flatten(2), lse, seed, offset


def _packed_attention_backward(
    grad: Tensor, packed: Tensor, mask: Tensor, heads: int, dropout: float, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor,
) -> Tensor:
    length, wide = packed.size(1), (heads, -1)
    *parts, _ = torch.ops.aten._efficient_attention_backward(
        grad.unflatten(2, wide), *_parted(packed, mask, heads), out.unflatten(2, wide), None, None, length, length, lse,
        dropout, seed, offset, 0, False, shared_storage_dqdkdv=True)
    strides = packed.unflatten(-1, (3, heads, -1)).select(2, 0).stride()
    if [each.stride() for each in parts] == [strides] * 3:  # they lie beside each other
        return parts[0].as_strided(packed.shape, packed.stride())
    return torch.stack(parts, 2).flatten(2)


def _keep_for_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    packed, mask, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(packed, mask, *output)


def _attention_gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor, None, None, None]:
    packed, mask, *rest = ctx.saved_tensors
    return torch.ops.deepnmt.packed_attention_backward(
        grad.contiguous(), packed, mask, *ctx.settings, *rest), None, None, None


for _name, _compute in (("packed_attention", _packed_attention),
                        ("packed_attention_backward", _packed_attention_backward)):
    _library.impl(_name, _compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"deepnmt::{_name}", _compute, lib=_library)
torch.library.register_autograd("deepnmt::packed_attention", _attention_gradients, setup_context=_keep_for_attention,
                                lib=_library)


class SelfAttention(nn.Module):
    """Attention of a sequence to itself. `qkv` [3D, D] holds the query, key and value matrices in this order."""

    def __init__(
        self, width: int, heads: int, dropout: float, linear: type[nn.Linear] = nn.Linear,
        rotate: Callable[[Tensor, int, int], Tensor] = unrotated,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.rotate = rotate  # see `positions.Positions`
        self.qkv = unfilled(linear, width, 3 * width)
        self.out = unfilled(linear, width, width)

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """[B, T, D] to [B, T, D]; `causal`: position t attends to positions up to t, and `mask` must be None."""
        packed, dropout = self.qkv(x), self.dropout if self.training else 0.0
        if (self.rotate is unrotated and mask is not None and mask.dtype != torch.bool and torch.is_grad_enabled()
                and device.attends_packed(packed)):
            return self.out(torch.ops.deepnmt.packed_attention(packed, mask, self.heads, dropout)[0])
        q, k, v = (split_heads(part, self.heads) for part in packed.chunk(3, dim=-1))
        q, k = (self.rotate(each, 0, x.size(1)) for each in (q, k))
        return self.out(merge_heads(attend(q, k, v, mask, dropout, causal)))

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
        packed = self.qkv(x)
        if self.rotate is unrotated and not torch.is_grad_enabled() and fused.usable(packed):
            return self.out(fused.attend_step(packed, past, visible, self.heads, slots))
        qkv = packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [3, B, H, K, d]
        if self.rotate is not unrotated:
            position = slots.start // (slots.stop - slots.start)
            qkv = torch.cat([self.rotate(qkv[:2], position, position + 1), qkv[2:]])
        past[..., slots, :] = qkv[1:]
        keys, values = past[..., : slots.stop, :]
        return self.out(merge_heads(attend(qkv[0], keys, values, visible)))


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
        return split_heads(k, self.heads), split_heads(v, self.heads)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]. In decoding T is the K hypotheses of a sentence, which share keys and values."""
        q = split_heads(self.q(x), self.heads)
        dropout = self.dropout if self.training else 0.0
        return self.out(merge_heads(attend(q, keys, values, mask, dropout)))
