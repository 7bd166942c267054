"""One run through `deepnmt train` that changes its layout at every start is the run that never did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm import Warm

# processes, ds_config, pipeline stages; accumulation makes up for it, so that every update has four micro-batches
Start = tuple[int, str, int]
STARTS: list[Start] = [(1, "null", 0), (2, "ds_configs/zero1_{}.json", 0), (4, "ds_configs/zero3_{}.json", 0),
                       (2, "ds_configs/pipeline_zero1_{}.json", 2), (2, "ds_configs/zero2_{}.json", 0),
                       (4, "ds_configs/pipeline_zero1_{}.json", 2), (1, "ds_configs/zero1_{}.json", 0)]
EACH = 4


def records(run: Path, kind: str) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [record for record in found if record["type"] == kind]


def trained(warm: Warm, recipe: Path, run: Path, start: Start, updates: int) -> None:
    world, layout, stages = start
    warm.train(world, recipe, f"run={run}", f"parallel.ds_config={layout}", f"parallel.pipeline_stages={stages}",
               f"batch.accumulation={4 * max(stages, 1) // world}", f"train.updates={updates}",
               "train.validate_every=6")
    assert warm.wait() == [0] * world, warm.said()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("fp16", 2e-2)])
def test_layout_changes_between_starts(
    precision: str, tolerance: float, prepared: Path, tmp_path: Path, warm: Warm
) -> None:
    recipe, whole, moved = prepared / "recipe.yaml", tmp_path / "whole", tmp_path / "moved"
    starts = [(world, layout.format(precision), stages) for world, layout, stages in STARTS]
    starts = starts if precision == "fp32" else starts[1:]
    trained(warm, recipe, whole, starts[0], EACH * len(starts))
    for number, start in enumerate(starts, 1):
        trained(warm, recipe, moved, start, EACH * number)
    ours, theirs = records(moved, "train"), records(whole, "train")
    assert len(ours) == len(theirs) == EACH * len(starts)
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("update", "epoch", "target_tokens", "learning_rate", "loss_scale", "skipped_updates"):
            assert mine[key] == other[key], key
        assert mine["loss"] == pytest.approx(other["loss"], abs=tolerance)
    valid = {record["update"]: record["loss"] for record in records(moved, "valid")}
    common = [record for record in records(whole, "valid") if record["update"] in valid]
    assert len(common) >= 3
    for record in common:
        assert valid[record["update"]] == pytest.approx(record["loss"], abs=tolerance)
