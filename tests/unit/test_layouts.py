"""What counts as work when a pipeline's idle time is measured, and layouts that cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from deepnmt.cli import main
from deepnmt.errors import UserError
from deepnmt.layouts import BusyClock, parse_layout
from deepnmt.parallel.engine import Engine


class OneStage:
    """Forward and backward of 10 ms each, 5 ms of waiting between them, and a step of 20 ms."""

    def time_instructions(self, add: Callable[[float], None]) -> None:
        self.add = add

    def train(self) -> None:
        time.sleep(0.01)
        self.add(0.01)
        time.sleep(0.015)
        self.add(0.01)
        time.sleep(0.02)


def test_the_step_is_neither_work_nor_waiting() -> None:
    stage = OneStage()
    clock = BusyClock(cast(Engine, stage))
    for _ in range(2):
        started = time.perf_counter()
        stage.train()
        ended = time.perf_counter()
        worked, last = clock.take()
        assert worked == 0.02, "each update begins from nothing"
        assert started + 0.025 <= last <= ended - 0.02


@pytest.mark.parametrize("text", ["zero1_fp32:0", "pipeline_zero1_fp32:4/0", "pipeline_zero1_fp32:0/2", "zero3:two"])
def test_layouts_of_no_process_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"is not of the form local, CONFIG:PROCESSES"):
        parse_layout(text)


def test_counts_of_micro_batches_are_above_0(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(Path(__file__).resolve().parents[2] / "recipes" / "demo" / "admin_18l-18l.yaml")
    assert main("pipeline-idle", [recipe, "--counts", "4", "0"]) == 2
    assert "--counts is 0, must be 1 or more" in capsys.readouterr().err
