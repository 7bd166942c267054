"""Prints the size of the project in Python tokens, without comments and docstrings; it does not depend on line breaks.

    python .ci/size.py            the two totals; exit code 1 if one is above its limit
    python .ci/size.py FOLDER     each file of a folder, largest last
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {("deepnmt", "studies"): 105_000, ("tests",): 142_700}
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
    totals = {rooms: sum(count(file) for room in rooms for file in (ROOT / room).rglob("*.py")) for rooms in LIMITS}
    for rooms, total in totals.items():
        print(f"{' and '.join(rooms)}: {total:,} tokens; the limit is {LIMITS[rooms]:,}")
    return int(any(total > LIMITS[rooms] for rooms, total in totals.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
