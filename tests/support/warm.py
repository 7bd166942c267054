"""Processes that need not import anything: they are forked from one that has imported torch, DeepSpeed and deepnmt.

Imports take five seconds and more, a tiny training run one. `Warm` talks to this file, started as a program: it reads a
job a line and answers with the process ids once they are forked, and with their exit codes once all have ended. A
forked process ends as deepnmt's programs do.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


class Warm:
    """The client. One job at a time: `start`, then `wait`; or `run`, which does both and wants exit codes of 0.

    Its processes are scheduled as batch jobs: a message that arrives does not interrupt the process that sends it. That
    one would lose its core while it holds gloo's lock, and gloo's thread would spin until it has it back.

    Args:
        preload: a library that the dynamic linker puts before all others.
        imports: further modules that its processes need not import.
    """

    def __init__(self, preload: Path | None = None, *imports: str) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
               **({"LD_PRELOAD": str(preload)} if preload else {})}
        self._server = subprocess.Popen([sys.executable, __file__, *imports], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, bufsize=0, env=env, cwd=ROOT)
        assert self._answer(300) == "ready"
        self._folder, self._jobs = tempfile.TemporaryDirectory(), 0
        self.pids: list[int] = []  # of the job that runs: later their numbers may be those of other processes
        self.log, self._waits = Path(), False

    def start(self, world: int, target: str, *arguments: object) -> list[int]:
        """Forks `world` ranks that call `module:function(*arguments)`; returns their process ids."""
        from deepnmt.processes.process_group import free_port

        if self._waits:  # for a job that its test, which has failed, did not wait for
            self._end()
        self._jobs += 1
        self.log = Path(self._folder.name, f"{self._jobs}.log")
        self.log.touch()
        job = {"world": world, "target": target, "arguments": [str(a) for a in arguments], "log": str(self.log),
               "port": str(free_port())}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(job).encode() + b"\n")
        self.pids, self._waits = self._answer(60), True
        return self.pids

    def wait(self, timeout: float = 600) -> list[int]:
        """The exit codes (minus the number of the signal that ended a process). Fails, and kills, after `timeout` s."""
        try:
            codes = self._answer(timeout)["codes"]
        except TimeoutError:
            self._end()
            raise AssertionError(f"not ended after {timeout} s:\n{self.said()}") from None
        self.pids, self._waits = [], False
        return codes

    def _end(self) -> None:
        for pid in self.pids:
            kill(pid)
        self._answer(60)
        self.pids, self._waits = [], False

    def said(self) -> str:
        """What the processes of the job wrote."""
        return self.log.read_text(errors="replace")

    def run(self, world: int, target: str, *arguments: object, timeout: float = 600) -> None:
        """Runs a job to its end; fails with its output unless every process ends with 0."""
        self.start(world, target, *arguments)
        codes = self.wait(timeout)
        assert codes == [0] * world, f"exit codes {codes}\n{self.said()}"

    def train(self, world: int, recipe: object, *overrides: str) -> list[int]:
        """Starts `deepnmt train`."""
        return self.start(world, "warm:train", recipe, *overrides)

    def close(self) -> None:
        for pid in self.pids:
            kill(pid)
        self._server.kill()
        self._server.wait()
        self._folder.cleanup()

    def _answer(self, timeout: float) -> Any:
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], timeout)[0]:
            raise TimeoutError
        line = self._server.stdout.readline()
        assert line, "the warm process has ended"
        return json.loads(line)


def kill(pid: int) -> None:
    """kill -9, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether a process has ended; whoever started it may not have asked yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def waiting(seconds: float, what: str) -> Iterator[None]:
    """Turns of a loop that waits for `what`, a moment apart; fails once `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.002)
    raise AssertionError(f"waited {seconds} s for {what}")


def train(*arguments: str) -> int:
    """What a rank of `Warm.train` calls."""
    from deepnmt.cli import main

    without_pictures()
    return main("train", arguments)


def without_pictures() -> None:
    """Runs draw no pictures from here on: matplotlib and two of them take longer than a tiny run's updates."""
    from deepnmt import plots

    plots.plot_admin_profile = plots.plot_learning_curve = lambda *_: None


def serve() -> None:
    """Reads jobs. A forked process ends with the exit code of its function."""
    from deepnmt.cli import end_process
    from deepnmt.processes.host import quiet_libraries

    gc.disable()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print while they are imported
    quiet_libraries()
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # DeepSpeed would import it: a second
    for name in ("pytest", "deepnmt.cli", "deepnmt.training.trainer", "deepnmt.parallel.pipeline.engine",
                 "deepnmt.parallel.zero", "deepnmt.tasks.translation.task", "deepnmt.tasks.translation.validate",
                 "deepspeed.module_inject.auto_ep_layer",  # DeepSpeed's engine would import it
                 "torch._dynamo",  # PyTorch's optimizers would import it
                 *sys.argv[1:]):
        importlib.import_module(name)
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses it on most CPUs; slow there, but it works
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # see `Warm`
    gc.freeze()  # a rank's collections, the one at its end too, would go through all that: 1.6 s of each process
    gc.enable()
    print(json.dumps("ready"), file=answers)
    while line := sys.stdin.readline():
        job = json.loads(line)
        pids = []
        for rank in range(job["world"]):
            pid = os.fork()
            if pid == 0:
                end_process(rank_of(job, rank))
            pids.append(pid)
        print(json.dumps(pids), file=answers)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps({"codes": codes}), file=answers)


def rank_of(job: dict[str, Any], rank: int) -> int:
    world = str(job["world"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=job["port"], RANK=str(rank), LOCAL_RANK=str(rank),
                      WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    module, function = job["target"].split(":")
    result = getattr(importlib.import_module(module), function)(*job["arguments"])
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    rooms = (*TESTS.iterdir(), *TESTS.glob("extras/*"), *TESTS.glob("tasks/*"))
    sys.path[:0] = [str(ROOT), *(str(room) for room in rooms if room.is_dir())]
    serve()
