"""How a run ends by itself, and which checkpoints it keeps: early stopping, epochs, the best by loss or by BLEU.

Runs in this process with the local engine; the results of validations are given by the test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusals import user_error
from run_files import records

from deepnmt.checkpoint.checkpoint import load_state
from deepnmt.config import load_recipe
from deepnmt.data.batching import Stream
from deepnmt.data.prepared import open_prepared
from deepnmt.parallel.engine import LocalEngine, StepStats
from deepnmt.processes.process_group import processes
from deepnmt.tasks.translation.task import TASK as TRANSLATION
from deepnmt.training.log import Monitor
from deepnmt.training.status import FINISHED
from deepnmt.training.task import Validation
from deepnmt.training.trainer import train

Run = Callable[..., Path]


@pytest.fixture
def run(prepared: Path, tmp_path: Path, threads: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Trains into a folder, with the `(loss, BLEU)` that validations shall give, and overrides; returns the folder."""
    def start(found: list[tuple[float, float]], *overrides: str) -> Path:
        coming = iter(found)

        def validated(*_: object) -> Validation:
            loss, bleu = next(coming)
            value = -bleu if recipe.train.best_by == "bleu" else loss
            return Validation(loss, math.exp(loss), value, {"bleu": bleu, "signature": "made up"})

        monkeypatch.setattr("deepnmt.plots.plot_learning_curve", lambda *_: None)
        recipe = load_recipe(prepared / "recipe.yaml", [
            f"run={tmp_path / 'run'}", "train.validate_every=1", "train.save_every=100", "train.keep_last=1",
            "average_last=1", "model.encoder.block=pre_ln", "model.decoder.block=pre_ln", *overrides])
        with processes(1) as ranks:
            assert train(recipe, ranks, replace(TRANSLATION, validate=validated)) == FINISHED
        assert next(coming, None) is None, "fewer validations than expected"
        return tmp_path / "run"

    return start


def ended(run: Path) -> int:
    """The update that a finished run ended at."""
    status = json.loads((run / "STATUS.json").read_text(encoding="utf-8"))
    assert status["status"] == "finished"
    return int(status["update"])


def kept(run: Path) -> list[int]:
    """The updates of the checkpoints that are kept."""
    return [int(path.name.removeprefix("update-")) for path in sorted((run / "checkpoints").iterdir())]


def test_patience_ends_the_run_and_the_best_is_kept(run: Run) -> None:
    folder = run([(5.0, 1.0), (4.0, 2.0), (4.5, 3.0), (4.2, 4.0)], "train.patience=2")
    assert ended(folder) == 4 and kept(folder) == [2, 4]  # the best, saved after its validation, and the last
    state = load_state(folder / "checkpoints" / "update-00000004")
    assert state.best == {"value": 4.0, "update": 2, "waited": 2}
    run([], "train.patience=2")  # the same command again: the run has ended already
    assert ended(folder) == 4
    run([(3.0, 5.0), (3.5, 6.0)], "train.patience=3", "train.updates=6")  # a better one resets the patience
    assert ended(folder) == 6 and kept(folder) == [5, 6]


def test_the_best_by_bleu_is_the_highest(run: Run) -> None:
    folder = run([(5.0, 10.0), (4.0, 30.0), (3.0, 20.0), (2.0, 25.0)], "train.best_by=bleu", "train.updates=4",
                 "train.keep_best=2")
    assert ended(folder) == 4 and kept(folder) == [2, 4]  # 30 and 25
    assert load_state(folder / "checkpoints" / "update-00000004").best == {"value": -30.0, "update": 2, "waited": 2}
    with user_error("  data.trg_lang: de -> fr\n  data.valid.trg_lang: None -> zh"):
        run([], "train.best_by=bleu", "data.trg_lang=fr", "data.valid.trg_lang=zh")


def test_epochs_end_the_run_and_the_eta(run: Run, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(prepared / "recipe.yaml", ["batch.tokens=2048"])
    sizes = Stream(open_prepared(recipe).split("train"), 2048, recipe.seed)
    updates = math.ceil((sizes.epoch_size(0) + sizes.epoch_size(1)) / 2)
    reported: list[tuple[int, float]] = []
    monkeypatch.setattr(Monitor, "train", lambda *arguments: reported.append(arguments[3:]))
    folder = run([(4.0, 1.0)], "batch.tokens=2048", "batch.accumulation=2", "train.epochs=2", "train.updates=1000",
                 "train.validate_every=1000", "train.max_seconds=1000")
    assert ended(folder) == updates > 2
    assert [to_go for to_go, _ in reported] == list(reversed(range(updates)))
    seconds = [at_most for _, at_most in reported]
    assert seconds == sorted(seconds, reverse=True) and 900 < seconds[-1] < seconds[0] < 1000


def test_time_ends_the_run(run: Run) -> None:
    """It has passed before the second update, which is the last."""
    folder = run([(4.0, 1.0), (3.0, 1.0)], "train.updates=1000", "train.max_seconds=1e-3")
    assert ended(folder) == 2 and kept(folder) == [2]


def test_a_number_is_better_than_none(run: Run) -> None:
    """A validation whose loss is NaN was the best for ever, so that patience ended the run."""
    folder = run([(math.nan, 0.0), (5.0, 1.0), (4.0, 2.0), (math.nan, 0.0)], "train.patience=2", "train.updates=4")
    assert ended(folder) == 4 and kept(folder) == [3, 4]
    assert load_state(folder / "checkpoints" / "update-00000004").best == {"value": 4.0, "update": 3, "waited": 1}


def test_no_checkpoint_of_initial_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update may be dropped; an average of the last checkpoints must not have the weights before it."""
    step, calls = LocalEngine.train_step, 0
    norms: list[float] = []

    def drop_first(engine: LocalEngine, *arguments: Any) -> StepStats:
        nonlocal calls
        calls += 1
        if calls == 1:
            return StepStats(math.nan, math.nan, math.inf, 1.0, False, flags=arguments[-1]())
        stats = step(engine, *arguments)
        norms.append(stats.grad_norm)
        return stats

    monkeypatch.setattr(LocalEngine, "train_step", drop_first)
    folder = run([(5.0, 1.0), (4.0, 2.0)], "train.updates=2", "train.save_every=1", "train.keep_last=9",
                 "train.log_every=2")
    assert ended(folder) == 2 and kept(folder) == [1, 2]
    [logged] = records(folder, "train")
    assert logged["gradient_norm"] == pytest.approx(sum(norms) / 2) and len(norms) == 2  # of those that were made
