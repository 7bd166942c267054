"""The task's functions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.data.batching import Position, Update
from deepnmt.model.loss import LossSums, label_smoothed_loss
from deepnmt.parallel.build import build_engine
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.tokens import PAD
from deepnmt.training.task import Task, Validation
from studies.toy_task import ToyTask

EPOCH = 6  # micro-batches of an epoch


class LanguageModel(nn.Module):
    """One layer of causal attention between a table and its transpose."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        width = recipe.model.width
        self.table = nn.Embedding(ToyTask().vocabulary, width)
        self.layer = nn.TransformerEncoderLayer(width, recipe.model.heads, recipe.model.ffn, 0.0, batch_first=True)

    def forward(self, batch: Batch) -> LossSums:
        given, following = batch["given"], batch["following"]
        mask = nn.Transformer.generate_square_subsequent_mask(given.size(1), device=given.device)
        hidden = self.layer(self.table(given), src_mask=mask, is_causal=True)
        return label_smoothed_loss(hidden, self.table.weight, following, 0.0, PAD)

    @staticmethod
    def smallest_batch(device: torch.device) -> Batch:
        ids = torch.full((1, 2), PAD + 1, device=device)
        return Batch({"given": ids, "following": ids}, key=0, tokens=2)


class Walks:
    """The data, and the stream of its micro-batches."""

    fingerprint = "walks"

    def batch(self, number: int, device: torch.device) -> Batch:
        made = ToyTask().batch(number, 8)
        tensors = {"given": made["trg_in"], "following": made["trg_out"]}
        return Batch(tensors, number, made.tokens).to(device)

    def update(self, position: Position, count: int, rank: int, world: int, device: torch.device) -> Update:
        first = position.epoch * EPOCH + position.index
        batches = [self.batch(number, device) for number in range(first, first + count)]
        return Update(batches[rank::world], sum(batch.tokens for batch in batches), first / EPOCH,
                      Position(*divmod(first + count, EPOCH)))

    def epoch_size(self, epoch: int) -> int:
        return EPOCH

    def passes(self, position: Position) -> float:
        return position.epoch + position.index / EPOCH

    def waste(self, epoch: int) -> float:
        return 0.0


def validate(recipe: Recipe, data: Walks, engine: Engine, ranks: Ranks) -> Validation:
    [(loss, nll)] = engine.evaluate([batch := data.batch(10**6, ranks.device)])
    bits = nll / batch.tokens / math.log(2)
    return Validation(loss / batch.tokens, math.exp(nll / batch.tokens), bits, {"bits": bits})


def describe(record: Mapping[str, Any]) -> str:
    return f" {record['bits']:.2f} bits a symbol"


def warn(recipe: Recipe, update: int, figures: Mapping[str, Any]) -> str | None:
    return "no bit is left to be learned" if figures["bits"] < 4 else None


def start(recipe: Recipe, layout: Layout, data: Walks, ranks: Ranks, initialise: bool) -> Engine:
    engine = build_engine(lambda each: LanguageModel(recipe), recipe, layout, ranks)
    if initialise:
        engine.fill(LanguageModel(recipe).state_dict().__getitem__)
    return engine


TASK = Task(
    check=lambda recipe: None, open=lambda recipe, texts: Walks(), verify=lambda data: None,
    stream=lambda recipe, data: data, start=start, validate=validate,
    files=lambda data: {"symbols.json": json.dumps(ToyTask().symbols).encode()},
    plan=lambda recipe, card: f"{recipe.model.width} wide, walks called {recipe.data.folder}",
    describe=describe, warn=warn)
