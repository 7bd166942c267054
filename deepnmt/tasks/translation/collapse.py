"""When the encoder counts as collapsed, and the sentence that a run says then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepnmt.config import Recipe, on_command_line
from deepnmt.optim.groups import is_in
from deepnmt.tasks.translation.source_use import GAIN, SourceUse

COLLAPSED = 0.9  # the common vector's share in the output of an encoder that has collapsed
SLOW_ENCODER = {"encoder": 0.1}  # factors of the rate with which encoders have not collapsed
SLOW_LAYERS = {"encoder": 0.05, "decoder": 0.2}
LATEST = 1000  # the update from which a collapse counts, however long the warm-up


def has_collapsed(use: SourceUse) -> bool:
    """Whether the encoder puts out one vector and the source is hardly used."""
    return use.encoder_common > COLLAPSED and use.source_gain < GAIN / 2


def settled(recipe: Recipe) -> int:
    """The update from which a collapse counts: the end of the warm-up, in which some encoders come near it and escape,
    but `LATEST` at most."""
    return min(max(1, recipe.schedule.warmup), LATEST)


def slower(factors: Mapping[str, float], side: str, share: float) -> dict[str, float]:
    """Factors of the rate with which a side, and its parts that have one of their own, learn at a share of theirs."""
    if side not in factors:
        factors = {side: 1.0, **factors}
    return {part: share * factor if is_in(side, part) else factor for part, factor in factors.items()}


def slower_encoder(recipe: Recipe) -> dict[str, Any]:
    """Settings with which an encoder that has collapsed learns more slowly. A recipe without factors gets
    them for a quarter of its updates: kept to the end they cost quality (studies/results/collapse.md)."""
    optimizer = recipe.optimizer
    factors = slower(optimizer.lr_factors, "encoder", SLOW_ENCODER["encoder"])
    settings: dict[str, Any] = {"optimizer.lr_factors": factors}
    if not optimizer.lr_factors:
        settings["optimizer.lr_factors_until"] = max(1, recipe.train.updates // 4)
    return settings


def collapse_note(recipe: Recipe, update: int, use: SourceUse) -> str | None:
    """A sentence with the setting to change if the encoder has collapsed by this update, else None."""
    if update < settled(recipe) or not has_collapsed(use):
        return None
    settings, longer, until = slower_encoder(recipe), "", recipe.optimizer.lr_factors_until
    if 0 < until < update:  # it may have collapsed when its rate rose
        settings["optimizer.lr_factors_until"], longer = 2 * until, ", and for longer"
    return (f"the encoder has collapsed: {use}; in a new run, lower its learning rate alone{longer}: "
            f"{on_command_line(settings)} (docs/guide/when_a_run_fails.md)")
