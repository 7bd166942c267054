"""Two machines on one, for tests of launchers: namespaces with their own network, host name and processes, and with
Debian's Slurm, sshd and pdsh in them.

`machines.sh` installs and writes everything in a throw-away overlay of the root file system, so nothing outside
changes; when its first process ends, the kernel ends all others. It needs root, and Debian's package registry where the
programs are not installed.
"""

from __future__ import annotations

import ctypes
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[2]
NODES = ("n1", "n2")
_SCRIPT = Path(__file__).with_name("machines.sh")
_START = 400.0  # seconds for installing and starting everything; 20 were measured, 150 on a crowded machine
_ENV = {"HOME": "/root",  # nothing that a user's shell may lack
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(REPO)}


class Unavailable(Exception):  # noqa: N818 (why tests are skipped)
    """This machine cannot play two; the message says why."""


class Machines:
    """Two running machines, `n1` and `n2`.

    Args:
        scratch: an empty folder, for the overlay.
        shared: a folder that both machines and the tests see under the same path.

    Raises:
        Unavailable: they cannot be started here.
    """

    def __init__(self, scratch: Path, shared: Path) -> None:
        if sys.platform != "linux" or os.geteuid():
            raise Unavailable("namespaces with their own network need root on Linux")
        if lacking := [name for name in ("unshare", "nsenter") if not shutil.which(name)]:
            raise Unavailable(f"{lacking[0]} is not installed (Debian's package util-linux)")
        self.shared = shared
        root = os.stat("/").st_dev
        outside = sorted({str(path) for path in (REPO, Path(sys.prefix), Path(sys.base_prefix))
                          if os.stat(path).st_dev != root})
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", _SCRIPT, "overlay",
             scratch, shared, *outside], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))  # a killed test leaves nothing, either
        said = self._until_ready()
        if said is not None:
            self.close()
            raise Unavailable(f"no machines on this machine: {said or 'no answer'}")
        self.pids = {name: self._first_process(name) for name in NODES}

    def _until_ready(self) -> str | None:
        """Waits for "ready"; returns what was said instead."""
        assert self._holder.stdout is not None
        said, until = "", time.monotonic() + _START
        while select.select([self._holder.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            line = self._holder.stdout.readline()
            if line == "ready\n":
                return None
            said = line.strip() or said
            if not line:
                break
        return said

    def _first_process(self, node: str) -> int:
        """The process of a machine that has PID 1 there, by its PID here."""
        for process in psutil.Process(self._holder.pid).children(recursive=True):
            if process.cmdline()[-2:] == ["node", node] and "unshare" not in process.cmdline()[0]:
                return process.pid
        raise Unavailable(f"machine {node} did not start")

    def command(self, node: str, words: str | list[str | Path]) -> list[str]:
        """The command that runs `words` (a list, or a line for bash) on a machine, in the shared folder."""
        line = words if isinstance(words, str) else shlex.join(map(str, words))
        return ["nsenter", f"--target={self.pids[node]}", "--mount", "--uts", "--net", "--pid", "--root",
                "--wd", "bash", "-c", f"cd {shlex.quote(str(self.shared))}; {line}"]

    def start(self, node: str, words: str | list[str | Path], output: Path, **env: str) -> subprocess.Popen[bytes]:
        """Starts a command on a machine; what it says goes into `output`."""
        with output.open("wb") as file:
            return subprocess.Popen(self.command(node, words), env={**_ENV, **env}, stdout=file, stderr=file,
                                    stdin=subprocess.DEVNULL, start_new_session=True, cwd="/")

    def run(self, node: str, words: str | list[str | Path], timeout: float = 120, **env: str) -> tuple[int, str]:
        """Runs a command on a machine; returns its exit code and what it said."""
        done = subprocess.run(self.command(node, words), env={**_ENV, **env}, capture_output=True, text=True,
                              timeout=timeout, check=False, stdin=subprocess.DEVNULL, cwd="/")
        return done.returncode, done.stdout + done.stderr

    def processes(self, *words: str) -> list[psutil.Process]:
        """The processes on the machines whose command line contains all of `words`."""
        found = []
        for process in psutil.Process().children(recursive=True):  # those of `start` are not below the machines' own
            try:
                line = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in words):
                found.append(process)
        return found

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
