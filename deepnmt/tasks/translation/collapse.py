"""When the encoder counts as collapsed, and the sentence that a run says then."""

from __future__ import annotations

from deepnmt.config import Recipe
from deepnmt.tasks.translation.source_use import GAIN, SourceUse

COLLAPSED = 0.9  # the common vector's share in the output of an encoder that has collapsed
LATEST = 1000  # the update from which a collapse counts, however long the warm-up


def has_collapsed(use: SourceUse) -> bool:
    """Whether the encoder puts out one vector and the source is hardly used."""
    return use.encoder_common > COLLAPSED and use.source_gain < GAIN / 2


def settled(recipe: Recipe) -> int:
    """The update from which a collapse counts: the end of the warm-up, in which some encoders come near it and escape,
    but `LATEST` at most."""
    return min(max(1, recipe.schedule.warmup), LATEST)


def collapse_note(recipe: Recipe, update: int, use: SourceUse) -> str | None:
    """A sentence with the setting to change if the encoder has collapsed by this update, else None."""
    if update < settled(recipe) or not has_collapsed(use):
        return None
    factors = {"encoder": 1.0, **recipe.optimizer.lr_factors}
    factors["encoder"] /= 10
    setting = ", ".join(f"{part}: {factor:g}" for part, factor in factors.items())
    return (f"the encoder has collapsed: {use}; in a new run, lower its learning rate alone: "
            f"'optimizer.lr_factors={{{setting}}}' (docs/guide/when_a_run_fails.md)")
