"""Label-smoothed cross-entropy with the output projection inside, in row chunks.

`R` target tokens, `B` sentences, `T` target length, `D` width, `V` vocabulary.

A whole [R, V] table of logits would be the largest tensor of the model and the most time spent outside matrix products.
Here each chunk of rows is projected, and its gradients are computed on the spot, so only [R, D] and [V, D] are kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Logits of one chunk: small enough for the cache on a CPU, large enough to fill a GPU.
_CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**27}

# A CPU's 16-bit products are compiled anew for every number of rows: there, rows of zeros make it a multiple of this.
_ROW_MULTIPLE = 64

_LEAST = 1e-30  # probability whose logarithm is exact enough; fp32 has normal numbers down to 1e-38


class LossSums(NamedTuple):
    """Sums over the target tokens, 0-dim fp32: the smoothed loss (differentiable) and the plain one (not)."""

    loss: Tensor
    nll: Tensor


def label_smoothed_loss(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, pad: int) -> LossSums:
    """The loss of hidden [B, T, D], projected by weight [V, D], against targets [B, T]; pad targets do not count.

    For logits z, right token y and ε = `smoothing` a token's loss is (1 - ε)(lse(z) - z_y) + ε(lse(z) - mean(z)): the
    ε of Szegedy et al. 2016 (section 7) is spread over all V entries, the right one and pad included, exactly as
    `torch.nn.functional.cross_entropy(label_smoothing=ε, ignore_index=pad, reduction="sum")` does. Softmax, losses and
    the sum over chunks of the weight's gradient are fp32 whatever the model's type.

    Between the softmax and its two products the gradient of the logits has the model's type, before the backward pass
    multiplies by the loss scale. In fp16 that loses up to 2^-25 an entry at any scale: a word of a probability below
    that pushes nothing, which takes from a token at most V·2^-25 of its probability mass, 0.001 at V = 32,000. The
    ε / V of each entry is not lost, it is added in fp32.
    """
    targets = targets.flatten()
    rows = (targets != pad).nonzero().squeeze(1)
    hidden = hidden.flatten(0, 1)
    if len(rows) < len(targets):
        hidden, targets = hidden.index_select(0, rows), targets.index_select(0, rows)
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return LossSums(*_ProjectedCrossEntropy.apply(hidden, weight, targets, smoothing, differentiable))


def loss_bytes(tokens: int, vocab: int, width: int, size: int, device: str) -> int:
    """Bytes held by `label_smoothed_loss` over `tokens` target tokens, its output's own [D] apart: the logits of one
    chunk, in 16 bits (`size` 2 bytes) with their scores in fp32, and the projection's gradient in fp32, then with one
    chunk's in 16 bits. `device`: cpu or cuda."""
    each = 4 if size == 4 else 6
    return each * (min(tokens * vocab, _CHUNK_LOGITS[device]) + vocab * width)


class _ProjectedCrossEntropy(torch.autograd.Function):
    """(hidden [R, D], weight [V, D], targets [R]) to the sums (loss, nll), with gradients made in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, differentiable: bool
    ) -> tuple[Tensor, Tensor]:
        rows = len(hidden)
        if hidden.device.type == "cpu" and hidden.dtype != torch.float32:
            extra = -rows % _ROW_MULTIPLE
            hidden, targets = F.pad(hidden, (0, 0, 0, extra)), F.pad(targets, (0, extra))
        weight_mean = weight.float().mean(0)
        loss, nll = hidden.new_zeros(2, dtype=torch.float32).unbind()
        hidden_grad = torch.empty_like(hidden) if differentiable else None
        weight_grad = weight.new_zeros(weight.shape, dtype=torch.float32) if differentiable else None
        size = min(len(hidden), max(1, _CHUNK_LOGITS[hidden.device.type] // len(weight)))
        size = size // _ROW_MULTIPLE * _ROW_MULTIPLE or size
        # made once: new memory for every chunk's scores and gradient took longer to get than to fill
        logits = hidden.new_empty(size, len(weight))
        table = logits if logits.dtype == torch.float32 else torch.empty_like(logits, dtype=torch.float32)
        for start in range(0, len(hidden), max(1, size)):
            real = rows - start  # rows of this chunk and after it that are tokens
            h, y = hidden[start : start + size], targets[start : start + size, None]
            # scores: the logits, then in place the probabilities, then the gradient of the logits
            product, scores = logits[: len(h)], table[: len(h)]
            torch.mm(h, weight.t(), out=product)
            if table is not logits:
                scores.copy_(product)
            right = scores.gather(1, y)
            lse = _softmax_(scores, y, right, h, weight)
            mean = torch.mv(h.float(), weight_mean)  # of a row's logits
            nll += (lse - right)[:real].sum()
            loss += (lse - (1 - smoothing) * right)[:real].sum() - smoothing * mean[:real].sum()
            if hidden_grad is not None and weight_grad is not None:
                # d loss / d z = softmax(z) - (1 - ε) onehot(y) - ε / V; the last term, a constant, waits for the end
                scores.scatter_add_(1, y, torch.full_like(right, smoothing - 1))
                scores[real:] = 0
                if table is not logits:
                    product.copy_(scores)
                torch.mm(product, weight, out=hidden_grad[start : start + size])
                _add_product(weight_grad, product.t(), h, table)
        if hidden_grad is not None and weight_grad is not None:
            hidden_grad -= smoothing * weight_mean
            weight_grad -= smoothing / len(weight) * hidden.sum(0, dtype=torch.float32)
            ctx.save_for_backward(hidden_grad[:rows], weight_grad)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, nll_grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * loss_grad, (weight_grad * loss_grad).to(ctx.weight_dtype), None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor, scratch: Tensor) -> None:
    """total += a @ b, where total is fp32. `scratch`: an fp32 tensor of any size, overwritten."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
        return
    product = torch.mm(a, b)
    if total.is_cuda:
        total += product
        return
    # there a sum of two types makes a copy first, in new memory, and takes three times as long as both steps here
    room = scratch.flatten()
    for sums, part in zip(total.view(-1).split(len(room)), product.view(-1).split(len(room)), strict=True):
        sums += room[: len(part)].copy_(part)


def _softmax_(scores: Tensor, y: Tensor, right: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """Makes scores [R, V] = h @ weightᵀ their softmax and returns their lse [R, 1]: a score less the logarithm of its
    probability. That of the right token, `right` at y [R, 1], serves unless it is next to nothing in some row; then
    the top one's does."""
    top = scores.amax(1, keepdim=True) if scores.is_cuda else None  # the question below would make the host wait there
    torch.softmax(scores, 1, out=scores)
    if top is None:
        likely = scores.gather(1, y)
        if not bool((likely < _LEAST).any()):
            return right - likely.log()
        top = torch.mm(h, weight.t()).amax(1, keepdim=True).float()
    return top - scores.amax(1, keepdim=True).log()
