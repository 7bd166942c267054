"""A stopped run makes up for what was due; one that cannot write its last checkpoint does not report success."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from kills import kill_before
from warm import Warm

from deepnmt import folders
from deepnmt.checkpoint.checkpoint import find_checkpoint, list_checkpoints, weights_in
from deepnmt.cli import COMMANDS, main
from deepnmt.config import Recipe, load_recipe
from deepnmt.errors import UserError
from deepnmt.files import read_log
from deepnmt.folders import FolderWriteError
from deepnmt.parallel.engine import Engine
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.training.status import FAILED, FINISHED, PREEMPTED, SIGNALS, run_status
from deepnmt.training.trainer import Trainer, train
from deepnmt.training.updates import UpdateHook

UPDATES = 7


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restores the signal handlers, which a run replaces."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before):
        signal.signal(number, handler)


def attempt(
    prepared: Path, run: Path, stop_in: int = 0, *overrides: str, signal_number: int = signal.SIGTERM
) -> int:
    """Trains on one process, logging every 3 updates and validating every 2; stopped in update `stop_in`."""
    recipe = load_recipe(prepared / "recipe.yaml", [
        f"run={run}", f"train.updates={UPDATES}", "train.log_every=3", "train.validate_every=2", "train.save_every=100",
        "train.keep_best=0", "train.valid_bleu=false", *overrides])

    @contextmanager
    def around(number: int) -> Iterator[None]:
        if number == stop_in:
            os.kill(os.getpid(), signal_number)
        yield

    with processes(1) as ranks:
        return train(recipe, ranks, watch=lambda *_: around)


def log(run: Path, kind: str, *keys: str) -> list[list[Any]]:
    return [[record[key] for key in keys] for record in read_log(run / "log.jsonl") if record["type"] == kind]


def test_a_validation_that_was_due_is_made_up_for(prepared: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert attempt(prepared, whole) == FINISHED
    assert attempt(prepared, broken, stop_in=4) == PREEMPTED
    assert [update for update, in log(broken, "valid", "update")] == [2]
    # stopped again in the last update: the run has not ended before its last validation
    assert attempt(prepared, broken, stop_in=UPDATES) == PREEMPTED
    assert [update for update, in log(broken, "valid", "update")] == [2, 4, 6]
    assert attempt(prepared, broken) == FINISHED
    valid, train = ("update", "loss", "best"), ("update", "loss", "gradient_norm", "perplexity", "target_tokens")
    assert log(broken, "valid", *valid) == log(whole, "valid", *valid) and len(log(whole, "valid", *valid)) == 4
    # a progress line covers all updates since the last one, across the stop
    assert log(broken, "train", *train) == log(whole, "train", *train) and len(log(whole, "train", *train)) == 3
    states = [json.loads((run / f"checkpoints/update-{UPDATES:08d}/state.json").read_text()) for run in (broken, whole)]
    assert states[0]["best"] == states[1]["best"]
    assert states[0]["extra"]["validations"] == states[1]["extra"]["validations"]


def test_killed_while_the_only_checkpoint_is_replaced(prepared: Path, tmp_path: Path) -> None:
    """A checkpoint with a late validation replaces the one without it."""
    run, only = tmp_path / "run", ("train.keep_last=1", "average_last=1")
    assert attempt(prepared, run, 2, *only) == PREEMPTED
    pid = os.fork()
    if pid == 0:
        try:
            kill_before(2, "update-00000002", "os.rename")  # the first makes way for the second
            attempt(prepared, run, 0, *only)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (left,) = list_checkpoints(run / "checkpoints")
    assert left.name.startswith(".before-update-00000002-") and find_checkpoint(run) == left
    assert attempt(prepared, run, 3, *only) == PREEMPTED
    begun = [words.split()[0] for words, in log(run, "event", "message") if words.startswith(("training", "resuming"))]
    assert begun == ["training", "resuming", "resuming"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["update-00000003"]


def test_a_patience_that_ends_in_a_late_validation(prepared: Path, tmp_path: Path) -> None:
    """At a rate near 0 the second validation is no better than the first."""
    settings = ("optimizer.lr=1.0e-12", "train.patience=1")
    assert attempt(prepared, tmp_path / "run", 4, *settings) == PREEMPTED
    assert attempt(prepared, tmp_path / "run", 0, *settings) == FINISHED
    assert log(tmp_path / "run", "valid", "update") == [[2], [4]]


def test_training_goes_on_while_a_checkpoint_is_written(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of update 2 reaches the disk only when update 4 has begun, and holds the weights of update 2."""
    begun, in_time, waited, fsync = threading.Event(), list[bool](), list[float](), os.fsync
    between: dict[str, float] = {}  # when update 2 had ended, and update 3 began

    def wait_and_sync(descriptor: int) -> None:
        since = time.perf_counter()
        in_time.append(begun.wait(30))
        waited.append(time.perf_counter() - since)
        fsync(descriptor)

    @contextmanager
    def around(number: int) -> Iterator[None]:
        if number == 4:
            begun.set()
        between.setdefault(f"begin {number}", time.perf_counter())
        yield
        between[f"end {number}"] = time.perf_counter()

    settings = ["train.updates=5", "train.save_every=2", "train.log_every=1", "train.valid_bleu=false"]
    with processes(1) as ranks:
        assert train(load_recipe(prepared / "recipe.yaml", [f"run={tmp_path}/one", *settings, "train.updates=2"]),
                     ranks) == FINISHED
        monkeypatch.setattr(os, "fsync", wait_and_sync)
        assert train(load_recipe(prepared / "recipe.yaml", [f"run={tmp_path}/run", *settings]), ranks,
                     watch=lambda *_: around) == FINISHED
    assert in_time and all(in_time), "training waited for the disk"
    ours, theirs = (dict(weights_in(tmp_path / run / "checkpoints/update-00000002")) for run in ("run", "one"))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)
    kinds = [(record["type"], record["update"]) for record in read_log(tmp_path / "run" / "log.jsonl")]
    assert kinds.index(("checkpoint", 4)) > kinds.index(("train", 3))
    found = log(tmp_path / "run", "checkpoint", "checkpoint", "bytes", "stall_seconds", "write_seconds")
    assert [checkpoint for checkpoint, *_ in found] == [2, 4, 5]
    assert found[0][1] == sum(file.stat().st_size for file in (tmp_path / "run/checkpoints/update-00000002").iterdir()
                              if file.name != "manifest.json")
    assert found[0][2] <= between["begin 3"] - between["end 2"] + 1e-3 and found[0][3] >= waited[0] - 1e-3


