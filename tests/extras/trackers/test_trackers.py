"""Weights & Biases and MLflow themselves, both in their modes without a network."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from refusals import user_error

import deepnmt
from deepnmt.extras.trackers import reporters as trackers
from deepnmt.extras.trackers.reporters import TRACKERS, Tracking

TINY = {"train.validate_every": 4, "train.save_every": 2, "train.valid_bleu": False, "model.encoder.block": "pre_ln",
        "model.decoder.block": "pre_ln"}


def train(prepared: Path, run: Path, updates: int, *names: str) -> list[dict[str, Any]]:
    """Trains and returns the training figures of the log."""
    changes = {**TINY, "run": run, "train.updates": updates, "train.trackers": list(names), "schedule.warmup": 1}
    log = deepnmt.train(prepared / "recipe.yaml", changes).log()
    return [record for record in log if record["type"] == "train"]


def test_a_resumed_run_is_one_run_of_mlflow(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed; pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    run, client = tmp_path / "run", MlflowClient(f"file:{tmp_path}/mlruns")
    train(prepared, run, 2, "mlflow")
    identity = json.loads((run / "trackers.json").read_text())["mlflow"]
    assert client.get_run(identity).info.status == "FINISHED"
    figures = train(prepared, run, 4, "mlflow")
    [experiment] = [one for one in client.search_experiments() if one.name == "deepnmt"]
    [kept] = client.search_runs([experiment.experiment_id])
    assert kept.info.run_id == identity and kept.info.run_name == "run" and kept.info.status == "FINISHED"
    assert kept.data.params["model.encoder.block"] == "pre_ln" and kept.data.params["train.trackers"] == "['mlflow']"
    history = client.get_metric_history(identity, "train/loss")
    assert [(one.step, one.value) for one in history] == [(one["update"], one["loss"]) for one in figures]
    assert client.get_metric_history(identity, "valid/loss")[-1].step == 4
    plain = train(prepared, tmp_path / "plain", 2)
    assert [one["loss"] for one in plain] == [one["loss"] for one in figures[:2]], "training does not notice"


def test_a_resumed_run_is_one_run_of_wandb(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed; pip install wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_PROJECT", "tests")):
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    train(prepared, run, 2, "wandb")
    figures = train(prepared, run, 4, "wandb")
    identity = json.loads((run / "trackers.json").read_text())["wandb"]
    attempts = sorted((run / "wandb").glob("offline-run-*"))
    files = [attempt / f"run-{identity}.wandb" for attempt in attempts]
    assert len(files) == 2 and all(file.is_file() for file in files)
    for file, updates in zip(files, (figures[:2], figures[2:]), strict=True):
        content = file.read_bytes()
        assert b"train/loss" in content and b"tests" in content
        for record in figures:
            assert (json.dumps(record["loss"]).encode() in content) == (record in updates)


class Slow:
    """A tracker that fails, and whose server answers when told to."""

    def __init__(self, run: Path, recipe: deepnmt.Recipe, identity: str | None) -> None:
        if recipe.seed == 99:
            raise ConnectionError("no server")
        self.identity, self.taken = identity or "first", []
        self.answers = threading.Event()

    def log(self, update: int, figures: dict[str, float]) -> None:
        if update == 2:
            raise ConnectionError("gone")
        self.answers.wait()
        self.taken.append((update, figures))

    def close(self, status: str) -> None:
        self.taken.append(status)


def test_training_waits_for_no_tracker(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "wandb", (Slow, "do this"))  # type: ignore[arg-type]
    monkeypatch.setattr(trackers, "import_module", lambda name: None)
    recipe = deepnmt.read_recipe(prepared / "recipe.yaml", {"train.trackers": ["wandb"], "run": tmp_path})
    said: list[str] = []
    tracking = Tracking(recipe, said.append)
    for update in (1, 2, 3):
        tracking.record("train", update, {"loss": 1.0})
    slow: Any = tracking._trackers["wandb"]
    assert slow.taken == []
    monkeypatch.setattr(trackers, "CLOSING", 0.01)
    tracking.close("finished")
    assert said == ["wandb did not take the last figures in 0 s; log.jsonl has them all"]
    slow.answers.set()
    tracking._thread.join()
    assert slow.taken == [(1, {"train/loss": 1.0}), (3, {"train/loss": 1.0}), "finished"]
    assert said[1:] == ["wandb did not take figures (gone); training continues, and it is tried again with the next"]
    (tmp_path / "trackers.json").write_text('{"wandb": "mine", "other": 3}')
    again = Tracking(recipe, said.append)
    assert again._trackers["wandb"].identity == "mine"
    again.close("failed")
    with user_error(r"wandb, of train.trackers, cannot begin \(no server\); do this"):
        Tracking(deepnmt.read_recipe(recipe, {"seed": 99}), said.append)

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(trackers, "import_module", missing)
    with user_error("names wandb, which is not installed; run pip install wandb, or remove it"):
        Tracking(recipe, said.append)


def test_mlflow_needs_an_address(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed; pip install mlflow-skinny")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = deepnmt.read_recipe(prepared / "recipe.yaml", {"train.trackers": ["mlflow"], "run": tmp_path})
    with user_error("MLFLOW_TRACKING_URI does not say where its server is"):
        Tracking(recipe, print)
