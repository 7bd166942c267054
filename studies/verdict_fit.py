"""Fits the doctor's verdict on runs whose outcome was measured, and tests it on runs it was not fitted on.

The rule is a random forest (`VerdictRule`) that scikit-learn grows. A run gives one example for each number of updates
at which its outcome was measured; together they weigh as much as one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepnmt.extras.doctor.outcome import OUTCOMES, Outcome
from deepnmt.extras.doctor.verdict import FEATURES, FLOOR, Node, Tree, VerdictRule, with_floor

TREES, LEAST_RUNS, MOST_LEAVES = 80, 3, 40  # of the forest; examples and leaves of a tree
POWERS = (1.0, 1.15, 1.3, 1.45, 1.6, 1.8)  # tried
OLD = 0.3  # weight of a run whose trial lacks the figures of the source
BINS = 5  # of the calibration error
FOLDS, ORDERS = 10, 4  # of the learning curve: parts of the runs, and how often they are drawn anew


@dataclass(frozen=True)
class Example:
    """One outcome of a run.

    Attributes:
        values: the features.
        weight: 1 over the number of the run's outcomes, times the weight of the run.
        groups: by kind of group (text, depth, block), the group the run is in.
        last: whether it is the outcome at the run's end.
    """

    values: dict[str, float]
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


def fit(examples: Sequence[Example], power: float = 1.0, trees: int = TREES) -> VerdictRule:
    """The forest of the examples."""
    from sklearn.ensemble import RandomForestClassifier  # in the extra `studies`

    names = list(FEATURES)
    x = np.array([[example.values[name] for name in names] for example in examples])
    y = np.array([OUTCOMES.index(example.outcome) for example in examples])
    forest = RandomForestClassifier(trees, min_samples_leaf=LEAST_RUNS, max_leaf_nodes=MOST_LEAVES, random_state=1)
    forest.fit(x, y, np.array([example.weight for example in examples]))
    spans = {name: [float(column.min()), float(column.max())] for name, column in zip(names, x.T, strict=True)}
    return VerdictRule([_tree(each.tree_, names, forest.classes_) for each in forest.estimators_], power, spans)


def _tree(grown: Any, names: Sequence[str], classes: npt.NDArray[np.int64]) -> Tree:
    """A tree of scikit-learn as ours, in its order: a node comes before those below it."""
    nodes = []
    for number in range(grown.node_count):
        shares = [0.0] * len(OUTCOMES)
        for place, value in zip(classes, grown.value[number, 0], strict=True):
            shares[place] = round(float(value), 4)
        leaf = grown.children_left[number] < 0
        nodes.append(Node(shares) if leaf else Node(
            shares, names[grown.feature[number]], round(float(grown.threshold[number]), 5),
            int(grown.children_left[number]), int(grown.children_right[number])))
    return nodes


def crossed(examples: Sequence[Example], kind: str, make: Callable[[Sequence[Example]], VerdictRule]) -> Judged:
    """Each group's runs at their end, predicted by a rule fitted on all other groups."""
    pairs = []
    for group in sorted({example.groups[kind] for example in examples}):
        others = [example for example in examples if example.groups[kind] != group]
        rule = make(others)
        pairs += [(rule.probabilities(example.values), example.outcome) for example in examples
                  if example.groups[kind] == group and example.last]
    return Judged(pairs)


def choose(held: Sequence[Judged]) -> float:
    """The power with the lowest log loss, summed over texts, depths and blocks held out in turn.

    Args:
        held: judged by rules of power 1, one for each kind of group.
    """
    return min(POWERS, key=lambda power: sum(raised(tested, power).log_loss for tested in held))


def raised(tested: Judged, power: float) -> Judged:
    """As by rules of another power; `tested` is by rules of power 1, with their floor."""
    pairs = []
    for probabilities, outcome in tested.pairs:
        shares = {name: max(0.0, value - FLOOR) for name, value in probabilities.items()}
        pairs.append((with_floor(shares, power), outcome))
    return Judged(pairs)


def learning_curve(
    runs: Sequence[Sequence[Example]], others: Sequence[Example], counts: Sequence[int]
) -> list[list[Judged]]:
    """How right a rule becomes as it learns from more runs. A tenth of the runs is predicted at a time, by a rule of
    power 1 fitted on a count of the rest and on `others`.

    Args:
        runs: the examples of each run, the one of its end last.
        others: examples that every rule is fitted on.

    Returns:
        For each count, `ORDERS` tests of all runs, in which these are drawn in another order; their pairs are in the
        order of `runs`.
    """
    tests = []
    for count in counts:
        drawn = []
        for order in range(ORDERS):
            places = np.random.default_rng(order).permutation(len(runs))
            predicted = {}
            for fold in np.array_split(places, FOLDS):
                rest = [place for place in places if place not in fold]
                rule = fit([*others, *(example for place in rest[:count] for example in runs[place])])
                for place in fold:
                    predicted[place] = rule.probabilities(runs[place][-1].values)
            drawn.append(Judged([(predicted[place], run[-1].outcome) for place, run in enumerate(runs)]))
        tests.append(drawn)
    return tests


def kinds_of(examples: Sequence[Example]) -> list[str]:
    """The kinds of groups of which there are several."""
    return [kind for kind in examples[0].groups if len({example.groups[kind] for example in examples}) > 1]


def report(tested: Judged) -> dict[str, Any]:
    """The figures of a test, for the rule's facts and the docs."""
    return {"runs": len(tested.pairs), "right": round(tested.accuracy, 4),
            "calibration_error": round(tested.calibration_error, 4), "log_loss": round(tested.log_loss, 4)}
