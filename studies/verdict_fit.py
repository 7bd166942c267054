"""Fits the doctor's verdict on runs whose outcome was measured, and tests it on runs it was not fitted on.

The rule is two linear regressions (`VerdictRule`): what the validation loss and the source's gain come to. They learn
more from a run than a classifier does, because they are told how far it was from the next outcome. A run gives one
example for each number of updates at which its outcome was measured; together they weigh as much as one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepnmt.extras.doctor.outcome import OUTCOMES, Outcome
from deepnmt.extras.doctor.verdict import FEATURES, Line, VerdictRule

Array = npt.NDArray[np.float64]

DECAYS = (0.1, 0.3, 1.0, 3.0)  # tried weight decays
# What each regression uses: chosen by hand on the runs of the fit, by the log loss with groups held out.
LOSS = ("trial_loss", "trial_norm", "budget", "trial_norm*budget", "below*budget", "blind*budget", "rate*trial_norm",
        "uneven*budget", "width")
GAIN = ("trial_gain", "budget", "below*budget", "blind*budget", "uneven*budget", "updates", "length")
BINS = 5  # of the calibration error


@dataclass(frozen=True)
class Example:
    """One outcome of a run.

    Attributes:
        values: the features.
        reached: what the regressions are to expect: nats below the frequencies, and the gain's logarithm.
        weight: 1 over the number of the run's outcomes.
        groups: by kind of group (text, depth, block), the group the run is in.
        last: whether it is the outcome at the run's end.
    """

    values: dict[str, float]
    reached: tuple[float, float]
    outcome: Outcome
    weight: float
    groups: dict[str, str]
    last: bool


@dataclass(frozen=True)
class Judged:
    """Judged and what came of them."""

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


def fit(
    examples: Sequence[Example], decay: float, loss: Sequence[str] = LOSS, gain: Sequence[str] = GAIN
) -> VerdictRule:
    """The rule with the smallest weighted sum of squared errors + decay · |weights|² of the standardised features."""
    weight = np.array([example.weight for example in examples])

    def line(number: int, names: Sequence[str]) -> Line:
        x = np.array([[math.prod(example.values[part] for part in name.split("*")) for name in names]
                      for example in examples])
        return _regression(x, np.array([example.reached[number] for example in examples]), weight, decay, names)

    values = {name: [example.values[name] for example in examples] for name in FEATURES}
    return VerdictRule(line(0, loss), line(1, gain), {name: [min(own), max(own)] for name, own in values.items()})


def _regression(x: Array, y: Array, weight: Array, decay: float, names: Sequence[str]) -> Line:
    """Ridge regression. The spread is that of each example about a line fitted without it, by the leverages (Allen
    1974, The Relationship between Variable Selection and Data Augmentation and a Method for Prediction). It is taken
    from their median distance, which is 1 / 1.4826 standard deviations of a normal distribution: a few runs that
    diverge lie so far off that the standard deviation itself made the rule say less than it knew."""
    centre, scale = x.mean(0), np.maximum(x.std(0), 1e-6)
    columns = np.hstack([np.ones((len(x), 1)), (x - centre) / scale])
    inverse = np.linalg.inv((columns * weight[:, None]).T @ columns + np.diag([0.0, *[decay] * len(names)]))
    solution = inverse @ ((columns * weight[:, None]).T @ y)
    leverage = weight * np.einsum("ij,jk,ik->i", columns, inverse, columns)
    left = (y - columns @ solution) / np.maximum(1 - leverage, 0.2)
    weights, middle, width = ({name: round(float(value), 6) for name, value in zip(names, each, strict=True)}
                              for each in (solution[1:], centre, scale))
    order = np.argsort(abs(left))
    middle_one = order[np.searchsorted(weight[order].cumsum(), weight.sum() / 2)]
    spread = 1.4826 * float(abs(left[middle_one]))
    return Line(round(float(solution[0]), 6), weights, middle, width, round(spread, 6))


def crossed(examples: Sequence[Example], kind: str, make: Callable[[Sequence[Example]], VerdictRule]) -> Judged:
    """Each group's runs at their end, predicted by a rule fitted on all other groups."""
    pairs = []
    for group in sorted({example.groups[kind] for example in examples}):
        others = [example for example in examples if example.groups[kind] != group]
        rule = make(others)
        pairs += [(rule.probabilities(example.values), example.outcome) for example in examples
                  if example.groups[kind] == group and example.last]
    return Judged(pairs)


def choose(examples: Sequence[Example]) -> float:
    """The decay with the lowest log loss, summed over texts, depths and blocks held out in turn."""
    return min(DECAYS, key=lambda decay: sum(crossed(examples, kind, lambda others: fit(others, decay)).log_loss
                                             for kind in kinds_of(examples)))


def kinds_of(examples: Sequence[Example]) -> list[str]:
    """The kinds of groups of which there are several."""
    return [kind for kind in examples[0].groups if len({example.groups[kind] for example in examples}) > 1]


def report(tested: Judged) -> dict[str, Any]:
    """The figures of a test, for the rule's facts and the docs."""
    return {"runs": len(tested.pairs), "right": round(tested.accuracy, 4),
            "calibration_error": round(tested.calibration_error, 4), "log_loss": round(tested.log_loss, 4)}
