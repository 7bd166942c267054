"""Attention of the queries, keys and values in [B, T, 3D] with a mask that is added, by the kernel that PyTorch takes
on a GPU for such a mask. Its backward pass writes the three gradients beside each other, so that nothing has to be put
together for the matrix product below.

`B` sentences, `T` length, `D` width, `H` heads, `d` = D / H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("deepnmt", "FRAGMENT")
_library.define("packed_attention(Tensor packed, Tensor mask, int heads, float dropout) -> (Tensor, Tensor, Tensor, "
                "Tensor)", tags=(torch.Tag.nondeterministic_seeded,))
_library.define("packed_attention_backward(Tensor grad, Tensor packed, Tensor mask, int heads, float dropout, "
                "Tensor out, Tensor lse, Tensor seed, Tensor offset) -> Tensor")


def attend(packed: Tensor, mask: Tensor, heads: int, dropout: float) -> Tensor:
    """softmax(q kᵀ / √d + mask) v: packed [B, T, 3D] and mask [B, 1, 1, T] to [B, T, D]."""
    return torch.ops.deepnmt.packed_attention(packed, mask, heads, dropout)[0]


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
