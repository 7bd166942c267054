"""`Monitor`: every figure appears on screen, in the JSON-lines log and in TensorBoard; the ETA; and files it writes."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from run_files import scalars

from deepnmt.config import Recipe, load_recipe
from deepnmt.data.prepared import PreparedData
from deepnmt.errors import UserError
from deepnmt.files import drop_partial_line, make_parent_folder, make_run_folder, read_log, write_text
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.plots import save
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import output_may_be_lost, print_status
from deepnmt.tasks.translation.task import TASK as TRANSLATION
from deepnmt.training.log import Monitor
from deepnmt.training.reporters import Console, LogFile
from deepnmt.training.resume import run_lock
from deepnmt.training.trainer import train

RECORD = {"epoch": 3, "loss": 4.25, "perplexity": 51.0, "learning_rate": 2.5e-4, "gradient_norm": 1.75,
          "loss_scale": 4096.0, "target_tokens_per_second": 1234.0, "target_tokens": 98765, "skipped_updates": 2,
          "padding_waste": 0.125, "training_seconds": 80.0}


def test_each_figure_is_on_screen_in_the_log_and_in_tensorboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 180.0])  # the run's beginning, and after its twenty updates
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monitor = Monitor(tmp_path, True, update=0, updates=120, describe=TRANSLATION.describe)
    monitor.train(20, RECORD, 100)
    monkeypatch.undo()
    use = {"source_gain": 0.123, "encoder_common": 0.5, "decoder_common": 0.25, "cross_attention_entropy": 0.875}
    monitor.look(20, use)
    monitor.valid(20, {"loss": 4.5, "perplexity": 60.0, "bleu": 12.5, "signature": "tok:13a", **use, "best": True})
    monitor.close()
    output = capsys.readouterr().err
    assert output.splitlines()[0] == ("update 20/120 epoch 3 loss 4.250 ppl 51.00 lr 2.50e-04 gnorm 1.75 scale 4096 "
                                      "1234 tok/s skipped 2 ETA 6:40")
    used = "source +0.12 common 0.50 attention 0.88"
    assert f"validation at update 20: loss 4.5000 ppl 60.00 BLEU 12.5 {used} (best so far)" in output
    assert f"a first look at update 20: {used}" in output
    trained, looked, validated = read_log(tmp_path / "log.jsonl")
    assert trained == {"type": "train", "update": 20, **RECORD, "seconds_left": 400.0}  # 100 updates of 4 s
    assert looked == {"type": "look", "update": 20, **use} and use.items() <= validated.items()
    assert validated["bleu"] == 12.5 and validated["signature"] == "tok:13a"
    board = scalars(tmp_path)
    expected = {**{f"train/{k}": v for k, v in RECORD.items()}, "train/seconds_left": 400.0, "valid/loss": 4.5,
                "valid/perplexity": 60.0, "valid/bleu": 12.5, "valid/best": 1.0,
                **{f"valid/{k}": v for k, v in use.items()}}
    assert {tag: values[20] for tag, values in board.items()} == pytest.approx(expected)


def test_the_eta_is_never_above_the_time_limit(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, True, update=0, updates=10**9)
    monitor.train(1, RECORD, 10**9 - 1, at_most=7.0)
    monitor.close()
    assert read_log(tmp_path / "log.jsonl")[0]["seconds_left"] == 7.0


def test_a_slow_beginning_does_not_spoil_the_eta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 900.0, 910.0, 920.0, 930.0])  # a second an update, but for the first ten
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monitor = Monitor(tmp_path, True, update=0, updates=100)
    for update in (10, 20, 30, 40):
        monitor.train(update, RECORD, 100 - update)
    monkeypatch.undo()
    monitor.close()
    assert [record["seconds_left"] for record in read_log(tmp_path / "log.jsonl")] == [8100.0, 80.0, 70.0, 60.0]


def test_the_start_is_no_part_of_the_eta(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 10,000 seconds: an Admin profile, for example."""
    real = time.monotonic

    def start(recipe: Recipe, layout: Layout, data: PreparedData, ranks: Ranks, initialise: bool) -> Engine:
        monkeypatch.setattr(time, "monotonic", lambda: real() + 10_000)
        return TRANSLATION.start(recipe, layout, data, ranks, initialise)

    recipe = load_recipe(prepared / "recipe.yaml", [f"run={tmp_path}", "train.updates=2", "train.valid_bleu=false"])
    assert train(recipe, Ranks.alone(), replace(TRANSLATION, start=start)) == 0
    first, _ = [record for record in read_log(tmp_path / "log.jsonl") if record["type"] == "train"]
    assert first["seconds_left"] < 5000


