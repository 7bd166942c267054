"""The recipes and DeepSpeed configurations that come with deepnmt.

`deepnmt/recipes` and `deepnmt/ds_configs` are links to the folders of the checkout, and real folders where deepnmt is
installed from a wheel.
"""

from __future__ import annotations

import re
from pathlib import Path

_HOME = Path(__file__).parent
# The schema of a recipe, for editors; a task with sections of its own has another. docs/generate.py writes them.
SCHEMA = _HOME / "config" / "recipe.schema.json"


def find_shipped(path: str | Path) -> Path:
    """The file or folder at `path`, or, if there is none, the one that comes with deepnmt.

    `recipes/demo/admin_18l-18l.yaml` and `demo/admin_18l-18l` are the same recipe. The result need not exist.
    """
    for place in (Path(path), _HOME / path, _HOME / "recipes" / f"{path}.yaml"):
        if place.exists():
            return place
    return Path(path)


def task_of(recipe: str) -> str:
    """The task that the text of a recipe names."""
    match = re.search(r"^task: *(\w+)", recipe, flags=re.MULTILINE)
    return match[1] if match else "translation"


def schema_of(task: str) -> Path:
    """The schema of a task's recipes."""
    own = _HOME / "tasks" / task / SCHEMA.name
    return own if own.is_file() else SCHEMA


def tasks_of_recipes() -> dict[str, str]:
    """The names of all recipes, each with its task."""
    home = _HOME / "recipes"
    return {name: task_of((home / f"{name}.yaml").read_text(encoding="utf-8")) for name in shipped_recipes()}


def shipped_recipes() -> dict[str, str]:
    """The names of all recipes, such as `demo/admin_18l-18l`, each with the first line of its comment."""
    home = _HOME / "recipes"
    recipes = {}
    for folder in sorted(home.iterdir()):
        for file in sorted(folder.glob("*.yaml")):
            first, *_ = file.read_text(encoding="utf-8").splitlines()
            recipes[f"{folder.name}/{file.stem}"] = first.strip("# ")
    return recipes
