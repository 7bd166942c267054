"""A micro-batch on the device: the input of engines, probes and profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from deepnmt.device import upload

TRANSLATION = ("src", "src_lengths", "trg_in", "trg_out")  # the names of translation's tensors


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        tensors: the inputs of the task's model by name. For translation, int64: src [B, S], src_lengths [B],
            trg_in [B, T] and trg_out [B, T]; a further loss may need others.
        key: the micro-batch's number in the run, which fixes its dropout masks.
        tokens: target tokens, including eos.
    """

    tensors: Mapping[str, Tensor]
    key: int
    tokens: int

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], key: int, tokens: int, device: torch.device) -> Batch:
        """A micro-batch of arrays by name, which are copied to the device."""
        return cls({name: upload(torch.from_numpy(array), device) for name, array in arrays.items()}, key, tokens)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def with_tensors(self, **tensors: Tensor) -> Batch:
        """The same with these tensors, new ones or in the place of others."""
        return replace(self, tensors={**self.tensors, **tensors})

    def to(self, device: torch.device) -> Batch:
        """The same with all tensors on a device."""
        return self.with_tensors(**{name: tensor.to(device) for name, tensor in self.tensors.items()})

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(iter(self.tensors.values())).device
