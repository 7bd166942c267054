"""The clock for a pipeline's idle time, a process's peak memory, and impossible layouts."""

from __future__ import annotations

import inspect
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from refusals import Refused

from deepnmt.parallel.engine import Engine
from studies.benchmarks.layouts import BusyClock, own_peak


class OneStage:
    """A stage with forward and backward passes of 10 ms each, 5 ms of waiting between them, and a step of 20 ms."""

    def time_instructions(self, add: Callable[[float], None]) -> None:
        self.add = add

    def train(self) -> None:
        time.sleep(0.01)
        self.add(0.01)
        time.sleep(0.015)
        self.add(0.01)
        time.sleep(0.02)


def test_the_step_is_neither_work_nor_idle_time() -> None:
    stage = OneStage()
    clock = BusyClock(cast(Engine, stage))
    for _ in range(2):
        started = time.perf_counter()
        stage.train()
        ended = time.perf_counter()
        worked, last = clock.take()
        assert worked == 0.02, "each update starts from 0"
        assert started + 0.025 <= last <= ended - 0.02


RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "demo" / "admin_18l-18l.yaml")


@pytest.mark.parametrize(("line", "message"), [
    *((f"layouts --layouts {text}", f"layout '{text}' is not of the form local, CONFIG:PROCESSES")
      for text in ("zero1_fp32:0", "pipeline_zero1_fp32:4/0", "pipeline_zero1_fp32:0/2", "zero3:two")),
    ("pipeline-idle --counts 4 0", "--counts is 0, must be 1 or more"),
    ("pipeline-idle --vocab 4", "--vocab is 4, must be 5 or more"),
    ("layouts --layouts local --vocab 4", "--vocab is 4, must be 5 or more"),
    ("pipeline-idle --stages 9", "parallel.pipeline_stages is 9, but the model has 4 layers (2 encoder, 2 decoder)"),
    ("layouts --layouts local pipeline_zero1_fp32:8/8",
     "parallel.pipeline_stages is 8, but the model has 4 layers (2 encoder, 2 decoder)"),
    ("layouts --layouts local --output mine/a.json",
     "file mine/a.json cannot be written: File exists; set --output to a f"),
    ("layouts --layouts local --output .",
     "file . cannot be written: Is a directory; set --output to a file that can be"),
    ("pipeline-idle --output mine", "folder mine cannot be written: File exists; set --output to a folder that can be"),
])
def test_mistakes_are_reported_before_anything_starts(
    line: str, message: str, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("subprocess.Popen")
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("mine")
    command, *words = line.split()
    assert message in refused(command, RECIPE, "model.encoder.layers=2", "model.decoder.layers=2", *words)
    assert Path("mine").read_text() == "mine"


def test_peak_memory_excludes_the_parent_process() -> None:
    """A plain Python process, started by this one, which has imported PyTorch."""
    lines = ["import resource, sys", "from pathlib import Path", inspect.getsource(own_peak), "print(own_peak())"]
    peak = float(subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, check=True).stdout)
    assert 2**20 < peak < own_peak() / 2


def test_peak_memory_without_vmhwm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in gVisor, which has VmSize, VmRSS and VmData only."""
    monkeypatch.setattr(Path, "read_text", lambda path: "VmSize:\t 9 kB\nVmRSS:\t 8 kB\nVmData:\t 7 kB\n")
    assert own_peak() == 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 2**24
