"""16 bits without ZeRO: fp32 weights, and a copy of the model in 16 bits that computes in their place.

DeepSpeed's own ways to this are wrong (`ds_engine.py` says how). So it is given the fp32 weights, whose reduction,
schedule and update it does right, and knows nothing of the copy. Each micro-batch's gradient comes from the copy in 16
bits and is summed, reduced and applied in fp32; after the update the copy takes the weights over, rounded. ZeRO-1
computes the same (Micikevicius et al. 2018, Mixed Precision Training, section 3.1).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class Rounded(Generic[Module]):
    """`module`: a copy of `weights` in `dtype`, buffers as they were. Its gradients, as they come, go into those of
    `weights`; `refresh` brings the values of `weights` to it."""

    def __init__(self, weights: Module, dtype: torch.dtype) -> None:
        self.module = copy.deepcopy(weights)
        self._pairs = list(zip(weights.parameters(), self.module.parameters(), strict=True))
        for weight, rounded in self._pairs:
            rounded.data = rounded.data.to(dtype)
            rounded.register_post_accumulate_grad_hook(partial(_hand_over, weight))

    @torch.no_grad()
    def refresh(self) -> None:
        for weight, rounded in self._pairs:
            rounded.copy_(weight)


class Weights(nn.Module):
    """What DeepSpeed is given: all weights are those of `weights`, the computing is done by `module`."""

    def __init__(self, weights: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.weights = weights
        self.computing = (module,)  # in a tuple, so that its weights are not counted among this module's

    def forward(self, *inputs: Any) -> Any:
        return self.computing[0](*inputs)

    def train(self, mode: bool = True) -> Weights:
        self.computing[0].train(mode)
        return super().train(mode)


def _hand_over(weight: nn.Parameter, rounded: torch.Tensor) -> None:
    """Adds the gradient of a 16-bit weight to that of the fp32 one."""
    gradient = rounded.grad
    if gradient is None:
        return
    if weight.grad is None:
        weight.grad = gradient.float()
    else:
        weight.grad += gradient
    rounded.grad = None
