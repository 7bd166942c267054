"""Batches onto the device."""

from __future__ import annotations

import torch

from deepnmt.data.batching import Batch


def to_tensors(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`src [B,S]`, `src_lengths [B]`, `trg_in [B,T]`, `trg_out [B,T]` as int64 tensors."""
    src, lengths, trg_in, trg_out = (
        torch.from_numpy(a).to(device, non_blocking=True)
        for a in (batch.src, batch.src_lengths, batch.trg_in, batch.trg_out)
    )
    return src, lengths, trg_in, trg_out
