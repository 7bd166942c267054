"""The toy task, and small models trained on it side by side."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from deepnmt.extras.doctor.variants import fresh_model
from deepnmt.parallel.engine import LocalEngine
from studies.side_by_side import train_side_by_side
from studies.toy_task import ToyTask
from studies.verdict_text import Choice, draw


def test_toy_task_is_a_permuted_walk() -> None:
    task = ToyTask(symbols=6, successors=2, shortest=3, longest=5, seed=4)
    batch = task.batch(7, 200)
    assert all(torch.equal(task.batch(7, 200)[name], tensor) for name, tensor in batch.tensors.items())
    src, lengths, trg_in, trg_out = batch.tensors.values()
    assert not torch.equal(task.batch(8, 200)["src"][:, :3], src[:, :3]) and batch.key == 7
    assert batch.tokens == int(lengths.sum())
    pairs, follows = set(), set()
    rows = zip(src.tolist(), lengths.tolist(), trg_in.tolist(), trg_out.tolist(), strict=True)
    for row, length, inputs, outputs in rows:
        walk, written = row[: length - 1], outputs[: length - 1]
        assert row[length - 1:] == outputs[length - 1:] == [2] + [3] * (6 - length) and 4 <= length <= 6
        assert inputs[:length] == [1, *written] and set(inputs[length:]) <= {3}
        pairs |= set(zip(walk, written, strict=True))
        follows |= set(pairwise(walk))
    assert len(pairs) == 6 and len({target for _, target in pairs}) == 6  # a permutation
    assert len(follows) == 6 * 2
    assert task.vocabulary == 10 and task.target_only == pytest.approx((math.log(6) + 3 * math.log(2)) / 5)


@pytest.mark.parametrize("blocks", ["pre_ln", "post_ln/dlcl", "admin", "fixup"])
def test_side_by_side_is_one_by_one(blocks: str) -> None:
    encoder, _, decoder = blocks.partition("/")
    task = ToyTask()
    [recipe] = draw(1, 1, Choice(texts=("toy",), seconds=(0.0, 99.0)), Path())
    tree = recipe.model.model_dump()
    for side, block in (("encoder", encoder), ("decoder", decoder or encoder)):
        tree[side] |= {"block": block, "layers": 2, "init": "auto"}
    recipe = recipe.model_copy(update={
        "model": type(recipe.model)(**{**tree, "width": 8, "heads": 2, "ffn": 8, "dropout": 0.0}),
        "optimizer": recipe.optimizer.model_copy(update={"name": "adam"}),
        "train": recipe.train.model_copy(update={"clip": 0.0, "label_smoothing": 0.0})})
    models = [fresh_model(recipe.model, task.vocabulary, task.vocabulary, 1, [task.batch(0, 3)]) for _ in range(2)]
    rates = [[1e-3 * update, 1e-2 / update] for update in range(1, 5)]
    together = list(train_side_by_side(models, (task.batch(u, 3) for u in range(4)), rates, recipe.optimizer))
    for place, model in enumerate(models):
        engine = LocalEngine(model, recipe, torch.device("cpu"))
        for update in range(4):
            batch = task.batch(update, 3)
            alone = engine.train_step([batch], batch.tokens, rates[update][place]).nll / batch.tokens
            assert together[update][place] == pytest.approx(alone, rel=2e-4)
