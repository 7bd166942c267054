"""Blocks, schedules and tasks from outside: Python files that a recipe names, and installed packages.

A plug-in is code, and it runs only if the user names it: in a recipe of their own, or on the command line. What a
checkpoint or a run folder names is compared, never run. So recipes are checked without running anything: the names that
a file defines are read from its syntax tree, `BLOCKS = {"sandwich": Sandwich}`, and those of a package from its entry
points, group `deepnmt.blocks`. The file runs when a name of it is first looked up in a `Table`.

A recipe holds each plug-in with the SHA-256 of its file, so that a run is not continued, nor a model loaded, with
another one.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import yaml

from deepnmt.config.choices import Choices
from deepnmt.errors import UserError

KINDS = {"BLOCKS": "block", "SCHEDULES": "schedule", "TASKS": "task"}

Row = TypeVar("Row")


@dataclass(frozen=True)
class Plugin:
    """A file that the user named; `names`: by kind, what it defines."""

    source: str
    sha256: str
    code: bytes
    names: Mapping[str, tuple[str, ...]]


_named: dict[str, Plugin] = {}  # by source: those that the user named in this process, the latest last
_modules: dict[str, ModuleType] = {}  # by SHA-256: those that have run


class Table(dict[str, Row]):
    """The rows of a kind, by name: deepnmt's own, and those of plug-ins when they are asked for."""

    def __init__(self, kind: str, rows: Mapping[str, Row], fault: Callable[[Any], str | None]) -> None:
        super().__init__(rows)
        self.kind, self.fault = kind, fault  # `fault`: what a row must be, if it is not

    def __missing__(self, name: str) -> Row:
        row = _find(self.kind, name)
        if fault := self.fault(row):
            raise UserError(f"the plug-in's {KINDS[self.kind]} {name} {fault}")
        return row

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or str(name) in known(self.kind, list(_named))


# -- what a recipe names -----------------------------------------------------------------------------------------------


def name_plugins(tree: dict[str, Any], named: Mapping[str, Choices[Any]], beside: Path | None = None) -> list[str]:
    """Takes the plug-ins of a recipe as named by the user, and writes their hashes into the tree; returns the faults.

    Args:
        tree: the settings, in place.
        named: deepnmt's own names, by the settings in which a recipe may have a plug-in's instead.
        beside: the folder of the recipe, in which files that are not in the current one are looked for.
    """
    wanted = as_mapping(tree.get("plugins", {}))
    if not isinstance(wanted, dict):
        return []  # a fault of its type, which the check of the recipe reports
    found, faults = {}, []
    own = {choices.plugins: choices for choices in named.values()}
    for source, written in wanted.items():
        if not str(source).endswith(".py"):  # a run's recipe may have an installed package, which is looked for below
            if source not in _installed_sources():
                faults.append(f"plugins: {source} is neither a Python file nor a plug-in of an installed package; give "
                              "a file whose name ends in .py, as in plugins: [my_block.py]")
            continue
        try:
            plugin = _read(str(source), beside)
            for kind, names in plugin.names.items():
                if taken := [name for name in names if name in own[kind]]:
                    raise UserError(f"{source} defines the {KINDS[kind]} {taken[0]}, which deepnmt has already; "
                                    "give it another name")
            if written not in (plugin.sha256, "", None):
                raise UserError(f"{source} has the SHA-256 {plugin.sha256}, but {written} was asked for; restore that "
                                "file, or write plugins: [FILE.py] to take the file as it is")
        except UserError as error:
            faults.append(f"plugins: {error}{_of_run(tree, str(source))}")
            continue
        _named.pop(plugin.source, None)
        _named[plugin.source] = plugin
        found[plugin.source] = plugin.sha256
    for setting, choices in named.items():
        name, kind = _value(tree, setting), str(choices.plugins)
        ours = (_named[source].names.get(kind, ()) for source in found if source in _named)
        here = {*own[kind], *(other for names in ours for other in names)}
        if isinstance(name, str) and name not in here and (point := _installed(kind).get(name)):
            found[point.value] = _hash_of(point)
    if found or "plugins" in tree:
        tree["plugins"] = found
    return faults


def as_mapping(value: Any) -> Any:
    """One file, or a list of them, as a mapping to hashes that are not known."""
    files = [value] if isinstance(value, str) else value
    return dict.fromkeys(files, "") if isinstance(files, list) and all(isinstance(f, str) for f in files) else value


def known(kind: str, sources: list[str]) -> list[str]:
    """The names of this kind in these plug-ins, and in installed packages."""
    return [name for source in sources if source in _named for name in _named[source].names.get(kind, ())] + [
        *_installed(kind)]


def are_named(sources: Mapping[str, str]) -> bool:
    """Whether the user named all of these files."""
    return all(source in _named or not source.endswith(".py") for source in sources)


