"""Runs over launchers and machines that are killed at random moments, again and again: all later losses, and the
weights, are those of a run that nobody disturbed, to the bit.

The launchers take turns. What is hit is drawn at random (a rank, or a part of the launcher), and so are the machine,
the signal and the moment: at some update, or while a rank starts. One kill a day; `DEEPNMT_KILLS=200` kills that often,
in two runs beside each other, since one waits while the other computes; `DEEPNMT_MINUTES=30` begins none after that
time, and `DEEPNMT_SEED=2` draws others.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import count, cycle
from pathlib import Path

import psutil
import pytest
from machines import Machines
from node_runs import LONG, Expected, finish, hostfile, stood, text, torchrun, wait_for, words
from warm import Warm

from deepnmt.files import read_log

KILLS = int(os.environ.get("DEEPNMT_KILLS", "1"))
CHAINS = min(KILLS, 2)
MINUTES = float(os.environ.get("DEEPNMT_MINUTES", "1e9"))
STARTING = 12.0  # seconds that a rank takes, at most, before its first update on a machine that is not crowded
ENDED = 170.0  # seconds: two minutes for who is lost, and the launcher's own
# pdsh tells no machine that a process of another one has ended: until all have met, it may just be late
OPTIONS = (LONG[0], "train.save_every=7", "train.validate_every=40", "parallel.start_timeout=100")

Start = Callable[[Machines, int, str, str], list[subprocess.Popen[bytes]]]


def one_machine(machines: Machines, port: int, line: str, name: str) -> list[subprocess.Popen[bytes]]:
    program = f"deepspeed --quiet --num_accelerators 2 --master_port {port} --module deepnmt train {line}"
    return [machines.start("n1", program, machines.shared / name)]


def slurm(machines: Machines, port: int, line: str, name: str) -> list[subprocess.Popen[bytes]]:
    program = f"srun --nodes=2 --ntasks=2 --cpu-bind=none --kill-on-bad-exit=1 deepnmt train {line}"
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


def strike(machines: Machines, run: Path, line: str, launcher: str, draw: random.Random, number: int) -> str | None:
    """Starts the run and hits it; returns what was hit, None if the run had finished before."""
    begun = last_update(run)
    started = LAUNCHERS[launcher](machines, 31000 + 3 * number, line, f"kill-{number}")
    starting, goal = draw.random() < 0.35, begun + draw.randint(1, 25)

    def ended() -> bool:
        return all(process.poll() is not None for process in started)

    def show() -> str:
        return f"{launcher}, kill {number}\n" + "\n".join(
            text(file)[-3000:] for file in sorted(machines.shared.glob(f"kill-{number}*")))

    if starting:
        wait_for(lambda: "rank" in parts(machines, run) or ended(), 250, show)
        time.sleep(draw.random() * STARTING)
    else:
        wait_for(lambda: last_update(run) >= goal or ended(), 250, show)
        time.sleep(draw.random() * 0.05)
    kind, sent = "", draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    while not kind:
        targets = parts(machines, run)
        if starting:  # before its processes look, nobody but the user sees that a launcher is killed
            targets = {"rank": targets["rank"]} if "rank" in targets else {}
        if not targets:
            break
        drawn = draw.choice(sorted(targets))
        with suppress(psutil.NoSuchProcess):
            draw.choice(sorted(targets[drawn], key=lambda process: process.pid)).send_signal(sent)
            kind = drawn
    wait_for(lambda: not machines.processes(f"run={run}"), ENDED, lambda: f"{kind} {sent!r} left something\n{show()}")
    for process in started:
        process.wait(100)
    assert kind or stood(run) == "finished", f"ended by itself\n{show()}"
    return f"{kind} {sent.name}{' starting' * (last_update(run) == begun)}" if kind else None


@pytest.mark.timeout(900 + 400 * KILLS)  # of 2 minutes each on a crowded machine, and 300 updates to the end
def test_killed_at_random(machines: Machines, prepared: Path, expected: Expected, warm: Warm) -> None:
    seed, began = int(os.environ.get("DEEPNMT_SEED", time.time_ns())), time.monotonic()
    done, runs, numbers = Counter[tuple[str, str]](), count(1), iter(range(KILLS))
    # a hostfile run that a signal ends, ends all that DeepSpeed's launcher has started for the user there
    one_deepspeed, one_warm = threading.Lock(), threading.Lock()
    print(f"seed {seed}")
    expected(300)

    def another() -> int | None:
        return next(numbers, None) if time.monotonic() < began + 60 * MINUTES else None

    def chain(first: int) -> None:
        """Kills one run after the other, as long as there are kills to do."""
        draw, turns, number = random.Random(f"{seed} {first}"), cycle(sorted(LAUNCHERS)), another()
        for _ in range(2 * first):
            next(turns)
        while number is not None:
            run = machines.shared / f"killed-{next(runs)}"
            line, what = words(prepared, run, *OPTIONS), ""
            while number is not None and what is not None:
                launcher = next(turns)
                with one_deepspeed if launcher in ("hostfile", "deepspeed") else nullcontext():
                    what = strike(machines, run, line, launcher, draw, number)
                if what is not None:
                    done[launcher, what] += 1
                    print(f"{time.monotonic() - began:.0f} s: {done.total()}. {launcher}, {what}, {run.name} at update "
                          f"{last_update(run)}", flush=True)
                    number = another()
            with one_warm:
                finish(warm, prepared, run, expected, 300, *OPTIONS)
            print(f"{time.monotonic() - began:.0f} s: {run.name}: all losses and weights are equal", flush=True)

    with ThreadPoolExecutor(CHAINS) as pool:
        for ended in [pool.submit(chain, first) for first in range(CHAINS)]:
            ended.result()
    for (launcher, what), times in sorted(done.items()):
        print(f"{times:4} {launcher}: {what}")
    print(f"{done.total()} kills, all later losses and weights equal: "
          + ", ".join(f"{sum(times for (launcher, _), times in done.items() if launcher == name)} {name}"
                      for name in LAUNCHERS)
          + "; " + ", ".join(f"{sum(times for (_, what), times in done.items() if name in what)} {name}"
                             for name in ("SIGKILL", "SIGTERM", "starting")))
    assert done.total() == KILLS or time.monotonic() > began + 60 * MINUTES
