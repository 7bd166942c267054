"""The updates of a run one after the other, for whoever makes some: the trainer, a study, a benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from deepnmt.config import Recipe
from deepnmt.data.batching import Position, Update
from deepnmt.optim import learning_rate
from deepnmt.parallel.engine import Engine, StepStats
from deepnmt.ranks import Ranks
from deepnmt.train.divergence import DroppedUpdates
from deepnmt.train.state import TrainState

# Entered around the update of this number; may give a function that then says what was seen in it.
Around = Callable[[int], AbstractContextManager[Callable[[StepStats], dict[str, float]] | None]]


class Batches(Protocol):
    """Where micro-batches come from; see `data.batching.Stream`."""

    def update(self, position: Position, count: int, rank: int, world: int, device: torch.device) -> Update: ...


@dataclass(frozen=True)
class Finished:
    """An update that was made, or dropped because a gradient was not finite.

    Attributes:
        number: from 1; a dropped update's is taken again by the next.
        update: its micro-batches, this process's share.
        stats: what the engine says of it.
        loss, nll: sums over all processes, smoothed and plain.
        seen: what the hook around it says.
        stop: whether any process was told to stop.
        hopeless: whether so many in a row were dropped that no more are worth trying.
    """

    number: int
    update: Update
    stats: StepStats
    loss: float
    nll: float
    seen: dict[str, float]
    stop: bool
    hopeless: bool


def updates(
    engine: Engine, batches: Batches, recipe: Recipe, state: TrainState, ranks: Ranks,
    around: Around = lambda number: nullcontext(), told: Callable[[], bool] = lambda: False,
) -> Iterator[Finished]:
    """Makes updates without end, each counted in `state` before it is given. Collective.

    Args:
        recipe: accumulation, learning rate and `train.max_seconds` count.
        around: a hook around each update.
        told: whether this process was told to stop.
    """
    dropped = DroppedUpdates()
    while True:
        started, number, limit = time.monotonic(), state.update + 1, recipe.train.max_seconds
        update = batches.update(state.position, engine.data_world * recipe.batch.accumulation, engine.data_rank,
                                engine.data_world, ranks.device)
        rate = learning_rate(recipe.optimizer.lr, recipe.schedule, number, recipe.train.updates, update.passes)
        with around(number) as look:
            stats = engine.train_step(update.batches, update.tokens, rate)
        seen = look(stats) if look and stats.applied else {}
        late = limit is not None and state.seconds >= limit
        loss, nll, stop, over = ranks.sum([stats.loss, stats.nll, float(told()), float(late)])
        state.position, state.out_of_time, interval = update.next, over > 0, state.interval
        if stats.applied:
            state.update = number
            state.target_tokens += update.tokens
            interval.loss += loss
            interval.nll += nll
            interval.tokens += update.tokens
            interval.gradient_norm += stats.grad_norm
            interval.applied += 1
        else:
            state.skipped += 1
        hopeless = dropped.count(stats)
        seconds = time.monotonic() - started
        interval.updates += 1
        interval.seconds += seconds
        interval.rate, interval.loss_scale = rate, stats.loss_scale
        state.seconds += seconds
        yield Finished(number, update, stats, loss, nll, seen, stop > 0, hopeless)
