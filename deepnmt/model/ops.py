"""The operations of the model that are more than a module of PyTorch, as plain functions.

The model calls them through this module, as `ops.dropout(x, p)`, so that `overrides.py` can put others in their place.

`B` sentences, `T` target or other length, `S` length of keys, `D` width, `H` heads, `d` = D / H, `K` hypotheses. A mask
of keys is boolean [B, 1, 1, S], false at padding, or is added to the scores, -inf at padding; None: no padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from deepnmt import device

Rotate = Callable[[Tensor, int, int], Tensor]  # see `positions.Positions`


def dropout(x: Tensor, p: float) -> Tensor:
    """Zeroes each element with probability p and scales the others so that the expected value stays."""
    if p == 0:
        return x
    return F.dropout(x, p) if device.on_gpu(x) else x * cpu_mask(x, p)


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


def self_attention(
    packed: Tensor, heads: int, mask: Tensor | None, dropout: float, causal: bool, rotate: Rotate
) -> Tensor:
    """`attend` of the queries, keys and values in [B, T, 3D], to [B, T, D]."""
    q, k, v = (split_heads(part, heads) for part in packed.chunk(3, dim=-1))
    q, k = (rotate(each, 0, packed.size(1)) for each in (q, k))
    return merge_heads(attend(q, k, v, mask, dropout, causal))


def attend_step(
    packed: Tensor, heads: int, past: Tensor, visible: Tensor | None, slots: slice, rotate: Rotate
) -> Tensor:
    """`self_attention` at one position of decoding; its keys and values are put into the past.

    Args:
        packed: queries, keys and values [B, K, 3D]; or [B, 1, 3D], if all hypotheses of a sentence are the same.
        past, visible, slots: see `SelfAttention.step`.

    Returns:
        [B, K, D], or [B, 1, D].
    """
    position = slots.start // (slots.stop - slots.start)
    q, k, v = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, K, d]
    q, k = (rotate(each, position, position + 1) for each in (q, k))
    past[0, ..., slots, :], past[1, ..., slots, :] = k, v
    keys, values = past[..., : slots.stop, :]
    return merge_heads(attend(q, keys, values, visible))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, D] to [B, H, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, d] to [B, T, D]."""
    return x.transpose(1, 2).flatten(2)


# -- masks of dropout on a CPU -----------------------------------------------------------------------------------------


def cpu_mask(x: Tensor, p: float) -> Tensor:
    """See `_cpu_mask`, of which torch.compile makes one operation: it cannot follow one that draws in place."""
    return _mask_operation(x.detach(), p) if torch.compiler.is_compiling() else _cpu_mask(x, p)


def dropped_of(p: float) -> int:
    """How many of the 2^16 values of 16 random bits drop an element, for a dropout of p."""
    return min(round(p * 2**16), 2**16 - 1)


def _cpu_mask(x: Tensor, p: float) -> Tensor:
    """A dropout mask in the shape and type of x: 0 with probability q, else 1 / (1 - q), q = round(2^16 p) / 2^16.

    PyTorch's Bernoulli sampling on a CPU takes longer than a layer's matrix products. Here one random 64-bit number
    serves four elements, 16 bits each. The scale is that of the rounded probability, so the expected value is exact.
    """
    dropped = dropped_of(p)
    samples = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    mask = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.ge(samples.view(torch.int16)[: x.numel()].view(x.shape), dropped - 2**15, out=mask)
    return mask.mul_(2**16 / (2**16 - dropped))


_mask_operation = torch.library.custom_op("deepnmt::cpu_mask", _cpu_mask, mutates_args=(),
                                          schema="(Tensor x, float p) -> Tensor",
                                          tags=(torch.Tag.nondeterministic_seeded,))
_mask_operation.register_fake(lambda x, p: torch.empty_like(x, memory_format=torch.contiguous_format))
