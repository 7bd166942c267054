"""The page of promises names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "studies" / "results" / "promises.md").read_text(encoding="utf-8")


def test_every_row_names_a_test_that_exists() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not re.match(r"\|(---| promise )", line)]
    assert len(rows) > 40
    for row in rows:
        _, promise, test, seen, _ = (cell.strip() for cell in row.split("|"))
        assert promise and seen and re.fullmatch(r"`tests/[a-z_/]+\.py(::test_\w+)?`", test), row
    for file, name in re.findall(r"`(tests/[a-z_/]+\.py)(?:::(test_\w+))?`", PAGE):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"\ndef {name}(" in text, f"{file}::{name}"
