"""`compare_layouts` and `pipeline_idle` in processes of their own, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import Tool

SMALL = ["--vocab", 50, "--tokens", 48, "--micro-batches", 2]


def test_layouts_take_the_same_updates_from_the_same_profile(prepared: Path, tmp_path: Path, study: Tool) -> None:
    done = study("layouts", prepared / "recipe.yaml", *SMALL, "--updates", 2, "--output", tmp_path / "a.json",
                "--layouts", "local", "pipeline_zero1_fp32:2")
    assert done.returncode == 0, done.stderr
    local, other = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert local["losses"][1] < local["losses"][0]
    assert max(local["omega"].values()) > 1.1
    assert other["losses"] == pytest.approx(local["losses"], rel=1e-5)
    assert other["norms"] == pytest.approx(local["norms"], rel=1e-4)
    assert other["omega"] == pytest.approx(local["omega"], rel=1e-6)
    assert len(other["peak_gib"]) == 2
    head, *rows = done.stdout.splitlines()
    assert head.endswith("largest ω") and len(rows) == 2
    assert len({row.split()[-1] for row in rows}) == 1


def test_idle_time_is_measured_and_drawn(prepared: Path, tmp_path: Path, study: Tool) -> None:
    done = study("pipeline-idle", prepared / "recipe.yaml", *SMALL[:4], "--counts", 2, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    [row] = json.loads((tmp_path / "idle.json").read_text())["rows"]
    assert row["formula"] == pytest.approx(1 / 3)
    assert len(row["idle"]) == 2 and all(0 < idle < 1 for idle in row["idle"])
    assert (tmp_path / "idle.png").stat().st_size > 5_000
