"""The recipes and DeepSpeed configurations that come with deepnmt.

`deepnmt/recipes` and `deepnmt/ds_configs` are links to the folders of the checkout, and real folders where deepnmt is
installed from a wheel.
"""

from __future__ import annotations

import re
from pathlib import Path

_HOME = Path(__file__).parent
SCHEMA = _HOME / "config" / "recipe.schema.json"  # of a recipe, for editors; written by docs/generate.py


def find_shipped(path: str | Path) -> Path:
    """The file or folder at `path`, or, if there is none, the one that comes with deepnmt.

    `recipes/demo/admin_18l-18l.yaml` and `demo/admin_18l-18l` are the same recipe. The result need not exist.
    """
    places = (Path(path), _HOME / path, _HOME / "recipes" / f"{path}.yaml")
    return next((place for place in places if place.exists()), places[0])


def tasks_of_recipes() -> dict[str, str]:
    """The names of all recipes, each with its task."""
    home = _HOME / "recipes"
    tasks = {}
    for name in shipped_recipes():
        found = re.search(r"^task: *(\w+)", (home / f"{name}.yaml").read_text(encoding="utf-8"), flags=re.MULTILINE)
        tasks[name] = found[1] if found else "translation"
    return tasks


def shipped_recipes() -> dict[str, str]:
    """The names of all recipes, such as `demo/admin_18l-18l`, each with the first line of its comment."""
    home = _HOME / "recipes"
    files = (file for folder in sorted(home.iterdir()) if folder.is_dir() for file in sorted(folder.glob("*.yaml")))
    return {str(file.relative_to(home).with_suffix("")): file.read_text(encoding="utf-8").splitlines()[0].strip("# ")
            for file in files}
