"""Checks that pages are easy to read: `python .ci/prose.py [PAGE ...]`; without arguments, all pages for readers.

Each fault is printed as file:line. Lines have at most 100 columns, in code 120; single long words do not count, nor do
rows of tables, which cannot be broken. No sentence has more than 45 words. Tables, code, headings and the targets of
links are left out of the sentences, and a piece of `code` counts as one word.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, CODE_COLUMNS, LONGEST = 100, 120, 45

_FENCE = re.compile(r"\s*(```+|~~~+)")
_NOT_PROSE = re.compile(r"\s*(#|\||<|\(.*\)=$|---+$|\[[^\]]+\]: )")  # headings, tables, HTML, labels, rules, references
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.) +|\s*> ?")
_ABBREVIATION = re.compile(r"\b(?:et al|e\.g|i\.e|eq|cf|vs|resp|no|fig)\.$", re.IGNORECASE)
_END = re.compile(r"[.!?][\"'”’)*_]*\s+")


class Sentence(NamedTuple):
    file: Path
    line: int
    text: str

    @property
    def words(self) -> int:
        return sum(any(c.isalnum() for c in word) for word in self.text.split())


def pages() -> list[Path]:
    """The pages for readers."""
    named = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    folders = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md"), *ROOT.glob("ds_configs/*.md"),
               *ROOT.glob("studies/**/*.md")]
    return [file for file in (*named, *sorted(folders)) if file.is_file()]


def prose_lines(file: Path) -> Iterator[tuple[int, str]]:
    """The number and text of each line outside code."""
    fence = ""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        elif not fence:
            yield number, line


def paragraphs(file: Path) -> Iterator[list[tuple[int, str]]]:
    """Lines of prose that belong together; an item of a list is a paragraph."""
    lines: list[tuple[int, str]] = []
    last = 0
    for number, line in prose_lines(file):
        item = _ITEM.match(line)
        if item or not line.strip() or _NOT_PROSE.match(line) or number != last + 1:
            yield lines
            lines = []
        if line.strip() and not _NOT_PROSE.match(line):
            lines.append((number, line[item.end():] if item else line))
        last = number
    yield lines


def sentences(file: Path) -> Iterator[Sentence]:
    for lines in paragraphs(file):
        text = "\n".join(line for _, line in lines)
        text = re.sub(r"`[^`]+`", lambda code: "code" + "\n" * code[0].count("\n"), text)
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)", lambda image: "\n" * image[0].count("\n"), text)
        text = re.sub(r"\]\([^)]*\)", lambda target: "]" + "\n" * target[0].count("\n"), text)
        start = 0
        for end in (*(match.end() for match in _END.finditer(text)), len(text)):
            if end < len(text) and _ABBREVIATION.search(text[start:end].rstrip()):
                continue
            if (found := text[start:end]).strip():
                before = text[:start].count("\n") + len(found) - len(found.lstrip("\n"))
                yield Sentence(file, lines[min(before, len(lines) - 1)][0], " ".join(found.split()))
            start = end


def wide_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that have too many columns."""
    prose = {number for number, _ in prose_lines(file)}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        limit = COLUMNS if number in prose else CODE_COLUMNS
        if len(line) > limit and not line.startswith("|") and " " in line.strip().lstrip("-*+> "):
            yield number, f"{len(line)} columns, must be {limit} or fewer"


def main(names: list[str]) -> int:
    files = [Path(name) for name in names] or [Path(os.path.relpath(page)) for page in pages()]
    faults = 0
    for file in files:
        found = [*wide_lines(file), *((s.line, f"a sentence of {s.words} words, must be {LONGEST} or fewer: "
                                               f"{s.text[:60]}…") for s in sentences(file) if s.words > LONGEST)]
        for line, fault in sorted(found):
            print(f"{file}:{line}: {fault}")
        faults += len(found)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
