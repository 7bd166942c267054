"""The demo at a toy size, under the real launcher, from corpus to score; a second call reuses everything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from refusals import Refused, Tool

from deepnmt.cli import main

ROOT = Path(__file__).resolve().parents[3]
TOY = ("vocab.size=200", "batch.tokens=256", "model.encoder.layers=1", "model.decoder.layers=1", "admin.tokens=256",
       "train.updates=6", "schedule.warmup=2", "train.validate_every=6", "train.save_every=2", "train.log_every=1",
       "train.valid_sentences=2", "translate.beam=1", "translate.max_ratio=1.0", "translate.max_extra=2",
       "average_last=2")


def listed_in_guide() -> list[str]:
    """The files of a run that the guide lists; "`a.json`, `.png`" means a.json and a.png."""
    text = (ROOT / "docs" / "guide" / "first_hour.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- (`.+?): ", text[text.index("- `recipe.yaml`: every"):], flags=re.MULTILINE)
    names: list[str] = []
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row):
            names.append(f"{Path(names[-1]).stem}{name}" if name.startswith(".") else name)
    return names


def written(folder: Path) -> dict[str, int]:
    """Every file with the time it was written."""
    return {str(file.relative_to(folder)): file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


def test_demo_from_corpus_to_score_and_again(
    tool: Tool, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "demo"
    words = [str(ROOT / "recipes" / "demo" / "admin_18l-18l.yaml"), "--pairs", "200", f"run={run}", *TOY]

    def demo() -> tuple[str, str]:
        done = tool("demo", *words, DEEPNMT_DEMO=str(tmp_path / "data"))
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    output, progress = demo()
    assert all(f"[{number}/5]" in progress for number in range(1, 6))
    assert "on 2 process(es) from scratch" in progress
    assert {"recipe.yaml", "checkpoints/update-*/", "averaged/", "admin_profile.png", "STATUS.json"} <= set(
        listed_in_guide())
    assert [name for name in listed_in_guide() if not list(run.glob(name.rstrip("/")))] == []
    scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    for metric in ("bleu", "chrf", "ter"):
        assert scores[metric] >= 0 and "|version:" in scores[f"{metric}_signature"]
    assert scores["averaged_updates"] == [4, 6] and scores["sentences"] == 20
    assert f"BLEU {scores['bleu']:.1f}  ({scores['bleu_signature']})" in output
    assert f"chrF {scores['chrf']:.1f}  ({scores['chrf_signature']})" in output
    assert [output.count(f"  {who} ") for who in ("English", "deepnmt", "reference")] == [3, 3, 3]

    hypotheses = [word for name in "xy" for word in ("--hypotheses", f"{name}={tmp_path}/data/text/test.de")]
    assert main("evaluate", [str(run), *hypotheses]) == 0
    assert "scores-x-y.json" in capsys.readouterr().err

    before = written(tmp_path)
    again, progress = demo()
    assert again == output
    assert f"{tmp_path}/data/prepared is up to date" in progress
    assert f"{run} is trained already and reused" in progress and "update 1/6" not in progress
    assert f"{run}/scores.json is up to date" in progress
    renewed = {name for name, when in written(tmp_path).items() if before.get(name) != when}
    assert all(name.startswith(("runs/demo/averaged/", "runs/demo/sample.")) for name in renewed), renewed

    monkeypatch.setenv("DEEPNMT_DEMO", str(tmp_path / "data"))
    message = refused("demo", *words, "model.encoder.layers=2", "optimizer.lr=9.0")
    assert "[4/5]" not in message
    assert f"{run} is finished, but was trained with other settings:\n  model.encoder.layers: 1 -> 2\n" in message