def test_only_rank_0_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(tmp_path / "run", False, update=0, updates=10)
    monitor.train(1, RECORD, 9)
    monitor.valid(1, {"loss": 4.5, "perplexity": 60.0, "best": True})
    monitor.event(1, "something happened")
    monitor.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr() == ("", "")


# -- damage and full disks: a run goes on ------------------------------------------------------------------------------


def _log(folder: Path, updates: int) -> bytes:
    """A run's reports up to an update."""
    monitor = Monitor(folder, True, update=0, updates=updates)
    for update in range(1, updates + 1):
        monitor.train(update, {**RECORD, "loss": 1 / update}, updates - update)
    monitor.event(updates, "Häuser\u2028und mehr")
    monitor.close()
    return (folder / "log.jsonl").read_bytes()


def test_every_damaged_log_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """200 flipped bits, truncations and foreign lines; the undamaged lines up to the checkpoint stay."""
    whole = _log(tmp_path, 20)
    file, draw, told = tmp_path / "log.jsonl", random.Random(3), 0
    lines = whole.split(b"\n")
    foreign = [b"7", b"[]", b'{"update": "3", "type": "train"}', b'{"update": 3}', b"\xff" * 9, b"[" * 200_000]
    for number in range(240):
        damaged = bytearray(whole)
        if number < 200:
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        elif number < 230:
            del damaged[draw.randrange(len(whole)):]
        else:
            damaged = bytearray(b"\n".join([*lines[:5], foreign[number % len(foreign)], *lines[5:]]))
        file.write_bytes(damaged)
        intact = {line for line in bytes(damaged).split(b"\n") if line in lines[:12]}
        capsys.readouterr()
        monitor = Monitor(tmp_path, True, update=12, updates=20)
        told += "damaged line(s), which readers of it leave out" in capsys.readouterr().err
        monitor.event(12, "resuming")
        monitor.close()
        now = file.read_bytes().split(b"\n")
        assert set(now) >= intact and not set(now) & set(lines[14:20]), number
        assert read_log(file)[-1] == {"type": "event", "update": 12, "message": "resuming"}
    assert told > 40
    file.write_bytes(whole[:-1])  # an editor left out the last line's end
    monitor = Monitor(tmp_path, True, update=20, updates=20)
    monitor.event(20, "resuming")
    monitor.close()
    assert file.read_bytes().startswith(whole) and len(read_log(file)) == 22


