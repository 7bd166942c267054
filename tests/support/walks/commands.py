"""The command `bits`."""

from __future__ import annotations

from pathlib import Path

from deepnmt.arguments import parse, recipe_parser
from deepnmt.commands import EXAMINE, Command
from deepnmt.files import read_log


def bits(words: list[str]) -> None:
    """Say how many bits a symbol has."""
    _, recipe = parse(recipe_parser("bits", "Prints the figure of the last validation.", "deepnmt bits runs/my"), words)
    print([line["bits"] for line in read_log(Path(recipe.run) / "log.jsonl") if line["type"] == "valid"][-1])


GROUP = EXAMINE
COMMANDS: dict[str, Command] = {"bits": bits}
