"""The 16-bit runs that the doctor's verdict is learned from go the way of DeepSpeed's engine."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_engines import parallel, step
from warm import Warm

from deepnmt.config import Precision, Recipe
from deepnmt.model.init import new_model
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.launch import processes
from deepnmt.parallel.settings import layout_of
from studies.side_by_side import train_side_by_side
from studies.toy_task import ToyTask
from studies.verdict_grid import Point, Settings

TASK, UPDATES, RATE = ToyTask(), 8, 3e-3
BLOCKS = ["post_ln", "pre_ln", "rezero"]
PRECISIONS: dict[Precision, float] = {"bf16": 5e-3, "fp16": 2e-3}  # how far losses may be from the engine's


def recipe(block: str, layout: str, power: int = 13) -> Recipe:
    plain = Point(block, block, 3, RATE, True).recipe(Settings(width=16, heads=2, ffn=32))
    return plain.model_copy(update={
        "parallel": plain.parallel.model_copy(update=parallel(layout)),
        "loss_scale": plain.loss_scale.model_copy(update={"initial_power": power})})


def trial(folder: str, precision: str) -> None:
    """Runs alone under DeepSpeed: the losses of each block."""
    with processes(threads=1, group=True) as ranks:
        losses = []
        for block in BLOCKS:
            made = recipe(block, f"zero1_{precision}")
            engine = start_engine(made, layout_of(made, 1), (TASK.vocabulary, TASK.vocabulary), ranks)
            losses.append([step(engine, [TASK.batch(update, 8)], ranks, RATE)[0] for update in range(UPDATES)])
            engine.close()
        if precision == "fp16":  # the same batch over and over: its loss stands still while the scale falls
            made = recipe("pre_ln", "zero1_fp16", 24)
            engine = start_engine(made, layout_of(made, 1), (TASK.vocabulary, TASK.vocabulary), ranks)
            losses.append([step(engine, [TASK.batch(0, 8)], ranks, RATE)[0] for _ in range(2 * UPDATES)])
            engine.close()
        Path(folder, f"{precision}.json").write_text(json.dumps(losses), encoding="utf-8")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_side_by_side_in_16_bits_is_deepspeeds_engine(precision: Precision, tmp_path: Path, warm: Warm) -> None:
    warm.run(1, "test_verdict_precision:trial", tmp_path, precision)
    theirs = json.loads((tmp_path / f"{precision}.json").read_text())
    if precision == "fp16":
        fallen, made = theirs.pop(), recipe("pre_ln", "zero1_fp16", 24)
        model = new_model(made.model, TASK.vocabulary, TASK.vocabulary, made.seed)
        found = [losses[0] for losses in train_side_by_side(
            [model], [TASK.batch(0, 8)] * 16, [[RATE]] * 16, made.optimizer, precision, made.loss_scale)]
        dropped = [sum(a == b for a, b in pairwise(losses)) for losses in (found, fallen)]
        assert dropped[0] == dropped[1] > 2 and fallen[-1] < fallen[0] - 0.1
        assert found == pytest.approx(fallen, rel=PRECISIONS[precision])
    for block, expected in zip(BLOCKS, theirs, strict=True):
        ours = recipe(block, f"zero1_{precision}")
        model = new_model(ours.model, TASK.vocabulary, TASK.vocabulary, ours.seed)
        batches = [TASK.batch(update, 8) for update in range(UPDATES)]
        found = [losses[0] for losses in train_side_by_side(
            [model], batches, [[RATE]] * UPDATES, ours.optimizer, precision, ours.loss_scale)]
        plain = [losses[0] for losses in train_side_by_side([model], batches, [[RATE]] * UPDATES, ours.optimizer)]
        assert found == pytest.approx(expected, rel=PRECISIONS[precision]), block
        assert found[0] == pytest.approx(expected[0], rel=2e-5) and abs(plain[0] / expected[0] - 1) > 2e-5, block
        assert expected[-1] < expected[0] - 0.2, block
