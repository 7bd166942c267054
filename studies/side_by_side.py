"""Many small models of one shape trained side by side, each at its own learning rate.

An update of a small model spends most of its time on calling operations, not on arithmetic. With the parameters of K
models stacked, one call serves all of them (`torch.func.vmap`). Each model takes the same steps as alone, up to
rounding (which a run close to divergence may amplify). In 16 bits weights and moments are kept in fp32 and rounded for
each pass, as in DeepSpeed; in fp16 every model has its own loss scale.

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

from deepnmt.batch import Batch
from deepnmt.config import LossScale, Optimizer, Precision
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _PlainLoss(nn.Module):
    """Returns a model's plain loss, summed over target tokens, using only operations that vmap supports."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, src: Tensor, lengths: Tensor, trg_in: Tensor, trg_out: Tensor) -> Tensor:
        hidden = self.model.decode(trg_in, self.model.encode(src, lengths), lengths)
        logits = F.linear(hidden, self.model.output_weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), trg_out.flatten(), ignore_index=PAD, reduction="sum")


class _Scales:
    """The loss scales of K models, each by the rule of `config.LossScale`."""

    def __init__(self, count: int, rule: LossScale) -> None:
        self.rule = rule
        self.scales = torch.full((count,), 2.0**rule.initial_power)
        self.clean = torch.zeros(count)  # updates without overflow since the scale last changed

    def unscale(self, gradient: Tensor) -> Tensor:
        """Divides the gradients [K, P] in place by their scales and sets the next scales; returns which are finite [K].

        A model whose loss is not finite has no finite gradient either, so its scale falls to the floor.
        """
        gradient /= self.scales[:, None]
        finite = gradient.isfinite().all(dim=1)
        self.clean = torch.where(finite, self.clean + 1, 0.0)
        self.scales = torch.where(finite, self.scales, (self.scales / 2).clamp_min(self.rule.floor))
        grown = self.clean >= self.rule.window
        self.scales, self.clean = torch.where(grown, self.scales * 2, self.scales), self.clean.masked_fill(grown, 0.0)
        return finite


def train_side_by_side(
    models: Sequence[Transformer], batches: Iterable[Batch], rates: Iterable[Sequence[float]], settings: Optimizer,
    precision: Precision = "fp32", loss_scale: LossScale | None = None,
) -> Iterator[list[float]]:
    """Trains K models without dropout by Adam; yields their losses in nats a target token, update by update.

    The given models are not changed. A model whose loss is no longer finite does not affect the others. In fp16 an
    update with an overflow is dropped and its model's loss scale halved.

    Args:
        batches: one for each update, the same for all models.
        rates: for each update the K learning rates.
        settings: only betas and eps are used.
        precision: of weights and activations in the forward and backward pass.
        loss_scale: of fp16 (default: as in a recipe without one).
    """
    plain_loss = _PlainLoss(copy.deepcopy(models[0])).eval()
    names = [name for name, _ in plain_loss.named_parameters()]
    shapes = [p.shape for p in plain_loss.parameters()]
    flat = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models])
    flat.requires_grad_()  # [K, P]
    first, second = torch.zeros_like(flat), torch.zeros_like(flat)
    scales = _Scales(len(models), loss_scale or LossScale()) if precision == "fp16" else None
    taken = torch.zeros(len(models), 1, dtype=torch.float64)  # updates of each
    beta1, beta2 = settings.betas

    def loss_of(parameters: dict[str, Tensor], *tensors: Tensor) -> Tensor:
        return functional_call(plain_loss, parameters, tensors)

    losses_of = vmap(loss_of, in_dims=(0, None, None, None, None))
    for batch, rate in zip(batches, rates, strict=False):
        pieces = flat.to(DTYPES[precision]).split([shape.numel() for shape in shapes], dim=1)
        stacked = {name: piece.unflatten(1, shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):  # fused attention would run the models one by one
            losses = losses_of(stacked, *batch.tensors) / batch.tokens
        [gradient] = torch.autograd.grad((losses if scales is None else losses * scales.scales).sum(), flat)
        with torch.no_grad():
            dropped = [] if scales is None else (~scales.unscale(gradient)).nonzero().flatten().tolist()
            before = [(state, state[dropped].clone()) for state in (flat, first, second, taken)]
            taken += 1
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            step = (second / (1 - beta2**taken).float()).sqrt_().add_(settings.eps).reciprocal_().mul_(first)
            flat.sub_(step * (torch.tensor(rate)[:, None] / (1 - beta1**taken)).float())
            for state, rows in before if dropped else []:
                state[dropped] = rows
        yield losses.tolist()
