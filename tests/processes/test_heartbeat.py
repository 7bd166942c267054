"""A process that dies, stops or fails is named, and all others end, whatever they wait for."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warm import Warm, has_ended, kill, waiting

from deepnmt.cli import main
from deepnmt.errors import UserError
from deepnmt.files import sha256
from deepnmt.processes import heartbeat


def together(fault: str, folder: str = "") -> int:
    """Runs on each rank, with short limits: endless sums, of which the second process leaves at a fault."""
    from deepnmt.processes.process_group import processes

    heartbeat.SILENCE = 6.0
    if fault in ("file", "collective"):
        heartbeat.TIME_LIMITS = {heartbeat.UPDATE: (60.0, 3.0)}
    try:
        with processes(1) as ranks:
            for number in range(10**9):
                heartbeat.begin(heartbeat.UPDATE)
                if ranks.rank == 1 and number == 20 and fault == "user":
                    raise UserError("a mistake of one")
                if ranks.rank == 1 and number == 20 and fault == "bug":
                    raise ValueError("a bug")
                if ranks.rank == 1 and number == 20 and fault == "file":
                    os.mkfifo(f"{folder}/pipe")
                    sha256(Path(folder, "pipe"))
                if ranks.rank == 1 and number == 20 and fault == "collective":
                    ranks.receive(torch.zeros(1), 0)
                ranks.sum([1.0])
                if number == 10:
                    print("begun", flush=True)
                time.sleep(0.01)
    except UserError as error:
        print(f"deepnmt: {error}", file=sys.stderr)
        return 2
    return 0


@pytest.mark.parametrize(("number", "victim"), [(signal.SIGSTOP, 1), (signal.SIGSTOP, 0), (signal.SIGKILL, 1)])
def test_a_process_that_shows_no_sign_of_life(number: int, victim: int, warm: Warm) -> None:
    pids = warm.start(2, "test_heartbeat:together", "")
    for _ in waiting(200, "both to begin"):
        if warm.said().count("begun") == 2:
            break
    os.kill(pids[victim], number)
    other = pids[1 - victim]
    for _ in waiting(40, "the other to end"):
        if has_ended(other):
            break
    kill(pids[victim])
    codes = warm.wait(200)
    assert codes[1 - victim] == 76, (codes, warm.said())
    assert f"no sign of life from rank {victim} on {os.uname().nodename}" in warm.said()


@pytest.mark.parametrize(("fault", "codes", "said"), [
    ("user", [2, 2], "a mistake of one"), ("bug", [76, 1], "has ended with ValueError: a bug")])
def test_a_fault_of_one_process_ends_all(fault: str, codes: list[int], said: str, warm: Warm) -> None:
    warm.start(2, "test_heartbeat:together", fault)
    assert warm.wait(200) == codes, warm.said()
    assert said in warm.said()


@pytest.mark.parametrize(("fault", "said"), [
    ("file", r"rank 1 on {} is in \w+ \([\w/]+\.py, line \d+\); the others wait for it"),
    ("collective", r"rank 0 on {0} is in _combine \(processes/ranks\.py, line \d+\), rank 1 on {0} is in receive "
                   r"\(processes/ranks\.py, line \d+\); all wait for one another")], ids=["file", "collective"])
def test_processes_that_live_but_do_not_go_on(fault: str, said: str, warm: Warm, tmp_path: Path) -> None:
    """One of them opens a pipe into which nobody writes, or waits for what the other does not send."""
    warm.start(2, "test_heartbeat:together", fault, tmp_path)
    assert warm.wait(200) == [76, 76], warm.said()
    told = [line for line in warm.said().splitlines() if line.startswith("deepnmt: ")]
    assert len(told) == 1, warm.said()
    start = r"deepnmt: training stands still: an update has taken \d+ s, of 3 s allowed; "
    assert re.match(start + said.format(re.escape(os.uname().nodename)), told[0]), told


def test_a_piece_of_work_may_take_as_long_as_the_others_did() -> None:
    """And generously longer; the first may compile. What has no name may take for ever."""
    assert heartbeat.allowed(heartbeat.UPDATE, []) == 1200 and heartbeat.allowed(heartbeat.UPDATE, [0.0, 3.0]) == 600
    assert heartbeat.allowed(heartbeat.UPDATE, [3.0, 90.0, 3.0]) == 900
    for kind in (heartbeat.VALIDATION, heartbeat.SAVE):
        assert heartbeat.allowed(kind, []) == 6 * 3600
        assert heartbeat.allowed(kind, [900.0]) == 9000 > heartbeat.allowed(kind, [9.0])
    assert heartbeat.allowed("", []) == heartbeat.allowed("", [9.0]) == math.inf


def test_the_first_checkpoint_may_take_as_long_as_the_first() -> None:
    """It is written beside updates, and was not waited for before."""
    monitor = heartbeat.HeartbeatMonitor(dist.HashStore(), 0, ["one"])
    for kind in (heartbeat.SAVE, heartbeat.UPDATE, heartbeat.SAVE, heartbeat.UPDATE):
        monitor.begin(kind)
    assert heartbeat.allowed(heartbeat.SAVE, monitor._past[heartbeat.SAVE]) == 6 * 3600
    monitor.took(heartbeat.SAVE, 1000.0)
    assert heartbeat.allowed(heartbeat.SAVE, monitor._past[heartbeat.SAVE]) == 10_000
    monitor.close()


def test_training_says_what_it_is_at(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates, of which the second and the last are validated and saved."""
    begun: list[str] = []
    monkeypatch.setattr(heartbeat, "begin", begun.append)
    words = (f"run={tmp_path / 'run'}", "train.updates=3", "train.validate_every=2", "train.valid_bleu=false")
    assert main("train", [str(prepared / "recipe.yaml"), *words]) == 0
    assert begun[:3] == [heartbeat.UPDATE, heartbeat.UPDATE, heartbeat.VALIDATION]
    assert begun.count(heartbeat.UPDATE) == 3
    at = [number for number, kind in enumerate(begun) if kind == heartbeat.VALIDATION]
    assert len(at) == 2 and all(begun[number + 1] == heartbeat.SAVE for number in at) and begun[-1] == heartbeat.SAVE
