"""Fits the verdict's rule on runs, and tests it on held-out runs. The rule is a logistic regression on features and
their squares, the same with weights that depend on the learning rate, or a decision tree.

Five-fold cross-validation on the training part, by log loss, chooses the form, the weight decay and the tree's depth.
Neighbouring points of a grid are similar, so the rule is also tested with each block held out in turn; one split may be
a lucky one, so also on other random splits. Runs that differ only in precision mostly end alike, so they are always in
the same part.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor

from deepnmt.doctor.verdict import FEATURES, VerdictRule
from deepnmt.errors import UserError
from studies.runs import Record

_FOLDS = 5
_NO_SQUARE = ("warmup", "bf16", "fp16")  # 0 or 1
_MIN_RUNS = 40  # to fit a rule on

Array = npt.NDArray[np.float64]
Fitter = Callable[[Sequence[Record]], VerdictRule]


@dataclass(frozen=True)
class Confusion:
    """Numbers of runs by outcome (learned or failed) and prediction (yes: to train)."""

    learned_yes: int
    learned_no: int
    failed_yes: int
    failed_no: int

    @property
    def total(self) -> int:
        """All runs."""
        return sum(vars(self).values())

    @property
    def accuracy(self) -> float:
        """The share of right predictions."""
        return (self.learned_yes + self.failed_no) / self.total if self.total else float("nan")

    def table(self) -> str:
        """The table as three lines of text."""
        rows = (("", "predicted to train", "predicted to fail"), ("learned", self.learned_yes, self.learned_no),
                ("did not", self.failed_yes, self.failed_no))
        return "\n".join(f"{name:<14}{yes:>20}{no:>20}" for name, yes, no in rows)


@dataclass(frozen=True)
class Fitted:
    """A fitted rule and its accuracy.

    Attributes:
        recipe: the chosen entry of `FITTERS`.
        held: the confusion table of the held-out runs.
        unseen: the accuracy on each block of a rule fitted without that block, if enough other runs are left.
        splits: the accuracy on the held-out part of each random split, of rules chosen and fitted for that split.
    """

    rule: VerdictRule
    recipe: str
    held: Confusion
    unseen: dict[str, float]
    splits: list[float]


def confusion(rule: VerdictRule, records: Sequence[Record]) -> Confusion:
    """The rule's predictions for these runs."""
    pairs = [(bool(record["learned"]), rule.probability(record["features"]) >= 0.5) for record in records]
    return Confusion(*(pairs.count((learned, yes)) for learned in (True, False) for yes in (True, False)))


def unpaired(record: Record) -> dict[str, Any]:
    """The point of a run without its precision."""
    return {name: value for name, value in record["point"].items() if name != "precision"}


def _group_key(record: Record) -> str:
    """A key that is equal for runs that differ only in precision."""
    return json.dumps(unpaired(record), sort_keys=True)


def held_out(record: Record, share: float) -> bool:
    """Whether a run is held out, which depends only on its point without the precision."""
    return int.from_bytes(hashlib.sha256(_group_key(record).encode()).digest()[:4], "big") / 2**32 < share


def _split(records: Sequence[Record], held: Sequence[bool]) -> tuple[list[Record], list[Record]]:
    """The runs to fit a rule on, and those held out."""
    parts: tuple[list[Record], list[Record]] = [], []
    for record, out in zip(records, held, strict=True):
        parts[out].append(record)
    return parts


def _too_alike(records: Sequence[Record]) -> bool:
    """Whether all runs learned, or none."""
    return len({bool(record["learned"]) for record in records}) < 2


def fit_rule(records: Sequence[Record], share: float = 0.3, splits: int = 20) -> Fitted:
    """Fits a rule on all runs but a held-out `share`, and tests it on these and on `splits` other splits.

    Raises:
        UserError: there are fewer than 40 runs, or all of them ended alike.
    """
    train, test = _split(records, [held_out(record, share) for record in records])
    if len(records) < _MIN_RUNS or _too_alike(train):
        raise UserError(f"{len(records)} runs, of which {sum(bool(r['learned']) for r in records)} learned, are too "
                        "few or too similar for a rule; run more of the grid with python -m studies "
                        "verdict-grid run")
    recipe = choose(train)
    unseen = {}
    blocks = [f"{record['point']['encoder']}/{record['point']['decoder']}" for record in records]
    for block in sorted(set(blocks)):
        others, own = _split(records, [each == block for each in blocks])
        if len(others) >= _MIN_RUNS and not _too_alike(others):  # otherwise no rule can be fitted without it
            unseen[block] = confusion(FITTERS[recipe](others), own).accuracy
    rule = FITTERS[recipe](train)
    return Fitted(rule, recipe, confusion(rule, test), unseen,
                  [_random_split_accuracy(records, share, seed) for seed in range(splits)])


