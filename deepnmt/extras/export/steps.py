"""What has to be done before the search of another program."""

from __future__ import annotations

from pathlib import Path

from deepnmt.checkpoint.checkpoint import find_checkpoint, weights_of
from deepnmt.config import Recipe
from deepnmt.extras.export.exported import read_exported


def before_search(recipe: Recipe) -> list[list[str]]:
    """The commands that a run needs before its model translates by `translate.backend`: an export, if there is none, or
    one of the same checkpoint before it was written anew.

    Raises:
        UserError: see `read_exported`.
    """
    if recipe.translate.backend != "ctranslate2":
        return []
    export, folder = ["export", recipe.run, "--to", "ctranslate2"], Path(recipe.run) / "ctranslate2"
    if not folder.is_dir():
        return [export]
    exported, checkpoint = read_exported(folder), find_checkpoint(Path(recipe.run))
    same_place = Path(exported["checkpoint"]).resolve() == checkpoint.resolve()
    if same_place and exported.get("weights") != weights_of(checkpoint):
        return [[*export, "--precision", exported["precision"]]]
    return []
