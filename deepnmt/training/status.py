"""How a run stands, for scripts: what its folder says, and whether a process still trains in it."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from deepnmt.errors import UserError
from deepnmt.folders import DamagedFolder, read_json

# Exit codes of `deepnmt status`, and of training: 75 is "try again" in sysexits.
FINISHED, ENDED, FAILED, RUNNING, PREEMPTED = 0, 1, 2, 3, 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # at which a run saves and stops


@dataclass(frozen=True)
class Status:
    """`code`: what `deepnmt status` ends with. `sentence`: the same in words."""

    code: int
    sentence: str


def run_status(run: Path) -> Status:
    """How the run in a folder stands.

    Raises:
        UserError: no training has begun in the folder.
    """
    if not (run / "STATUS.json").exists() and not (run / ".lock").exists():
        raise UserError(f"{run} has no STATUS.json, so no training has begun there; give the folder of a run")
    try:
        said = read_json(run, "STATUS.json")
        age = f", {_duration(time.time() - (run / 'STATUS.json').stat().st_mtime)} ago"
    except (DamagedFolder, OSError):
        said, age = {}, ""
    warning = f"; {said['warning']}" if isinstance(said.get("warning"), str) else ""
    at = f"at update {said['update']:,}" if isinstance(said.get("update"), int) else "at an unknown update"
    if (holder := _holder(run / ".lock")) is not None:
        return Status(RUNNING, f"{run} is running: {holder or 'a process'} trains there; last word {at}{age}{warning}")
    word, why = said.get("status"), str(said.get("cause") or said.get("error") or "")
    if word == "finished":
        return Status(FINISHED, f"{run} is finished, {at}{age}{warning}")
    if word == "preempted":
        return Status(PREEMPTED, f"{run} was stopped {why} {at}{age}, and saved; the same command resumes it{warning}")
    if word == "lost":
        return Status(ENDED, f"{run} ended {at}{age}: {why}")
    if word == "failed":
        return Status(FAILED, f"{run} has failed {at}{age}: {why}")
    return Status(ENDED, f"{run} ended without saying so, after its last word {at}{age}: it was killed, or its machine "
                  "went down, or trains on a machine whose locks this one does not see; the same command resumes it "
                  "from its newest checkpoint")


def _holder(lock: Path) -> str | None:
    """Who holds a run's lock ("" if unknown), None if nobody does, or if this file system has no locks."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 200, 0).decode(errors="replace").strip()
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _duration(seconds: float) -> str:
    """"12 s", "5 min", "3 h" or "2 days"."""
    for unit, size, until in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < until:
            return f"{max(0, seconds) // size:.0f} {unit}"
    return f"{seconds // 86_400:.0f} days"
