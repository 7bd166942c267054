"""What has to be done before the search of another program."""

from __future__ import annotations

from pathlib import Path

from deepnmt.config import Recipe


def before_search(recipe: Recipe) -> list[list[str]]:
    """The commands that a run needs before its model translates by `translate.backend`: an export, if there is none."""
    if recipe.translate.backend != "ctranslate2" or (Path(recipe.run) / "ctranslate2").is_dir():
        return []
    return [["export", recipe.run, "--to", "ctranslate2"]]
