"""The averaging job: checkpoints of a run into one, for the final score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepnmt.checkpoint import average as averaging
from deepnmt.config import Model, Recipe
from deepnmt.errors import UserError


def average_run(
    recipe: Recipe,
    last: int | None = None,
    best: int | None = None,
    updates: Sequence[int] | None = None,
    span: tuple[int, int] | None = None,
    folders: Sequence[str | Path] | None = None,
    output: str | Path | None = None,
    model: Model | None = None,
) -> Path:
    """Averages checkpoints of a run.

    Args:
        recipe: whose `run` holds the checkpoints.
        last, best, updates, span, folders: at most one of these: the last n, the n with the best validation, a list of
            updates, all from one update to another, or checkpoint folders of any runs. Without, the last
            `recipe.average_last`, or fewer where no more of the last ones are kept.
        output: the folder of the average; without, `averaged` in the run folder.
        model: what the checkpoints must hold; without, any one model.

    Returns:
        The folder written.

    Raises:
        UserError: more than one way of choosing, no such checkpoints, or see `averaging.save_average`.
    """
    ways = [last, best, updates, span, folders]
    if sum(way is not None for way in ways) > 1:
        raise UserError("checkpoints to average can be chosen in one way only: last, best, updates, a range or folders")
    checkpoints = Path(recipe.run) / "checkpoints"
    if last is not None:
        chosen = averaging.last(checkpoints, last)
    elif best is not None:
        chosen = averaging.best(checkpoints, best)
    elif updates is not None:
        chosen = averaging.listed(checkpoints, updates)
    elif span is not None:
        chosen = averaging.between(checkpoints, *span)
    elif folders is not None:
        chosen = [Path(folder) for folder in folders]
    else:
        chosen = averaging.up_to_last(checkpoints, recipe.average_last)
    if not chosen:
        raise UserError(f"there is no checkpoint in {checkpoints}; train first")
    target = Path(output) if output is not None else Path(recipe.run) / "averaged"
    return averaging.save_average(chosen, target, model)
