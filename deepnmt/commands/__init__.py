"""The commands of `deepnmt`: a module for each group here, and a module `commands` of each task and visitor.

Such a module has the functions `COMMANDS` by name, the headline `GROUP` under which they are listed, and optionally the
command `BEFORE` which they are listed, and `REQUIREMENTS`, the packages that an installation may lack. A task's may
have `CLAIMS`: for a command that others have, too, and that is given no recipe, whether its words are the task's. A
module imports nothing heavy at its top: `--help` and a mistake on the command line are answered without torch. What a
command calls is imported once its arguments have been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType

from deepnmt.config import Recipe
from deepnmt.config.fields import either
from deepnmt.config.load import read_tree
from deepnmt.errors import UserError
from deepnmt.shipped import find_shipped
from deepnmt.visitors import task_lines, task_modules, visitor_modules

Claim = Callable[[Sequence[str]], bool]  # of the words after a command's name
Command = Callable[[list[str]], int | None]  # from the words after its name to the exit code (None: 0)

RECIPES = "Recipes to begin with"
TEXT = "From text to a score, in the order of use"
EXAMINE = "Examine a model, or convert it"
TRY = "Try deepnmt, or a cluster"
_CORE = ("recipes", "text", "train", "convert")


def command_modules() -> list[ModuleType]:
    """Those of the core, of tasks and of visitors."""
    return [*_core_modules(), *task_modules("commands").values(), *visitor_modules("commands")]


def _core_modules() -> list[ModuleType]:
    return [import_module(f"deepnmt.commands.{name}") for name in _CORE]


def command_groups() -> dict[str, dict[str, Command]]:
    """All commands by name, under their headlines, in the order in which they are listed."""
    core, tasks, visitors = _core_modules(), task_modules("commands"), visitor_modules("commands")
    commands: dict[str, Command] = {}
    for module in (*core, *visitors):
        commands |= module.COMMANDS
    for name in dict.fromkeys(name for module in tasks.values() for name in module.COMMANDS):
        of_tasks = {task: module.COMMANDS[name] for task, module in tasks.items() if name in module.COMMANDS}
        claims = {task: module.CLAIMS[name] for task, module in tasks.items() if name in getattr(module, "CLAIMS", ())}
        commands[name] = _of_task(name, of_tasks, commands.get(name), claims)

    default_first = [tasks[task] for task in sorted(tasks, key=lambda task: task != Recipe.default("task"))]
    lister: dict[str, ModuleType] = {}  # of a command that several modules have: a visitor's before a task's
    for module in (*core, *visitors, *default_first):
        for name in module.COMMANDS:
            lister.setdefault(name, module)
    groups: dict[str, list[str]] = {headline: [] for headline in (RECIPES, TEXT, EXAMINE, TRY)}
    for module in (*core, *default_first, *visitors):
        listed, before = groups[module.GROUP], getattr(module, "BEFORE", None)
        place = listed.index(before) if before in listed else len(listed)
        listed[place:place] = [name for name in module.COMMANDS if lister[name] is module]
    return {headline: {name: commands[name] for name in listed} for headline, listed in groups.items()}


def _of_task(
    name: str, commands: Mapping[str, Command], other: Command | None, claims: Mapping[str, Claim]
) -> Command:
    """A command that tasks have, under one name: that of the task of the recipe it is given, or that claims its words;
    by default `other`, of the core or a visitor, or else that of translation."""
    default = other or commands.get(Recipe.default("task"), next(iter(commands.values())))

    def run(words: list[str]) -> int | None:
        task = next((task for task, claim in claims.items() if claim(words)), "") or task_named(words)
        if task in task_lines() and task not in commands and other is None:
            raise UserError(f"{name} is a command of task: {either(list(commands))}, but the recipe has task: {task}; "
                            "see deepnmt --help for others")
        if not task and {"-h", "--help"} & {*words}:
            for task in ("", *claims):
                print(f"\nwith task: {task}\n" if task else "", end="")
                with suppress(SystemExit):  # argparse ends the program after its help
                    commands.get(task, default)(words)
            sys.exit(0)
        return commands.get(task, default)(words)

    run.__doc__ = default.__doc__
    return run


def task_named(words: Sequence[str]) -> str:
    """The task of the first recipe or run in a command line; "" if there is none."""
    for word in words:
        file = find_shipped(word)
        if file.is_dir():
            file /= "recipe.yaml"
        if not word.startswith("-") and file.suffix in (".yaml", ".yml") and file.is_file():
            with suppress(UserError):  # which the command says when it reads the file
                return str(read_tree(file).get("task", Recipe.default("task")))
    return ""
