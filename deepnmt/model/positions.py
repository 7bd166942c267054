"""How a model knows positions: sinusoids added to the embeddings, or rotated queries and keys.

`T` length, `D` width, `d` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

Rotate = Callable[[Tensor, int, int], Tensor]


class Positions(NamedTuple):
    """`table`: (positions, D) to what is added to the embeddings, [positions, D] or [positions, 1]. `rotate`: queries
    or keys [..., T, d] at the positions `start` to `stop` - 1 (or all at one) to the same shape; None: as they are."""

    table: Callable[[int, int], Tensor]
    rotate: Rotate | None = None


def sinusoids(positions: int, width: int) -> Tensor:
    """The positions [positions, D] of Vaswani et al. 2017, section 3.5, in Marian's order: sines first, then cosines.

    Row p holds sin(p / 10000^(2i/D)) at i and its cosine at D/2 + i, for i < D/2; positions count from 0.
    """
    return _waves(range(positions), width, width // 2)


def fairseq_sinusoids(positions: int, width: int) -> Tensor:
    """As `sinusoids`, but with the rates 10000^(-i / (D/2 - 1)) of tensor2tensor and positions from 2: fairseq counts
    them behind its id of pad."""
    return _waves(range(2, positions + 2), width, max(width // 2 - 1, 1))


def _waves(positions: range, width: int, steps: int) -> Tensor:
    """Sines and cosines of position · 10000^(-i / steps), for i < D/2."""
    if torch.get_default_device().type == "meta":  # to compute there PyTorch would import its compiler: 1.4 s
        return torch.empty(len(positions), width)
    rates = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / steps)
    angles = torch.arange(positions.start, positions.stop, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def no_sinusoids(positions: int, width: int) -> Tensor:
    """Zeros [positions, 1]."""
    return torch.zeros(positions, 1)


def rotated(x: Tensor, start: int, stop: int) -> Tensor:
    """Turns the pair (x_i, x_{i + d/2}) at position p by the angle p / 10000^(2i/d), for i < d/2, in fp32 at least.

    Su et al. 2021, RoFormer, section 3.2.2, whose pairs are neighbours; the two differ by the order of dimensions.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    size = 1 << (stop - 1).bit_length()  # a few tables serve all lengths
    cosines, sines = (table[start:stop] for table in _angles(size, x.size(-1), x.device, dtype))
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1).to(x.dtype)


@lru_cache(maxsize=64)
def _angles(size: int, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [size, d/2]."""
    with torch.inference_mode(False):  # or training could not use what decoding has made
        rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
        angles = torch.arange(size, dtype=torch.float64, device="cpu")[:, None] * rates
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


POSITIONS: dict[str, Positions] = {
    "sinusoidal": Positions(sinusoids),
    "fairseq": Positions(fairseq_sinusoids),
    "rotary": Positions(no_sinusoids, rotated),
}
