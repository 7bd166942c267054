"""Gradients of one batch: of every sub-layer's output, of every matrix, and at five places of a decoder layer.

Liu et al. 2020 (Admin), figure 3: the norm of the loss's gradient with respect to every sub-layer's output. Takase et
al. 2023 (B2T), figures 3, 4 and 7: the same by layer, and at the places (1) to (5) of a Post-LN decoder layer. Xiong
et al. 2020 (Pre-LN), figure 3: of the last FFN's second matrix.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.doctor.probes import (
    layers_of,
    matrices,
    mean_loss,
    norms_of,
    sublayers,
    watching,
)
from deepnmt.model.blocks import SIDES
from deepnmt.model.transformer import Transformer

# From the bottom of a Post-LN decoder layer: around its first and second norm, and into its third.
PLACES = ("norms.0.in", "norms.0", "norms.1.in", "norms.1", "norms.2.in")


@dataclass(frozen=True)
class Gradients:
    """Norms (Euclidean, all elements) of the gradient of the mean loss of a batch.

    Attributes:
        loss: nats a target token.
        outputs: by sub-layer, of its output x, as in `decoder.layers.3.ffn`.
        matrices: by matrix, as in `encoder.layers.0.self_attn.q`.
        places: by decoder layer, norms at the places (1) to (5) of the B2T paper; only where all five are there and
            the norms come after the branches.
    """

    loss: float
    outputs: dict[str, float]
    matrices: dict[str, float]
    places: dict[str, list[float]] = field(default_factory=dict)

    @property
    def last_ffn(self) -> float:
        """Of the second matrix of the decoder's last FFN."""
        return [value for name, value in self.matrices.items() if name.endswith("ffn.fc2")
                and name.startswith("decoder.")][-1]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"loss": self.loss, "outputs": self.outputs, "matrices": self.matrices, "places": self.places}


def gradients(model: Transformer, batch: Batch) -> Gradients:
    """One forward and one backward pass in evaluation mode (no dropout); the model's own `.grad` is left empty."""
    norms: dict[str, float] = {}
    wanted = {name for side in SIDES for name in sublayers(model, side)}
    order: list[str] = []

    def see(name: str, tensor: Tensor) -> None:
        order.append(name)
        if name in wanted or ".rule.norms." in name:
            tensor.register_hook(lambda grad: norms.__setitem__(name, float(grad.detach().norm())))

    was_training = model.training
    model.eval()
    model.zero_grad(set_to_none=True)
    with watching(model, see):
        loss = mean_loss(model, batch)
    loss.backward()
    grads = [(name, p.grad if p.grad is not None else torch.zeros_like(p)) for name, p in model.named_parameters()]
    by_matrix = {name: float(rows.norm()) for name, rows in matrices(grads)}
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    places = _places(model, order, norms)
    return Gradients(float(loss.detach()), {n: norms.get(n, 0.0) for n in sorted(wanted, key=order.index)}, by_matrix,
                     places)


def _places(model: Transformer, order: list[str], norms: dict[str, float]) -> dict[str, list[float]]:
    """The five places of each decoder layer whose norms follow their branches."""
    found = {}
    for index, layer in enumerate(layers_of(model, "decoder")):
        name = f"decoder.layers.{index}"
        if len(norms_of(layer)) < 3:
            continue
        if order.index(f"{name}.rule.norms.0.in") < order.index(f"{name}.rule.adds.0"):
            continue
        found[name] = [norms.get(f"{name}.rule.{place}", 0.0) for place in PLACES]
    return found


@dataclass(frozen=True)
class HalfZeros:
    """Exact zeros among the gradients of an fp16 copy of the model.

    Attributes:
        scale: the loss scale, which an update's whole loss is multiplied by.
        finite: whether every gradient was finite.
        shares: by part (`encoder.layers.3`, `embeddings`), the share of elements that are exactly zero.
        shares_fp32: the same in fp32: what is zero there was not lost to fp16.
    """

    scale: float
    finite: bool
    shares: dict[str, float]
    shares_fp32: dict[str, float]

    @property
    def lost(self) -> float:
        """The largest share, over the layers, that is zero in fp16 and was not in fp32."""
        return max((self.shares[name] - self.shares_fp32[name] for name in self.shares if ".layers." in name),
                   default=math.nan)


def half_zeros(model: Transformer, batch: Batch, scale: float, accumulation: int = 1) -> HalfZeros:
    """Runs an fp16 copy of the model on the batch with its loss multiplied by `scale`, forward and backward.

    Args:
        accumulation: micro-batches of an update and process, of which the batch is one. Each is a sum divided by the
            update's tokens, so its backward pass is that of its mean loss × scale / accumulation.
    """
    half = copy.deepcopy(model).half().eval()
    (mean_loss(half, batch).float() * (scale / accumulation)).backward()
    plain = copy.deepcopy(model).float().eval()
    mean_loss(plain, batch).backward()
    finite = all(bool(p.grad.isfinite().all()) for p in half.parameters() if p.grad is not None)
    return HalfZeros(scale, finite, _zero_shares(half), _zero_shares(plain))


def _zero_shares(model: Transformer) -> dict[str, float]:
    """The share of exact zeros by layer (embeddings together)."""
    counts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        part = ".".join(name.split(".")[:3]) if ".layers." in name else name.split(".")[0]
        total = counts.setdefault(part, [0, 0])
        total[0] += parameter.numel() if parameter.grad is None else int((parameter.grad == 0).sum())
        total[1] += parameter.numel()
    return {part: zeros / total for part, (zeros, total) in counts.items()}
