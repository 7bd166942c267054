"""How far a model's output moves when its weights move, against depth.

Liu et al. 2020 (Admin), theorem 2, corollaries 1 and 2 and figure 4: |F(x, W) - F(x, W*)|² grows like N for Post-LN
and like log N for Pre-LN. Here a change is the mean square of the difference over all elements at real positions,
divided by the output's variance, so that stacks with and without a norm on top stand on one scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.doctor.probes import layer_outputs, matrices, stack_outputs
from deepnmt.model.blocks import Side
from deepnmt.model.init import generator_for
from deepnmt.model.transformer import Transformer


@dataclass(frozen=True)
class Fit:
    """The least-squares line value = slope · term + offset, and its R²."""

    slope: float
    offset: float
    r2: float


def fit_line(terms: Sequence[float], values: Sequence[float]) -> Fit:
    """R² is 1 - (squares left) / (squares around the mean); NaN with fewer than three points or equal values."""
    if len(terms) < 3 or not all(map(math.isfinite, values)):
        return Fit(math.nan, math.nan, math.nan)
    x, y = torch.tensor(terms, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    dx, dy = x - x.mean(), y - y.mean()
    if not dx.square().sum() or not dy.square().sum():
        return Fit(math.nan, math.nan, math.nan)
    slope = float((dx * dy).sum() / dx.square().sum())
    left = (dy - slope * dx).square().sum() / dy.square().sum()
    return Fit(slope, float(y.mean() - slope * x.mean()), float(1 - left))


@dataclass(frozen=True)
class Growth:
    """Changes at several depths N (layers), with their fits to N and to log N."""

    depths: list[int]
    changes: list[float]
    linear: Fit
    logarithmic: Fit

    @classmethod
    def of(cls, depths: Sequence[int], changes: Sequence[float]) -> Growth:
        """Fits both terms."""
        return cls(list(depths), list(changes), fit_line([float(n) for n in depths], changes),
                   fit_line([math.log(n) for n in depths], changes))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def change(before: Tensor, after: Tensor) -> float:
    """mean (after - before)² / Var[before], for outputs [positions, D]."""
    return float((after - before).square().mean() / before.var(correction=0))


def compare(model: Transformer, batch: Batch, before: dict[Side, Tensor]) -> dict[Side, float]:
    """The change of both stacks' outputs since `before` (of `stack_outputs`)."""
    after = stack_outputs(model, batch)
    return {side: change(before[side], after[side]) for side in before}


@contextmanager
@torch.no_grad()
def perturbed(model: Transformer, size: float, seed: int) -> Iterator[None]:
    """While it lasts, noise is added to every matrix of the layers (not to embeddings, norms and biases).

    The noise of a matrix is normal with `size` times Xavier's standard deviation sqrt(2 / (rows + columns)): the same
    for every block, whatever it makes of its own initial weights. Afterwards the weights are what they were.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    named = [(name, parameter.data) for name, parameter in model.named_parameters() if ".layers." in name]
    try:
        for name, matrix in matrices(named):
            kept.append((matrix, matrix.clone()))
            deviation = size * math.sqrt(2 / sum(matrix.shape))
            noise = torch.empty(matrix.shape).normal_(std=deviation, generator=generator_for(seed, f"noise of {name}"))
            matrix.add_(noise.to(matrix))
        yield
    finally:
        for matrix, weights in kept:
            matrix.copy_(weights)


def random_change(
    model: Transformer, batch: Batch, size: float = 0.01, trials: int = 3
) -> dict[Side, float]:
    """The mean change of both outputs over `trials` draws of noise, in evaluation mode; see `perturbed`."""
    was_training = model.training
    model.eval()
    before = stack_outputs(model, batch)
    total: dict[Side, float] = {"encoder": 0.0, "decoder": 0.0}
    for trial in range(trials):
        with perturbed(model, size, trial):
            for side, value in compare(model, batch, before).items():
                total[side] += value / trials
    model.train(was_training)
    return total


@torch.no_grad()
def layer_changes(
    model: Transformer, batch: Batch, size: float = 0.01, trials: int = 3
) -> dict[Side, list[float]]:
    """The mean change of every layer's output in one model over draws of noise, in evaluation mode."""
    was_training = model.training
    model.eval()
    before = layer_outputs(model, batch)
    total: dict[Side, list[float]] = {side: [0.0] * len(outputs) for side, outputs in before.items()}
    for trial in range(trials):
        with perturbed(model, size, trial):
            for side, outputs in layer_outputs(model, batch).items():
                for index, after in enumerate(outputs):
                    total[side][index] += change(before[side][index], after) / trials
    model.train(was_training)
    return total
