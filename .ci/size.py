"""Keeps each room of the project within its budget of Python tokens, without comments and docstrings.

    python .ci/size.py            the rooms and their budgets; exit code 1 if one is over it
    python .ci/size.py FOLDER     each file of a folder, largest last

Budgets were set 2 % above what the rooms had, so that a small change fits. Whoever adds what a room is worth raises its
budget in the same change, and says why. Denser code is no way to keep one.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = {
    "deepnmt/checkpoint": 9_160, "deepnmt/commands": 4_010, "deepnmt/config": 18_720, "deepnmt/data": 35_100,
    "deepnmt/decode": 17_650, "deepnmt/evaluate": 6_540, "deepnmt/model": 28_600, "deepnmt/optim": 3_300,
    "deepnmt/parallel": 14_500, "deepnmt/processes": 9_000, "deepnmt/training": 18_000,
    "deepnmt/tasks": 33_760,
    "deepnmt": 17_780,  # its own files, not those of the rooms
    "deepnmt/extras": 96_600, "studies": 63_100, "tests": 402_000,
}
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count(file: Path) -> int:
    """Tokens of a Python file."""
    text = file.read_text(encoding="utf-8")
    docstrings = {(node.body[0].lineno, node.body[0].col_offset) for node in ast.walk(ast.parse(text))
                  if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None}
    total = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth += kind == "FSTRING_START"  # from Python 3.12 on an f-string is many tokens; it counts as one, as before
        counted = kind == "FSTRING_START" and depth == 1 if "FSTRING" in kind else not depth
        total += counted and token.type not in LAYOUT and token.start not in docstrings
        depth -= kind == "FSTRING_END"
    return total


def main(folders: list[str]) -> int:
    if folders:
        for size, file in sorted((count(file), file) for folder in folders for file in Path(folder).rglob("*.py")):
            print(f"{size:7,}  {file}")
        return 0
    over = False
    for room, budget in BUDGETS.items():
        files = (ROOT / room).glob("*.py") if room == "deepnmt" else (ROOT / room).rglob("*.py")
        total = sum(count(file) for file in files)
        over |= total > budget
        print(f"{total:8,} of {budget:8,}  {room}{'  OVER ITS BUDGET' if total > budget else ''}")
    rooms = {f"deepnmt/{file.parent.name}" for file in ROOT.glob("deepnmt/*/__init__.py")}
    for room in sorted(rooms - BUDGETS.keys()):
        print(f"deepnmt has a room without a budget: {room}")
        over = True
    return int(over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
