"""A language model with adaptive softmax and dropout: the same losses in every layout, and after kill -9."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kills import kill_before
from small_text import recipe, write_texts
from tiny_engines import parallel
from warm import Warm

from deepnmt.data.batching import START
from deepnmt.files import read_log
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.settings import layout_of
from deepnmt.processes.launch import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.language_model.task import TASK
from deepnmt.tasks.language_model.text import open_text, prepare_text
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


def losses(folder: Path, layout: str, stages: int, fixed: bool, ranks: Ranks) -> list[float]:
    """Of four updates, and of the validation text after them. `fixed`: an update has so many micro-batches, else so
    many tokens, which other processes divide into other micro-batches; then without dropout."""
    sized = {"accumulation": TOGETHER * (stages or 1) // ranks.world} if fixed else {"update_tokens": 500}
    dropouts = {name: fixed * MODEL[name] for name in ("dropout", "attention_dropout", "band_dropout")}
    made = recipe(folder, model={**MODEL, **dropouts}, batch={"tokens": 100, **sized},
                  parallel=parallel(layout, stages))
    data, found = open_text(made), []
    engine = start_engine(made, layout_of(made, ranks.world), (data.vocab.size, data.vocab.size), ranks)
    stream, position, count = TASK.stream(made, data), START, made.batch.entries(engine.data_world)
    for _ in range(4):
        update = stream.update(position, count, engine.data_rank, engine.data_world, ranks.device)
        stats = engine.train_step(update.batches, update.tokens, 0.01)
        found.append(stats.loss / update.tokens)
        position = update.next
    found.append(TASK.validate(made, data, engine, ranks).loss)
    engine.close()
    return found


def compute(folder: str, layouts: str) -> None:
    """Runs on each rank."""
    rows = json.loads(layouts)
    with processes(threads=1, group=rows[0][0] != "local") as ranks:
        found = [losses(Path(folder), layout, stages, fixed, ranks) for layout, stages, fixed in rows]
        if ranks.first:
            Path(folder, f"losses-{ranks.world}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("job", JOBS)
def test_losses_are_those_of_one_process(job: str, tmp_path: Path, warm: Warm) -> None:
    world, rows = JOBS[job]
    write_texts(tmp_path)
    prepare_text(recipe(tmp_path, model=MODEL))
    warm.run(1, "test_lm_layouts:compute", tmp_path, json.dumps([("local", 0, False), ("local", 0, True)]))
    warm.run(world, "test_lm_layouts:compute", tmp_path, json.dumps(rows))
    alone = json.loads((tmp_path / "losses-1.json").read_text())
    assert all(ours[0] > ours[-1] for ours in alone)
    for row, theirs in zip(rows, json.loads((tmp_path / f"losses-{world}.json").read_text()), strict=True):
        assert theirs == pytest.approx(alone[row[2]], rel=1e-6), row


def killed(folder: str, run: str, number: str) -> int:
    """Runs on each rank: training that is killed before a change in its checkpoints; 0: not at all."""
    if int(number):
        kill_before(int(number), Path(run, "checkpoints"))
    changes: dict[str, Any] = {"run": run, "model": MODEL, "parallel": parallel("zero1_fp32"),
                               "train": {"updates": 9, "save_every": 3, "validate_every": 3}}
    with processes(threads=1, group=True) as ranks:
        return train(recipe(Path(folder), **changes), ranks, TASK)


def test_a_killed_run_goes_on_exactly(tmp_path: Path, warm: Warm) -> None:
    write_texts(tmp_path)
    prepare_text(recipe(tmp_path, model=MODEL))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    warm.run(1, "test_lm_layouts:killed", tmp_path, whole, 0)
    for number in (5, 30):
        warm.start(1, "test_lm_layouts:killed", tmp_path, broken, number)
        assert warm.wait(180) == [-9], warm.said()
    warm.run(1, "test_lm_layouts:killed", tmp_path, broken, 0)
    for kind in ("train", "valid"):
        logs = [{record["update"]: record["loss"] for record in read_log(run / "log.jsonl") if record["type"] == kind}
                for run in (whole, broken)]
        assert logs[0] == logs[1] and 9 in logs[0]
    ends = [(run / "checkpoints" / "update-00000009" / "weights.safetensors").read_bytes() for run in (whole, broken)]
    assert ends[0] == ends[1]
