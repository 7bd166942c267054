"""Plug-ins: Python files with blocks, schedules or tasks of your own.

A plug-in is code. `name_plugins` has the one rule for when it runs: the user named the file on this command line (in
Python: in the settings), or in a recipe that does not lie with a run, a model or an export, which may come from
anywhere. What those name is compared by its SHA-256, which a run's recipe holds, and never run.

The same rule holds for the commands of `metrics`, see `name_commands`.

A plug-in runs when it is named, and the rows of its tables, such as `BLOCKS = {"sandwich": Sandwich}`, are found in
deepnmt's own tables of that kind from then on.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from deepnmt.config.choices import Choices
from deepnmt.config.fields import either
from deepnmt.errors import UserError

KINDS = {"BLOCKS": "block", "SCHEDULES": "schedule", "OBJECTIVES": "objective", "TASKS": "task",
         "LANGUAGE_IDS": "language identifier"}
MARKS = frozenset({"manifest.json", "deepnmt.json", "log.jsonl", "checkpoints"})  # of models, exports and runs
MOST_FOLDERS = 20_000  # that are looked through for them

Row = TypeVar("Row")


@dataclass(frozen=True)
class Plugin:
    """A file that has run, and its tables by kind."""

    file: str
    sha256: str
    tables: Mapping[str, Mapping[str, Any]]


_commands: set[str] = set()  # of metrics, which the user named in this process
_plugins: dict[str, Plugin] = {}  # by SHA-256: those that the user named in this process, the latest last


class Table(dict[str, Row]):
    """The rows of a kind, by name: deepnmt's own, and those of plug-ins."""

    def __init__(self, kind: str, rows: Mapping[str, Row], fault: Callable[[Any], str | None]) -> None:
        super().__init__(rows)
        self.kind, self.fault = kind, fault  # `fault`: what a row must be, if it is not

    def __missing__(self, name: str) -> Row:
        for plugin in reversed(_plugins.values()):
            if name in plugin.tables[self.kind]:
                row: Row = plugin.tables[self.kind][name]
                if fault := self.fault(row):
                    raise UserError(f"the {KINDS[self.kind]} {name} of {plugin.file} {fault}")
                return row
        raise UserError(f"there is no {KINDS[self.kind]} {name} in deepnmt or in a plug-in that you named; if it is in "
                        "a file, name that: plugins=[FILE.py]")

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or any(name in plugin.tables[self.kind] for plugin in _plugins.values())


# -- what a recipe names -----------------------------------------------------------------------------------------------


def name_plugins(tree: dict[str, Any], named: Mapping[str, Choices[Any]], by: Path | bool) -> list[str]:
    """Runs the plug-ins that the user named, and writes their hashes into the tree; returns the faults.

    Args:
        tree: the settings, in place.
        named: deepnmt's own names, by the settings in which a recipe may have a plug-in's instead.
        by: where they are named. True: on the command line or in Python; False: in what belongs to a run or a model;
            a recipe: there, so that they run unless it lies with a run or a model. A file may then be beside it.
    """
    wanted = as_mapping(tree.get("plugins", {}))
    if not by or not wanted or not isinstance(wanted, dict):
        return []  # a wrong type is a fault that the check of the recipe reports
    beside = [by.parent] if isinstance(by, Path) else []
    if isinstance(by, Path) and (why := lies_with_a_model(by.resolve().parent, tree.get("run"))):
        return [f"plugins: {file} is code, and runs only if you name it on the command line, because {by} lies with "
                f"{why}: add {_way(_find_file(str(file), beside) or file)}, or move the recipe"
                for file, sha256 in wanted.items() if not sha256]  # with a hash it is what a run remembers
    own = {str(choices.plugins): choices for choices in named.values()}
    hashes, faults = {}, []
    for name, sha256 in wanted.items():
        try:
            plugin = _run(str(name), beside, sha256, own)
            hashes[plugin.file] = plugin.sha256
        except UserError as error:
            faults.append(f"plugins: {error}")
    tree["plugins"] = hashes
    return faults


def name_commands(tree: Mapping[str, Any], by: Path | bool) -> None:
    """Remembers the commands of `metrics` in a tree of settings that the user named; `by`: see `name_plugins`."""
    metrics = tree.get("metrics")
    if not by or not metrics or not isinstance(metrics, Mapping):
        return
    if not isinstance(by, Path) or not lies_with_a_model(by.resolve().parent, tree.get("run")):
        _commands.update(str(metric.get("command")) for metric in metrics.values() if isinstance(metric, Mapping))


def is_named(command: str) -> bool:
    """Whether the user named this command of `metrics`."""
    return command in _commands


