"""Accuracy, F1 and Matthews' correlation, from how often each label was given for each; and their mean over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepnmt.evaluate.significance import student_t

Table = npt.NDArray[np.float64]  # [K, K]: how often the label of a row was predicted to be that of a column


def count(right: npt.NDArray[np.integer], predicted: npt.NDArray[np.integer], labels: int) -> Table:
    """The table of the right labels [N] and the predicted ones [N]."""
    return np.bincount(right * labels + predicted, minlength=labels**2).reshape(labels, labels).astype(np.float64)


def scores(table: Table) -> dict[str, float]:
    """The figures of a table: `accuracy`; `f1`, of the last of two labels, or the mean over more than two; and
    `matthews` (of several labels: Gorodkin 2004, Comparing two K-category assignments). What would divide by 0 is 0."""
    right, total = np.diag(table), float(table.sum())
    actual, predicted = table.sum(1), table.sum(0)
    f1 = 2 * right / np.maximum(actual + predicted, 1)
    covariance = float(right.sum()) * total - float(actual @ predicted)
    scale = math.sqrt((total**2 - float(actual @ actual)) * (total**2 - float(predicted @ predicted)))
    return {"accuracy": float(right.sum()) / total, "f1": float(f1[-1] if len(f1) == 2 else f1.mean()),
            "matthews": covariance / scale if scale else 0.0}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of several seeds' values, and half the width of its 95 % interval by Student's t; NaN of one value."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, student_t(n - 1) * deviation / math.sqrt(n)
