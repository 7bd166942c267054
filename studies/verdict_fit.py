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

import torch
from torch import Tensor

from deepnmt.doctor.verdict import FEATURES, VerdictRule
from deepnmt.errors import UserError

_LEAST_IN_LEAF = 5
_FOLDS = 5
_NO_SQUARE = ("warmup", "bf16", "fp16")  # 0 or 1
_FEWEST = 40  # runs that a rule is made of

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
                        "few or too much alike for a rule; run more of the grid with tools/verdict_grid.py run")
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


def _table(records: Sequence[Record], names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Features [runs, names] and labels [runs], float64."""
    x = torch.tensor([[record["features"][name] for name in names] for record in records], dtype=torch.float64)
    return x, torch.tensor([float(record["learned"]) for record in records], dtype=torch.float64)


def _spans(records: Sequence[Record], names: Sequence[str]) -> dict[str, list[float]]:
    values = {name: [float(record["features"][name]) for record in records] for name in names}
    return {name: [min(found), max(found)] for name, found in values.items()}


def fit_logistic(
    records: Sequence[Record], decay: float, names: Sequence[str] = tuple(FEATURES), by_rate: bool = False
) -> VerdictRule:
    """Logistic regression on standardised features and their squares.

    Args:
        decay: half of it times the squared weights is added to the log loss summed over the runs.
        by_rate: also on the product of each feature with the log rate, so that what a number means may depend on it.
    """
    x, y = _table(records, names)
    centre, scale = x.mean(0), x.std(0, correction=0).clamp_min(1e-9)
    z = (x - centre) / scale
    squared = [place for place, name in enumerate(names) if name not in _NO_SQUARE]
    crossed = [place for place, name in enumerate(names) if name != "rate"] if by_rate else []
    products = z[:, crossed] * z[:, [list(names).index("rate")]] if crossed else z[:, :0]
    found, bias = _newton(torch.cat([z, z[:, squared].square(), products], dim=1), y, decay)
    weights, squares, rates = found.split([len(names), len(squared), len(crossed)])

    def spread(values: Tensor, places: list[int]) -> list[float]:
        return torch.zeros(len(names), dtype=x.dtype).index_copy(0, torch.tensor(places, dtype=torch.int64),
                                                                 values).tolist()

    body = {"centre": centre.tolist(), "scale": scale.tolist(), "weights": weights.tolist(),
            "squares": spread(squares, squared), "by_rate": spread(rates, crossed), "bias": bias}
    return VerdictRule("logistic", list(names), body, _spans(records, names))


def _newton(columns: Tensor, y: Tensor, shrink: float) -> tuple[Tensor, float]:
    """Weights and bias of a logistic regression of y [N] on columns [N, C]."""
    z = torch.cat([columns, torch.ones(len(columns), 1, dtype=columns.dtype)], dim=1)
    decay = torch.full((z.size(1),), shrink, dtype=z.dtype)
    decay[-1] = 1e-6
    weights = torch.zeros(z.size(1), dtype=z.dtype)
    for _ in range(30):
        p = torch.sigmoid(z @ weights)
        slope = z.t() @ (p - y) + decay * weights
        curvature = (z * (p * (1 - p))[:, None]).t() @ z + torch.diag(decay)
        step = torch.linalg.solve(curvature, slope)
        weights = weights - step
        if float(step.abs().max()) < 1e-6:
            break
    return weights[:-1], float(weights[-1])


def fit_tree(records: Sequence[Record], depth: int, names: Sequence[str] = tuple(FEATURES)) -> VerdictRule:
    """A decision tree by Gini impurity, at most `depth` questions deep, at least five runs in a leaf."""
    x, y = _table(records, names)
    return VerdictRule("tree", list(names), _grow(x, y, names, depth), _spans(records, names))


def _grow(x: Tensor, y: Tensor, names: Sequence[str], depth: int) -> dict[str, Any]:
    leaf = {"probability": float((y.sum() + 1) / (len(y) + 2)), "runs": len(y)}
    best: tuple[float, int, float] | None = None
    if depth and len(y) >= 2 * _LEAST_IN_LEAF and 0 < y.sum() < len(y):
        for column in range(x.size(1)):
            split = _best_split(x[:, column], y)
            if split is not None and (best is None or split[0] < best[0]):
                best = (split[0], column, split[1])
    if best is None:
        return leaf
    low = x[:, best[1]] <= best[2]
    return {"feature": names[best[1]], "threshold": best[2], "low": _grow(x[low], y[low], names, depth - 1),
            "high": _grow(x[~low], y[~low], names, depth - 1)}


def _best_split(values: Tensor, y: Tensor) -> tuple[float, float] | None:
    """The impurity (runs × p (1 - p), summed over both sides) and the threshold of the best cut, if there is any."""
    order = values.argsort(stable=True)
    v, ones = values[order], y[order].cumsum(0)
    count = torch.arange(1, len(v) + 1, dtype=v.dtype)
    left = ones - ones.square() / count
    ones_right, count_right = ones[-1] - ones, (len(v) - count).clamp_min(1)
    impurity = left + ones_right - ones_right.square() / count_right
    allowed = (count >= _LEAST_IN_LEAF) & (len(v) - count >= _LEAST_IN_LEAF)
    allowed[:-1] &= v[1:] > v[:-1]
    allowed[-1] = False
    if not allowed.any():
        return None
    cut = int(impurity.masked_fill(~allowed, torch.inf).argmin())
    return float(impurity[cut]), float((v[cut] + v[cut + 1]) / 2)


FITTERS: dict[str, Fitter] = {
    **{f"logistic, decay {decay}": partial(fit_logistic, decay=decay) for decay in (0.03, 0.1, 0.3, 1.0, 3.0)},
    **{f"logistic by rate, decay {decay}": partial(fit_logistic, decay=decay, by_rate=True)
       for decay in (0.3, 1.0, 3.0)},
    **{f"tree, {depth} questions": partial(fit_tree, depth=depth) for depth in (2, 3, 4)},
}
