"""The loop that makes updates, shared by the trainer, the studies and the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from deepnmt.config import Recipe
from deepnmt.data.batching import Position, Update
from deepnmt.optim.schedules import learning_rate
from deepnmt.parallel.engine import Engine, StepStats
from deepnmt.processes.ranks import Ranks
from deepnmt.training.state import TrainState

LIMIT = 25  # dropped updates in a row, at one loss scale

# A context manager entered around update `number`; may yield a function that returns figures measured in that update.
UpdateHook = Callable[[int], AbstractContextManager[Callable[[StepStats], dict[str, float]] | None]]


class Batches(Protocol):
    """Where micro-batches come from; see `data.batching.Stream`."""

    def update(self, position: Position, count: int, rank: int, world: int, device: torch.device) -> Update: ...


@dataclass(frozen=True)
class FinishedUpdate:
    """An update that was applied, or dropped because a gradient was not finite.

    Attributes:
        number: from 1; the next update takes the number of a dropped one.
        update: this process's share of its micro-batches.
        stats: the engine's figures.
        measured: figures from the hook.
        stop: whether a stop was requested on any process.
        give_up: whether too many in a row were dropped, see `DroppedUpdates`.
    """

    number: int
    update: Update
    stats: StepStats
    measured: dict[str, float]
    stop: bool
    give_up: bool


class DroppedUpdates:
    """Counts consecutive dropped updates at the same loss scale.

    A few are normal. Many in a row at the same scale are not: above its floor the scale halves with each one, and at
    the floor, or without a loss scale, nothing changes that could help.
    """

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


def updates(
    engine: Engine, batches: Batches, recipe: Recipe, state: TrainState, ranks: Ranks,
    hook: UpdateHook = lambda number: nullcontext(), stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[FinishedUpdate]:
    """Makes updates without end; counts each in `state`, then yields it. Collective.

    Args:
        recipe: its batch, learning rate and `train.max_seconds` are used.
        hook: see `UpdateHook`.
        stop_requested: returns whether this process was asked to stop.
    """
    entries, limit = recipe.batch.entries(engine.data_world), recipe.train.max_seconds

    def take(position: Position) -> Update:
        """This process's share of the update at a position."""
        return batches.update(position, entries, engine.data_rank, engine.data_world, ranks.device)

    def with_tokens(taken: Update, tokens: float) -> Update:
        """With the tokens of all processes, from their sum, in which those of a pipeline count once a stage."""
        return replace(taken, tokens=round(tokens) * engine.data_world // ranks.world)

    def take_at_once(position: Position) -> Update:
        """As `take`, where no update is made meanwhile that could sum its tokens. Collective."""
        taken = take(position)
        return with_tokens(taken, ranks.sum([taken.tokens])[0]) if taken.shared else taken

    ahead, stages, dropped = take_at_once(state.position), len(state.stages), DroppedUpdates()

    def take_ahead(position: Position, late: bool) -> tuple[float, ...]:
        """Takes the next update while the device computes this one; returns what all processes then sum."""
        nonlocal ahead
        ahead = take(position)
        return float(stop_requested()), float(late), *([float(ahead.tokens)] if ahead.shared else [])

    while True:
        if len(state.stages) != stages:  # one has begun, and what was taken may be of the one before
            ahead, stages = take_at_once(state.position), len(state.stages)
        started, number, update = time.monotonic(), state.update + 1, ahead
        late = limit is not None and state.seconds >= limit
        rate = learning_rate(recipe.optimizer.lr, recipe.schedule, number, recipe.train.updates, update.passes,
                             [validation["value"] for validation in state.validations])
        with hook(number) as measure:
            stats = engine.train_step(update.batches, update.tokens, rate, partial(take_ahead, update.next, late))
        measured = measure(stats) if measure and stats.applied else {}
        stop, over, *tokens = stats.flags
        if tokens:
            ahead = with_tokens(ahead, tokens[0])
        state.position, state.out_of_time, interval = update.next, over > 0, state.interval
        if stats.applied:
            state.update = number
            state.target_tokens += update.tokens
            interval.loss += stats.loss
            interval.nll += stats.nll
            for name, value in stats.figures.items():
                interval.figures[name] = interval.figures.get(name, 0.0) + value
            interval.tokens += update.tokens
            interval.gradient_norm += stats.grad_norm
            interval.applied += 1
        else:
            state.skipped += 1
        seconds = time.monotonic() - started
        interval.seconds += seconds
        interval.rate, interval.loss_scale = rate, stats.loss_scale
        state.seconds += seconds
        yield FinishedUpdate(number, update, stats, measured, stop > 0, dropped.count(stats))
