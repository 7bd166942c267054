"""Optimizers and schedules in the training job: SGD and a stepped rate resume bit for bit; what must not change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_files import records, tensors

from deepnmt.cli import main

SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.5", "train.valid_bleu=false")
STEP = ("schedule.name=step", "schedule.warmup=2", "schedule.step_epoch=2", "train.updates=12")


pytestmark = pytest.mark.usefixtures("threads")


def train(prepared: Path, run: Path, *settings: str) -> int:
    return main("train", [str(prepared / "recipe.yaml"), f"run={run}", "parallel.ds_config=null", "parallel.threads=1",
                          *settings])


def test_sgd_with_a_step_resumes_bit_for_bit(prepared: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = (*SGD, *STEP, "batch.tokens=1536", "batch.accumulation=2")  # some updates an epoch
    assert train(prepared, whole, *settings) == 0
    assert train(prepared, broken, *settings, "train.updates=3") == 0
    assert train(prepared, broken, *settings) == 0
    for kind in ("weights", "moments"):
        ours, theirs = (tensors(run, 12, kind) for run in (broken, whole))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ours and all(name.endswith(".momentum_buffer") for name in ours)
    rates, again = ([record["learning_rate"] for record in records(run, "train")] for run in (whole, broken))
    assert rates == again
    assert rates[:2] == [0.25, 0.5] and rates[2] == 0.5  # an epoch has more than three updates
    stepped = [rate for rate in rates if rate < 0.25]
    assert rates[-1] < 0.05 and stepped == sorted(stepped, reverse=True) and len(set(rates[2:])) > 2


def test_sgd_without_momentum_has_nothing_to_store(prepared: Path, tmp_path: Path) -> None:
    for updates in (3, 6):
        assert train(prepared, tmp_path / "run", *SGD, "optimizer.momentum=0.0", f"train.updates={updates}") == 0
    assert tensors(tmp_path / "run", 6, "moments") == {}


def test_another_optimizers_moments_are_rejected(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(prepared, run, "train.updates=3", "train.valid_bleu=false") == 0
    assert train(prepared, run, *SGD) == 2
    output = capsys.readouterr().err
    assert "a run begun with other settings:\n  optimizer.momentum: 0.0 -> 0.9\n  optimizer.name: adam -> sgd" in output
    assert train(prepared, run, "optimizer.name=radam", "train.updates=6", "train.valid_bleu=false") == 0
