"""A rule from runs: a logistic regression on features and their squares, the same with weights that depend on the
learning rate, or a decision tree; judged on runs held out.

Which of them, how much the weights are shrunk, and how deep the tree is, is decided on the training part alone, by the
log loss over five folds of it. Since neighbouring points of a grid are alike, the same is also done with each block
held out in turn; and since one split is a matter of luck, with other splits. Runs that differ in precision alone mostly
end alike, so they always stand on the same side.
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
_FEWEST = 40  # runs that a rule is made of

Array = npt.NDArray[np.float64]
Fitter = Callable[[Sequence[Record]], VerdictRule]


@dataclass(frozen=True)
class Confusion:
    """Runs by what they did (learned or not) and what was said of them."""

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
        """The share of right answers."""
        return (self.learned_yes + self.failed_no) / self.total if self.total else float("nan")

    def table(self) -> str:
        """Three lines."""
        rows = (("", "predicted to train", "predicted to fail"), ("learned", self.learned_yes, self.learned_no),
                ("did not", self.failed_yes, self.failed_no))
        return "\n".join(f"{name:<14}{yes:>20}{no:>20}" for name, yes, no in rows)


@dataclass(frozen=True)
class Fitted:
    """A rule, how it was made, and how well it does.

    Attributes:
        recipe: the entry of `FITTERS` that was chosen.
        held: on the runs held out.
        unseen: its accuracy on each block when fitted without that block, where enough others are left.
        splits: the accuracy on the part held out of each of the random splits, everything chosen anew for each.
    """

    rule: VerdictRule
    recipe: str
    held: Confusion
    unseen: dict[str, float]
    splits: list[float]


def confusion(rule: VerdictRule, records: Sequence[Record]) -> Confusion:
    """What the rule says of these runs."""
    answers = [(bool(record["learned"]), rule.probability(record["features"]) >= 0.5) for record in records]
    return Confusion(*(answers.count((done, said)) for done in (True, False) for said in (True, False)))


def unpaired(record: Record) -> dict[str, Any]:
    """The point of a run without its precision: runs that differ in that alone mostly end alike."""
    return {name: value for name, value in record["point"].items() if name != "precision"}


def _group_key(record: Record) -> str:
    """What runs share that differ in precision alone."""
    return json.dumps(unpaired(record), sort_keys=True)


def held_out(record: Record, share: float) -> bool:
    """Whether a run is held out; a function of its point alone, precision apart."""
    return int.from_bytes(hashlib.sha256(_group_key(record).encode()).digest()[:4], "big") / 2**32 < share


def _split(records: Sequence[Record], held: Sequence[bool]) -> tuple[list[Record], list[Record]]:
    """The runs that a rule is fitted on, and those that are held out."""
    parts: tuple[list[Record], list[Record]] = [], []
    for record, out in zip(records, held, strict=True):
        parts[out].append(record)
    return parts


def _too_alike(records: Sequence[Record]) -> bool:
    """Whether they all ended alike."""
    return len({bool(record["learned"]) for record in records}) < 2


def fit_rule(records: Sequence[Record], share: float = 0.3, splits: int = 20) -> Fitted:
    """The rule of all runs but a `share` that is held out, and what it is worth, on `splits` other splits too.

    Raises:
        UserError: fewer than 40 runs, or all of them ended alike.
    """
    train, test = _split(records, [held_out(record, share) for record in records])
    if len(records) < _FEWEST or _too_alike(train):
        raise UserError(f"{len(records)} runs, of which {sum(bool(r['learned']) for r in records)} learned, are too "
                        "few or too much alike for a rule; run more of the grid with python -m studies "
                        "verdict-grid run")
    recipe = choose(train)
    unseen = {}
    blocks = [f"{record['point']['encoder']}/{record['point']['decoder']}" for record in records]
    for block in sorted(set(blocks)):
        others, own = _split(records, [each == block for each in blocks])
        if len(others) >= _FEWEST and not _too_alike(others):  # else there is no rule without it
            unseen[block] = confusion(FITTERS[recipe](others), own).accuracy
    rule = FITTERS[recipe](train)
    return Fitted(rule, recipe, confusion(rule, test), unseen,
                  [_random_split_accuracy(records, share, seed) for seed in range(splits)])


def _random_split_accuracy(records: Sequence[Record], share: float, seed: int) -> float:
    """The accuracy on the part held out of a random split."""
    keys = list(map(_group_key, records))
    points = list(dict.fromkeys(keys))
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed)).tolist()
    held = {points[index] for index in order[: round(share * len(points))]}
    train, test = _split(records, [key in held for key in keys])
    return confusion(FITTERS[choose(train)](train), test).accuracy


def choose(train: Sequence[Record]) -> str:
    """The entry of `FITTERS` with the least log loss over five folds."""
    return min(FITTERS, key=lambda name: folded(train, FITTERS[name]))


def folded(records: Sequence[Record], fitter: Fitter) -> float:
    """Log loss in nats a run over five folds, each judged by a rule fitted on the other four."""
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
    """Features [runs, names] and labels [runs], float64; the least and the largest value of each feature."""
    x = np.array([[record["features"][name] for name in names] for record in records], dtype=np.float64)
    spans = {name: [float(column.min()), float(column.max())] for name, column in zip(names, x.T, strict=True)}
    return x, np.array([float(record["learned"]) for record in records]), spans


def fit_logistic(
    records: Sequence[Record], decay: float, names: Sequence[str] = tuple(FEATURES), by_rate: bool = False
) -> VerdictRule:
    """Logistic regression on standardised features and their squares.

    Args:
        decay: half of it times the squared weights is added to the log loss summed over the runs.
        by_rate: also on the product of each feature with the log rate, so that what a number means may depend on it.
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
    else:  # runs that all ended alike tell nothing about a feature
        weights, bias = np.zeros(columns.shape[1]), math.log((y.sum() + 1) / (len(y) - y.sum() + 1))
    linear, squares, rates = np.zeros((3, len(names)))
    linear[:], squares[squared], rates[crossed] = np.split(weights, [len(names), len(names) + len(squared)])
    body = {"centre": standard.mean_.tolist(), "scale": standard.scale_.tolist(), "weights": linear.tolist(),
            "squares": squares.tolist(), "by_rate": rates.tolist(), "bias": bias}
    return VerdictRule("logistic", list(names), body, spans)


def fit_tree(records: Sequence[Record], depth: int, names: Sequence[str] = tuple(FEATURES)) -> VerdictRule:
    """A decision tree by Gini impurity, at most `depth` questions deep, at least five runs in a leaf."""
    x, y, spans = _table(records, names)
    # of labels 0 and 1 the squared error is half the Gini impurity
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
