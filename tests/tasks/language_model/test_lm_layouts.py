"""A language model with adaptive softmax and dropout: the same losses in every layout, and after kill -9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kills import kill_before
from small_text import recipe, tree, write_texts
from task_layouts import four_updates
from tiny_engines import parallel
from warm import Warm

from deepnmt.files import read_log
from deepnmt.processes.process_group import processes
from deepnmt.tasks.language_model.task import TASK
from deepnmt.tasks.language_model.text import PreparedText
from deepnmt.training.trainer import train

TOGETHER = 6  # micro-batches of an update, of all processes
MODEL: dict[str, Any] = {
    "bands": [7, 11], "band_factor": 2, "band_dropout": 0.2, "dropout": 0.2, "attention_dropout": 0.1,
    "decoder": {"block": "b2t", "layers": 3}}
# Name of a job: processes, and of each of its engines the layout, pipeline stages, and whether an update has a fixed
# number of micro-batches.
JOBS: dict[str, tuple[int, list[tuple[str, int, bool]]]] = {
    "zero-2": (2, [("zero0_fp32", 0, True), ("zero1_fp32", 0, True), ("zero2_fp32", 0, True), ("zero3_fp32", 0, True),
                   ("zero1_fp32", 0, False)]),
    "pipeline-2": (2, [("zero1_fp32", 2, True)]),
    "pipeline-3": (3, [("zero0_fp32", 3, True)]),
}


def recipe_of(folder: Path, world: int, layout: str, stages: int, fixed: bool) -> dict[str, Any]:
    """`fixed`: an update has so many micro-batches, else so many tokens, which other processes divide into other
    micro-batches; then without dropout."""
    sized = {"accumulation": TOGETHER * (stages or 1) // world} if fixed else {"update_tokens": 500}
    dropouts = {name: fixed * MODEL[name] for name in ("dropout", "attention_dropout", "band_dropout")}
    return tree(folder, model={**MODEL, **dropouts}, batch={"tokens": 100, **sized},
                parallel=parallel(layout, stages, threads=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a prepared text."""
    folder = tmp_path_factory.mktemp("lm")
    write_texts(folder)
    PreparedText.prepare(recipe(folder, model=MODEL))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path, warm: Warm) -> list[list[float]]:
    """What one process computes; with a fixed number of micro-batches last."""
    return four_updates(warm, 1, folder, [recipe_of(folder, 1, "local", 0, fixed) for fixed in (False, True)])


@pytest.mark.parametrize("job", JOBS)
def test_losses_are_those_of_one_process(job: str, folder: Path, alone: list[list[float]], warm: Warm) -> None:
    world, rows = JOBS[job]
    assert all(ours[0] > ours[3] for ours in alone)
    found = four_updates(warm, world, folder, [recipe_of(folder, world, *row) for row in rows])
    for row, theirs in zip(rows, found, strict=True):
        assert theirs == pytest.approx(alone[row[2]], rel=1e-6), row


def killed(folder: str, run: str, number: str) -> int:
    """Runs on each rank: training that is killed before a change in its checkpoints; 0: not at all."""
    if int(number):
        kill_before(int(number), Path(run, "checkpoints"))
    changes: dict[str, Any] = {"run": run, "model": MODEL, "parallel": parallel("zero1_fp32"),
                               "train": {"updates": 9, "save_every": 3, "validate_every": 3}}
    with processes(threads=1, group=True) as ranks:
        return train(recipe(Path(folder), **changes), ranks, TASK)


def test_a_killed_run_goes_on_exactly(folder: Path, warm: Warm) -> None:
    whole, broken = folder / "whole", folder / "broken"
    warm.run(1, "test_lm_layouts:killed", folder, whole, 0)
    for number in (5, 30):
        warm.start(1, "test_lm_layouts:killed", folder, broken, number)
        assert warm.wait(180) == [-9], warm.said()
    warm.run(1, "test_lm_layouts:killed", folder, broken, 0)
    for kind in ("train", "valid"):
        logs = [{record["update"]: record["loss"] for record in read_log(run / "log.jsonl") if record["type"] == kind}
                for run in (whole, broken)]
        assert logs[0] == logs[1] and 9 in logs[0]
    ends = [(run / "checkpoints" / "update-00000009" / "weights.safetensors").read_bytes() for run in (whole, broken)]
    assert ends[0] == ends[1]
