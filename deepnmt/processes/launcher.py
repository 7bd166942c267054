"""The end of the launcher, which must not leave processes behind that train on unseen.

`deepspeed` starts launch.py, which starts the processes. Over a hostfile, `deepspeed` starts pdsh, which starts an ssh
to each machine, and sshd starts launch.py there. A signal to one of these ends that one only. So every process looks
once a second whether they are all still there. If not, it sends itself SIGTERM, at which training saves and stops.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_SECONDS = 1.0  # between two looks
_LAUNCH = "deepspeed.launcher.launch"
_RUNNERS = ("deepspeed", "ds", "deepspeed.launcher.runner")
_HUNG_UP = 0
if sys.platform == "linux":
    _HUNG_UP = select.POLLHUP | select.POLLRDHUP | select.POLLERR | select.POLLNVAL

_lost = ""


def lost_launcher() -> str:
    """What has ended, if this process has asked itself to stop for that reason: "the deepspeed command on n1"."""
    return _lost


def end_with_launcher() -> None:
    """Has this process get SIGTERM when its launcher ends in any way."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: at once, for the parent of whatever kind
    watched = dict(_launchers())
    if watched:
        threading.Thread(target=_watch, args=(watched, _remote_streams(watched)), daemon=True).start()


def _launchers() -> Iterator[tuple[psutil.Process, str]]:
    """DeepSpeed's processes above this one, and those that lead to its machine, each with its name for a message."""
    try:
        above = psutil.Process().parents()
        lines = [process.cmdline() for process in above]
        scripts = [number for number, line in enumerate(lines) if _LAUNCH in line]
        if not scripts:
            return
        launch = scripts[0]
        for process in above[: launch + 1]:
            yield process, "deepspeed's launch.py"
        for process, line in zip(above[launch + 1 :], lines[launch + 1 :]):
            if _is_runner(line):
                yield process, "the deepspeed command"
                return
            if process.name().startswith("sshd"):
                yield process, "the ssh connection"
                break
        words = [word for word in lines[launch] if word.startswith(("--world_info=", "--master_port="))]
        yield from _pdsh(words)
    except psutil.Error:  # it has just ended, so that prctl's signal is under way
        return


def _pdsh(words: list[str]) -> Iterator[tuple[psutil.Process, str]]:
    """pdsh with these words of launch.py in its command, and the `deepspeed` command, if they run on this machine."""
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if not line or Path(line[0]).name != "pdsh" or not set(words) <= set(line):
                continue
            yield process, "pdsh"
            parent = process.parent()
            if parent is not None and _is_runner(parent.cmdline()):
                yield parent, "the deepspeed command"
        except psutil.Error:
            continue


def _is_runner(line: list[str]) -> bool:
    return any(Path(word).name in _RUNNERS for word in line[:4])


def _remote_streams(watched: dict[psutil.Process, str]) -> select.poll | None:
    """The pipes from an sshd, which closes them when the other side of the connection has ended."""
    if "the ssh connection" not in watched.values():
        return None
    streams = select.poll()
    for descriptor in (0, 1, 2):
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            continue
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            streams.register(descriptor, _HUNG_UP)
    return None if streams.poll(0) else streams  # some ssh closes one of them from the start


def _watch(watched: dict[psutil.Process, str], streams: select.poll | None) -> None:
    global _lost
    while not _lost:
        time.sleep(_SECONDS)
        gone = [name for process, name in watched.items() if _has_ended(process)]
        if not gone and streams is not None and streams.poll(0):
            gone = ["pdsh or the ssh connection"]
        if gone:
            _lost = f"{gone[-1]} has ended ({socket.gethostname()})"
            os.kill(os.getpid(), signal.SIGTERM)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
