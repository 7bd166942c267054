"""Optimizers and schedules in the training job: SGD and a stepped rate go on to the last bit; what may not change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepnmt.cli import main

SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.5", "train.valid_bleu=false")
STEP = ("schedule.name=step", "schedule.warmup=2", "schedule.step_epoch=2", "train.updates=12")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Commands take the machine's cores; here they run beside other tests."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def train(prepared: Path, run: Path, *settings: str) -> int:
    return main("train", [str(prepared / "recipe.yaml"), f"run={run}", "parallel.ds_config=null", "parallel.threads=1",
                          *settings])


def files(run: Path, update: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"update-{update:08d}"
    return load_file(folder / "weights.safetensors") | load_file(folder / "moments.safetensors")


def log(run: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [record for record in records if record["type"] == "train"]


def test_sgd_with_a_step_goes_on_to_the_last_bit(prepared: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = (*SGD, *STEP, "batch.tokens=1536", "batch.accumulation=2")  # some updates an epoch
    assert train(prepared, whole, *settings) == 0
    assert train(prepared, broken, *settings, "train.updates=3") == 0
    assert train(prepared, broken, *settings) == 0
    ours, theirs = files(broken, 12), files(whole, 12)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    moments = load_file(whole / "checkpoints" / "update-00000012" / "moments.safetensors")
    assert moments and all(name.endswith(".momentum_buffer") for name in moments)
    rates = [record["learning_rate"] for record in log(whole)]
    assert rates == [record["learning_rate"] for record in log(broken)]
    assert rates[:2] == [0.25, 0.5] and rates[2] == 0.5  # the text is seen once in more than three updates
    stepped = [rate for rate in rates if rate < 0.25]
    assert rates[-1] < 0.05 and stepped == sorted(stepped, reverse=True) and len(set(rates[2:])) > 2


def test_sgd_without_momentum_has_nothing_to_store(prepared: Path, tmp_path: Path) -> None:
    for updates in (3, 6):
        assert train(prepared, tmp_path / "run", *SGD, "optimizer.momentum=0.0", f"train.updates={updates}") == 0
    assert load_file(tmp_path / "run" / "checkpoints" / "update-00000006" / "moments.safetensors") == {}


def test_another_optimizers_moments_are_refused(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(prepared, run, "train.updates=3", "train.valid_bleu=false") == 0
    assert train(prepared, run, *SGD) == 2
    said = capsys.readouterr().err
    assert "a run begun with other settings:\n  optimizer.momentum: 0.0 -> 0.9\n  optimizer.name: adam -> sgd" in said
    assert train(prepared, run, "optimizer.name=radam", "train.updates=6", "train.valid_bleu=false") == 0
