"""What tests of runs on several machines share: how a run is started, and what is read of it."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machines import NODES, REPO, Machines
from run_files import losses, tensors
from warm import Warm

from deepnmt.checkpoint.checkpoint import list_checkpoints, update_of

LAUNCH = REPO / "recipes" / "launch"
SETTINGS = (f"parallel.ds_config={REPO}/ds_configs/zero1.json", "model.encoder.block=pre_ln",
            "model.decoder.block=pre_ln", "train.valid_bleu=false")
LONG = ("train.updates=300", "train.save_every=1000", "train.validate_every=1000")  # time enough to be stopped in
ENDLESS = (*LONG, "train.updates=100000")  # for runs that are always stopped, and then finished with fewer
GONE = 30.0  # seconds within which everything must have ended

Expected = Callable[[int], Path]  # from a number of updates to a run of so many that nobody disturbed


def wait_for(condition: Callable[[], Any], seconds: float, what: Callable[[], str]) -> Any:
    """The first true value of `condition`; fails with what `what` says after `seconds`."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, what()
        time.sleep(0.1)
    return found


def words(prepared: Path, run: Path, *overrides: str) -> str:
    return shlex.join([str(prepared / "recipe.yaml"), f"run={run}", *SETTINGS, *overrides])


def assert_same(run: Path, expected: Expected, updates: int) -> None:
    """Losses and weights are those of one machine, to the bit."""
    assert losses(run) == losses(expected(updates))
    ours, theirs = tensors(run, updates, "weights"), tensors(expected(updates), updates, "weights")
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def finish(warm: Warm, prepared: Path, run: Path, expected: Expected, updates: int, *overrides: str) -> None:
    """Resumes on two processes of this machine, which wait for no launcher, and compares the whole run."""
    begun = newest(run)
    warm.train(2, prepared / "recipe.yaml", f"run={run}", *SETTINGS, *LONG, *overrides, f"train.updates={updates}")
    assert warm.wait() == [0, 0], warm.said()
    if begun < updates:  # a run that was killed after its last save may have finished or not
        assert ("resuming from" in warm.said()) == (begun > 0), warm.said()
    assert_same(run, expected, updates)


def newest(run: Path) -> int:
    """The update of the newest checkpoint, 0 before there is any."""
    return max(map(update_of, list_checkpoints(run / "checkpoints")), default=0)


def stood(run: Path) -> str:
    """The `status` in STATUS.json, "" before there is any."""
    try:
        return str(json.loads((run / "STATUS.json").read_text())["status"])
    except FileNotFoundError:
        return ""


def text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def hostfile(machines: Machines, port: int, line: str, name: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts recipes/launch/hostfile.sh on n1, with its files for these machines."""
    if not (machines.shared / "hosts").exists():
        (machines.shared / ".deepspeed_env").write_text(
            (LAUNCH / ".deepspeed_env").read_text().replace("cuda", "cpu"))
        (machines.shared / "hosts").write_text((LAUNCH / "hosts").read_text().replace("node", "n").replace("=8", "=1"))
    said = machines.shared / name
    return machines.start("n1", f"MASTER_PORT={port} {LAUNCH}/hostfile.sh {line}", said), said


def torchrun(machines: Machines, port: int, line: str, name: str) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    """Starts recipes/launch/torchrun.sh on both machines."""
    said = [machines.shared / f"{name}-{node}" for node in NODES]
    command = f"NODES=2 FIRST=n1 PROCESSES=1 PORT={port} {LAUNCH}/torchrun.sh {line}"
    return [machines.start(node, command, file) for node, file in zip(NODES, said)], said


def by_hand(machines: Machines, port: int, line: str, name: str, program: str = "deepnmt train"
            ) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    """Starts a process on each machine without a launcher, which would have rules of its own for lost machines."""
    said = [machines.shared / f"{name}-{node}" for node in NODES]
    return [machines.start(node, f"{program} {line}", file, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0",
                           LOCAL_WORLD_SIZE="1", MASTER_ADDR="n1", MASTER_PORT=str(port))
            for rank, (node, file) in enumerate(zip(NODES, said))], said
