"""Averaging and evaluation do not depend on the layout that saved a run: same model, translations and scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import options, without_keys
from warm import Warm

from deepnmt.checkpoint.average import average_run
from deepnmt.checkpoint.checkpoint import load_state, load_weights
from deepnmt.config import Translate, load_recipe
from deepnmt.decode.translate import translate_files
from deepnmt.evaluate.evaluate import evaluate_run

# processes, layout, pipeline stages; accumulation is chosen so that every update has two micro-batches
LOCAL = (1, "local", 0)
OTHERS = [(2, "zero3_fp32", 0), (2, "zero1_fp32", 2)]
BEGUN, UPDATES = 80, 86
SEARCHES = {"greedy": Translate(method="greedy"), "beam": Translate(beam=4, max_extra=5)}

Layout = tuple[int, str, int]


def trained(warm: Warm, prepared: Path, run: Path, layout: Layout, updates: int, every: int) -> None:
    world, config, stages = layout
    warm.train(world, prepared / "recipe.yaml", f"run={run}", *options(config, stages),
               f"batch.accumulation={2 * max(stages, 1) // world}",
               f"train.updates={updates}", f"train.save_every={every}", "train.keep_last=10",
               "train.validate_every=1000", "train.valid_bleu=false")
    assert warm.wait() == [0] * world, warm.said()


@pytest.fixture(scope="module")
def begun(prepared: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """A run long enough for a BLEU above 0."""
    run = tmp_path_factory.mktemp("begun") / "run"
    trained(warm, prepared, run, LOCAL, BEGUN, BEGUN)
    return run


def outcome(begun: Path, prepared: Path, run: Path, layout: Layout, warm: Warm) -> dict[str, Any]:
    """Resumes and saves in a layout; returns the average's weights, translations and scores."""
    shutil.copytree(begun, run)
    trained(warm, prepared, run, layout, UPDATES, 2)
    recipe = load_recipe(run / "recipe.yaml")
    folder = average_run(recipe, last=3)
    assert load_state(folder).extra["averaged_updates"] == [82, 84, 86]
    texts = {}
    for name, search in SEARCHES.items():
        translate_files(folder, str(prepared / "text" / "test.en"), str(run / name), search)
        texts[name] = (run / name).read_text(encoding="utf-8")
    evaluate_run(recipe)
    scores = json.loads((run / "scores.json").read_text())
    return {"weights": load_weights(folder), "texts": texts,
            "scores": {key: value for key, value in scores.items() if key not in ("checkpoint", "system")}}


@pytest.fixture(scope="module")
def local(begun: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> dict[str, Any]:
    return outcome(begun, prepared, tmp_path_factory.mktemp("local") / "run", LOCAL, warm)


@pytest.mark.parametrize("layout", OTHERS, ids=["zero3", "pipeline"])
def test_average_equals_that_of_the_local_engine(
    layout: Layout, local: dict[str, Any], begun: Path, prepared: Path, tmp_path: Path, warm: Warm
) -> None:
    found = outcome(begun, prepared, tmp_path / "run", layout, warm)
    first = load_weights(begun / "checkpoints" / f"update-{BEGUN:08d}")
    ours, theirs = found["weights"], local["weights"]
    assert ours.keys() == theirs.keys()
    moved = max(float((theirs[name] - weight).abs().max()) for name, weight in first.items())
    kept = {name: without_keys(name, weight) for name, weight in theirs.items()}
    apart = {name: float((ours[name] - weight)[kept[name]].abs().max()) for name, weight in theirs.items()}
    assert max(apart.values()) <= 1e-6 < moved / 100, sorted((value, name) for name, value in apart.items())[-5:]
    assert found["texts"] == local["texts"] and len(set(local["texts"]["beam"].splitlines())) > 5
    assert found["scores"] == local["scores"] and local["scores"]["bleu"] > 0
