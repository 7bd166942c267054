"""A run, its data and its recipe from version 0.1.0 (277469d) can be resumed, averaged, translated with, folded and
diagnosed.

That version trained `tests/fixtures/run_of_0_1` for 8 updates. The figures here are those of its next updates.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from refusals import user_error
from warm import Warm

from deepnmt.checkpoint.checkpoint import load_state
from deepnmt.cli import main
from deepnmt.config import load_recipe
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import PreparedData
from deepnmt.training.resume import changes_since

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "run_of_0_1"
LOSSES = {10: 5.085368311682413, 12: 5.1110643041939}
VALIDATION = 5.054639584550234
LOG_PROBS = [-135.07815551757812, -128.82366943359375]  # of two test sentences, by the average


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the fixture that can be written to."""
    return Path(shutil.copytree(FIXTURE, tmp_path_factory.mktemp("old") / "old"))


def test_data_prepared_again_are_those_of_the_old_run(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose checkpoint has the fingerprint that version 0.1 gave them: the hash of its manifest."""
    monkeypatch.chdir(old)
    recipe = load_recipe(old / "recipe.yaml", ["data.folder=again"])
    again, then = PreparedData.open(prepare(recipe)), PreparedData.open(old / "data")
    again.verify()
    then.verify()
    checkpoint = old / "run" / "checkpoints" / "update-00000008"
    known = load_state(checkpoint).extra["data_fingerprint"]
    assert again.fingerprint == then.fingerprint != known
    assert known in again.former_fingerprints and known in then.former_fingerprints
    changes_since(checkpoint, recipe, [again.fingerprint, *again.former_fingerprints], 1)
    with user_error("was trained on other data than again holds now"):
        changes_since(checkpoint, recipe, [again.fingerprint], 1)


def test_an_old_run_is_usable(old: Path, warm: Warm, threads: None, capfd: pytest.CaptureFixture[str]) -> None:
    run = old / "run"
    warm.train(1, old / "recipe.yaml", f"run={run}", f"data.folder={old / 'data'}")
    assert warm.wait() == [0], warm.said()
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = {row["update"]: row["loss"] for row in log if row["type"] == "train" and row["update"] > 8}
    assert losses == pytest.approx(LOSSES, abs=1e-4)
    assert [row["loss"] for row in log if row["type"] == "valid"][-1] == pytest.approx(VALIDATION, abs=1e-4)

    assert main("average", [str(run)]) == 0
    output = old / "out.jsonl"
    assert main("translate", [str(run), "--input", str(old / "text" / "test.en"), "--output", str(output),
                              "--format", "jsonl"]) == 0
    best = [json.loads(line)["hypotheses"][0] for line in output.read_text().splitlines()]
    assert [h["log_prob"] for h in best[:2]] == pytest.approx(LOG_PROBS, abs=1e-3) and best[0]["tokens"] == 41
    assert main("fold", [str(run)]) == 0
    assert "as post_ln" in capfd.readouterr().out
    assert main("diagnose", [str(run), "--tokens", "64", f"data.folder={old / 'data'}"]) == 0
    assert list(run.glob("diagnosis-*/diagnosis.html"))
