"""Recipes of several corpora over the small prepared texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deepnmt.config import Recipe, check_recipe


def tree_of(prepared: Path, folder: Path, **data: Any) -> dict[str, Any]:
    """The small recipe with other data settings."""
    tree = yaml.safe_load((prepared / "recipe.yaml").read_text(encoding="utf-8"))
    tree["run"], tree["data"]["folder"] = str(folder / "run"), str(folder / "data")
    tree["data"] |= data
    return tree


def recipe_of(prepared: Path, folder: Path, **data: Any) -> Recipe:
    return check_recipe(tree_of(prepared, folder, **data), "recipe")


def text(prepared: Path, name: str, **settings: Any) -> dict[str, Any]:
    return {"src": str(prepared / "text" / f"{name}.en"), "trg": str(prepared / "text" / f"{name}.de"), **settings}
