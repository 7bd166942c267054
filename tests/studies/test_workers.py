"""`run_workers`: the answer it returns, and what it raises if a process fails."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from refusals import user_error

from deepnmt.errors import UserError
from deepnmt.processes.ranks import Ranks
from studies.benchmarks import workers

Work = Callable[[dict[str, Any], Ranks], Any]


def run(work: Work, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `work` on two "processes", one after the other, here."""

    class Here:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            rank = int(env["RANK"])

            @contextlib.contextmanager
            def processes(threads: int, *, group: bool) -> Iterator[Ranks]:
                yield Ranks(rank, 2, rank, 2, torch.device("cpu"))

            monkeypatch.setattr(workers, "processes", processes)
            monkeypatch.setattr(workers, "end_process", sys.exit)
            monkeypatch.setattr(sys, "argv", ["worker", *command[-2:]])
            monkeypatch.setenv("DEEPNMT_THREADS", env["DEEPNMT_THREADS"])
            try:
                workers.answer_job(work)
                self.code: object = 0
            except SystemExit as end:
                self.code = end.code
            except ArithmeticError:
                self.code = 1

        def poll(self) -> object:
            return self.code

        def wait(self, timeout: float = 0.0) -> object:
            return self.code

        def terminate(self) -> None:
            """It has ended."""

        kill = terminate

    monkeypatch.setattr(workers.subprocess, "Popen", Here)
    return workers.run_workers("nowhere", {"a": 3}, 2, 1)


def test_the_answer_is_that_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(lambda job, ranks: [job["a"], ranks.rank], monkeypatch) == [3, 0]


def test_a_user_error_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(job: dict[str, Any], ranks: Ranks) -> None:
        raise UserError(f"no fp16 on {ranks.rank}; name bf16")

    with user_error(r"^no fp16 on 0; name bf16$"):
        run(work, monkeypatch)


@pytest.mark.parametrize("second", [ArithmeticError, None])
def test_a_user_error_takes_precedence_over_failures_that_follow_from_it(
    second: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(job: dict[str, Any], ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise UserError("too few GPUs")
        if second:
            raise second

    with user_error(r"^too few GPUs$"):
        run(work, monkeypatch)


def test_any_other_failure_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(job: dict[str, Any], ranks: Ranks) -> None:
        raise ArithmeticError

    with pytest.raises(RuntimeError, match=r"a process of nowhere failed \(exit codes \[1, 1\]\)"):
        run(work, monkeypatch)


def test_processes_that_wait_for_a_failed_one_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the others one ends by itself in time, one on SIGTERM, one only when it is killed."""
    monkeypatch.setattr(workers, "_GRACE", 1.0)
    failed = subprocess.Popen(["sh", "-c", "exit 2"])
    commands = ["trap '' TERM; echo; exec sleep 60", "exec sleep 60",
                f"while kill -0 {failed.pid} 2> /dev/null; do sleep 0.02; done"]  # until somebody has seen it fail
    running = [*(subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE) for command in commands), failed]
    assert running[0].stdout is not None and running[0].stdout.readline() == b"\n"  # from now on it ignores SIGTERM
    started = time.monotonic()
    try:
        assert workers.wait_for_all(running) == [-9, -15, 0, 2]
    finally:
        for process in running:
            process.kill()
            if process.stdout is not None:
                process.stdout.close()
    assert time.monotonic() - started < 40


def test_no_process_is_ended_while_none_failed() -> None:
    running = [subprocess.Popen(["sh", "-c", f"sleep {seconds}"]) for seconds in (0, 0.2)]
    assert workers.wait_for_all(running) == [0, 0]
