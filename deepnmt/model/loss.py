"""The loss: what training minimises, as an object that every engine, pipeline stage and probe calls in the same way;
and cross-entropy fused with the output projection, in chunks of rows. `objective.py` has what else may be minimised.

`R` target tokens, `B` sentences, `T` target length, `D` width, `V` vocabulary.

A full [R, V] table of logits would be the largest tensor of the model, and would take more time than anything else
outside matrix products. Here each chunk of rows is projected and its gradients are computed at once, so that only
[R, D] and [V, D] are kept for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from deepnmt import device as device_
from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.tokens import PAD

# Logits of one chunk: few enough for the cache of a CPU, enough to use a whole GPU.
_CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**27}

# On a CPU, 16-bit products are compiled for every number of rows, so rows of zeros make it a multiple of this.
_ROW_MULTIPLE = 64

_LEAST = 1e-30  # probability whose logarithm is exact enough; fp32 has normal numbers down to 1e-38


def perplexity(nll: float, tokens: float) -> float:
    """e to the power of the mean plain loss, from the sum in nats over so many tokens; at most e^50."""
    return math.exp(min(nll / tokens, 50.0))


class LossSums(NamedTuple):
    """Sums over the target tokens of a micro-batch, fp32 scalars; only `loss` has a gradient.

    Attributes:
        loss: what is minimised.
        nll: the cross-entropy without smoothing.
        others: further figures by name, see `Objective.figures`.
    """

    loss: Tensor
    nll: Tensor
    others: Mapping[str, Tensor] = {}

    def detached(self) -> LossSums:
        """The same without gradient."""
        return self._replace(loss=self.loss.detach(), nll=self.nll.detach())


class Objective(nn.Module):
    """A loss. In `training` it may differ from what validation measures; it has no parameters.

    Attributes:
        figures: names of the further sums in the `LossSums` of training, of which the log has the mean over target
            tokens.
    """

    figures: tuple[str, ...] = ()

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing  # `train.label_smoothing`

    @classmethod
    def of(cls, recipe: Recipe) -> Objective:
        """The loss of a recipe. One with settings of its own reads them here."""
        return cls(recipe.train.label_smoothing)

    def attach(self, model: Any) -> None:
        """Called once with the whole `Transformer`, in which a loss may watch modules by hooks."""

    def prepare(self, batch: Batch) -> Batch:
        """The micro-batch that the model computes instead of this one; called on every stage of a pipeline."""
        return batch

    def loss(self, hidden: Tensor, weight: Tensor, batch: Batch) -> LossSums:
        """The sums of a prepared micro-batch.

        Args:
            hidden: the decoder's output [B, T, D].
            weight: the output projection [V, D].
        """
        raise NotImplementedError


class CrossEntropy(Objective):
    """Label-smoothed cross-entropy, see `label_smoothed_loss`."""

    def loss(self, hidden: Tensor, weight: Tensor, batch: Batch) -> LossSums:
        return label_smoothed_loss(hidden, weight, batch["trg_out"], self.smoothing, PAD, batch.tokens)


def label_smoothed_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, pad: int, tokens: int | None = None
) -> LossSums:
    """The loss of hidden [B, T, D], projected by weight [V, D], against targets [B, T]; pad targets do not count.

    For logits z, target token y and ε = `smoothing` a token's loss is (1 - ε)(lse(z) - z_y) + ε(lse(z) - mean(z)). The
    ε of Szegedy et al. 2016 (section 7) is spread over all V entries, including y and pad, exactly as in
    `torch.nn.functional.cross_entropy(label_smoothing=ε, ignore_index=pad, reduction="sum")`. Softmax, losses and the
    sum over chunks of the weight's gradient are in fp32 for every type of the model.

    The gradient of the logits is rounded to the model's type before its two products, and so before the backward pass
    multiplies by the loss scale. In fp16 that costs up to 2^-25 an entry at any scale: a word with a smaller
    probability has no gradient. Of a token's probability mass at most V·2^-25 is lost this way, 0.001 at V = 32,000.
    The ε / V of each entry is not lost, because it is added in fp32.

    Args:
        tokens: how many targets count, for a GPU; None: the host waits for their number.
    """
    (hidden,), targets = token_rows([hidden], targets, pad, tokens)
    return LossSums(*linear_cross_entropy(hidden, weight, targets, smoothing))


def token_rows(
    hidden: Sequence[Tensor], targets: Tensor, pad: int, tokens: int | None = None
) -> tuple[list[Tensor], Tensor]:
    """The rows of tensors [B, T, D] that have a target, [R, D], and the targets [R] of [B, T]."""
    targets = targets.flatten()
    if device_.on_gpu(targets):  # the host does not wait: it knows the number
        count = int((targets != pad).sum()) if tokens is None else tokens
        rows = (targets == pad).byte().argsort(stable=True)[:count]
    else:
        rows = (targets != pad).nonzero().squeeze(1)
    flat = [each.flatten(0, 1) for each in hidden]
    if len(rows) == len(targets):
        return flat, targets
    return [each.index_select(0, rows) for each in flat], targets.index_select(0, rows)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Loss and nll of `label_smoothed_loss` for hidden [R, D] and targets [R]."""
    return _ProjectedCrossEntropy.apply(hidden, weight, targets, smoothing, needs_gradient(hidden, weight))