def _random_split_accuracy(records: Sequence[Record], share: float, seed: int) -> float:
    """The accuracy on the held-out part of a random split."""
    keys = list(map(_group_key, records))
    points = list(dict.fromkeys(keys))
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed)).tolist()
    held = {points[index] for index in order[: round(share * len(points))]}
    train, test = _split(records, [key in held for key in keys])
    return confusion(FITTERS[choose(train)](train), test).accuracy


def choose(train: Sequence[Record]) -> str:
    """The entry of `FITTERS` with the lowest log loss over five folds."""
    return min(FITTERS, key=lambda name: cross_validated_loss(train, FITTERS[name]))


def cross_validated_loss(records: Sequence[Record], fitter: Fitter) -> float:
    """Log loss in nats per run over five folds, each predicted by a rule fitted on the other four."""
    total = 0.0
    keys = list(map(_group_key, records))
    folds = {key: number % _FOLDS for number, key in enumerate(dict.fromkeys(keys))}
    for fold in range(_FOLDS):
        train, test = _split(records, [folds[key] == fold for key in keys])
        rule = fitter(train)
        for record in test:
            probability = rule.probability(record["features"])
            total -= math.log(max(probability if record["learned"] else 1 - probability, 1e-6))
    return total / len(records)


def _table(records: Sequence[Record], names: Sequence[str]) -> tuple[Array, Array, dict[str, list[float]]]:
    """Features [runs, names] and labels [runs], float64; the smallest and largest value of each feature."""
    x = np.array([[record["features"][name] for name in names] for record in records], dtype=np.float64)
    spans = {name: [float(column.min()), float(column.max())] for name, column in zip(names, x.T, strict=True)}
    return x, np.array([float(record["learned"]) for record in records]), spans


def fit_logistic(
    records: Sequence[Record], decay: float, names: Sequence[str] = tuple(FEATURES), by_rate: bool = False
) -> VerdictRule:
    """Logistic regression on standardised features and their squares.

    Args:
        decay: the summed log loss is increased by decay / 2 times the squared norm of the weights.
        by_rate: also uses the product of each feature with the log rate, so that its effect may depend on the rate.
    """
    x, y, spans = _table(records, names)
    standard = StandardScaler().fit(x)
    z = standard.transform(x)
    squared = [column for column, name in enumerate(names) if name not in _NO_SQUARE]
    crossed = [column for column, name in enumerate(names) if by_rate and name != "rate"]
    products = z[:, crossed] * z[:, [list(names).index("rate")]] if crossed else z[:, :0]
    columns = np.hstack([z, z[:, squared] ** 2, products])
    if len(set(y)) > 1:
        model = LogisticRegression(C=1 / decay, solver="newton-cholesky", tol=1e-8).fit(columns, y)
        weights, bias = model.coef_[0], float(model.intercept_[0])
    else:  # all runs ended alike, so no feature has an effect
        weights, bias = np.zeros(columns.shape[1]), math.log((y.sum() + 1) / (len(y) - y.sum() + 1))
    linear, squares, rates = np.zeros((3, len(names)))
    linear[:], squares[squared], rates[crossed] = np.split(weights, [len(names), len(names) + len(squared)])
    body = {"centre": standard.mean_.tolist(), "scale": standard.scale_.tolist(), "weights": linear.tolist(),
            "squares": squares.tolist(), "by_rate": rates.tolist(), "bias": bias}
    return VerdictRule("logistic", list(names), body, spans)


def fit_tree(records: Sequence[Record], depth: int, names: Sequence[str] = tuple(FEATURES)) -> VerdictRule:
    """A decision tree by Gini impurity, of at most `depth` levels, with at least five runs in a leaf."""
    x, y, spans = _table(records, names)
    # For labels 0 and 1 the squared error is half the Gini impurity.
    tree = DecisionTreeRegressor(max_depth=depth, min_samples_leaf=5, random_state=0).fit(x, y).tree_

    def node(at: int) -> dict[str, Any]:
        runs = int(tree.n_node_samples[at])
        if tree.feature[at] < 0:
            return {"probability": (float(tree.value[at, 0, 0]) * runs + 1) / (runs + 2), "runs": runs}
        return {"feature": names[tree.feature[at]], "threshold": float(tree.threshold[at]),
                "low": node(tree.children_left[at]), "high": node(tree.children_right[at])}

    return VerdictRule("tree", list(names), node(0), spans)


FITTERS: dict[str, Fitter] = {
    **{f"logistic, decay {decay}": partial(fit_logistic, decay=decay) for decay in (0.03, 0.1, 0.3, 1.0, 3.0)},
    **{f"logistic by rate, decay {decay}": partial(fit_logistic, decay=decay, by_rate=True)
       for decay in (0.3, 1.0, 3.0)},
    **{f"tree, {depth} questions": partial(fit_tree, depth=depth) for depth in (2, 3, 4)},
}
