"""Measurements in fresh processes: a job goes out as JSON, rank 0's answer comes back.

A module that measures has a function `work(job: dict, ranks: Ranks) -> Any` and ends with

    if __name__ == "__main__":
        answer_job(work)

Start it with `run_workers("studies.benchmarks.that_module", job, processes, threads)`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepnmt.cli import end_process
from deepnmt.errors import UserError
from deepnmt.processes.process_group import free_port, processes
from deepnmt.processes.ranks import Ranks

_GRACE = 2.0  # seconds the other processes get to end by themselves once one has failed


def run_workers(module: str, job: dict[str, Any], count: int, threads: int) -> Any:
    """Runs `module`'s `work` on `count` fresh processes of `threads` threads each; returns rank 0's answer.

    Raises:
        UserError: a process raised one.
        RuntimeError: a process failed in another way; the reason is on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        task, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        user_error = _error_file(answer)
        task.write_text(json.dumps(job), encoding="utf-8")
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "OMP_NUM_THREADS": str(threads),
            "DEEPNMT_THREADS": str(threads),
        }
        command = module_command(module, str(task), str(answer))
        running = [subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(count)]
        codes = wait_for_all(running)
        if user_error.exists():
            raise UserError(user_error.read_text(encoding="utf-8"))
        if any(codes):
            raise RuntimeError(f"a process of {module} failed (exit codes {codes})")
        return json.loads(answer.read_text(encoding="utf-8"))


def module_command(module: str, *words: str) -> list[str]:
    """The command that runs a module as a program with this process's `sys.path`. (`python -m` would prefer a deepnmt/
    in the user's folder.)"""
    start = f"import runpy, sys; sys.path[:] = {sys.path!r}; runpy.run_module({module!r}, run_name='__main__')"
    return [sys.executable, "-c", start, *words]


def wait_for_all(running: list[subprocess.Popen[bytes]]) -> list[int]:
    """Waits until all processes have ended; returns their exit codes.

    Once one has failed, the others get `_GRACE` seconds: they might otherwise wait half an hour for it.
    """
    deadline = math.inf
    while None in (codes := [process.poll() for process in running]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.02)
    for process in running:
        process.terminate()  # does nothing if it has ended
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        process.kill()
    return [process.wait() for process in running]


def answer_job(work: Callable[[dict[str, Any], Ranks], Any]) -> None:
    """Runs in each worker: reads the job named on the command line and calls `work`; rank 0 writes the answer.

    The first process that raises `UserError` writes its message for `run_workers`; each ends with exit code 2.
    """
    task, answer = map(Path, sys.argv[1:3])
    job = json.loads(task.read_text(encoding="utf-8"))
    code = 0
    try:
        with processes(int(os.environ["DEEPNMT_THREADS"]), group=True) as ranks:
            result = work(job, ranks)
            if ranks.first:
                answer.write_text(json.dumps(result), encoding="utf-8")
    except UserError as error:
        with contextlib.suppress(FileExistsError), _error_file(answer).open("x", encoding="utf-8") as file:
            file.write(str(error))
        code = 2
    end_process(code)


def _error_file(answer: Path) -> Path:
    """Where a worker writes the message of a `UserError`, beside the answer."""
    return answer.with_name("user_error.txt")
