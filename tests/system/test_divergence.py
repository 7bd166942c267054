"""A run whose gradients stay non-finite ends with a diagnosis; its last checkpoint goes on as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm import Warm

from deepnmt.checkpoint import verify


def losses(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {r["update"]: r["loss"] for r in records if r["type"] == "train"}


def trained(warm: Warm, world: int, recipe: Path, *overrides: str) -> list[int]:
    warm.train(world, recipe, *overrides)
    return warm.wait()


@pytest.mark.parametrize(("world", "layout", "kind"), [
    (1, "null", "fp32"), (2, "ds_configs/zero1_fp32.json", "fp32"), (2, "ds_configs/zero3_bf16.json", "bf16"),
    (2, "ds_configs/zero1_fp16.json", "fp16"),
])
def test_run_that_blew_up(world: int, layout: str, kind: str, prepared: Path, tmp_path: Path, warm: Warm) -> None:
    recipe, run, whole = prepared / "recipe.yaml", tmp_path / "run", tmp_path / "whole"
    common = (f"parallel.ds_config={layout}", "train.valid_bleu=false")
    assert trained(warm, world, recipe, f"run={run}", *common, "train.updates=6") == [0] * world, warm.said()
    # one update at this rate throws every weight out of range
    codes = trained(warm, world, recipe, f"run={run}", *common, "optimizer.lr=1.0e+38", "train.save_every=100")
    said, status = warm.said(), json.loads((run / "STATUS.json").read_text())
    assert codes == [2] * world and "Traceback" not in said, said
    assert status["status"] == "failed" and status["update"] == 7 and status["error"].startswith("Diverged: 25 updates")
    assert f"First non-finite in {kind}: the " in said and "optimizer.lr (now 1e+38)" in said
    assert ("its floor" in said) == (kind == "fp16")
    checkpoint = run / "checkpoints" / "update-00000006"
    assert str(checkpoint) in said
    verify(checkpoint)
    dropped = said.count("a non-finite gradient at update 8: dropped")
    assert dropped == 25 if kind != "fp16" else dropped > 25
    assert trained(warm, world, recipe, f"run={run}", *common) == [0] * world, warm.said()
    assert trained(warm, world, recipe, f"run={whole}", *common) == [0] * world, warm.said()
    assert losses(run) == losses(whole) and len(losses(run)) == 12
