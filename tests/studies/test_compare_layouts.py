"""`compare_layouts` in forked processes, and `pipeline_idle` in new ones, at a toy size."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from warm import Warm

from studies.__main__ import main
from studies.benchmarks import workers

SMALL = ["--vocab", "50", "--tokens", "48", "--micro-batches", "2"]


def worker(module: str, *files: str) -> None:
    """Runs on each rank: the program that `run_workers` starts, with the files of a job and its answer."""
    os.environ["DEEPNMT_THREADS"], sys.argv = "1", [module, *files]
    workers.end_process = lambda code: None  # type: ignore[assignment,misc]
    runpy.run_module(module, run_name="__main__")


def test_layouts_take_the_same_updates_from_the_same_profile(
    prepared: Path, tmp_path: Path, warm: Warm, threads: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:
    def run_workers(module: str, job: dict[str, Any], count: int, threads: int) -> Any:
        task, answer = tmp_path / "job.json", tmp_path / "answer.json"
        task.write_text(json.dumps(job))
        warm.run(count, "test_compare_layouts:worker", module, task, answer)
        return json.loads(answer.read_text())

    monkeypatch.setattr("studies.benchmarks.layouts.run_workers", run_workers)
    words = [str(prepared / "recipe.yaml"), *SMALL, "--updates", "2", "--output", str(tmp_path / "a.json")]
    assert main("layouts", [*words, "--layouts", "local", "pipeline_zero1_fp32:2"]) == 0
    local, other = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert local["losses"][1] < local["losses"][0]
    assert max(local["omega"].values()) > 1.1
    assert other["losses"] == pytest.approx(local["losses"], rel=1e-5)
    assert other["norms"] == pytest.approx(local["norms"], rel=1e-4)
    assert other["omega"] == pytest.approx(local["omega"], rel=1e-6)
    assert len(other["peak_gib"]) == 2
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("largest ω") and len(rows) == 2
    assert len({row.split()[-1] for row in rows}) == 1


def test_idle_time_is_measured_and_plotted(prepared: Path, tmp_path: Path, threads: None) -> None:
    words = [str(prepared / "recipe.yaml"), *SMALL[:4], "--counts", "2", "--output", str(tmp_path)]
    assert main("pipeline-idle", words) == 0
    [row] = json.loads((tmp_path / "idle.json").read_text())["rows"]
    assert row["formula"] == pytest.approx(1 / 3)
    assert len(row["idle"]) == 2 and all(0 < idle < 1 for idle in row["idle"])
    assert (tmp_path / "idle.png").stat().st_size > 5_000
