"""The study of rates that carry over: a run of each kind, resumed, and a table of planted losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import studies.transfer as transfer
from deepnmt.config import load_recipe, with_settings
from deepnmt.extras.doctor.coordinates import Size
from studies.runs import fingerprint_of, json_lines


def test_runs_are_recorded_once(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SMALL", Size(16, 1, 1))
    monkeypatch.setattr(transfer, "GROUPS", {"depth": [Size(16, 1, 1), Size(16, 2, 1)]})
    monkeypatch.setattr(transfer, "RATES", 1)
    blocks = ["model.encoder.block=pre_ln", "model.decoder.block=pre_ln"]
    recipe, runs = load_recipe(prepared / "recipe.yaml", blocks), tmp_path / "runs.jsonl"
    transfer.run_all(recipe, runs, 1, 2, 600)
    first = runs.read_text(encoding="utf-8")
    text = transfer.run_all(recipe, runs, 1, 2, 600)
    assert runs.read_text(encoding="utf-8") == first and len(first.splitlines()) == 3
    assert text.startswith("3 runs of 1 seeds") and "| depth | 16 | 2-1 | 0.0" in text
    monkeypatch.setattr(transfer, "train", lambda *_: {"loss": 9.0, "gain": 0.0, "cpu_seconds": 1.0})
    text = transfer.run_all(with_settings(recipe, {"batch.tokens": 512}), runs, 1, 2, 600)
    assert "| 9.000 |" in text and text.startswith("3 runs"), "those of the other recipe are left out"
    assert len(runs.read_text(encoding="utf-8").splitlines()) == 6
    old = [json.loads(line) for line in first.splitlines()]
    for record in old:
        del record["fingerprint"]  # as in older lines
    runs.write_text(json_lines(old), encoding="utf-8")
    transfer.run_all(recipe, runs, 1, 2, 600)
    assert len(runs.read_text(encoding="utf-8").splitlines()) == 3


def test_what_makes_another_run(prepared: Path) -> None:
    """Not where it lies, its seed and its threads, nor what the study varies."""
    recipe = load_recipe(prepared / "recipe.yaml")
    same = with_settings(recipe, {"run": "elsewhere", "seed": 9, "parallel.threads": 2, "data.folder": "moved",
                                  "data.train.src": "moved.en", "optimizer.lr": 0.1})
    own = fingerprint_of(recipe, "data", ["optimizer.lr"])
    assert fingerprint_of(same, "data", ["optimizer.lr"]) == own
    others = [fingerprint_of(recipe, "others", ["optimizer.lr"]), fingerprint_of(same, "data")]
    for setting, value in {"batch.tokens": 512, "parallel.ds_config": "zero1.json", "train.init_from": "run"}.items():
        others.append(fingerprint_of(with_settings(recipe, {setting: value}), "data", ["optimizer.lr"]))
    assert len({own, *others}) == 6


@pytest.mark.parametrize(("last", "found"), [
    ({"update": 2, "loss": "nan", "source_gain": "nan"}, (None, None)), ({"update": 1, "loss": 3.0}, (None, None)),
    ({"update": 2, "loss": 3.0, "source_gain": 0.5}, (3.0, 0.5)), ({"update": 2, "loss": 3.0}, (3.0, None))])
def test_a_run_that_diverged_has_no_loss(
        last: dict[str, Any], found: tuple[Any, Any], prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "short_run", lambda *_: [last])
    recipe = load_recipe(prepared / "recipe.yaml", ["model.encoder.block=pre_ln", "model.decoder.block=pre_ln"])
    record = transfer.train(recipe, {"size": [16, 1, 1], "carried": False, "rate": 1e-3, "seed": 1, "updates": 2})
    assert (record["loss"], record["gain"]) == found


def test_the_best_rate_is_that_of_the_lowest_mean_loss() -> None:
    def run(rate: float, loss: float | None, width: int, carried: bool, seed: int) -> transfer.Record:
        return {"size": [width, 4, 4], "carried": carried, "rate": rate, "seed": seed, "loss": loss, "cpu_seconds": 1.0}

    losses = {(64, True): [3, 2, 4], (256, True): [3, 2.2, 2.1], (256, False): [1, 2, None]}
    records = [run(rate, loss, width, carried, seed) for seed in (1, 2) for (width, carried), row in losses.items()
               for rate, loss in zip((0.1, 0.2, 0.4), row, strict=True)]
    text = transfer.report(records)
    assert "| width | 64 | 4-4 | 0.2 | +0 | 2.000 | 0.2 | +0 | 2.000 |" in text
    assert "| width | 256 | 4-4 | 0.4 (at the end) | +1 | 2.100 | 0.1 (at the end) | -1 | 1.000 |" in text
    assert "| width | 128 | 4-4 | – | – | – | – | – | – |" in text
