"""Linear maps for decoding on a CPU, with their matrices in the layout of oneDNN's matrix product.

In PyTorch's own layout every product copies the matrix first. With the few rows of a search that takes a third of the
product's time.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.model.sublayers import FeedForward
from deepnmt.model.transformer import Transformer

_pack: Any = None
with suppress(AttributeError):  # if PyTorch was built without oneDNN
    _pack, _product = torch.ops.mkldnn._reorder_linear_weight.default, torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(nn.Module):
    """x Wᵀ + b, or its ReLU, without gradients."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = _pack(weight.detach())
        self.bias = None if bias is None else bias.detach()
        self.then = "none"

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.bias, self.then, [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a product for these numbers: on a CPU with AVX2, and for bf16 with more than that."""
    if _pack is None or weight.device.type != "cpu" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack(model: Transformer) -> Transformer:
    """Packs the linear maps of a model in place and returns it, which can then be used under `torch.inference_mode`
    alone; leaves it as it is where that cannot be done (`can_pack`)."""
    weight = model.output_weight
    if not can_pack(weight):
        return model
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Linear:  # a subclass may do more
                setattr(module, name, PackedLinear(child.weight, child.bias))
        if type(module) is FeedForward and module.activation is F.relu and isinstance(module.fc1, PackedLinear):
            module.fc1.then = "relu"
            module.activation = nn.Identity()
    model.project = PackedLinear(weight, None)
    return model


def packed_copy(model: Transformer) -> Transformer:
    """A packed model that shares all else with `model`."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return pack(copy.deepcopy(model, shared))
