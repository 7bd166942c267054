"""Dropout whose masks are a function of (run seed, micro-batch, place in the model) and of nothing else.

A layer seeds the device's default generator at its entry. Masks are then the same in every layout, activation
checkpointing recomputes them by itself, and a resumed run needs no generator state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def stable_hash(*parts: int | str) -> int:
    """63 bits that depend on the parts alone: the same on every machine and in every process."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_dropout(device: torch.device, seed: int, key: int, name: str) -> None:
    """Seeds the default generator of `device` for the part `name` of the model in the micro-batch `key`.

    `torch.manual_seed` would visit every device; only the one that draws the masks is seeded here.
    """
    number = stable_hash(seed, key, name)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, without dropout; its own mode is put back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class Dropout(nn.Module):
    """Zeroes each element with probability `p` in training and scales the others up, so that the mean stays."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape to the same shape."""
        if not self.training or self.p == 0:
            return x
        return F.dropout(x, self.p) if x.is_cuda else x * cpu_mask(x, self.p)


def cpu_mask(x: Tensor, p: float) -> Tensor:
    """A dropout mask in the shape and type of x: 0 with probability q, else 1 / (1 - q), q = round(2^16 p) / 2^16.

    PyTorch's Bernoulli draws on a CPU take longer than a layer's matrix products. Here one 64-bit draw serves four
    elements, 16 bits each; the scale belongs to the probability as rounded, so the expected value is exact.
    """
    dropped = min(round(p * 2**16), 2**16 - 1)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    mask = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.ge(draws.view(torch.int16)[: x.numel()].view(x.shape), dropped - 2**15, out=mask)
    return mask.mul_(2**16 / (2**16 - dropped))