def needs_gradient(hidden: Tensor, weight: Tensor) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)


def chunk_rows(hidden: Tensor, vocab: int) -> int:
    """How many rows are projected at a time."""
    return max(1, _CHUNK_LOGITS["cuda" if device_.on_gpu(hidden) else "cpu"] // vocab)


def divergence(
    first: Tensor, second: Tensor, weight: Tensor, targets: Tensor, pad: int, tokens: int | None = None
) -> Tensor:
    """Σ KL(p‖q) + KL(q‖p) over the target tokens, p and q the predictions of first and second [B, T, D], projected by
    weight [V, D]. For targets [B, T], pad and tokens see `label_smoothed_loss`."""
    rows, _ = token_rows([first, second], targets, pad, tokens)
    return _Divergence.apply(*rows, weight)


def loss_bytes(tokens: int, vocab: int, width: int, size: int, device: str) -> int:
    """Memory of `label_smoothed_loss` in bytes, without the gradient of the hidden states.

    It is the logits of one chunk and the gradient of the projection in fp32, and for a 16-bit model a 16-bit copy of
    each; on a GPU the logits have only the model's type.

    Args:
        tokens: target tokens.
        size: bytes of a number of the model: 4 or 2.
        device: cpu or cuda.
    """
    each = 4 if size == 4 else 6
    return (size if device == "cuda" else each) * min(tokens * vocab, _CHUNK_LOGITS[device]) + each * vocab * width


class _ProjectedCrossEntropy(torch.autograd.Function):
    """(hidden [R, D], weight [V, D], targets [R]) to the sums (loss, nll); gradients are computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, differentiable: bool
    ) -> tuple[Tensor, Tensor]:
        rows = len(hidden)
        if not device_.on_gpu(hidden) and hidden.dtype != torch.float32:
            extra = -rows % _ROW_MULTIPLE
            hidden, targets = F.pad(hidden, (0, 0, 0, extra)), F.pad(targets, (0, extra))
        weight_mean = weight.float().mean(0)
        loss, nll = hidden.new_zeros(2, dtype=torch.float32).unbind()
        hidden_grad = torch.empty_like(hidden) if differentiable else None
        weight_grad = weight.new_zeros(weight.shape, dtype=torch.float32) if differentiable else None
        size = min(len(hidden), chunk_rows(hidden, len(weight)))
        size = size // _ROW_MULTIPLE * _ROW_MULTIPLE or size
        # allocated once: new memory for every chunk took longer to allocate than to fill
        logits = hidden.new_empty(size, len(weight))
        table = logits if logits.dtype == torch.float32 else torch.empty_like(logits, dtype=torch.float32)
        for start in range(0, len(hidden), max(1, size)):
            real = max(0, rows - start)  # rows from here on that are tokens, not rows of zeros
            h, y = hidden[start : start + size], targets[start : start + size, None]
            # scores: the logits, then in place the probabilities, then the gradient of the logits
            product, scores = logits[: len(h)], table[: len(h)]
            torch.mm(h, weight.t(), out=product)
            if table is not logits:
                scores.copy_(product)
            target_logits = scores.gather(1, y)
            lse = _softmax_(scores, y, target_logits, h, weight)
            mean = torch.mv(h.float(), weight_mean)  # of a row's logits
            nll += (lse - target_logits)[:real].sum()
            loss += (lse - (1 - smoothing) * target_logits)[:real].sum() - smoothing * mean[:real].sum()
            if hidden_grad is not None and weight_grad is not None:
                # d loss / d z = softmax(z) - (1 - ε) onehot(y) - ε / V; the constant ε / V is subtracted at the end
                scores.scatter_add_(1, y, torch.full_like(target_logits, smoothing - 1))
                scores[real:] = 0
                if table is not logits:
                    product.copy_(scores)
                torch.mm(product, weight, out=hidden_grad[start : start + size])
                add_product(weight_grad, product.t(), h, table)
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


class _Divergence(torch.autograd.Function):
    """(h, g [R, D], weight [V, D]) to Σ KL(p‖q) + KL(q‖p) over the rows, p = softmax(h weightᵀ) and q = softmax(g
    weightᵀ); in chunks, gradients are computed in the forward."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
        total = first.new_zeros((), dtype=torch.float32)
        grads = torch.empty_like(first), torch.empty_like(second)
        weight_grad = weight.new_zeros(weight.shape, dtype=torch.float32)
        size = max(1, chunk_rows(first, len(weight)) // 4)
        for chunk in (slice(start, start + size) for start in range(0, len(first), size)):
            logs = [torch.mm(h[chunk], weight.t()).float().log_softmax(1) for h in (first, second)]
            for (own, other), h, grad in zip((logs, logs[::-1]), (first, second), grads, strict=True):
                p, ratio = own.exp(), own - other
                divergence = (p * ratio).sum(1, keepdim=True)  # of p from q
                # d KL(p‖q) / d z = p (log p/q - KL(p‖q)), d KL(q‖p) / d z = p - q
                of_logits = p * (ratio - divergence) + p - other.exp()
                total += divergence.sum()
                of_logits = of_logits.to(h.dtype)
                torch.mm(of_logits, weight, out=grad[chunk])
                add_product(weight_grad, of_logits.t(), h[chunk], ratio)
        ctx.save_for_backward(*grads, weight_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second, weight = ctx.saved_tensors
        return first * total_grad, second * total_grad, (weight * total_grad).to(ctx.weight_dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, scratch: Tensor) -> None:
    """total += a @ b, where total is in fp32. `scratch`: an fp32 tensor of any size, which is overwritten."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
        return
    product = torch.mm(a, b)
    if device_.on_gpu(total):
        total += product
        return
    # on a CPU, adding tensors of two types first copies one into new memory, and takes three times as long as this
    buffer = scratch.flatten()
    for sums, part in zip(total.view(-1).split(len(buffer)), product.view(-1).split(len(buffer)), strict=True):
        sums += buffer[: len(part)].copy_(part)


def _softmax_(scores: Tensor, y: Tensor, target_logits: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """Replaces scores [R, V] = h @ weightᵀ by their softmax, and returns the log-sum-exp [R, 1] of each row.

    The log-sum-exp is a logit minus the logarithm of its probability. The logit is that of the target token y [R, 1],
    unless its probability underflows in some row; then it is the largest logit.
    """
    # the check below would make the host wait for a GPU
    top = scores.amax(1, keepdim=True) if device_.on_gpu(scores) else None
    torch.softmax(scores, 1, out=scores)
    if top is None:
        likely = scores.gather(1, y)
        if not bool((likely < _LEAST).any()):
            return target_logits - likely.log()
        top = torch.mm(h, weight.t()).amax(1, keepdim=True).float()
    return top - scores.amax(1, keepdim=True).log()