@pytest.mark.parametrize("fails", [("write",), ("write", "replace")])
def test_a_full_disk_is_told_once_and_nothing_is_lost(
    fails: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write = os.write
    half = iter([True])
    monitor = Monitor(tmp_path, True, update=0, updates=9)
    monitor.train(1, RECORD, 8)
    with monkeypatch.context() as patch:
        for name in fails:
            patch.setattr(os, name, full)
        # a disk takes as much as it can
        patch.setattr(os, "write", lambda file, data: write(file, data[:9]) if next(half, False) else full())
        for update in (2, 3, 4):
            monitor.train(update, RECORD, 9 - update)
            status = json.loads((tmp_path / "STATUS.json").read_text())
            assert status == {"status": "running", "update": update}
    said = capsys.readouterr().err
    assert said.count("log.jsonl cannot be written: No space left on device; training continues, and") == 1
    assert said.count("cannot be written") == 2, "the log and TensorBoard's files"
    monitor.train(5, RECORD, 4)
    monitor.close()
    assert [record["update"] for record in read_log(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 5]
    assert sorted(scalars(tmp_path)["train/loss"]) == [1, 2, 3, 4, 5]


class _Disk(io.FileIO):
    """A file that cannot be written while `error` is set."""

    error = 0

    def write(self, data: Any) -> int:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(data)


@pytest.mark.parametrize("end", ["", '{"type": "train", "upd'])
def test_a_resumed_log_has_no_line_of_a_later_update(end: str, tmp_path: Path) -> None:
    """Wherever it stands: an update is dropped while the checkpoint of the one before is still written."""
    lines = [json.dumps({"type": kind, "update": update}) + "\n" for kind, update in (
        ("train", 3), ("event", 4), ("checkpoint", 3), ("event", 4), ("event", 3), ("train", 4), ("event", 5))]
    file = tmp_path / "log.jsonl"
    file.write_text("".join([*lines[:3], "damaged\n", *lines[3:], end]), encoding="utf-8")
    assert LogFile(file).resume(3) == 1
    assert file.read_text(encoding="utf-8") == "".join([lines[0], lines[2], "damaged\n", lines[4]])


@pytest.mark.parametrize(("error", "gone"), [(errno.ENOSPC, False), (errno.EAGAIN, False), (errno.EPIPE, True)])
def test_one_failed_line_does_not_end_a_log(
    error: int, gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full for a moment takes later lines; a reader that has gone does not come back."""
    disk = _Disk(tmp_path / "job.log", "w")
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(disk), line_buffering=True))
    with output_may_be_lost():
        print_status("update 1")
        disk.error = error
        print_status("update 2")
        disk.error = 0
        print_status("update 3")
    lines = (tmp_path / "job.log").read_text().splitlines()
    assert lines[0] == "update 1" and ("update 3" in lines) is not gone
    assert (os.readlink(f"/proc/self/fd/{disk.fileno()}") == os.devnull) is gone


def test_a_status_that_cannot_be_written_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "STATUS.json").mkdir()
    monitor = Monitor(tmp_path, True, update=0, updates=9)
    for update in (1, 2):
        monitor.train(update, RECORD, 9 - update)
    monitor.close()
    assert capsys.readouterr().err.count("STATUS.json cannot be written: Is a directory") == 1
    assert len(read_log(tmp_path / "log.jsonl")) == 2


def test_the_status_is_never_older_than_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(tmp_path, True, update=0, updates=9)
    seen = []

    def shown(text: str) -> None:
        seen.append((text.split(":")[0].split("/")[0], json.loads((tmp_path / "STATUS.json").read_text())["update"]))

    monkeypatch.setattr("deepnmt.training.reporters.print_status", shown)
    monkeypatch.setattr(Console, "print", lambda console, line: shown(line))
    monitor.train(3, RECORD, 6)
    monitor.valid(4, {"loss": 4.5, "perplexity": 60.0, "best": True})
    monitor.close()
    assert seen == [("update 3", 3), ("validation at update 4", 4)]


def test_a_lost_process_is_the_last_word(tmp_path: Path) -> None:
    """It is told of by another thread, and then the collective fails, too."""
    monitor = Monitor(tmp_path, True, update=0, updates=9)
    monitor.status("lost", 3, error="no sign of life from rank 1 on n2")
    monitor.status("failed", 3, error="RuntimeError: a connection was closed")
    monitor.close()
    assert json.loads((tmp_path / "STATUS.json").read_text())["status"] == "lost"


def test_nothing_is_written_through_links_of_a_foreign_folder(tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    for name in ("STATUS.json", "log.jsonl", ".lock", "curve.png"):
        (run / name).symlink_to(victim)
    monitor = Monitor(run, True, update=0, updates=9)
    monitor.train(1, RECORD, 8)
    monitor.close()
    save(Figure(), run / "curve.png")
    with pytest.raises(UserError, match=r"\.lock cannot be locked: Too many levels of symbolic links"), \
            run_lock(run, Ranks.alone()):
        pass
    assert victim.read_text() == "mine" and not (run / "curve.png").is_symlink()


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_kill_while_a_file_is_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.yaml"
    write_text(file, "run: ä\n")
    assert file.read_text(encoding="utf-8") == "run: ä\n" and list(tmp_path.iterdir()) == [file]

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)  # the last step, after the text is written
    with pytest.raises(KeyboardInterrupt):
        write_text(file, "run")
    assert file.read_text(encoding="utf-8") == "run: ä\n"


@pytest.mark.parametrize(("before", "after"), [
    ("", ""), ('{"a": 1}\n', '{"a": 1}\n'), ('{"a": 1}\n{"b": ', '{"a": 1}\n'), ('{"b"', ""),
    ('{"a": 1}\n{"b": "ä"}', '{"a": 1}\n{"b": "ä"}\n'),  # complete: an editor left out the last line end
])
def test_an_incomplete_last_line_is_dropped(before: str, after: str, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text(before, encoding="utf-8")
    drop_partial_line(file)
    assert file.read_text(encoding="utf-8") == after
    with pytest.raises(UserError, match=r"runs.jsonl/x cannot be written: Not a directory; name another"):
        drop_partial_line(file / "x")


def test_a_folder_that_cannot_be_made_is_reported_with_its_option(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    with pytest.raises(UserError, match=r"^run folder .*mine/x cannot be written: Not a directory; set run to a fold"):
        make_run_folder(mine / "x")
    with pytest.raises(UserError, match=r"^folder .*mine cannot be written: File exists; set --output to a folder"):
        make_run_folder(mine, "--output")
    for file, why in ((mine / "x.json", "File exists"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=rf"^file {file} cannot be written: {why}; set --output to a file that can"):
            make_parent_folder(file)
    assert mine.read_text() == "mine" and list(tmp_path.iterdir()) == [mine]
    make_parent_folder(tmp_path / "new" / "x.json")
    assert list((tmp_path / "new").iterdir()) == []
