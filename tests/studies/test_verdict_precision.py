"""The 16-bit runs that the doctor's verdict is fitted on train as DeepSpeed's engine does."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_engines import parallel, step
from warm import Warm

from deepnmt.batch import Batch
from deepnmt.config import Precision, Recipe, with_settings
from deepnmt.model.init import new_model
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.launch import processes
from deepnmt.parallel.settings import layout_of
from studies.side_by_side import train_side_by_side
from studies.toy_task import ToyTask
from studies.verdict_grid import Point, Settings

TASK, UPDATES, RATE = ToyTask(), 8, 3e-3
BLOCKS = ["post_ln", "pre_ln", "rezero"]
PRECISIONS: dict[Precision, float] = {"bf16": 5e-3, "fp16": 2e-3}  # tolerance of the losses


def recipe(block: str, layout: str, power: int = 13) -> Recipe:
    plain = Point(block, block, 3, RATE, True).recipe(Settings(width=16, heads=2, ffn=32))
    settings = {f"parallel.{name}": value for name, value in parallel(layout).items()}
    return with_settings(plain, {**settings, "loss_scale.initial_power": power})


def runs(precision: str) -> list[tuple[Recipe, list[Batch]]]:
    """A run for each block; in fp16 also one that repeats a batch, whose loss is constant while the scale falls."""
    batches = [TASK.batch(update, 8) for update in range(UPDATES)]
    found = [(recipe(block, f"zero1_{precision}"), batches) for block in BLOCKS]
    if precision == "fp16":
        found.append((recipe("pre_ln", "zero1_fp16", 24), batches[:1] * 2 * UPDATES))
    return found


def trial(folder: str, precision: str) -> None:
    """Runs in one process under DeepSpeed: writes the losses of each run."""
    with processes(threads=1, group=True) as ranks:
        losses = []
        for made, batches in runs(precision):
            engine = start_engine(made, layout_of(made, 1), (TASK.vocabulary, TASK.vocabulary), ranks)
            losses.append([step(engine, [batch], ranks, RATE)[0] for batch in batches])
            engine.close()
        Path(folder, f"{precision}.json").write_text(json.dumps(losses), encoding="utf-8")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_side_by_side_in_16_bits_is_deepspeeds_engine(precision: Precision, tmp_path: Path, warm: Warm) -> None:
    warm.run(1, "test_verdict_precision:trial", tmp_path, precision)
    theirs = json.loads((tmp_path / f"{precision}.json").read_text())
    for number, ((made, batches), expected) in enumerate(zip(runs(precision), theirs, strict=True)):
        model, rates = new_model(made.model, TASK.vocabulary, TASK.vocabulary, made.seed), [[RATE]] * len(batches)
        found, plain = ([losses[0] for losses in train_side_by_side([model], batches, rates, made.optimizer, *narrow)]
                        for narrow in ((precision, made.loss_scale), ()))
        assert found == pytest.approx(expected, rel=PRECISIONS[precision]), number
        if number < len(BLOCKS):
            assert found[0] == pytest.approx(expected[0], rel=2e-5) and abs(plain[0] / expected[0] - 1) > 2e-5, number
            assert expected[-1] < expected[0] - 0.2, number
        else:
            dropped = [sum(a == b for a, b in pairwise(losses)) for losses in (found, expected)]
            assert dropped[0] == dropped[1] > 2 and expected[-1] < expected[0] - 0.1
