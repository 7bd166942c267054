"""Batches onto the device."""

from __future__ import annotations

import torch
from torch import nn

from deepnmt.data.batching import Batch


def to_tensors(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`src [B,S]`, `src_lengths [B]`, `trg_in [B,T]`, `trg_out [B,T]` as int64 tensors."""
    src, lengths, trg_in, trg_out = (
        torch.from_numpy(a).to(device, non_blocking=True)
        for a in (batch.src, batch.src_lengths, batch.trg_in, batch.trg_out)
    )
    return src, lengths, trg_in, trg_out


def take_over(model: nn.Module, source: nn.Module) -> None:
    """Gives `model` the buffers of `source`, built alike, and copies of its parameters, in their type and place."""
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        ours.data = theirs.detach().clone()
    for part, other in zip(model.modules(), source.modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False):
            setattr(part, name, buffer)