def lies_with_a_model(folder: Path, run: object = None) -> str | None:
    """A clause on the run, model or export in which a folder lies, or which lies in it at any depth; None if there is
    none. `run`, where the recipe's own run will be, counts from the start, or it would be refused at its resumption."""
    if isinstance(run, str) and Path(run).resolve().is_relative_to(folder):
        return f"its run {run}"
    for place in (folder, *folder.parents):
        for mark in sorted(MARKS):
            if (place / mark).exists():
                return f"{place / mark}"
    for number, (below, folders, files) in enumerate(os.walk(folder)):
        for mark in MARKS.intersection([*folders, *files]):
            return f"{Path(below) / mark}"
        if number == MOST_FOLDERS:
            return f"more than {MOST_FOLDERS:,} folders, which may hold a model"
    return None


def as_mapping(value: Any) -> Any:
    """One file, or a list of them, as a mapping to hashes that are not known."""
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        return value
    return dict.fromkeys(files, "")


def known(kind: str, sources: Mapping[str, str]) -> list[str]:
    """The names of this kind in these plug-ins, as far as they have run."""
    names: list[str] = []
    for sha256 in sources.values():
        if sha256 in _plugins:
            names += _plugins[sha256].tables[kind]
    return names


def source_of(kind: str, name: str) -> str | None:
    """The SHA-256 of the plug-in whose row of this kind and name is used; None if none that has run has it."""
    return next((plugin.sha256 for plugin in reversed(_plugins.values()) if name in plugin.tables[kind]), None)


def that_have_run(sources: Mapping[str, str]) -> dict[str, str]:
    """Those of these plug-ins that the user named."""
    return {file: sha256 for file, sha256 in sources.items() if sha256 in _plugins}


def have_run(sources: Mapping[str, str]) -> bool:
    """Whether the user named all of these plug-ins."""
    return len(that_have_run(sources)) == len(sources)


def require_same(sources: Mapping[str, str], where: Path) -> None:
    """Raises `UserError` unless the user named each of the plug-ins with which the checkpoint `where` was trained, and
    none has changed since."""
    for file, sha256 in sources.items():
        if sha256 in _plugins:
            continue
        trained = f"{where} was trained with the plug-in {file} of SHA-256 {sha256}"
        for plugin in _plugins.values():
            if Path(plugin.file).name == Path(file).name:
                raise UserError(f"{trained}, but it is now {plugin.sha256}; restore that file, and name it: "
                                f"{_way(file)}")
        raise UserError(f"{trained}; deepnmt runs the code of a plug-in only if you name it: add {_way(file)}")


def same_plugins(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether they are the same code, wherever the files are."""
    return sorted(one.values()) == sorted(other.values())


def _way(file: object) -> str:
    return f"plugins=[{file}]"


# -- files -------------------------------------------------------------------------------------------------------------


def _find_file(name: str, beside: list[Path]) -> Path | None:
    for folder in (Path(), *beside):
        if (folder / name).is_file():
            return folder / name
    return None


def _run(name: str, beside: list[Path], sha256: object, own: Mapping[str, Choices[Any]]) -> Plugin:
    """Runs a file, unless its code has run already, and makes it the latest. Raises `UserError`."""
    if not name.endswith(".py"):
        raise UserError(f"{name} is no Python file; give a file whose name ends in .py, as in plugins: [my_block.py]")
    file = _find_file(name, beside)
    if file is None:
        raise UserError(f"there is no file {name}{', neither here nor beside the recipe' * bool(beside)}; give the "
                        "path of a plug-in")
    try:
        code = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    now = hashlib.sha256(code).hexdigest()
    if sha256 not in (now, "", None):
        raise UserError(f"{file} has the SHA-256 {now}, but {sha256} was asked for; restore that file, or write "
                        "plugins: [FILE.py] to take the file as it is")
    for other in [other for other in _plugins.values() if other.file == str(file) and other.sha256 != now]:
        del _plugins[other.sha256]  # the same file, as it was
    before = _plugins.pop(now, None)
    _plugins[now] = Plugin(str(file), now, before.tables if before else _tables(file, code, own))
    return _plugins[now]


def _tables(file: Path, code: bytes, own: Mapping[str, Choices[Any]]) -> dict[str, dict[str, Any]]:
    """What a plug-in defines, by kind. Raises `UserError` if it fails, defines nothing, or a name of deepnmt's."""
    module = ModuleType(f"deepnmt_plugin_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses look for it
    try:
        exec(compile(code, file, "exec"), module.__dict__)  # the bytes that were hashed
    except (Exception, SystemExit) as error:
        raise UserError(f"the plug-in {file} cannot be run: {type(error).__name__}: {error}") from error
    tables = {kind: getattr(module, kind, {}) for kind in KINDS}
    if not all(isinstance(table, dict) for table in tables.values()) or not any(tables.values()):
        raise UserError(f"{file} defines no {either(list(KINDS.values()))}; write a table of them at its end, such "
                        'as BLOCKS = {"sandwich": Sandwich}')
    for kind, table in tables.items():
        for name in table:
            if name in own[kind]:
                raise UserError(f"{file} defines the {KINDS[kind]} {name}, which deepnmt has already; give it another "
                                "name")
    return tables
