"""A micro-batch on the device: the input of engines, probes and profiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        tensors: the positional inputs of the task's model. For translation, int64: src [B, S], src_lengths [B],
            trg_in [B, T] and trg_out [B, T].
        key: the micro-batch's number in the run, which fixes its dropout masks.
        tokens: target tokens, including eos.
    """

    tensors: tuple[Tensor, ...]
    key: int
    tokens: int

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.tensors[0].device
