"""A process that dies, stops or fails is named, and all others end, whatever they wait for."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest
from warm import Warm, waiting

from deepnmt.errors import UserError


def together(fault: str) -> int:
    """Runs on each rank, with short limits: endless sums, of which the second process leaves at a fault."""
    from deepnmt.parallel import watch
    from deepnmt.parallel.launch import processes

    watch.SILENCE = 6.0
    try:
        with processes(1) as ranks:
            for number in range(10**9):
                if ranks.rank == 1 and number == 20 and fault == "user":
                    raise UserError("a mistake of one")
                if ranks.rank == 1 and number == 20 and fault == "bug":
                    raise ValueError("a bug")
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
    pids = warm.start(2, "test_watch:together", "")
    for _ in waiting(60, "both to begin"):
        if warm.said().count("begun") == 2:
            break
    os.kill(pids[victim], number)
    started, other = time.monotonic(), pids[1 - victim]
    for _ in waiting(60, "the other to end"):
        if not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE:
            break
    assert time.monotonic() - started < 40
    os.kill(pids[victim], signal.SIGKILL)
    codes = warm.wait(30)
    assert codes[1 - victim] == 76, (codes, warm.said())
    assert f"no sign of life from rank {victim} on {os.uname().nodename}" in warm.said()


@pytest.mark.parametrize(("fault", "codes", "said"), [
    ("user", [2, 2], "a mistake of one"), ("bug", [76, 1], "has ended with ValueError: a bug")])
def test_a_fault_of_one_process_ends_all(fault: str, codes: list[int], said: str, warm: Warm) -> None:
    warm.start(2, "test_watch:together", fault)
    assert warm.wait(60) == codes, warm.said()
    assert said in warm.said()
