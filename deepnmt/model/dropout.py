"""Dropout whose masks depend on (run seed, micro-batch, part of the model) only.

Each layer seeds the device's default generator before it computes. So masks are the same in every layout, activation
checkpointing reproduces them, and a resumed run needs no generator state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from deepnmt import device as device_
from deepnmt.model import ops


def stable_hash(*parts: int | str) -> int:
    """A 63-bit hash of the parts, the same on every machine and in every process."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_dropout(device: torch.device, seed: int, key: int, name: str) -> None:
    """Seeds the default generator of `device` for the part `name` of the model in the micro-batch `key`.

    Unlike `torch.manual_seed`, it seeds no other device.
    """
    device_.default_generator(device).manual_seed(stable_hash(seed, key, name))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode, without dropout, and restores its mode at the end."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class Dropout(nn.Module):
    """In training, zeroes each element with probability `p` and scales the others so that the expected value stays."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    @property
    def rate(self) -> float:
        """The probability now: 0 in evaluation."""
        return self.p if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape to the same shape."""
        return ops.dropout(x, self.rate)
