"""A link that is down for a while is waited for; one that stays down, or a process that is stopped, ends all machines
with a sentence that names it, and nothing is lost.

One run meets all three, one after the other. In the end all losses and weights are those of a run that nobody
disturbed, to the bit.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
from machines import NODES, Machines
from node_runs import ENDLESS, GONE, Expected, by_hand, finish, newest, text, wait_for, words
from warm import Warm

from deepnmt.checkpoint.checkpoint import list_checkpoints, verify
from deepnmt.processes.heartbeat import SILENCE

OPTIONS = (*ENDLESS, "train.save_every=10")
AWAY = 10.0  # seconds without a sign that a test has time for; what they are in a run, the first one uses up to a third
IMPATIENT = ("python -c 'import os, signal, sys; from deepnmt.cli import main; "
             "from deepnmt.processes import heartbeat; "
             f"signal.signal(signal.SIGUSR2, lambda *_: vars(heartbeat.current).update(_limit={AWAY}, _period=1.0) "
             "or os.write(2, b\"impatient\\n\")); "
             "sys.exit(main(\"train\", sys.argv[1:]))'")


def link(machines: Machines, state: str) -> None:
    """Sets the network of the second machine up or down."""
    code, said = machines.run("n2", f"ip link set eth0 {state}")
    assert code == 0, said


def ranks(machines: Machines, run: Path, said: list[Path]) -> list[psutil.Process]:
    """Both processes that train, in order of their ranks. From now on they wait for `AWAY` seconds only."""
    found = sorted((process for process in machines.processes(f"run={run}") if process.name().startswith("python")),
                   key=lambda process: process.environ()["RANK"])
    assert len(found) == 2, found
    for process in found:
        process.send_signal(signal.SIGUSR2)
    wait_for(lambda: all("impatient" in text(file) for file in said), 60, lambda: "\n".join(map(text, said)))
    return found


def check_what_was_told(run: Path, said: list[Path], lost: list[int], least: int) -> None:
    """The `lost` ranks named the other one, and what was saved by update `least` is whole."""
    for rank in lost:
        told = [line for line in text(said[rank]).splitlines() if line.startswith("deepnmt: ")]
        other = f"no sign of life from rank {1 - rank} on {NODES[1 - rank]} for "
        assert len(told) == 1 and other in told[0] and f"cut off from {NODES[rank]}" in told[0], told
    status = json.loads((run / "STATUS.json").read_text())
    assert status["status"] == "lost" and "rank 1 on n2" in status["error"]
    assert newest(run) >= least
    verify(list_checkpoints(run / "checkpoints")[-1])


def test_a_link_that_is_down_for_20_seconds_and_one_that_stays_down(machines: Machines, prepared: Path) -> None:
    run = machines.shared / "lost"
    started, said = by_hand(machines, 29900, words(prepared, run, *OPTIONS), "link", IMPATIENT)
    wait_for(lambda: "update 20/" in text(said[0]), 200, lambda: text(said[0]))
    link(machines, "down")
    try:
        until, stands = time.monotonic() + 20, ""
        while stands != text(said[0]):  # what was under way when the link went down
            stands = text(said[0])
            time.sleep(2.0)
        time.sleep(max(0.0, until - time.monotonic()))
        assert text(said[0]) == stands and [process.poll() for process in started] == [None, None]
    finally:
        link(machines, "up")
    before = int(stands.rpartition("update ")[2].partition("/")[0])
    wait_for(lambda: f"update {before + 20}/" in text(said[0]), 100, lambda: text(said[0]))
    assert SILENCE > 60 and SILENCE + GONE <= 120, "20 s are waited for with a margin, and two minutes never"
    ranks(machines, run, said)
    link(machines, "down")
    try:
        assert [process.wait(AWAY + 2 * GONE) for process in started] == [76, 76], "\n".join(map(text, said))
    finally:
        link(machines, "up")
    check_what_was_told(run, said, [0, 1], before // 10 * 10 + 10)  # saved every 10; the last may not be whole


def test_a_process_that_is_stopped(machines: Machines, prepared: Path, expected: Expected, warm: Warm) -> None:
    """It ends when it goes on. The run is the one before, if that has run; it is finished on one machine."""
    run = machines.shared / "lost"
    before = newest(run)
    started, said = by_hand(machines, 29930, words(prepared, run, *OPTIONS), "stop", IMPATIENT)
    wait_for(lambda: f"update {before + 20}/" in text(said[0]), 200, lambda: text(said[0]))
    assert ("resuming from" in text(said[0])) == (before > 0), text(said[0])
    victim = ranks(machines, run, said)[1]
    victim.send_signal(signal.SIGSTOP)
    try:
        assert started[0].wait(AWAY + 2 * GONE) == 76, text(said[0])
    finally:
        victim.send_signal(signal.SIGCONT)
        started[1].send_signal(signal.SIGCONT)  # nsenter stops itself where its child is stopped
    assert started[1].wait(AWAY + 2 * GONE) == 76, text(said[1])
    check_what_was_told(run, said, [0], before + 10)
    finish(warm, prepared, run, expected, newest(run) // 100 * 100 + 100)
