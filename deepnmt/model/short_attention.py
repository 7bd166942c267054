"""Attention that trains on short sentences in bf16 on a CPU with AMX, by batched products of 16 bits.

PyTorch's fused kernel has no fast way there: its 16-bit backward pass takes six times the time of its fp32 one, and
that one 1.4 to 2 times the time of this (docs/log.md). Softmax and its gradient are fp32, but scores and their
gradients leave their products rounded to bf16, as in any attention that is written out in bf16: a score of 30 is then
off by up to 0.06, where the fused kernel would keep it.

oneDNN compiles a product for each shape, 0.7 ms and 0.7 MB, and sentences come in many. So lengths are filled up to a
multiple of 4 and B · H to one of 64: of 2,075 shapes in 8,200 updates on Multi30k 226 are left.

`B` sentences, `H` heads, `N` = B · H and its multiple, `T` and `S` lengths of queries and keys, `d` width of a head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LENGTHS, _HEADS = 4, 64  # what lengths and B · H are made multiples of


@cache
def _has_amx() -> bool:
    """Without AMX 16-bit products are no faster than fp32 ones. PyTorch's question for it is not a public one yet."""
    asks = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return asks is not None and bool(asks())


def is_short(q: Tensor, keys: Tensor, mask: Tensor | None) -> bool:
    """Whether `ShortAttention` serves q [B, H, T, d] and keys [B, H, S, d] on a CPU.

    It keeps 6 bytes a score and 6 a number of q, keys and values; fp32 copies of these and of the output take 16, so
    with S up to 1.5 · d it needs no more memory. fp16 could not hold large scores.
    """
    boolean = mask is None or mask.dtype == torch.bool
    return q.dtype == torch.bfloat16 and boolean and 2 * _filled(keys.size(2), _LENGTHS) <= 3 * q.size(3) and _has_amx()


class ShortAttention(torch.autograd.Function):
    """softmax(q kᵀ / √d) v of q [B, H, T, d], keys and values [B, H, S, d] in bf16 to [B, H, T, d]; `mask` is boolean
    [B, 1, 1, S] or None and shows every sentence at least one key."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        ctx.sizes, ctx.length, seen = q.shape[:2], q.size(2), keys.size(2)
        ctx.seen = seen
        q, keys, values = _fill(q), _fill(keys), _fill(values)
        table = torch.bmm(q, keys.transpose(1, 2)).float().mul_(q.size(2) ** -0.5)  # [N, T, S]
        table[:, :, seen:] = -torch.inf
        if causal:
            table += torch.full(table.shape[1:], -torch.inf).triu_(1)
        if mask is not None:
            _cut(table, ctx.sizes)[..., :seen].masked_fill_(~mask, -torch.inf)
        torch.softmax(table, 2, out=table)
        rounded = table.to(q.dtype)
        ctx.save_for_backward(q, keys, values, table, rounded)
        return _cut(torch.bmm(rounded, values), ctx.sizes)[:, :, : ctx.length]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, table, rounded = ctx.saved_tensors
        grad = _fill(grad)
        values_grad = torch.bmm(rounded.transpose(1, 2), grad)
        table_grad = torch.bmm(grad, values.transpose(1, 2)).float()
        scores_grad = torch._softmax_backward_data(table_grad, table, 2, torch.float32)
        product_grad = scores_grad.mul_(q.size(2) ** -0.5).to(q.dtype)
        q_grad, keys_grad = torch.bmm(product_grad, keys), torch.bmm(product_grad.transpose(1, 2), q)
        return (_cut(q_grad, ctx.sizes)[:, :, : ctx.length], _cut(keys_grad, ctx.sizes)[:, :, : ctx.seen],
                _cut(values_grad, ctx.sizes)[:, :, : ctx.seen], None, None)


def _filled(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _fill(x: Tensor) -> Tensor:
    """[B, H, L, d] to [N, L filled up, d]; what is filled in is 0, so that nothing comes of it."""
    heads, length = x.size(0) * x.size(1), x.size(2)
    filled = x.new_empty(_filled(heads, _HEADS), _filled(length, _LENGTHS), x.size(3))
    _cut(filled, x.shape[:2])[:, :, :length] = x
    filled[:, length:] = 0
    filled[heads:] = 0
    return filled


def _cut(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """[N, ...] to [B, H, ...]."""
    return x[: sizes[0] * sizes[1]].unflatten(0, sizes)
