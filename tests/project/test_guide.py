"""docs/guide/ quotes deepnmt correctly: its recipe is valid and has the printed sizes, and the messages that it
explains exist. Its commands and links are tested in test_pages.py."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from deepnmt.cli import main

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"


def test_the_recipe_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    page = (GUIDE / "your_own_text.md").read_text(encoding="utf-8")
    recipe, = re.findall(r"^```yaml\n(run: .*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main("train", ["my.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for figure in ("model", "parameters", "tokens per update", "layout"):
        line, = re.findall(rf"^# {figure} .*$", page, flags=re.MULTILINE)
        assert re.search("^" + re.escape(line) + "$", printed, flags=re.MULTILINE), (line, printed)


def strings(file: Path) -> list[str]:
    """The strings in a file's code, without docstrings; of an f-string its fixed parts."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [node.value for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings]


def test_messages_that_the_guide_explains_exist() -> None:
    """Each quoted symptom of when_a_run_fails.md, apart from its "...", is in the code."""
    page = (GUIDE / "when_a_run_fails.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| \"([^\"]+)\" \|", page, flags=re.MULTILINE)
    code = "\n".join(text for file in (ROOT / "deepnmt").rglob("*.py") for text in strings(file))
    pieces = [piece.strip(" ,") for words in quoted for piece in words.split("...")]
    assert quoted and [piece for piece in pieces if piece not in code] == []
