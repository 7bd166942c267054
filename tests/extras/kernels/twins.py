"""The operations of fused.py in PyTorch, for tensors on a CPU: what the Triton kernels are held to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deepnmt.extras.kernels import fused


def drop(x: Tensor, residual: Tensor | None, p: float, key: Tensor | None) -> tuple[Tensor, Tensor]:
    drawn = fused._draw(x, p) if key is None else key
    out = x * kept(x, drawn, p)
    return out if residual is None else residual + out, drawn if key is None else key.new_empty(0)


def add_norm(
    branch: Tensor, x: Tensor, other: Tensor | None, omega: Tensor | None, alpha: float, weight: Tensor,
    bias: Tensor | None, eps: float, p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    key = fused._draw(x, p)
    total = (x.float() if x.dtype.itemsize == 2 else x) * (alpha if omega is None else omega)
    if other is not None:
        total = total + other
    total = (total + branch * kept(branch, key, p)).to(x.dtype)
    return total, (_normed(total, eps, bias is not None)[0] * weight + (0.0 if bias is None else bias)).to(x.dtype), key


def _normed(total: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """A sum [..., D] normed, without weight and bias, and the factor [..., 1] by which."""
    h = total.float() if total.dtype.itemsize == 2 else total
    if centred:
        h = h - h.mean(-1, keepdim=True)
    factor = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    return h * factor, factor


def add_norm_backward(
    grad: Tensor, total: Tensor, x: Tensor | None, omega: Tensor | None, alpha: float, weight: Tensor, centred: bool,
    eps: float, p: float, key: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    h, factor = _normed(total, eps, centred)
    g = grad * weight.to(h.dtype)
    change = g - h * (g * h).mean(-1, keepdim=True)
    if centred:
        change = change - g.mean(-1, keepdim=True)
    change = change * factor
    sums = [grad * h, *[grad.to(h.dtype)] * centred, *([] if omega is None or x is None else [change * x])]
    parts = torch.stack([each.flatten(0, -2).sum(0) for each in sums])[None]
    of_branch = (change * kept(change, key, p)).to(total.dtype) if fused._apart(omega, alpha, p) else total.new_empty(0)
    return (change * (alpha if omega is None else omega)).to(total.dtype), of_branch, parts


def kept(x: Tensor, key: Tensor, p: float) -> Tensor:
    """The dropout mask of x [..., D], 0 or the scale of what is kept, by the numbers that the kernels draw.

    128 random bits serve eight elements of a row, 16 bits each. `cpu_mask` has the same probability and scale.
    """
    seed, counter, dropped, scale = fused._numbers(key, p)
    if not dropped:
        return torch.ones((), dtype=x.dtype)
    width, low = x.size(-1), 2**32 - 1
    block = max(16, 2 ** (width - 1).bit_length())  # of a kernel: a power of 2
    eights = torch.arange(x.numel() // width * (block // 8)) & low
    a, b, c, d = philox([eights, *(torch.full_like(eights, number) for number in (counter & low, 0, 2**31))], seed)
    bits = torch.stack([part for word in (a, c, b, d) for part in (word & 0xFFFF, word >> 16)], -1)
    return (bits.view(-1, block)[:, :width].reshape(x.shape) >= dropped).to(x.dtype) * scale


def philox(counter: list[Tensor], key: int) -> list[Tensor]:
    """Four words of random bits for a counter of four words and a key of two. Philox4x32 with ten rounds: Salmon et al.
    2011, Parallel Random Numbers: As Easy as 1, 2, 3."""
    low = 2**32 - 1
    a, b, c, d = counter
    first, second = key & low, key >> 32 & low
    for _ in range(10):
        upper, lower = c * 0xCD9E8D57, a * 0xD2511F53
        a, b, c, d = ((upper >> 32) & low) ^ b ^ first, upper & low, ((lower >> 32) & low) ^ d ^ second, lower & low
        first, second = (first + 0x9E3779B9) & low, (second + 0xBB67AE85) & low
    return [a, b, c, d]


def relu_backward(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    of_sum = grad * (out > 0)
    rows = of_sum.flatten(0, -2)
    return of_sum, (rows.float() if rows.dtype.itemsize == 2 else rows).sum(0, keepdim=True)


def column_sums(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return parts.sum(0).to(dtype)


def attend_step(packed: Tensor, past: Tensor, visible: Tensor | None, heads: int, start: int, stop: int) -> Tensor:
    parts = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # [3, B, H, K, d]
    past[..., start:stop, :] = parts[1:]
    keys, values = past[..., :stop, :]
    attended = F.scaled_dot_product_attention(parts[0], keys, values, visible)
    return attended.transpose(1, 2).flatten(2)


def cross_entropy_(logits: Tensor, targets: Tensor, counts: Tensor, smoothing: float, gradient: bool) -> Tensor:
    z = logits.float() if logits.dtype.itemsize == 2 else logits.clone()
    lse, of_target = z.logsumexp(1), z.gather(1, targets[:, None])[:, 0]
    if gradient:
        chances = (z - lse[:, None]).exp()
        chances.scatter_add_(1, targets[:, None], chances.new_full((len(z), 1), smoothing - 1))
        logits.copy_(chances * counts[:, None])
    return torch.stack([(lse - (1 - smoothing) * of_target) * counts, (lse - of_target) * counts], 1)


_library = torch.library.Library("deepnmt", "IMPL")
for _compute in (drop, add_norm, add_norm_backward, relu_backward, column_sums, attend_step, cross_entropy_):
    _library.impl(_compute.__name__, _compute, "CPU")
_library.impl("addmm_relu", fused._addmm_relu, "CPU")
