"""What visitors add, the folders of `deepnmt/extras`. The core names none of them: it asks every folder there is for a
module of some name, and goes on without those that are gone.

- `commands`: the commands of a visitor, see `deepnmt.commands`.
- `objective`: `around(objective, recipe)` returns what is minimised instead, see `model.objective`.
- `stream`: `around(kind, recipe, data)` returns the kind of stream that training reads, see `training.task`.
- `training`: what is called within training, see `training.trainer.Trainer`: `watch` and `explain`.
- `steps`: what `deepnmt run` calls: `before_search`, from a recipe to the commands that its search needs before.
- `reporters`: `track`, from a recipe that names `train.trackers` and a function that prints a line to a
  `training.reporters.Reporter`.
- `searchers`: from a model, settings and a device to a `decode.search.Searcher`, by the names of `translate.backend`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from deepnmt.errors import UserError
from deepnmt.version import PACKAGE


def visitor_modules(kind: str) -> list[ModuleType]:
    """The modules `deepnmt.extras.FOLDER.kind` that there are, by the folders' names."""
    files = sorted(PACKAGE.glob(f"extras/*/{kind}.py"))
    return [import_module(f"deepnmt.extras.{file.parent.name}.{kind}") for file in files]


def find(kind: str, name: str) -> Any:
    """What a visitor's module `kind` has by this name; None if none has it."""
    for module in visitor_modules(kind):
        if hasattr(module, name):
            return getattr(module, name)
    return None


def require_visitor(folder: str, setting: str) -> None:
    """Raises `UserError` if the visitor is not there that a setting needs."""
    if not (PACKAGE / "extras" / folder).is_dir():
        raise UserError(f"{setting} needs deepnmt/extras/{folder}, which is not installed; install deepnmt anew, or "
                        "leave the setting out")
