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

_FOLDS = 5
_NO_SQUARE = ("warmup", "bf16", "fp16")  # 0 or 1
_FEWEST = 40  # runs that a rule is made of

Array = npt.NDArray[np.float64]
Record = dict[str, Any]
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
        return self.learned_yes + self.learned_no + self.failed_yes + self.failed_no

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return (self.learned_yes + self.failed_no) / self.total if self.total else float("nan")

    def table(self) -> str:
        """Three lines."""
        return (f"{'':<14}{'said: trains':>14}{'said: fails':>14}\n"
                f"{'learned':<14}{self.learned_yes:>14}{self.learned_no:>14}\n"
                f"{'did not':<14}{self.failed_yes:>14}{self.failed_no:>14}")


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
    counts = {(done, said): 0 for done in (True, False) for said in (True, False)}
    for record in records:
        counts[bool(record["learned"]), rule.probability(record["features"]) >= 0.5] += 1
    return Confusion(counts[True, True], counts[True, False], counts[False, True], counts[False, False])


def held_out(record: Record, share: float) -> bool:
    """Whether a run is held out; a function of its point alone, precision apart."""
    return int.from_bytes(hashlib.sha256(_twins(record).encode()).digest()[:4], "big") / 2**32 < share


def _twins(record: Record) -> str:
    """What runs share that differ in precision alone."""
    return json.dumps(unpaired(record), sort_keys=True)


def unpaired(record: Record) -> dict[str, Any]:
    """The point of a run without its precision: runs that differ in that alone mostly end alike."""
    return {name: value for name, value in record["point"].items() if name != "precision"}


def fit_rule(records: Sequence[Record], share: float = 0.3, splits: int = 20) -> Fitted:
    """The rule of all runs but a `share` that is held out, and what it is worth, on `splits` other splits too.

    Raises:
        UserError: fewer than 40 runs, or all of them ended alike.
    """
    train = [record for record in records if not held_out(record, share)]
    test = [record for record in records if held_out(record, share)]
    if len(records) < _FEWEST or len({record["learned"] for record in train}) < 2:
        raise UserError(f"{len(records)} runs, of which {sum(bool(r['learned']) for r in records)} learned, are too "
                        "few or too much alike for a rule; run more of the grid with python -m studies "
                        "verdict-grid run")
    recipe = choose(train)
    unseen = {}
    for block in sorted({_block(record) for record in records}):
        others = [record for record in records if _block(record) != block]
        own = [record for record in records if _block(record) == block]
        if len(others) < _FEWEST or len({bool(record["learned"]) for record in others}) < 2:
            continue  # no rule without it
        unseen[block] = confusion(FITTERS[recipe](others), own).accuracy
    rule = FITTERS[recipe](train)
    return Fitted(rule, recipe, confusion(rule, test), unseen, [_by_luck(records, share, n) for n in range(splits)])


def _by_luck(records: Sequence[Record], share: float, seed: int) -> float:
    """The accuracy on the part held out of a random split."""
    points = list(dict.fromkeys(map(_twins, records)))
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed)).tolist()
    held = {points[place] for place in order[:round(share * len(points))]}
    train = [record for record in records if _twins(record) not in held]
    test = [record for record in records if _twins(record) in held]
    return confusion(FITTERS[choose(train)](train), test).accuracy


def _block(record: Record) -> str:
    return f"{record['point']['encoder']}/{record['point']['decoder']}"


def choose(train: Sequence[Record]) -> str:
    """The entry of `FITTERS` with the least log loss over five folds."""
    return min(FITTERS, key=lambda name: folded(train, FITTERS[name]))


def folded(records: Sequence[Record], fitter: Fitter) -> float:
    """Log loss in nats a run over five folds, each judged by a rule fitted on the other four."""
    total = 0.0
    number = {point: place for place, point in enumerate(dict.fromkeys(map(_twins, records)))}
    for fold in range(_FOLDS):
        inside = [record for record in records if number[_twins(record)] % _FOLDS == fold]
        rule = fitter([record for record in records if number[_twins(record)] % _FOLDS != fold])
        for record in inside:
            probability = rule.probability(record["features"])
            right = probability if record["learned"] else 1 - probability
            total -= math.log(max(right, 1e-6))
    return total / len(records)


def _table(records: Sequence[Record], names: Sequence[str]) -> tuple[Array, Array]:
    """Features [runs, names] and labels [runs], float64."""
    x = np.array([[record["features"][name] for name in names] for record in records], dtype=np.float64)
    return x, np.array([float(record["learned"]) for record in records])


def _spans(x: Array, names: Sequence[str]) -> dict[str, list[float]]:
    """The least and the largest value of each feature."""
    return {name: [float(column.min()), float(column.max())] for name, column in zip(names, x.T, strict=True)}


def fit_logistic(
    records: Sequence[Record], decay: float, names: Sequence[str] = tuple(FEATURES), by_rate: bool = False
) -> VerdictRule:
    """Logistic regression on standardised features and their squares.

    Args:
        decay: half of it times the squared weights is added to the log loss summed over the runs.
        by_rate: also on the product of each feature with the log rate, so that what a number means may depend on it.
    """
    x, y = _table(records, names)
    standard = StandardScaler().fit(x)
    z = standard.transform(x)
    squared = [place for place, name in enumerate(names) if name not in _NO_SQUARE]
    crossed = [place for place, name in enumerate(names) if name != "rate"] if by_rate else []
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
    return VerdictRule("logistic", list(names), body, _spans(x, names))


def fit_tree(records: Sequence[Record], depth: int, names: Sequence[str] = tuple(FEATURES)) -> VerdictRule:
    """A decision tree by Gini impurity, at most `depth` questions deep, at least five runs in a leaf."""
    x, y = _table(records, names)
    # of labels 0 and 1 the squared error is half the Gini impurity
    tree = DecisionTreeRegressor(max_depth=depth, min_samples_leaf=5, random_state=0).fit(x, y).tree_

    def node(at: int) -> dict[str, Any]:
        runs = int(tree.n_node_samples[at])
        if tree.feature[at] < 0:
            return {"probability": (float(tree.value[at, 0, 0]) * runs + 1) / (runs + 2), "runs": runs}
        return {"feature": names[tree.feature[at]], "threshold": float(tree.threshold[at]),
                "low": node(tree.children_left[at]), "high": node(tree.children_right[at])}

    return VerdictRule("tree", list(names), node(0), _spans(x, names))


FITTERS: dict[str, Fitter] = {
    **{f"logistic, decay {decay}": partial(fit_logistic, decay=decay) for decay in (0.03, 0.1, 0.3, 1.0, 3.0)},
    **{f"logistic by rate, decay {decay}": partial(fit_logistic, decay=decay, by_rate=True)
       for decay in (0.3, 1.0, 3.0)},
    **{f"tree, {depth} questions": partial(fit_tree, depth=depth) for depth in (2, 3, 4)},
}
