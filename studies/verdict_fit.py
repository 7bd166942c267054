"""Fits the doctor's verdict on runs whose outcome was measured, and tests it on runs it was not fitted on.

The rule is two logistic regressions (`VerdictRule`): does the model learn anything, and if so, does it read its source?
This is a continuation-ratio model (Fienberg 1980, The Analysis of Cross-Classified Categorical Data), which needs few
weights. A run gives one example for each number of updates at which its outcome was measured; together they weigh as
much as one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepnmt.doctor.outcome import OUTCOMES, Outcome
from deepnmt.doctor.verdict import FEATURES, VerdictRule

Array = npt.NDArray[np.float64]

DECAYS = (0.1, 0.3, 1.0, 3.0)  # tried weight decays
BINS = 5  # of the calibration error


@dataclass(frozen=True)
class Example:
    """One outcome of a run.

    Attributes:
        values: the features.
        weight: 1 over the number of the run's outcomes.
        groups: by kind of group (text, depth, block), the group the run is in.
        last: whether it is the outcome at the run's end.
    """

    values: dict[str, float]
    outcome: Outcome
    weight: float
    groups: dict[str, str]
    last: bool


@dataclass(frozen=True)
class Tested:
    """Predictions and what came of them."""

    pairs: list[tuple[dict[Outcome, float], Outcome]]

    @property
    def accuracy(self) -> float:
        """The share of runs whose most probable outcome came."""
        return float(np.mean([_most(probabilities) == outcome for probabilities, outcome in self.pairs]))

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: over bins of the probability of the predicted outcome, the mean distance
        between that probability and the share of right predictions (Naeini et al. 2015, Guo et al. 2017)."""
        sure = np.array([max(probabilities.values()) for probabilities, _ in self.pairs])
        right = np.array([float(_most(probabilities) == outcome) for probabilities, outcome in self.pairs])
        bins = np.minimum((sure * BINS).astype(int), BINS - 1)
        return float(sum(abs((sure - right)[bins == number].sum()) for number in range(BINS)) / len(sure))

    @property
    def log_loss(self) -> float:
        """Nats a run."""
        return float(np.mean([-np.log(max(probabilities[outcome], 1e-6)) for probabilities, outcome in self.pairs]))

    def table(self) -> list[list[str]]:
        """The confusion table: a row for each outcome, a column for each prediction."""
        head = ["", *(f"predicted: {name}" for name in OUTCOMES)]
        return [head, *([name, *(str(sum(_most(probabilities) == column and outcome == name
                                         for probabilities, outcome in self.pairs)) for column in OUTCOMES)]
                        for name in OUTCOMES)]


def _most(probabilities: dict[Outcome, float]) -> Outcome:
    return max(OUTCOMES, key=probabilities.__getitem__)


def fit(examples: Sequence[Example], decay: float, names: Iterable[str] = FEATURES) -> VerdictRule:
    """The rule with the smallest sum of weighted log losses + decay / 2 · |weights|² of the standardised features."""
    names = list(names)
    x = np.array([[example.values[name] for name in names] for example in examples])
    weight = np.array([example.weight for example in examples])
    rank = np.array([OUTCOMES.index(example.outcome) for example in examples])
    centre, scale = x.mean(0), np.maximum(x.std(0), 1e-6)
    z = (x - centre) / scale
    stages = [_logistic(z[known], (rank[known] > stage).astype(float), weight[known], decay)
              for stage, known in ((0, rank >= 0), (1, rank >= 1))]

    def named(values: Array) -> dict[str, float]:
        return {name: round(float(value), 6) for name, value in zip(names, values, strict=True)}

    return VerdictRule(names, named(centre), named(scale), *({**named(weights[1:]), "bias": round(float(weights[0]), 6)}
                                                             for weights in stages),
                       {name: [float(column.min()), float(column.max())] for name, column in zip(names, x.T,
                                                                                                 strict=True)})


def _logistic(z: Array, y: Array, weight: Array, decay: float) -> Array:
    """Bias and weights of a logistic regression, by Newton's method; the bias is not shrunk (but for 1e-3, so that
    examples of one kind alone have a solution)."""
    columns = np.hstack([np.ones((len(z), 1)), z])
    penalty = np.diag([1e-3, *[decay] * z.shape[1]])
    solution = np.zeros(columns.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(-np.clip(columns @ solution, -500, 500)))
        gradient = columns.T @ (weight * (p - y)) + penalty @ solution
        hessian = (columns * (weight * p * (1 - p))[:, None]).T @ columns + penalty
        step = np.linalg.solve(hessian, gradient)
        solution -= step * min(1.0, 5.0 / max(float(np.abs(step).max()), 1e-12))
        if float(np.abs(step).max()) < 1e-9:
            break
    return solution


def crossed(examples: Sequence[Example], kind: str, make: Callable[[Sequence[Example]], VerdictRule]) -> Tested:
    """Each group's runs at their end, predicted by a rule fitted on all other groups."""
    pairs = []
    for group in sorted({example.groups[kind] for example in examples}):
        others = [example for example in examples if example.groups[kind] != group]
        rule = make(others)
        pairs += [(rule.probabilities(example.values), example.outcome) for example in examples
                  if example.groups[kind] == group and example.last]
    return Tested(pairs)


def choose(examples: Sequence[Example], names: Iterable[str] = FEATURES) -> float:
    """The decay with the lowest log loss, summed over texts, depths and blocks held out in turn."""
    names = list(names)
    return min(DECAYS, key=lambda decay: sum(
        crossed(examples, kind, lambda others: fit(others, decay, names)).log_loss for kind in ("text", "depth",
                                                                                               "block")))


def report(tested: Tested) -> dict[str, Any]:
    """The figures of a test, for the rule's facts and the docs."""
    return {"runs": len(tested.pairs), "right": round(tested.accuracy, 4),
            "calibration_error": round(tested.calibration_error, 4), "log_loss": round(tested.log_loss, 4)}
