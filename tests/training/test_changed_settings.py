"""A setting changed between two starts takes effect, as the weights show, or is rejected by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from run_files import records, tensors
from warm import Warm

from deepnmt.checkpoint.checkpoint import load_state

COMMON = ("train.valid_bleu=false", "train.save_every=1", "train.validate_every=100", "train.keep_last=9",
          "train.keep_best=0", "loss_scale.initial_power=3", "loss_scale.window=1")
FP16 = "parallel.ds_config=ds_configs/zero1_fp16.json"  # as in version 0.1: two settings of today
BETA1, BETA2, EPS = 0.9, 0.98, 1e-9  # the recipe's defaults


def trained(warm: Warm, world: int, recipe: Path, run: Path, *changes: str) -> None:
    warm.run(world, "warm:train", recipe, f"run={run}", *COMMON, *changes)


def scale_at(run: Path, update: int) -> dict[str, float] | None:
    return load_state(run / f"checkpoints/update-{update:08d}").loss_scale


def test_what_changes_takes_effect(prepared: Path, tmp_path: Path, warm: Warm) -> None:
    recipe, run = prepared / "recipe.yaml", tmp_path / "run"
    trained(warm, 2, recipe, run, FP16, "train.clip=0", "train.updates=3")
    assert scale_at(run, 3) == {"scale": 64.0, "clean": 3}

    # a while in fp32: the loss scale is kept for later; and the text has moved
    moved = [shutil.copy(prepared / "text" / f"train.{side}", tmp_path) for side in ("en", "de")]
    trained(warm, 1, recipe, run, "parallel.ds_config=null", "train.clip=0", "train.updates=4",
            f"data.train={{src: {moved[0]}, trg: {moved[1]}}}")
    assert scale_at(run, 4) == {"scale": 64.0, "clean": 3}
    message = next(record["message"] for record in records(run, "event") if "resuming from" in record["message"])
    for words in ("now parallel.ds_config: ds_configs/zero1.json -> None", "now parallel.precision: fp16 -> fp32",
                  "now train.updates: 3 -> 4",
                  "now processes: 2 -> 1", "now micro-batches of an update: 2 -> 1"):
        assert words in message, message

    warm.train(1, recipe, f"run={run}", *COMMON, "train.updates=6", "loss_scale.initial_power=4",
               "train.label_smoothing=0.3")
    assert warm.wait() == [2] and "loss_scale.initial_power: 3 -> 4" in warm.said()
    assert "train.label_smoothing: 0.1 -> 0.3" in warm.said(), "the best validation is that of the lowest loss"
    warm.train(1, recipe, f"run={run}", *COMMON, f"data.valid.src={prepared}/text/test.en")
    assert warm.wait() == [2] and "made from other texts than the recipe's data.valid names" in warm.said()

    trained(warm, 2, recipe, run, FP16, "train.updates=7", "train.clip=0.01", "optimizer.lr=0.05",
            "loss_scale.window=2")
    later = records(run, "train")[4:]
    assert [record["loss_scale"] for record in later] == [64, 128, 128], "the fourth clean update doubles it"
    rate = 0.05 * (4 / 7) ** 0.5  # inverse square root after 4 updates of warm-up
    assert later[-1]["learning_rate"] == pytest.approx(rate)
    check_update(run, 7, rate, clip=0.01)
    assert later[-1]["gradient_norm"] > 0.1, "the norm before clipping"

    trained(warm, 2, recipe, run, FP16, "train.updates=5", "train.clip=0.01", "optimizer.lr=0.05",
            "loss_scale.window=2")
    assert "train.updates is 5, and this run is past it" in warm.said()


def check_update(run: Path, update: int, rate: float, clip: float) -> None:
    """Checks that the gradient that Adam used has the norm `clip`, and that the weights changed by `rate` times Adam's
    direction."""
    before, after = (tensors(run, number, "moments") for number in (update - 1, update))
    used = {key: (after[key] - BETA1 * before[key]) / (1 - BETA1) for key in after if key.endswith(".exp_avg")}
    norm = torch.stack([gradient.double().norm() for gradient in used.values()]).norm()
    assert float(norm) == pytest.approx(clip, rel=1e-3)
    old, new = (tensors(run, number, "weights") for number in (update - 1, update))
    for name, weight in new.items():
        mean = after[f"{name}.exp_avg"] / (1 - BETA1**update)
        square = after[f"{name}.exp_avg_sq"] / (1 - BETA2**update)
        torch.testing.assert_close(weight - old[name], -rate * mean / (square.sqrt() + EPS), rtol=1e-3, atol=1e-6)
