"""Optimizers and schedules in the training job: SGD and rates that fall resume bit for bit; what must not change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_files import records, tensors
from warm import Warm

from deepnmt.cli import main

SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.5", "train.valid_bleu=false")
STEP = ("schedule.name=step", "schedule.step_epoch=2")
WSD = ("schedule.name=wsd", "schedule.decay=7")
PLATEAU = ("schedule.name=plateau", "schedule.patience=1", "train.validate_every=2", "train.valid_bleu=true",
           "train.best_by=bleu")  # which such short runs hardly improve


pytestmark = pytest.mark.usefixtures("threads")


def train(prepared: Path, run: Path, *settings: str) -> int:
    return main("train", words(prepared, run, *settings))


def words(prepared: Path, run: Path, *settings: str) -> list[str]:
    return [str(prepared / "recipe.yaml"), f"run={run}", "parallel.ds_config=null", "parallel.threads=1", *settings]


@pytest.mark.parametrize("schedule", [STEP, WSD, PLATEAU], ids=["step", "wsd", "plateau"])
def test_sgd_resumes_bit_for_bit(schedule: tuple[str, ...], prepared: Path, tmp_path: Path, warm: Warm) -> None:
    """Killed while it saves update 6: a run with fewer updates has other rates with wsd, and one validation more."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = (*SGD, *schedule, "schedule.warmup=2", "train.updates=12", "batch.tokens=1536", "batch.accumulation=2")
    assert train(prepared, whole, *settings) == 0
    warm.start(1, "test_fine_tuning:train_until", 3, *words(prepared, broken, *settings))  # saved: the best, update 3
    assert warm.wait() == [-9] and (broken / "checkpoints" / "update-00000003").exists(), warm.said()
    assert train(prepared, broken, *settings) == 0
    for kind in ("weights", "moments"):
        ours, theirs = (tensors(run, 12, kind) for run in (broken, whole))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ours and all(name.endswith(".momentum_buffer") for name in ours)
    trace, again = ([(record["loss"], record["gradient_norm"], record["learning_rate"])
                     for record in records(run, "train")] for run in (whole, broken))
    assert trace == again
    rates = [rate for _, _, rate in trace]
    assert rates[:3] == [0.25, 0.5, 0.5]  # an epoch has more than three updates
    assert rates[-1] < 0.05 and rates[1:] == sorted(rates[1:], reverse=True) and len(set(rates[2:])) > 2


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


def test_squares_that_muon_does_not_keep(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adam would divide the gradients of matrices by almost nothing: with beta2 0.999 its steps were 30 times as long.
    """
    run, muon = tmp_path / "run", ("optimizer.name=muon", "optimizer.momentum=0.95", "train.valid_bleu=false")
    assert train(prepared, run, "train.updates=2", "train.valid_bleu=false") == 0
    assert train(prepared, run, "train.updates=4", *muon) == 0, "all that Muon needs is there"
    assert train(prepared, run, "train.updates=6", "train.valid_bleu=false") == 2
    assert "optimizer.momentum: 0.95 -> 0.0\n  optimizer.name: muon -> adam" in capsys.readouterr().err
