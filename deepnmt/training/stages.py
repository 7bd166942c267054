"""Where a run's stages end (`data.stages`): what the state keeps of it, and its stream is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepnmt.config import Recipe
from deepnmt.data.batching import Position
from deepnmt.training.state import TrainState


def resume_stages(stream: Any, state: TrainState) -> None:
    """Tells a stream the stages that have begun."""
    if state.stages:
        stream.begin_stages([epoch for epoch, _ in state.stages])


def end_stages(recipe: Recipe, stream: Any, state: TrainState) -> list[str]:
    """Ends the stage of the present update, if it is time, and returns what is to be said of those that begin.

    All is a function of the state, so that every process does the same, and so does a run that is resumed. A stage that
    ends within an epoch leaves the rest of that out: the next begins with an epoch.
    """
    said: list[str] = []
    stages = getattr(recipe.data, "stages", ())  # the data of other tasks have none
    while len(state.stages) + 1 < len(stages):
        epoch, update = state.stages[-1] if state.stages else (0, 0)
        until = stages[len(state.stages)].until
        if until.epochs is not None and state.position.epoch >= epoch + until.epochs:
            begin = epoch + until.epochs
        elif _is_over(until.updates, state.update - update) or _is_over(until.patience, _waited(state, update)):
            begin = state.position.epoch + (state.position.index > 0)
            state.position = Position(begin, 0)
        else:
            break
        state.stages.append((begin, state.update))
        if state.best:
            state.best = {**state.best, "waited": 0}
        stream.begin_stages([first for first, _ in state.stages])
        mix = stages[len(state.stages)].mix
        shares = ", ".join(f"{name} {share / sum(mix.values()):.1%}" for name, share in mix.items())
        counted = begin + 1  # from 1, as in progress lines
        said.append(f"stage {len(state.stages) + 1} of {len(stages)} begins with epoch {counted}: {shares}")
    return said


def _is_over(limit: int | None, count: int) -> bool:
    return limit is not None and count >= limit


def _waited(state: TrainState, update: int) -> int:
    """How many validations after an update came after the best of them."""
    values: Sequence[float] = [one["value"] for one in state.validations if one["update"] > update]
    return len(values) - 1 - values.index(min(values)) if values else 0
