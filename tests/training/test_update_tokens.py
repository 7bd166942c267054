"""With `batch.update_tokens` a run has the same losses with any number of processes, layout and size of micro-batches,
also when they change from one start to the next. Dropout is off: its masks are drawn for a micro-batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from refusals import user_error
from tiny_engines import options, recipe_with
from warm import Warm

from deepnmt.config import load_recipe
from deepnmt.data.batching import collate
from deepnmt.model.init import Initialiser, fill
from deepnmt.parallel.engine import build_of
from deepnmt.training.resume import changes_since

UPDATES = 6
# processes, layout, pipeline stages, batch.tokens: what 500 target tokens an update are made of
Start = tuple[int, str, int, int]
SETTINGS = ("batch.update_tokens=500", "model.dropout=0", f"train.updates={UPDATES}", "train.log_every=1",
            "train.validate_every=1000", "train.valid_bleu=false", "train.save_every=1000")


def train(warm: Warm, recipe: Path, run: Path, start: Start, *more: str) -> None:
    world, layout, stages, tokens = start
    warm.run(world, "warm:train", recipe, f"run={run}", *options(layout, stages), *SETTINGS,
             f"batch.tokens={tokens}", *more)


def trace(run: Path) -> list[tuple[float, ...]]:
    found = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [tuple(record[name] for name in ("update", "target_tokens", "epoch", "loss", "gradient_norm"))
            for record in found if record["type"] == "train"]


def check_same(run: Path, control: Path) -> None:
    ours, theirs = trace(run), trace(control)
    assert len(ours) == len(theirs) == UPDATES
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[:3] == other[:3]
        assert mine[3] == pytest.approx(other[3], abs=1e-6)
        assert mine[4] == pytest.approx(other[4], rel=1e-5)


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory, prepared: Path, warm: Warm) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    train(warm, prepared / "recipe.yaml", run, (1, "local", 0, 1024))
    return run


@pytest.mark.parametrize("start", [
    (1, "local", 0, 61), (2, "zero1_fp32", 0, 61), (4, "zero2_fp32", 0, 100), (4, "zero3_fp32", 0, 1024),
    (2, "zero1_fp32", 2, 1024), (4, "zero0_fp32", 2, 61)])
def test_any_layout_and_micro_batch_has_the_same_losses(
    start: Start, control: Path, prepared: Path, tmp_path: Path, warm: Warm
) -> None:
    train(warm, prepared / "recipe.yaml", tmp_path, start)
    check_same(tmp_path, control)


def test_a_run_goes_on_with_other_processes_and_micro_batches(
    control: Path, prepared: Path, tmp_path: Path, warm: Warm
) -> None:
    starts: list[Start] = [(2, "zero1_fp32", 0, 70), (1, "local", 0, 1024), (4, "zero1_fp32", 2, 200)]
    for number, start in enumerate(starts, 1):
        train(warm, prepared / "recipe.yaml", tmp_path, start, f"train.updates={2 * number}")
    check_same(tmp_path, control)
    recipe = load_recipe(tmp_path / "recipe.yaml", ["batch.tokens=300"])
    newest = max((tmp_path / "checkpoints").glob("update-*"))
    fingerprint = json.loads((newest / "state.json").read_text())["extra"]["data_fingerprint"]
    assert "batch.tokens: 200 -> 300" in map(str, changes_since(newest, recipe, [fingerprint], 4))
    other = load_recipe(tmp_path / "recipe.yaml", ["batch.update_tokens=600"])
    with user_error("batch.update_tokens: 500 -> 600"):
        changes_since(newest, other, [fingerprint], 4)


def test_a_recipe_with_accumulation_too_is_refused() -> None:
    with user_error(r"batch: accumulation is 2, but update_tokens \(500\) already says .*; remove one of the two"):
        recipe_with(batch={"update_tokens": 500, "accumulation": 2})


@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_a_micro_batch_without_sentences_counts_nothing(alpha: float) -> None:
    recipe = recipe_with(train={"updates": 1, "r_drop": alpha}, model={"width": 16, "heads": 2, "ffn": 24})
    model = build_of(recipe, (40, 40))(lambda part: None).train()
    fill(model, Initialiser(recipe.model, 40, 40, 1))
    empty = collate(cast(Any, None), [], 7, torch.device("cpu"))
    sums = model(empty)
    sums.loss.backward()
    assert empty.tokens == 0 and float(sums.loss.detach()) == float(sums.nll) == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
