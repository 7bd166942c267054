"""The loss over a whole text, shared among the processes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from deepnmt.batch import Batch
from deepnmt.data.arrays import Indices
from deepnmt.data.batching import EpochPlan
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks

# Micro-batches passed to the engine in one call. P pipeline stages idle (P - 1) / (64 + P - 1) of the time, 5 % for 4;
# waiting micro-batches are integers, and a stage holds the activations of two.
BATCHES_PER_CALL = 64


def sum_losses(
    plan: EpochPlan, batch: Callable[[Indices, torch.device], Batch], engine: Engine, ranks: Ranks
) -> list[float]:
    """This process's share of the sums (loss, nll, target tokens) over the micro-batches of a plan, which `batch`
    makes. Collective."""
    totals = [0.0, 0.0, 0.0]
    rounds = math.ceil(len(plan) / engine.data_world)  # the same on all: ZeRO-3 gathers weights in every forward
    for first in range(0, rounds, BATCHES_PER_CALL):
        turns = range(first, min(first + BATCHES_PER_CALL, rounds))
        indices = [turn * engine.data_world + engine.data_rank for turn in turns]
        batches = [batch(plan[index if index < len(plan) else 0], ranks.device) for index in indices]
        for index, made, (loss, nll) in zip(indices, batches, engine.evaluate(batches), strict=True):
            if index < len(plan):
                totals = [totals[0] + loss, totals[1] + nll, totals[2] + made.tokens]
    copies = ranks.world // engine.data_world  # the stages of a pipeline count the same tokens
    return [totals[0], totals[1], totals[2] / copies]