def test_a_failed_write_is_told_and_the_next_one_tried(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, calls = folders.publish, list[int]()

    def full_once(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise FolderWriteError("the disk is full")
        publish(*arguments)

    monkeypatch.setattr(folders, "publish", full_once)
    assert attempt(prepared, tmp_path, 0, "train.save_every=2", "train.updates=4") == FINISHED
    events = [(message, update) for message, update in log(tmp_path, "event", "message", "update")]
    (told,) = [update for message, update in events if message.startswith("checkpoint not written, training continues")]
    assert told in (3, 4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000004"]


@pytest.mark.parametrize("stop_in", [0, 3])
def test_no_space_for_the_last_checkpoint(prepared: Path, tmp_path: Path, stop_in: int) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(FolderWriteError, match=r"cannot be written: .*the same command then begins anew"):
        attempt(prepared, tmp_path, stop_in, "train.save_every=2")
    events = " ".join(message for message, in log(tmp_path, "event", "message"))
    assert "checkpoint not written, training continues (1 of 3 in a row, then the run ends)" in events
    assert "finished" not in events and "resumes from here" not in events


@pytest.mark.parametrize(("words", "why"), [
    ("seed=8", "holds a run begun with other settings"), ("train.log_every=4", "no such tracker")])
def test_a_refused_resume_is_not_preempted_any_more(
    words: str, why: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a script that starts the run again at `preempted` does so for ever."""
    def refuse(_: Trainer) -> None:
        raise UserError("no such tracker")

    assert attempt(prepared, tmp_path, 2) == PREEMPTED == run_status(tmp_path).code
    monkeypatch.setattr(Trainer, "_add_reporters", refuse)
    with pytest.raises(UserError, match=why):
        attempt(prepared, tmp_path, 0, words)
    status = run_status(tmp_path)
    assert status.code == FAILED and "at update 2, " in status.sentence and why in status.sentence


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_parent_ignores(number: int, prepared: Path, tmp_path: Path) -> None:
    """As nohup does, and a shell for a job in the background, which Ctrl-C is not for."""
    signal.signal(number, signal.SIG_IGN)
    assert attempt(prepared, tmp_path, 2, "train.updates=3", signal_number=number) == FINISHED


@pytest.mark.parametrize("stopped", [False, True])
def test_a_dropped_update_is_logged_once(stopped: bool, prepared: Path, tmp_path: Path) -> None:
    """Killed after it, the run drops it again. Stopped in it, it does not: what is saved then is behind it."""
    def watch(recipe: Recipe, engine: Engine, ranks: Ranks) -> UpdateHook:
        tried: list[int] = []

        @contextmanager
        def around(number: int) -> Iterator[None]:
            tried.append(number)
            if number == killed_in:
                raise RuntimeError("killed")
            weight = next(engine.module.parameters())
            kept = weight.detach().clone()
            if tried.count(number) == 1 and number == 4:
                weight.data.fill_(math.nan)
                if killed_in and stopped:
                    os.kill(os.getpid(), signal.SIGTERM)
            yield
            if weight.isnan().any():
                weight.data.copy_(kept)

        return around

    recipe = load_recipe(prepared / "recipe.yaml", [
        f"run={tmp_path}", "train.updates=6", "train.save_every=3", "train.validate_every=99",
        "train.valid_bleu=false"])
    killed_in = 5
    with nullcontext() if stopped else pytest.raises(RuntimeError, match="killed"):
        assert train(recipe, Ranks.alone(), watch=watch) == PREEMPTED
    killed_in = 0
    assert train(recipe, Ranks.alone(), watch=watch) == FINISHED
    skipped = [message for message, in log(tmp_path, "event", "message") if "skipped update" in message]
    if stopped:
        assert [message.partition(":")[0] for message in skipped][:1] == ["skipped update 4"], skipped
    else:
        assert len(skipped) == 1 and skipped[0].startswith("skipped update 4:"), skipped


def test_all_processes_fail_with_the_last_checkpoint_and_one_reports_it(
        prepared: Path, tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    warm.train(2, prepared / "recipe.yaml", f"run={tmp_path}", "train.updates=2", "train.valid_bleu=false",
               "parallel.ds_config=ds_configs/zero1.json")
    assert warm.wait() == [2, 2], warm.said()
    assert warm.said().count("deepnmt: checkpoint folder") == 1, warm.said()
    assert json.loads((tmp_path / "STATUS.json").read_text())["status"] == "failed"
    warm.start(2, "test_stopping:mistake")
    assert warm.wait() == [2, 2], warm.said()
    assert warm.said().splitlines() == ["deepnmt: only the second makes this"]


def mistake() -> int:
    """Runs on each rank."""
    def start(_: list[str]) -> int:
        with processes(1) as ranks:
            ranks.barrier()
            if ranks.rank == 1:
                raise UserError("only the second makes this")
            return 2

    COMMANDS["train"] = start
    return main("train", [])
