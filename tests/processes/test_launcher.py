"""Whatever ends the `deepspeed` command or its launch.py, no process trains on unseen. What it trains has the losses of
processes that need no launcher."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from installed import environment
from run_files import losses
from warm import Warm

import deepnmt
from deepnmt.checkpoint.checkpoint import list_checkpoints
from deepnmt.cli import main
from deepnmt.processes.process_group import free_port

DEEPSPEED = str(Path(sys.executable).with_name("deepspeed"))
GONE = 60.0  # seconds, on a busy machine, within which all processes must have ended
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the processes above")

# Says which process it is, and why it is asked to stop.
WAITING = """
import os, signal, sys, time
from pathlib import Path
from deepnmt.processes.process_group import processes
from deepnmt.processes.launcher import lost_launcher
def stop(number, frame):
    Path(f"stopped-{os.environ['RANK']}").write_text(lost_launcher())
    sys.exit(75)
with processes(1) as ranks:
    signal.signal(signal.SIGTERM, stop)
    Path(f"there-{ranks.rank}").write_text("")
    time.sleep(120)
"""


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} after {seconds:g} s"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., psutil.Popen]]:
    """Starts `deepspeed` on two processes in `tmp_path`."""
    started = []

    def run(*words: str) -> psutil.Popen:
        env = environment(Path(DEEPSPEED).parent, tmp_path, PYTHONPATH=str(Path(deepnmt.__file__).parents[1]))
        with (tmp_path / "said").open("w") as said:
            runner = psutil.Popen([DEEPSPEED, "--quiet", "--num_accelerators", "2", "--master_port", str(free_port()),
                                   *words], cwd=tmp_path, env=env, stdout=said, stderr=subprocess.STDOUT,
                                  start_new_session=True)
        started.append(runner)
        return runner

    yield run
    for runner in started:
        with suppress(psutil.NoSuchProcess):
            for process in [*runner.children(recursive=True), runner]:
                process.kill()


@pytest.mark.parametrize(("target", "number", "code"), [
    ("runner", signal.SIGINT, -signal.SIGINT), ("launch.py", signal.SIGTERM, 1), ("launch.py", signal.SIGKILL, 0)])
def test_every_end_of_the_launcher_reaches_the_processes(
        target: str, number: int, code: int, start: Callable[..., psutil.Popen], tmp_path: Path) -> None:
    """The last exit code is DeepSpeed's fault: it hides that its launch.py was killed. The runner is killed below."""
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    runner = start(str(script))
    wait_for(lambda: len(list(tmp_path.glob("there-*"))) == 2, 120, "the processes have not met")
    (launch,) = runner.children()
    ranks = launch.children()
    (runner if target == "runner" else launch).send_signal(number)
    assert runner.wait(GONE) == code
    wait_for(lambda: not any(process.is_running() for process in [launch, *ranks]), GONE, "processes are left behind")
    reasons = {file.read_text() for file in tmp_path.glob("stopped-*")}
    if target == "runner":  # else the kernel's own signal may be first
        assert any(reason.startswith("the deepspeed command has ended") for reason in reasons), reasons


def test_training_saves_when_the_deepspeed_command_is_killed(
        start: Callable[..., psutil.Popen], prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        warm: Warm) -> None:
    run, forked = tmp_path / "run", tmp_path / "forked"
    words = [str(prepared / "recipe.yaml"), "train.validate_every=100000", "train.save_every=100000",
             "parallel.ds_config=ds_configs/zero1.json"]
    runner = start("--module", "deepnmt", "train", *words, f"run={run}", "train.updates=100000")
    wait_for(lambda: "update 3/" in (tmp_path / "said").read_text(), 200, "no update")
    assert main("status", [str(run)]) == 3
    everything = runner.children(recursive=True)
    runner.kill()
    assert runner.wait() == -signal.SIGKILL
    wait_for(lambda: not any(process.is_running() for process in everything), GONE, "processes are left behind")
    assert "stopped because the deepspeed command has ended" in (tmp_path / "said").read_text()
    assert main("status", [str(run)]) == 75
    said = json.loads((run / "STATUS.json").read_text())
    (saved,) = list_checkpoints(run / "checkpoints")
    assert saved.name == f"update-{said['update']:08d}" and said["update"] >= 3
    assert "was stopped because the deepspeed command has ended" in capsys.readouterr().out
    warm.run(2, "warm:train", *words, f"run={forked}", "train.updates=3", "train.valid_bleu=false")
    found, expected = losses(run), losses(forked)
    assert len(expected) == 3 and expected == {update: found[update] for update in expected}