def require_same(sources: Mapping[str, str], where: Path) -> None:
    """Raises `UserError` unless the user named each of the plug-ins with which the checkpoint `where` was trained, and
    none has changed since."""
    for source, sha256 in sources.items():
        if not source.endswith(".py"):
            points = [point for kind in KINDS for point in _installed(kind).values() if point.value == source]
            now = _hash_of(points[0]) if points else None
            way = f"install the package of {source} as it was"
        else:
            now = next((plugin.sha256 for plugin in _named.values() if plugin.sha256 == sha256), None) or next(
                (plugin.sha256 for plugin in _named.values() if Path(plugin.source).name == Path(source).name), None)
            way = f"restore that file, and name it: plugins=[{source}]"
        trained = f"{where} was trained with the plug-in {source} of SHA-256 {sha256}"
        if now is None:
            raise UserError(f"{trained}; deepnmt runs the code of a plug-in only if you name it: "
                            f"{'add plugins=[' + source + ']' if source.endswith('.py') else way}")
        if now != sha256:
            raise UserError(f"{trained}, but it is now {now}; {way}")


def same_plugins(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether they are the same code, wherever the files are."""
    return sorted(one.values()) == sorted(other.values())


# -- files and packages ------------------------------------------------------------------------------------------------


def _read(source: str, beside: Path | None) -> Plugin:
    """A plug-in's code and the names that it defines. Raises `UserError`."""
    file = next((file for file in (Path(source), (beside or Path()) / source) if file.is_file()), None)
    if file is None:
        raise UserError(f"there is no file {source}, neither here nor beside the recipe; give the path of a plug-in")
    try:
        code = file.read_bytes()
        body = ast.parse(code, str(file)).body
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{file} is not Python that can be read: {error}") from None
    names: dict[str, tuple[str, ...]] = {}
    for line in body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        value = getattr(line, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and target.id in KINDS and isinstance(value, ast.Dict):
                names[target.id] = tuple(str(key.value) for key in value.keys if isinstance(key, ast.Constant))
    if not any(names.values()):
        raise UserError(f"{file} defines no block, schedule or task; write a table of them at its end, such as "
                        'BLOCKS = {"sandwich": Sandwich}')
    return Plugin(str(file), hashlib.sha256(code).hexdigest(), code, names)


def _of_run(tree: Mapping[str, Any], source: str) -> str:
    """With which hash of the plug-in the recipe's run was trained, if there is such a run."""
    try:
        begun = yaml.safe_load((Path(str(tree.get("run"))) / "recipe.yaml").read_text(encoding="utf-8"))["plugins"]
        sha256 = next(sha256 for name, sha256 in begun.items() if Path(name).name == Path(source).name)
    except (OSError, LookupError, TypeError, AttributeError, StopIteration, ValueError, yaml.YAMLError):
        return ""
    return f" ({tree['run']} was trained with the one of SHA-256 {sha256})"


def _value(tree: Mapping[str, Any], setting: str) -> Any:
    value: Any = tree
    for name in setting.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


@cache
def _installed(kind: str) -> dict[str, EntryPoint]:
    """The entry points of installed packages, by name."""
    return {point.name: point for point in entry_points(group=f"deepnmt.{kind.lower()}")}


def _installed_sources() -> set[str]:
    """What recipes call the plug-ins of installed packages."""
    return {point.value for kind in KINDS for point in _installed(kind).values()}


def _hash_of(point: EntryPoint) -> str:
    """The SHA-256 of the file of an installed module."""
    spec = importlib.util.find_spec(point.module)
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest() if spec and spec.origin else ""


def _find(kind: str, name: str) -> Any:
    """The row of this name in a plug-in that the user named, or in an installed package; runs it if it has not run."""
    for plugin in reversed(_named.values()):
        if name in plugin.names.get(kind, ()):
            return getattr(_run(plugin), kind)[name]
    if point := _installed(kind).get(name):
        return point.load()
    raise UserError(f"there is no {KINDS[kind]} {name} in deepnmt, in a plug-in that you named or in an installed "
                    "package; if it is in a file, name that: plugins=[FILE.py]")


def _run(plugin: Plugin) -> ModuleType:
    """The module of a plug-in, run once. Raises `UserError` if it fails."""
    if plugin.sha256 not in _modules:
        module = ModuleType(f"deepnmt_plugin_{Path(plugin.source).stem}")
        module.__file__ = plugin.source
        sys.modules[module.__name__] = module  # where dataclasses look for it
        try:
            exec(compile(plugin.code, plugin.source, "exec"), module.__dict__)
        except Exception as error:
            raise UserError(f"the plug-in {plugin.source} cannot be run: {type(error).__name__}: {error}") from error
        _modules[plugin.sha256] = module
    return _modules[plugin.sha256]
