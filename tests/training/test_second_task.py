"""A second task, a decoder-only language model on the toy task, needs no change in deepnmt."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_engines import recipe_of
from torch import nn
from warm import Warm

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import verify
from deepnmt.config import Recipe, with_settings
from deepnmt.data.batching import Position, Update
from deepnmt.files import read_log
from deepnmt.model.loss import LossSums, label_smoothed_loss
from deepnmt.parallel.build import build_engine
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.settings import Layout
from deepnmt.processes.launch import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.tokens import PAD
from deepnmt.training.task import Task
from deepnmt.training.trainer import train
from deepnmt.training.validate import Validation
from studies.toy_task import ToyTask

UPDATES, EPOCH = 16, 6  # micro-batches of an epoch


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

    def waste(self, epoch: int) -> float:
        return 0.0


def validate(recipe: Recipe, data: Walks, engine: Engine, ranks: Ranks) -> Validation:
    [(loss, nll)] = engine.evaluate([batch := data.batch(10**6, ranks.device)])
    return Validation(loss / batch.tokens, nll / batch.tokens, value=loss / batch.tokens)


def start(recipe: Recipe, layout: Layout, data: Walks, ranks: Ranks, initialise: bool) -> Engine:
    engine = build_engine(lambda each: LanguageModel(recipe), recipe, layout, ranks)
    if initialise:
        engine.fill(LanguageModel(recipe).state_dict().__getitem__)
    return engine


LANGUAGE = Task(
    check=lambda recipe: None, open=lambda recipe, texts: Walks(), verify=lambda data: None,
    stream=lambda recipe, data: data, start=start, validate=validate,
    files=lambda data: {"symbols.json": json.dumps(ToyTask().symbols).encode()})


def trained(run: str, layout: str, updates: str) -> int:
    """Runs on each rank."""
    with processes(1, group=layout != "local") as ranks:
        recipe = recipe_of(layout, 2 // ranks.world, updates=int(updates), log_every=1, validate_every=4, save_every=4,
                           valid_bleu=False)
        return train(with_settings(recipe, {
            "run": run, "optimizer.lr": 0.02, "schedule.name": "constant", "schedule.warmup": 0, "average_last": 1,
        }), ranks, LANGUAGE)


@pytest.mark.parametrize(("world", "layout"), [(1, "local"), (2, "zero1_fp32")])
def test_a_language_model_trains_and_resumes(world: int, layout: str, tmp_path: Path, warm: Warm) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for run, updates in ((whole, UPDATES), (broken, UPDATES // 2), (broken, UPDATES)):
        warm.run(world, "test_second_task:trained", run, layout, updates)
    ours, theirs = ([r["loss"] for r in read_log(run / "log.jsonl") if "loss" in r] for run in (broken, whole))
    assert ours == theirs and len(ours) == UPDATES + UPDATES // 4
    assert ours[-1] < math.log(ToyTask().vocabulary) < ours[0]
    last = [run / "checkpoints" / f"update-{UPDATES:08d}" for run in (broken, whole)]
    for checkpoint in last:
        verify(checkpoint)
        assert json.loads((checkpoint / "symbols.json").read_text()) == ToyTask().symbols
    assert len({(checkpoint / "weights.safetensors").read_bytes() for checkpoint in last}) == 1
