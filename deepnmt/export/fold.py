"""The folding job: the model of a run, or one checkpoint of it, into a plain Post-LN checkpoint."""

from __future__ import annotations

from pathlib import Path

from deepnmt.checkpoint.average import warn_if_outdated
from deepnmt.checkpoint.checkpoint import find_checkpoint
from deepnmt.config import Recipe
from deepnmt.export.post_ln import save_folded


def fold_run(recipe: Recipe, checkpoint: str | Path | None = None, output: str | Path | None = None) -> str:
    """Folds and returns a line that says what was written and how exact it is.

    Args:
        recipe: whose `run` is folded.
        checkpoint: a checkpoint or run folder to be folded in its place; without, the run's average, else its newest.
        output: the folder written; without, `folded` in the run folder.

    Raises:
        UserError: see `folding.save_folded`.
    """
    target = Path(output) if output is not None else Path(recipe.run) / "folded"
    source = find_checkpoint(Path(checkpoint or recipe.run))
    warn_if_outdated(source)
    folded = save_folded(source, target)
    return (f"{folded.folder}: {' and '.join(folded.stacks)} as post_ln; logits of random sentences differ by at most "
            f"{folded.difference:.1e} in float64 (the largest is {folded.largest_logit:.1f})")
