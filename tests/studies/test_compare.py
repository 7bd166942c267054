"""Comparing runs, and the benchmark at a toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import Refused

from studies.__main__ import main
from studies.compare import compare_runs

ROOT = Path(__file__).resolve().parents[2]


def write_log(run: Path, losses: dict[int, float]) -> None:
    run.mkdir()
    lines = [json.dumps({"type": "train", "update": u, "loss": v}) for u, v in losses.items()]
    lines.append('{"type": "train", "upd')  # the partial line of a kill
    (run / "log.jsonl").write_text("\n".join(lines), encoding="utf-8")


def test_compare_plots_and_tabulates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_log(tmp_path / "one", {10: 6.0, 20: 5.0, 30: 4.5})
    write_log(tmp_path / "two", {10: 6.5, 20: 6.25})
    words = (tmp_path / "one", tmp_path / "two", "--output", tmp_path / "picture.png")
    assert main("compare", [str(word) for word in words]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[:3] == [["update", "10", "20"], ["one", "6.000", "5.000"], ["two", "6.500", "6.250"]]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_compare_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name / "run", {10: 6.0})
    runs = [str(tmp_path / name / "run") for name in ("x", "y")]
    for words, names in (([f"Admin={runs[0]}", runs[1]], ["Admin", runs[1]]), (runs, runs), (runs[:1], ["run"])):
        assert main("compare", [*words, "--output", str(tmp_path / "picture.png")]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]] == names


def test_how_a_run_that_diverged_used_its_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its log has text for what is not finite."""
    (tmp_path / "run").mkdir()
    figures = {"loss": 3.0, "source_gain": 0.1, "encoder_common": 0.5}
    lines = [{"type": "valid", "update": 10, **figures},
             {"type": "valid", "update": 20, **dict.fromkeys(figures, "nan")}]
    (tmp_path / "run" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert main("compare", [str(tmp_path / "run"), "--source-use", "--output", str(tmp_path / "picture.png")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["run", "20", "nan", "nan"]


def test_compare_validations(tmp_path: Path, refused: Refused) -> None:
    for name, perplexities in (("one", {10: 400.0, 20: 100.0}), ("two", {10: 300.0, 20: 200.0})):
        write_log(tmp_path / name, {5: 6.0})
        log = [json.dumps({"type": "valid", "update": u, "loss": 9.0, "perplexity": p})
               for u, p in perplexities.items()]
        (tmp_path / name / "log.jsonl").write_text("\n".join(log) + "\n", encoding="utf-8")
    runs = {name: tmp_path / name for name in ("one", "two")}
    text = compare_runs(runs, tmp_path / "p.png", "Validation", valid=True)
    rows = [line.split() for line in text.splitlines()]
    assert rows[:3] == [["update", "10", "20"], ["one", "5.991", "4.605"], ["two", "5.704", "5.298"]]
    write_log(tmp_path / "three", {10: 6.0})
    assert "has no line of validation yet" in refused("compare", "--valid", tmp_path / "three")


def test_compare_without_a_log(refused: Refused, tmp_path: Path) -> None:
    assert "has no log.jsonl" in refused("compare", tmp_path)


@pytest.mark.skipif(not os.environ.get("DEEPNMT_LONG"), reason="nine programs in turn: DEEPNMT_LONG=1")
def test_benchmark_times_every_layout(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "deepnmt").mkdir()
    (tmp_path / "deepnmt" / "__init__.py").write_text("raise ImportError('not the package that was started')")
    command = [sys.executable, "-m", "studies", "benchmark", str(prepared / "recipe.yaml"), "--updates", "1",
               "--rounds", "1", "--output", "b.json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    rates = json.loads((tmp_path / "b.json").read_text())["training_target_tokens_per_second"]
    assert any(name.startswith("torch.nn.Transformer") for name in rates)
    assert any("bf16" in name for name in rates) and any("local fp32" in name for name in rates)
    assert all(len(v) == 1 and v[0] > 0 for v in rates.values())
    assert "x the best plain PyTorch loop" in done.stdout
