"""Measurements in processes of their own: a job out, an answer back, nothing left behind.

A module that measures has a function `work(job: dict, ranks: Ranks) -> Any` and ends with

    if __name__ == "__main__":
        answer_job(work)

and is started by `run_workers("deepnmt.that_module", job, processes, threads)`.
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

from deepnmt.errors import UserError
from deepnmt.parallel.launch import free_port, processes
from deepnmt.ranks import Ranks

_GRACE = 2.0  # seconds that the others have to end by themselves, once a process has failed


def run_workers(module: str, job: dict[str, Any], count: int, threads: int) -> Any:
    """Runs `module`'s work on `count` fresh processes; what rank 0 answered.

    Raises:
        UserError: a process came upon a mistake of the user's.
        RuntimeError: a process failed; its output, which went to this process's stderr, says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        task, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        mistake = _mistake(answer)
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
        codes = _codes(running)
        if mistake.exists():
            raise UserError(mistake.read_text(encoding="utf-8"))
        if any(codes):
            raise RuntimeError(f"a process of {module} failed (exit codes {codes})")
        return json.loads(answer.read_text(encoding="utf-8"))


def module_command(module: str, *words: str) -> list[str]:
    """Runs a module as a program with the packages of this process: with -m, a deepnmt/ in the user's folder would come
    first."""
    start = f"import runpy, sys; sys.path[:] = {sys.path!r}; runpy.run_module({module!r}, run_name='__main__')"
    return [sys.executable, "-c", start, *words]


def _codes(running: list[subprocess.Popen[bytes]]) -> list[int]:
    """Waits until all processes have ended; their exit codes.

    Once one has failed the others are ended after a moment: they may wait for it where they meet, for half an hour.
    """
    deadline = math.inf
    while None in (codes := [process.poll() for process in running]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.02)
    for process in running:
        process.terminate()  # nothing, where it has ended
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        process.kill()
    return [process.wait() for process in running]


def answer_job(work: Callable[[dict[str, Any], Ranks], Any]) -> None:
    """The other end, in each process: reads the job named on the command line, works, and rank 0 writes the answer; a
    mistake of the user's is written by the first process that comes upon one, and ends it with exit code 2."""
    task, answer = map(Path, sys.argv[1:3])
    job = json.loads(task.read_text(encoding="utf-8"))
    try:
        with processes(int(os.environ["DEEPNMT_THREADS"]), group=True) as ranks:
            found = work(job, ranks)
            if ranks.first:
                answer.write_text(json.dumps(found), encoding="utf-8")
    except UserError as error:
        with contextlib.suppress(FileExistsError), _mistake(answer).open("x", encoding="utf-8") as file:
            file.write(str(error))
        sys.exit(2)


def _mistake(answer: Path) -> Path:
    """Where a user's mistake is written, beside the answer."""
    return answer.with_name("mistake.txt")
