"""A run whose gradients stay non-finite ends with a diagnosis; one can resume from its last checkpoint.

In one layout of each kind; if DEEPNMT_LONG is set, in more of them.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from run_files import losses, tensors
from tiny_engines import options
from warm import Warm

from deepnmt.checkpoint.checkpoint import Contents, load_state, load_weights, verify, write_checkpoint

Row = tuple[int, str, int]  # processes, layout, pipeline stages
LONG = bool(os.environ.get("DEEPNMT_LONG"))
BLOWN: list[Row] = [(1, "local", 0), (2, "zero1_fp16", 0), (2, "zero1_fp32", 2)]
BLOWN_TOO: list[Row] = [(2, "zero3_bf16", 0), (2, "zero1_fp32", 0), (2, "zero0_fp32", 2),
                        (2, "zero1_fp16", 2)]
NAMED: list[Row] = [(1, "local", 0), (2, "zero1_fp32", 2)]
NAMED_TOO: list[Row] = [(2, "zero3_fp32", 0)]


@pytest.mark.parametrize(("world", "layout", "stages"), [
    pytest.param(*row, marks=[pytest.mark.slow] * row[1].endswith("fp16"))
    for row in [*BLOWN, *(BLOWN_TOO if LONG else [])]])
def test_run_that_diverged(world: int, layout: str, stages: int, prepared: Path, tmp_path: Path, warm: Warm) -> None:
    recipe, run, whole = prepared / "recipe.yaml", tmp_path / "run", tmp_path / "whole"
    kind = "fp32" if layout == "local" else layout.rpartition("_")[2]
    common = (*options(layout, stages), "train.valid_bleu=false")
    warm.run(world, "warm:train", recipe, f"run={run}", *common, "train.updates=6")
    # one update at this rate makes every weight overflow
    warm.train(world, recipe, f"run={run}", *common, "optimizer.lr=1.0e+38", "train.save_every=100")
    codes = warm.wait()
    output, status = warm.said(), json.loads((run / "STATUS.json").read_text())
    assert codes == [2] * world and "Traceback" not in output and output.count("deepnmt: ") == 1, output
    assert status["status"] == "failed" and status["update"] == 7 and status["error"].startswith("Diverged: 25 updates")
    assert f"First non-finite in {kind}: the " in output and "optimizer.lr (now 1e+38)" in output
    assert ("its floor" in output) == (kind == "fp16")
    checkpoint = run / "checkpoints" / "update-00000006"
    assert str(checkpoint) in output
    verify(checkpoint)
    dropped = output.count("skipped update 8: its gradient is not finite")
    assert dropped == 25 if kind != "fp16" else dropped > 25
    for folder in (run, whole):
        warm.run(world, "warm:train", recipe, f"run={folder}", *common)
    assert losses(run) == losses(whole) and len(losses(run)) == 12


BROKEN = "decoder.layers.1.ffn.fc1"


@pytest.mark.parametrize(("world", "layout", "stages"), [*NAMED, *(NAMED_TOO if LONG else [])])
def test_every_layout_names_the_layer(
    world: int, layout: str, stages: int, blown: Path, prepared: Path, tmp_path: Path, warm: Warm
) -> None:
    run = tmp_path / "run"
    shutil.copytree(blown, run)
    checkpoint = run / "checkpoints" / "update-00000006"
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    warm.train(world, prepared / "recipe.yaml", f"run={run}", *options(layout, stages))
    codes = warm.wait()
    output, status = warm.said(), json.loads((run / "STATUS.json").read_text())
    assert codes == [2] * world and "Traceback" not in output, output
    assert f"First non-finite in fp32: the output of {BROKEN}; the tensor before it reached" in output
    assert status["status"] == "failed" and BROKEN in status["error"]
    assert output.count("skipped update 7: its gradient is not finite") == 25
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == before


@pytest.fixture(scope="module")
def blown(prepared: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """A run whose checkpoint is undamaged, but has a matrix so large that its product overflows."""
    run = tmp_path_factory.mktemp("blown") / "run"
    warm.run(1, "warm:train", prepared / "recipe.yaml", f"run={run}", "train.updates=6", "train.valid_bleu=false")
    checkpoint = run / "checkpoints" / "update-00000006"
    weights = load_weights(checkpoint)
    weights[f"{BROKEN}.weight"].fill_(3e38)
    files = {name: (checkpoint / name).read_bytes() for name in ("src.spm", "trg.spm")}
    write_checkpoint(checkpoint, Contents(weights, tensors(run, 6, "moments"), load_state(checkpoint),
                                          (checkpoint / "recipe.yaml").read_text(), files))
    return run
