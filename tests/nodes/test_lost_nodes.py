"""A link that is down for a while is waited for; one that stays down, or a process that is stopped, ends all machines
with a sentence that names it, and nothing is lost.

One run meets all three, one after the other; each start resumes it. The last one ends it, and all losses and weights
are those of a run that nobody disturbed, to the bit.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from machines import NODES, Machines
from node_runs import ENDLESS, GONE, Expected, assert_same, by_hand, newest, text, wait_for, words

from deepnmt.checkpoint.checkpoint import list_checkpoints, verify
from deepnmt.parallel.watch import SILENCE

OPTIONS = (*ENDLESS, "train.save_every=10")
AWAY = 10.0  # seconds without a sign that a test has time for; what they are in a run, the last one uses up to a third
IMPATIENT = (f"python -c 'import sys; from deepnmt.parallel import watch; watch.SILENCE = {AWAY}; "
             "from deepnmt.cli import main; sys.exit(main(\"train\", sys.argv[1:]))'")


def link(machines: Machines, state: str) -> None:
    """Sets the network of the second machine up or down."""
    code, said = machines.run("n2", f"ip link set eth0 {state}")
    assert code == 0, said


@pytest.mark.parametrize("fault", ["link", "stop"])
def test_a_machine_that_stays_away(fault: str, machines: Machines, prepared: Path) -> None:
    """Down for ever, each machine names the other's process; stopped, it is named, and ends when it goes on."""
    run = machines.shared / "lost"
    before = newest(run)
    started, said = by_hand(machines, {"link": 29910, "stop": 29930}[fault], words(prepared, run, *OPTIONS), fault,
                            IMPATIENT)
    wait_for(lambda: f"update {before + 20}/" in text(said[0]), 200, lambda: text(said[0]))
    found = [process for process in machines.processes(f"run={run}")
             if process.name().startswith("python") and process.environ().get("RANK") == "1"]
    victim = found[0] if fault == "stop" else None
    if victim is None:
        link(machines, "down")
    else:
        victim.send_signal(signal.SIGSTOP)
    try:
        lost = [0, 1] if victim is None else [0]
        assert [started[rank].wait(AWAY + 2 * GONE) for rank in lost] == [76] * len(lost), "\n".join(map(text, said))
    finally:
        if victim is None:
            link(machines, "up")
        else:
            victim.send_signal(signal.SIGCONT)
            started[1].send_signal(signal.SIGCONT)  # nsenter stops itself where its child is stopped
    assert started[1].wait(AWAY + 2 * GONE) == 76, text(said[1])
    for rank in lost:
        told = [line for line in text(said[rank]).splitlines() if line.startswith("deepnmt: ")]
        other = f"no sign of life from rank {1 - rank} on {NODES[1 - rank]} for "
        assert len(told) == 1 and other in told[0] and f"cut off from {NODES[rank]}" in told[0], told
    status = json.loads((run / "STATUS.json").read_text())
    assert status["status"] == "lost" and "rank 1 on n2" in status["error"]
    assert newest(run) >= before + 10
    verify(list_checkpoints(run / "checkpoints")[-1])


def test_a_link_that_is_down_for_20_seconds(machines: Machines, prepared: Path, expected: Expected) -> None:
    run = machines.shared / "lost"
    before = newest(run)  # what the others left, who may not have run
    updates = before // 100 * 100 + 200
    started, said = by_hand(machines, 29900, words(prepared, run, *OPTIONS, f"train.updates={updates}"), "outage")
    wait_for(lambda: f"update {before + 20}/" in text(said[0]), 200, lambda: text(said[0]))
    assert ("resuming from" in text(said[0])) == (before > 0), text(said[0])
    link(machines, "down")
    try:
        time.sleep(1.0)
        stands = text(said[0])
        time.sleep(19.0)
        assert text(said[0]) == stands and [process.poll() for process in started] == [None, None]
    finally:
        link(machines, "up")
    assert [process.wait(200) for process in started] == [0, 0], "\n".join(map(text, said))
    assert_same(run, expected, updates)
    assert SILENCE > 60 and SILENCE + GONE <= 120, "20 s are waited for with a margin, and two minutes never"
