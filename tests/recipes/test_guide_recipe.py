"""The recipe that docs/guide/your_own_text.md shows is a recipe, and the sizes printed there are its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepnmt.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "your_own_text.md").read_text(encoding="utf-8")


def test_the_recipe_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    recipe, = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main("train", ["my.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for figure in ("model", "parameters", "tokens per update", "layout"):
        line, = re.findall(rf"^# {figure} .*$", PAGE, flags=re.MULTILINE)
        assert re.search("^" + re.escape(line) + "$", printed, flags=re.MULTILINE), (line, printed)
