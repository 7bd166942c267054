"""The commands of `deepnmt`: a module for each group here, and a module `commands` of each task and visitor.

Such a module has the functions `COMMANDS` by name, the headline `GROUP` under which they are listed, and optionally the
command `BEFORE` which they are listed, and `REQUIREMENTS`, the packages that an installation may lack. It imports
nothing heavy at its top: `--help` and a mistake on the command line are answered without torch. What a command calls is
imported once its arguments have been checked.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from deepnmt.visitors import task_modules, visitor_modules

Command = Callable[[list[str]], int | None]  # from the words after its name to the exit code (None: 0)

RECIPES = "Recipes to begin with"
TEXT = "From text to a score, in the order of use"
EXAMINE = "Examine a model, or convert it"
TRY = "Try deepnmt, or a cluster"
_CORE = ("recipes", "text", "train", "convert", "cluster")


def command_modules() -> list[ModuleType]:
    """Those of the core, then those of tasks and visitors."""
    core = [import_module(f"deepnmt.commands.{name}") for name in _CORE]
    return [*core, *task_modules("commands"), *visitor_modules("commands")]


def command_groups() -> dict[str, dict[str, Command]]:
    """All commands by name, under their headlines, in the order in which they are listed."""
    groups: dict[str, list[tuple[str, Command]]] = {headline: [] for headline in (RECIPES, TEXT, EXAMINE, TRY)}
    for module in command_modules():
        listed = groups[module.GROUP]
        names = [name for name, _ in listed]
        before = getattr(module, "BEFORE", None)
        place = names.index(before) if before in names else len(names)
        listed[place:place] = module.COMMANDS.items()
    return {headline: dict(listed) for headline, listed in groups.items()}
