"""The doctor through its command line: a recipe before training, a run's checkpoint, and the papers in small."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import deepnmt.diagnose
from deepnmt.cli import main
from deepnmt.reproduce import Small, reproduce

ONE = "parallel.threads=1"
PICTURES = {"dependency", "change", "gradients", "matrices", "places", "likeness", "ranges", "half"}


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "diagnosis.json").read_text()))


def write_rule(folder: Path, weight: float) -> str:
    """A rule that asks for the rate alone: `weight` below 0 wants it low."""
    rule = {"format": "deepnmt-verdict", "version": 2, "kind": "logistic", "names": ["rate"],
            "body": {"centre": [-3.15], "scale": [0.3], "weights": [weight], "squares": [0.0], "bias": 0.0},
            "spans": {"rate": [-5, -3]}, "facts": {}}
    (folder / "rule.json").write_text(json.dumps(rule))
    return str(folder / "rule.json")


def test_a_recipe_before_training(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(prepared / "recipe.yaml"), f"run={tmp_path}", "--tokens", "100", ONE]
    assert main("diagnose", [*words, "--rule", write_rule(tmp_path, -5.0)]) == 0
    said, folder = capsys.readouterr().out, tmp_path / "diagnosis"
    assert re.search(r"^verdict +(trains|does NOT train) \(probability 0\.\d\d\)", said, flags=re.MULTILINE)
    found = read(folder)
    assert {file.stem for file in folder.glob("*.png")} == PICTURES | {"last_ffn"}
    page = (folder / "diagnosis.html").read_text()
    assert page.count("data:image/png;base64,") == 9 and "http" not in page.replace("http-equiv", "")
    assert len(found["dependency"]["decoder"]) == 3 * 2 + 1 and len(found["likeness"]["encoder"]) == 2
    assert found["growth"].keys() == {"1 % noise on the matrices", "one update at the peak rate 0.005"}
    assert found["last_ffn"]["depths"] == [1, 2] and all(math.isfinite(n) for n in found["last_ffn"]["norms"])
    assert found["change"]["update"]["loss_after"] != found["change"]["update"]["loss_before"]
    assert found["about"]["sentences"] >= 2 and found["about"]["target tokens"] <= 100
    assert set(found["verdict"]["instead"]) == set() or not found["verdict"]["trains"]


def test_a_verdict_of_no_tries_other_recipes(prepared: Path, tmp_path: Path) -> None:
    assert main("diagnose", [str(prepared / "recipe.yaml"), f"run={tmp_path}", "schedule.warmup=0", ONE,
                             "--tokens", "60", "--rule", write_rule(tmp_path, -9.0)]) == 0
    verdict = read(tmp_path / "diagnosis")["verdict"]
    assert not verdict["trains"] and verdict["probability"] < 0.5 and len(verdict["outside"]) == 1
    assert verdict["instead"]["optimizer.lr=0.0005"] > 0.9 > 0.5 > verdict["instead"]["schedule.warmup=1"]
    assert "model.encoder.block=pre_ln model.decoder.block=pre_ln" in verdict["instead"]


def test_a_run_and_its_checkpoints(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert main("train", [str(prepared / "recipe.yaml"), f"run={run}", "train.updates=6", "train.valid_bleu=false",
                          "train.probe_every=2", ONE]) == 0
    assert main("diagnose", [str(run), "--tokens", "60", ONE]) == 0
    said = capsys.readouterr().out
    folder = run / "diagnosis-update-00000006"
    found = read(folder)
    assert "verdict" not in found and "verdict" not in said
    assert {file.stem for file in folder.glob("*.png")} == PICTURES | {"moved"}
    assert (found["moved"][0]["update"], found["moved"][-1]["until"]) == (3, 6)
    assert max(found["moved"][0]["updates"].values()) == 1.0
    assert found["about"]["checkpoint"].endswith("update-00000006")
    monkeypatch.setattr(deepnmt.diagnose, "SHIPPED", tmp_path / "none.json")
    assert main("diagnose", [str(run), "--fresh", "--tokens", "60", ONE]) == 0
    assert read(run / "diagnosis")["verdict"] is None and "no rule comes with this version" in capsys.readouterr().out
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if tag.startswith("probe/")]
    assert len(tags) == 2 * 4
    points = board.Scalars("probe/decoder.layers.1/gradient_norm")
    assert [p.step for p in points] == [2, 4, 6] and all(p.value > 0 for p in points)


@pytest.mark.parametrize("name", ["corollaries", "vanishing", "last_ffn"])
def test_papers_in_small(name: str, tmp_path: Path) -> None:
    text = reproduce(name, tmp_path, Small(width=8, sentences=2, trials=1, deepest=3))
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert (tmp_path / f"{name}.png").stat().st_size > 5000 and "post_ln" in text
    if name == "corollaries":
        assert found["growth"]["pre_ln"]["depths"] == [1, 2, 3]
    elif name == "vanishing":
        assert len(found["gradients"]["post_ln"]["places"]) == 3
    else:
        assert found["depths"] == [2] and found["norms"]["pre_ln"][0] > 0


def test_mistakes(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(prepared / "recipe.yaml")
    assert main("diagnose", [recipe, f"run={tmp_path}", "--checkpoint", str(tmp_path / "none")]) == 2
    assert main("diagnose", [recipe, f"run={tmp_path}", "--tokens", "0"]) == 2
    assert main("diagnose", [recipe, f"run={tmp_path}", "--rule", str(tmp_path / "none.json")]) == 2
    said = capsys.readouterr().err
    assert "there is no folder" in said and "--tokens is 0" in said and "none.json cannot be read" in said
