"""Dropout whose masks depend on (run seed, micro-batch, part of the model) only.

Each layer seeds the device's default generator before it computes. So masks are the same in every layout, activation
checkpointing reproduces them, and a resumed run needs no generator state.

`overrides.py` may put another `dropout` in the place of the one here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt import device as device_


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
        return dropout(x, self.rate)


def dropout(x: Tensor, p: float) -> Tensor:
    """Zeroes each element with probability p and scales the others so that the expected value stays."""
    if p == 0:
        return x
    return F.dropout(x, p) if device_.on_gpu(x) else x * cpu_mask(x, p)


# -- masks on a CPU ---------------------------------------------------------------------------------------------------


def cpu_mask(x: Tensor, p: float) -> Tensor:
    """See `_cpu_mask`, of which torch.compile makes one operation: it cannot follow one that draws in place."""
    return _mask_operation(x.detach(), p) if torch.compiler.is_compiling() else _cpu_mask(x, p)


def dropped_of(p: float) -> int:
    """How many of the 2^16 values of 16 random bits drop an element, for a dropout of p."""
    return min(round(p * 2**16), 2**16 - 1)


def _cpu_mask(x: Tensor, p: float) -> Tensor:
    """A dropout mask in the shape and type of x: 0 with probability q, else 1 / (1 - q), q = round(2^16 p) / 2^16.

    PyTorch's Bernoulli sampling on a CPU takes longer than a layer's matrix products. Here one random 64-bit number
    serves four elements, 16 bits each. The scale is that of the rounded probability, so the expected value is exact.
    """
    dropped = dropped_of(p)
    samples = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    mask = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.ge(samples.view(torch.int16)[: x.numel()].view(x.shape), dropped - 2**15, out=mask)
    return mask.mul_(2**16 / (2**16 - dropped))


_mask_operation = torch.library.custom_op("deepnmt::cpu_mask", _cpu_mask, mutates_args=(),
                                          schema="(Tensor x, float p) -> Tensor",
                                          tags=(torch.Tag.nondeterministic_seeded,))
_mask_operation.register_fake(lambda x, p: torch.empty_like(x, memory_format=torch.contiguous_format))
