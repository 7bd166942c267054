"""What visitors add, the folders of `deepnmt/extras`. The core names none of them: it asks every folder there is for a
module of some name, and goes on without those that are gone.

- `commands`: the commands of a visitor, see `deepnmt.commands`.
- `hooks`: functions that the core calls at some moment if there are any: `watch` and `explain` in training, see
  `training.trainer.Trainer`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from deepnmt.version import PACKAGE


def visitor_modules(name: str) -> list[ModuleType]:
    """The modules `deepnmt.extras.FOLDER.name` that there are, by the folders' names."""
    files = sorted(PACKAGE.glob(f"extras/*/{name}.py"))
    return [import_module(f"deepnmt.extras.{file.parent.name}.{name}") for file in files]


def find_hook(name: str) -> Any:
    """The function of this name in a visitor's module `hooks`; None if no visitor has one."""
    return next((getattr(module, name) for module in visitor_modules("hooks") if hasattr(module, name)), None)
