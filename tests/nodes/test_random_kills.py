"""Runs over launchers and machines that are killed at random moments, again and again: all later losses, and the
weights, are those of a run that nobody disturbed, to the bit.

A start is by a launcher drawn at random, and so are what is hit (a rank, or a part of the launcher), on which machine,
with which signal and at which update. One kill a day; `DEEPNMT_KILLS=200` kills that often.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from machines import Machines
from node_runs import LONG, Expected, finish, hostfile, text, torchrun, wait_for, words
from warm import Warm

from deepnmt.files import read_log

KILLS = int(os.environ.get("DEEPNMT_KILLS", "1"))
PER_RUN = 10  # kills of one run of 300 updates
ENDED = 170.0  # seconds: two minutes for who is lost, and the launcher's own
OPTIONS = (LONG[0], "train.save_every=7", "train.validate_every=40")

Start = Callable[[Machines, int, str, str], list[subprocess.Popen[bytes]]]


def one_machine(machines: Machines, port: int, line: str, name: str) -> list[subprocess.Popen[bytes]]:
    program = f"deepspeed --quiet --num_accelerators 2 --master_port {port} --module deepnmt train {line}"
    return [machines.start("n1", program, machines.shared / name)]


def slurm(machines: Machines, port: int, line: str, name: str) -> list[subprocess.Popen[bytes]]:
    program = f"srun --nodes=2 --ntasks=2 --kill-on-bad-exit=1 deepnmt train {line}"
    return [machines.start("n1", program, machines.shared / name, MASTER_PORT=str(port))]


LAUNCHERS: dict[str, Start] = {
    "deepspeed": one_machine,
    "hostfile": lambda *arguments: [hostfile(*arguments)[0]],
    "torchrun": lambda *arguments: torchrun(*arguments)[0],
    "srun": slurm,
}


def last_update(run: Path) -> int:
    log = run / "log.jsonl"
    return max((record["update"] for record in read_log(log) if record["type"] == "train"), default=0) \
        if log.exists() else 0


def parts(machines: Machines, run: Path) -> dict[str, list[psutil.Process]]:
    """The processes of a run, by what they are."""
    found: dict[str, list[psutil.Process]] = {}
    for process in machines.processes(f"run={run}"):
        try:
            name, environment = process.name(), process.environ()
            words = process.cmdline()
        except psutil.Error:
            continue
        if name in ("bash", "sh", "nsenter", "hostfile.sh", "torchrun.sh"):
            continue
        ranked = any(key in environment for key in ("LOCAL_RANK", "SLURM_PROCID")) and "train" in words
        kind = "rank" if ranked and name != "srun" and not any("launch" in word for word in words[:6]) else name
        found.setdefault(kind, []).append(process)
    return found


def strike(machines: Machines, run: Path, line: str, draw: random.Random, number: int) -> str | None:
    """Starts the run and hits it; returns what was done, None if the run had finished before."""
    launcher = draw.choice(sorted(LAUNCHERS))
    started = LAUNCHERS[launcher](machines, 31000 + 3 * number, line, f"kill-{number}")
    goal = last_update(run) + draw.randint(1, 60)

    def show() -> str:
        return f"{launcher}, kill {number}\n" + "\n".join(
            text(file)[-3000:] for file in sorted(machines.shared.glob(f"kill-{number}*")))

    wait_for(lambda: last_update(run) >= goal or all(process.poll() is not None for process in started), 250, show)
    time.sleep(draw.random() * 0.05)
    targets = parts(machines, run)
    if not targets:
        return None
    kind = draw.choice(sorted(targets))
    sent = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    victim = draw.choice(sorted(targets[kind], key=lambda process: process.pid))
    try:
        victim.send_signal(sent)
    except psutil.NoSuchProcess:
        return None
    wait_for(lambda: not machines.processes(f"run={run}"), ENDED, lambda: f"{kind} {sent!r} left something\n{show()}")
    for process in started:
        process.wait(30)
    return f"{launcher}: {kind} {sent.name}"


@pytest.mark.timeout(900 + 400 * KILLS)  # of 2 minutes each on a crowded machine, and 300 updates to the end
def test_killed_at_random(machines: Machines, prepared: Path, expected: Expected, warm: Warm) -> None:
    seed = time.time_ns()
    draw, done, runs = random.Random(seed), Counter[str](), 0
    print(f"seed {seed}")
    while done.total() < KILLS:
        runs += 1
        run = machines.shared / f"killed-{runs}"
        line = words(prepared, run, *OPTIONS)
        for _ in range(min(PER_RUN, KILLS - done.total())):
            what = strike(machines, run, line, draw, done.total() + 50 * runs)
            if what is None:
                break
            done[what] += 1
            print(f"{done.total()} {what} at update {last_update(run)}", flush=True)
        finish(warm, prepared, run, expected, 300, *OPTIONS)
        print(f"run {runs}: all losses and weights equal after {done.total()} kills so far", flush=True)
    print("\n".join(f"{count} {what}" for what, count in sorted(done.items())))
