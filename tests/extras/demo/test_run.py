"""When the demo reuses an existing run or scores, and how it starts training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_run
from refusals import Refused, contents

from deepnmt import config
from deepnmt.checkpoint.average import average_run
from deepnmt.errors import UserError
from deepnmt.extras.demo import run as demo_run
from deepnmt.extras.demo.run import is_scored, require_same_settings

ROOT = Path(__file__).resolve().parents[3]


def test_only_the_scores_of_this_average_are_reused(tmp_path: Path) -> None:
    corpus = {"src": ["test.en"], "trg": ["test.de"]}
    recipe = tiny_run.recipe_of(tmp_path / "run", {"test": corpus})
    for update in (10, 20):
        tiny_run.write(recipe, update)
    average_run(recipe)
    due = {"sets": {"test": {}}, "averaged_updates": [10, 20], "translate": recipe.translate.model_dump()}
    file = tmp_path / "run" / "scores.json"
    assert not is_scored(recipe, file)
    others = ({"sets": {"other": {}}}, {"sets": {"test": {}, "other": {}}}, {"averaged_updates": []},
              {"averaged_updates": [10]}, {"translate": config.Translate(beam=9).model_dump()})
    for scores in (*({**due, **change} for change in others), {"systems": {"x": {}, "y": {}}, "comparisons": []}):
        file.write_text(json.dumps(scores))
        assert not is_scored(recipe, file), scores
    file.write_text(json.dumps(due))
    assert is_scored(recipe, file)
    tiny_run.write(recipe, 30)
    assert not is_scored(recipe, file)


def test_a_finished_run_of_other_settings_is_not_reused(tmp_path: Path) -> None:
    trained = tiny_run.recipe_of(tmp_path / "run")
    free = {"run": "moved", "average_last": 2, "translate": config.Translate(beam=9),
            "parallel": trained.parallel.model_copy(update={"threads": 3})}
    require_same_settings(trained, trained.model_copy(update=free))
    other = tiny_run.recipe_of(tmp_path / "run", model={"heads": 4})
    other = other.model_copy(update={**free, "seed": 2, "train": config.Train(updates=7)})
    with pytest.raises(UserError) as fault:
        require_same_settings(trained, other)
    head, *changes, way_out = str(fault.value).splitlines()
    assert head == "moved is finished, but was trained with other settings:"
    assert changes == ["  model.heads: 2 -> 4", "  seed: 1 -> 2", "  train.updates: 10 -> 7"]
    assert "remove moved to start over" in way_out and "run=FOLDER" in way_out


def test_training_is_launched_from_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the package is, and whatever is in the current folder."""
    calls: list[list[str]] = []

    def launched(command: list[str], **_: Any) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(returncode=0)

    recipe = tiny_run.recipe_of(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", launched)
        demo_run.train_on_all(recipe)
    main, *words = calls[0][-3:]
    assert main == str(ROOT / "deepnmt" / "__main__.py") and words == ["train", f"{tmp_path}/run/demo.yaml"]
    (tmp_path / "deepnmt").mkdir()
    (tmp_path / "deepnmt" / "__init__.py").write_text("raise SystemExit(3)")
    done = subprocess.run([sys.executable, main, "train", "--help"], cwd=tmp_path, capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0 and "Trains the model" in done.stdout, done.stderr


def test_mistakes(prepared: Path, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    recipe = prepared / "recipe.yaml"
    assert "data.train names others" in refused("demo", recipe, "data.train={tsv: x.tsv}")
    assert "data.train names others" in refused("demo", "bert/small_2l", "data.train=a", "data.valid=b")
    assert "--pairs is 5, must be 10 or more" in refused("demo", recipe, "--pairs", 5)
    mine = f"data.train={{src: {tmp_path}/train.en, trg: {tmp_path}/train.de}}"
    assert f"{tmp_path} has other content than a demo corpus" in refused("demo", recipe, mine)
    assert contents(tmp_path) == {"file": b"mine"}
