"""Ends a run whose gradients stay non-finite (see `updates.DroppedUpdates`): the message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import list_checkpoints
from deepnmt.config import Recipe
from deepnmt.errors import UserError
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.training.updates import LIMIT

# Returns sentences on where a run broke and what to try. All processes call it, with their own micro-batches of the
# last update, the factor of their loss sums, and the loss scale on top of that; only rank 0's sentences are used.
Explain = Callable[[Recipe, Engine, Ranks, Sequence[Batch], float, float], list[str]]


class Diverged(UserError):  # noqa: N818 (a state of the run, not of the program)
    """Training cannot continue; the message says where it broke and what to try. Only rank 0 has the full message."""


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
