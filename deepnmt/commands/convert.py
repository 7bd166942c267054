"""The command `consolidate`."""

from __future__ import annotations

from pathlib import Path

from deepnmt.arguments import parse, recipe_parser, settable
from deepnmt.commands import EXAMINE, Command
from deepnmt.commands.options import checkpoint_of


def consolidate(words: list[str]) -> None:
    """Put a checkpoint that several processes wrote in shards into one file."""
    parser = recipe_parser(
        "consolidate",
        "Writes a checkpoint in shards as one whose weights and moments are in one file each, as other programs read\n"
        "them. deepnmt itself needs it nowhere: every command reads either form.\n\n"
        "Reads a checkpoint of the run. Writes RUN/consolidated, a checkpoint folder, or the one that --output names.",
        "deepnmt consolidate runs/my\n"
        "deepnmt consolidate runs/my --checkpoint best --output runs/my/one-file",
    )
    parser.add_argument("--checkpoint", default="newest", metavar="WHICH",
                        help="best (by validation), newest, or the folder of a checkpoint (default newest)")
    parser.add_argument("--output", metavar="FOLDER", help="the folder to write, or the checkpoint itself, which "
                        "it then replaces (default: RUN/consolidated)")
    args, recipe = parse(parser, words)
    settable(args, ["run"], "a checkpoint is rewritten as it is")
    from deepnmt.checkpoint.consolidate import DEFAULT, consolidate

    source = Path(checkpoint_of(args.checkpoint, recipe) or recipe.run)
    print(consolidate(source, Path(args.output or Path(recipe.run) / DEFAULT)))


GROUP = EXAMINE
COMMANDS: dict[str, Command] = {"consolidate": consolidate}
