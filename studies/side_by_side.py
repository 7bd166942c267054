"""Many small models of one shape trained side by side, each at its own learning rate.

An update of a small model spends most of its time on calling operations, not on arithmetic. With the parameters of K
models stacked, one call serves all of them (`torch.func.vmap`). Each model takes the same steps as alone, up to
rounding (which a run close to divergence may amplify).

`K` models, `P` parameters of one, `B` sentences, `S` source length, `T` target length.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.config import Optimizer
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD


class _PlainLoss(nn.Module):
    """Returns a model's plain loss, summed over target tokens, using only operations that vmap supports."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, src: Tensor, lengths: Tensor, trg_in: Tensor, trg_out: Tensor) -> Tensor:
        hidden = self.model.decode(trg_in, self.model.encode(src, lengths), lengths)
        logits = F.linear(hidden, self.model.output_weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), trg_out.flatten(), ignore_index=PAD, reduction="sum")


def train_side_by_side(
    models: Sequence[Transformer], batches: Iterable[Batch], rates: Iterable[Sequence[float]], settings: Optimizer
) -> Iterator[list[float]]:
    """Trains K models without dropout by Adam; yields their losses in nats a target token, update by update.

    The given models are not changed. A model whose loss is no longer finite does not affect the others.

    Args:
        batches: one for each update, the same for all models.
        rates: for each update the K learning rates.
        settings: only betas and eps are used.
    """
    plain_loss = _PlainLoss(copy.deepcopy(models[0])).eval()
    names = [name for name, _ in plain_loss.named_parameters()]
    shapes = [p.shape for p in plain_loss.parameters()]
    flat = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models])
    flat.requires_grad_()  # [K, P]
    first, second = torch.zeros_like(flat), torch.zeros_like(flat)
    beta1, beta2 = settings.betas

    def loss_of(parameters: dict[str, Tensor], *tensors: Tensor) -> Tensor:
        return functional_call(plain_loss, parameters, tensors)

    losses_of = vmap(loss_of, in_dims=(0, None, None, None, None))
    for taken, (batch, rate) in enumerate(zip(batches, rates, strict=False), 1):
        pieces = flat.split([shape.numel() for shape in shapes], dim=1)
        stacked = {name: piece.unflatten(1, shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):  # fused attention would run the models one by one
            losses = losses_of(stacked, *(batch[name] for name in TRANSLATION)) / batch.tokens
        [gradient] = torch.autograd.grad(losses.sum(), flat)
        with torch.no_grad():
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            step = (second / (1 - beta2**taken)).sqrt_().add_(settings.eps).reciprocal_().mul_(first)
            flat.sub_(step * (torch.tensor(rate)[:, None] / (1 - beta1**taken)))
        yield losses.tolist()
