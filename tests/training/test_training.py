"""The training job: a resumed run equals an uninterrupted one bit for bit; its output; what it rejects."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import Refused
from run_files import losses, tensors
from warm import Warm, waiting

from deepnmt.config import load_recipe
from deepnmt.data.batching import Stream, Update
from deepnmt.errors import UserError
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.translation.task import TASK as TRANSLATION
from deepnmt.training import trainer
from deepnmt.training.state import Interval
from deepnmt.training.trainer import train as train_here

Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(warm: Warm) -> Train:
    """Trains a recipe on some processes, which must end with `code`; returns their output."""

    def run(recipe: Path, processes: int, *overrides: str, code: int = 0) -> str:
        warm.train(processes, recipe, *overrides)
        assert warm.wait() == [code] * processes and "Traceback" not in warm.said(), warm.said()
        return warm.said()

    return run


@pytest.mark.parametrize(("processes", "layout"), [(1, "null"), (2, "ds_configs/zero1.json")])
def test_stopped_run_resumes_bit_for_bit(
    prepared: Path, tmp_path: Path, processes: int, layout: str, train: Train
) -> None:
    recipe, whole, broken = prepared / "recipe.yaml", tmp_path / "whole", tmp_path / "broken"
    options = (f"parallel.ds_config={layout}",)
    train(recipe, processes, f"run={whole}", *options)
    # ends after 6 updates (with a checkpoint), then resumes with the full recipe
    train(recipe, processes, f"run={broken}", "train.updates=6", *options)
    (broken / "admin_profile.json").unlink()  # resuming needs only the checkpoint
    assert "train.updates: 6 -> 12" in train(recipe, processes, f"run={broken}", *options)
    assert losses(whole) == losses(broken) and len(losses(whole)) == 12
    ours, theirs = (tensors(run, 12, "weights") for run in (broken, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((whole / "STATUS.json").read_text())["status"] == "finished"
    assert list((whole / "tensorboard").glob("events*"))


def test_sigterm_saves_and_reports_it(prepared: Path, tmp_path: Path, warm: Warm) -> None:
    run = tmp_path / "run"
    [pid] = warm.train(1, prepared / "recipe.yaml", f"run={run}", "train.updates=5000")
    log = run / "log.jsonl"
    for _ in waiting(120, "update 4"):
        if log.exists() and '"type": "train", "update": 4,' in log.read_text():
            break
    os.kill(pid, signal.SIGTERM)
    assert warm.wait() == [75], warm.said()
    status = json.loads((run / "STATUS.json").read_text())
    assert (status["status"], status["signal"]) == ("preempted", "SIGTERM")
    assert (run / "checkpoints" / f"update-{status['update']:08d}" / "manifest.json").exists()


def flip(file: Path, place: int) -> None:
    """Flips one bit of a byte."""
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_skipped(prepared: Path, trained: Path, tmp_path: Path, train: Train) -> None:
    recipe, run = prepared / "recipe.yaml", Path(shutil.copytree(trained, tmp_path / "run"))
    *_, whole, newest = sorted((run / "checkpoints").glob("update-*"))
    file = newest / "weights.safetensors"
    flip(file, file.stat().st_size // 2)
    message = train(recipe, 1, f"run={run}")
    assert "weights.safetensors" in message and f"resuming from {whole}\n" in message


def test_the_status_is_as_new_as_the_progress_line_and_an_untested_deepspeed_is_reported_once(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    monkeypatch.setattr(os, "environ", os.environ.copy())  # later tests must not use this group's port
    monkeypatch.setattr("deepnmt.training.reporters.print_status", lambda line: found.append(
        (line.split("/")[0], json.loads((tmp_path / "run" / "STATUS.json").read_text()))))
    monkeypatch.setattr("deepnmt.parallel.ds_config.version", lambda _: "0.19.99")
    recipe = load_recipe(prepared / "recipe.yaml", [f"run={tmp_path / 'run'}", "train.updates=3",
                                                    "parallel.ds_config=ds_configs/zero1.json"])
    with processes(1, group=True) as ranks:
        assert train_here(recipe, ranks) == 0
    assert found == [(f"update {update}", {"status": "running", "update": update}) for update in (1, 2, 3)]
    assert capsys.readouterr().err.count("DeepSpeed 0.19.99 is installed") == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_data_with_a_flipped_bit_is_rejected(prepared: Path, tmp_path: Path, processes: int, train: Train) -> None:
    shutil.copytree(prepared / "data", tmp_path / "data")
    flip(tmp_path / "data" / "valid.trg.tokens", 0)
    message = train(prepared / "recipe.yaml", processes, f"run={tmp_path / 'run'}", f"data.folder={tmp_path / 'data'}",
                 "parallel.ds_config=ds_configs/zero1.json", code=2)
    assert message.count("SHA-256 of valid.trg.tokens differs from that in manifest.json") == 1, message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("trips", [False, True])
def test_damage_found_beside_the_first_updates_ends_the_run_before_anything_is_saved(
    trips: bool, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Large data are still being read when training begins; training may even trip over the damage first."""
    seen = threading.Event()

    def slowly(_data: object) -> None:
        seen.wait(60)
        raise UserError("prepared data are damaged: x.tokens")

    def update(*_arguments: object) -> Update:
        seen.set()
        if trips:
            raise IndexError("a token that no vocabulary has")
        return draw(*_arguments)

    draw = Stream.update
    monkeypatch.setattr(Stream, "update", update)
    monkeypatch.setattr(trainer, "AT_ONCE", 0.0)
    recipe = load_recipe(prepared / "recipe.yaml", [f"run={tmp_path / 'run'}", "train.updates=5", "train.save_every=3"])
    with pytest.raises(UserError, match=r"^prepared data are damaged: x\.tokens$"):
        train_here(recipe, Ranks.alone(), replace(TRANSLATION, verify=slowly))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert json.loads((tmp_path / "run" / "STATUS.json").read_text())["status"] == "failed"
    assert trips or "update 1/5" in capsys.readouterr().err


@pytest.mark.parametrize(("override", "message"), [
    ("model.width=32", "model.width: 16 -> 32"),
    ("seed=8", "seed: 7 -> 8"),
    ("batch.tokens=512", "batch.tokens: 256 -> 512"),
])
def test_resume_rejects_settings_of_another_run(
    prepared: Path, trained: Path, override: str, message: str, refused: Refused
) -> None:
    assert message in refused("train", prepared / "recipe.yaml", f"run={trained}", override)


def test_two_processes_need_a_layout(prepared: Path, tmp_path: Path, train: Train) -> None:
    message = train(prepared / "recipe.yaml", 2, f"run={tmp_path}", "parallel.ds_config=null", code=2)
    assert message.count("parallel.ds_config is null") == 1


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory, train: Train) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train(prepared / "recipe.yaml", 1, f"run={run}")
    return run


def test_sums_of_an_older_run_are_read() -> None:
    """All but its own are figures of the objective; a sum of 0 is as good as none."""
    old = {"loss": 3.0, "nll": 2.0, "tokens": 5, "updates": 1, "further_loss": 0.5, "none": 0.0}
    read = Interval.from_saved(old)
    assert (read.loss, read.tokens, read.figures) == (3.0, 5, {"further_loss": 0.5})
    assert Interval.from_saved(read.to_saved()) == read
