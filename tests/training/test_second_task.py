"""A second task, a decoder-only language model on the toy task, is a folder and needs no change in deepnmt."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tiny_engines import recipe_of
from walks.task import TASK
from warm import Warm

from deepnmt.checkpoint.checkpoint import verify
from deepnmt.config import with_settings
from deepnmt.files import read_log
from deepnmt.processes.process_group import processes
from deepnmt.training.trainer import train
from studies.toy_task import ToyTask

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 16
RECIPE = """
run: {run}
task: walks
data: {{folder: alphabet}}
model: {{width: 16, heads: 2, ffn: 25}}
optimizer: {{lr: 0.02}}
schedule: {{name: constant, warmup: 0}}
train: {{updates: 16, log_every: 1, validate_every: 4, save_every: 4}}
parallel: {{ds_config: null, threads: 1}}
average_last: 1
"""
# What somebody does with a task whose folder lies in deepnmt/tasks.
PROGRAM = """
import sys
import deepnmt
from deepnmt import plots
from deepnmt.cli import main

plots.plot_learning_curve = lambda *_: None
whole, broken = sys.argv[1:]
print(deepnmt.__file__)
assert main(None, ["--help"]) == 0
assert main("train", [whole, "data.folder=nowhere"]) == 2
assert main("train", [whole, "data.src_lang=de"]) == 2
assert main("prepare", [whole]) == 2
assert main("train", [whole, "--dry-run"]) == 0
for words in ([whole], [broken, "train.updates=8"], [broken]):
    assert main("train", words) == 0
assert main("bits", [whole]) == 0
"""


def check(whole: Path, broken: Path) -> None:
    """Two runs, the second of which was stopped and went on, are the same, and have learned."""
    ours, theirs = ([r["loss"] for r in read_log(run / "log.jsonl") if "loss" in r] for run in (broken, whole))
    assert ours == theirs and len(ours) == UPDATES + UPDATES // 4
    assert ours[-1] < math.log(ToyTask().vocabulary) < ours[0]
    last = [run / "checkpoints" / f"update-{UPDATES:08d}" for run in (broken, whole)]
    for checkpoint in last:
        verify(checkpoint)
        assert json.loads((checkpoint / "symbols.json").read_text()) == ToyTask().symbols
    assert len({(checkpoint / "weights.safetensors").read_bytes() for checkpoint in last}) == 1


def test_a_folder_in_tasks_is_enough(tmp_path: Path) -> None:
    """It has recipes, figures, a warning, files and a command of its own, and resumes to the bit."""
    shutil.copytree(ROOT / "deepnmt", tmp_path / "deepnmt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "support" / "walks", tmp_path / "deepnmt" / "tasks" / "walks")
    for name in ("whole", "broken"):
        (tmp_path / f"{name}.yaml").write_text(RECIPE.format(run=tmp_path / name), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, "whole.yaml", "broken.yaml"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(tmp_path / "deepnmt")) and "  bits " in done.stdout
    assert "data.folder: walks lead somewhere; give another name" in done.stderr
    assert "data.src_lang: unknown setting; known: folder" in done.stderr
    assert "task: walks has no data to prepare; run deepnmt train" in done.stderr
    assert "16 wide, walks called alphabet" in done.stdout
    check(tmp_path / "whole", tmp_path / "broken")
    validations = [r for r in read_log(tmp_path / "whole" / "log.jsonl") if r["type"] == "valid"]
    assert float(done.stdout.split()[-1]) == validations[-1]["bits"]
    assert f" {validations[0]['bits']:.2f} bits a symbol" in done.stderr
    assert json.loads((tmp_path / "whole" / "STATUS.json").read_text())["warning"] == "no bit is left to be learned"


def trained(run: str, updates: str) -> int:
    """Runs on each rank."""
    with processes(1, group=True) as ranks:
        recipe = recipe_of("zero1_fp32", 2 // ranks.world, updates=int(updates), log_every=1, validate_every=4,
                           save_every=4, valid_bleu=False)
        return train(with_settings(recipe, {
            "run": run, "optimizer.lr": 0.02, "schedule.name": "constant", "schedule.warmup": 0, "average_last": 1,
        }), ranks, TASK)


def test_it_trains_and_resumes_with_zero(tmp_path: Path, warm: Warm) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for run, updates in ((whole, UPDATES), (broken, UPDATES // 2), (broken, UPDATES)):
        warm.run(2, "test_second_task:trained", run, updates)
    check(whole, broken)
