"""What visitors add, the folders of `deepnmt/extras`. The core names none of them: it asks every folder there is for a
module of some name, and goes on without those that are gone.

- `commands`: the commands of a visitor, see `deepnmt.commands`.
- `annotations`: what a corpus has beside its pairs, by the names of settings, see `data.annotations`.
- `objective`: `around(objective, recipe)` returns what is minimised instead, see `model.objective`; in
  `FORMER_FIGURES` today's names of figures by those in older checkpoints.
- `overrides`: faster operations in the place of the model's own, see `model.overrides`.
- `stream`: `around(kind, recipe, data)` returns the kind of stream that training reads, see `data.mixing`.
- `training`: what is called within training, `watch`, see `training.trainer.Trainer`, and `explain`, see
  `training.divergence`.
- `steps`: what `deepnmt run` calls: `before_search`, from a recipe to the commands that its search needs before.
- `reporters`: `reporters`, from a recipe and a function that prints a line to a list of
  `training.reporters.Reporter`.
- `validation`: `measure(recipe, data)` returns what measures sentences, or None, see `tasks/translation`;
  `describe` what a progress line says of it.
- `scorers`: `scorer`, from a recipe, the name of one of its `metrics` and the sources to a scorer as SacreBLEU has
  them, see `evaluate.metrics`.
- `searchers`: from a model, settings and a device to a `decode.search.Searcher`, by the names of `translate.backend`.

Tasks, the folders of `deepnmt/tasks`, are found in the same way. A folder has the name that a recipe's `task` gives,
and in it are

- `LINE` in the package itself: what the task is. It imports no torch.
- `task`: `TASK`, see `training.task.Task`.
- `commands`, if it has some of its own: as those of a visitor. Several tasks may have one of the same name; the recipe
  decides.
- `settings`, if its recipes have other sections than those of translation: `RECIPE`, a subclass of `config.Recipe`. It
  imports no torch. `docs/generate.py` writes their schema, `recipe.schema.json`, beside it.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from deepnmt.errors import UserError
from deepnmt.version import PACKAGE


def visitor_modules(kind: str) -> list[ModuleType]:
    """The modules `deepnmt.extras.FOLDER.kind` that there are, in the order of the folders' names."""
    return list(_modules("extras", kind).values())


def task_modules(kind: str) -> dict[str, ModuleType]:
    """The modules `deepnmt.tasks.TASK.kind` that there are, by the tasks' names."""
    return _modules("tasks", kind)


def task_module(name: str, kind: str) -> ModuleType | None:
    """The module `kind` of a task; None if there is none. Those of the other tasks are not imported."""
    if not name.isidentifier() or not (PACKAGE / "tasks" / name / f"{kind}.py").is_file():
        return None
    return import_module(f"deepnmt.tasks.{name}.{kind}")


def task_lines() -> dict[str, str]:
    """The tasks that there are, and what each is, in a line. Imports no torch."""
    names = sorted(file.parent.name for file in PACKAGE.glob("tasks/*/task.py"))
    return {name: import_module(f"deepnmt.tasks.{name}").LINE for name in names}


def _modules(room: str, kind: str) -> dict[str, ModuleType]:
    names = sorted(file.parent.name for file in PACKAGE.glob(f"{room}/*/{kind}.py"))
    return {name: import_module(f"deepnmt.{room}.{name}.{kind}") for name in names}


class NeedsVisitors(Protocol):
    """A section of a recipe."""

    def visitors(self) -> dict[str, str]: ...


def find(kind: str, name: str) -> Any:
    """What a visitor's module `kind` has by this name; None if none has it."""
    for module in visitor_modules(kind):
        if hasattr(module, name):
            return getattr(module, name)
    return None


def require_visitors(section: NeedsVisitors, name: str = "") -> None:
    """Raises `UserError` if a visitor is not there that a setting of this section needs; `name`: the section's."""
    for setting, folder in section.visitors().items():
        if not (PACKAGE / "extras" / folder).is_dir():
            where = f"{name}.{setting}" if name else setting
            raise UserError(f"{where} needs deepnmt/extras/{folder}, which is not installed; install deepnmt anew, or "
                            "leave the setting out")
