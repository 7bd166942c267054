"""Ends a run whose gradients stay non-finite: when to give up, and the message.

A few dropped updates are normal. Many in a row at the same loss scale are not: above its floor the scale halves with
each one, and at the floor, or without a loss scale, nothing changes that could help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import list_checkpoints
from deepnmt.config import Recipe
from deepnmt.errors import UserError
from deepnmt.parallel.engine import Engine, StepStats
from deepnmt.processes.ranks import Ranks

LIMIT = 25  # dropped updates in a row, at one loss scale

# Returns sentences on where a run broke and what to try. All processes call it, with their own micro-batches of the
# last update, the factor of their loss sums, and the loss scale on top of that; only rank 0's sentences are used.
Explain = Callable[[Recipe, Engine, Ranks, Sequence[Batch], float, float], list[str]]


class Diverged(UserError):  # noqa: N818 (a state of the run, not of the program)
    """Training cannot continue; the message says where it broke and what to try. Only rank 0 has the full message."""


class DroppedUpdates:
    """Counts consecutive dropped updates at the same loss scale."""

    def __init__(self) -> None:
        self._count, self._scale = 0, 0.0

    def count(self, stats: StepStats) -> bool:
        """Counts one more update; returns whether it is time to give up."""
        if stats.applied:
            self._count = 0
            return False
        self._count = self._count + 1 if stats.loss_scale == self._scale else 1
        self._scale = stats.loss_scale
        return self._count >= LIMIT


def diverged(
    recipe: Recipe, engine: Engine, ranks: Ranks, batches: Sequence[Batch], factor: float, scale: float,
    explain: Explain | None = None, before: Sequence[str] = (),
) -> Diverged:
    """The error that ends the run; for the arguments see `Explain`. Collective.

    Args:
        before: sentences on what was seen before.
    """
    explanation = explain(recipe, engine, ranks, batches, factor, scale) if explain else []
    if not ranks.first:
        silent = Diverged("gradients stay non-finite; rank 0 reports where and what to try")
        silent.reported = True
        return silent
    floor = f" (loss scale {scale:g}, its floor)" if engine.scaler_state() else ""
    checkpoints = list_checkpoints(Path(recipe.run) / "checkpoints")
    left = "No checkpoint was written yet; start again."
    if checkpoints:
        left = (f"{checkpoints[-1]} is untouched: the same command with the changed setting resumes from it. If it "
                "breaks again soon, the weights had diverged before: move the newest checkpoints out of that folder.")
    return Diverged("\n  ".join([f"{LIMIT} updates in a row were dropped because their gradients were not finite, so "
                                 f"the run ends{floor}.", *explanation, *before, left]))
