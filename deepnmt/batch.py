"""A micro-batch on the device, as engines, probes and profiles are given it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        tensors: what the task's model takes, in this order. In translation int64: src [B, S], src_lengths [B],
            trg_in [B, T] and trg_out [B, T].
        key: the micro-batch's number in the run, which fixes its dropout masks.
        tokens: target tokens, end of sentence counted.
    """

    tensors: tuple[Tensor, ...]
    key: int
    tokens: int

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tensors[0].device
