"""One model's tensors into another."""

from __future__ import annotations

from torch import nn


def take_over(model: nn.Module, source: nn.Module) -> None:
    """Gives `model` the buffers of `source`, built alike, and copies of its parameters, in their type and place."""
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        ours.data = theirs.detach().clone()
    for part, other in zip(model.modules(), source.modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False):
            setattr(part, name, buffer)
