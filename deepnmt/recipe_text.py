"""A recipe as text: its YAML, what is changed on the command line, and the environment variables in it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from deepnmt.errors import UserError

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")  # ${NAME} or ${NAME:-default}
_DEEPEST = 50  # groups within groups; a recipe has five


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as text and yes as a boolean; here numbers are numbers, and a key given twice is a fault."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.\d*$|^[-+]?\.\d+([eE][-+]?\d+)?$"),
    list("-+0123456789."),
)


def read_tree(file: Path) -> dict[str, Any]:
    """The settings in a YAML file, unchecked. Raises `UserError` where it cannot be read or holds something else."""
    try:
        tree = _tree(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no recipe {file}; recipes/ holds those that come with deepnmt") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {file} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as the date 2026-13-01
        raise UserError(f"recipe {file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"recipe {file} must be a mapping of settings, not {type(tree).__name__}")
    return tree


def override(tree: dict[str, Any], words: str) -> None:
    """Puts `key.key=value` into a tree; the value is read as YAML. Raises `UserError`."""
    key, equals, text = words.partition("=")
    if not equals or not key:
        raise UserError(f"override {words!r} is not of the form key.key=value, for example train.updates=300")
    try:
        value = _tree(text)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"override {words!r}: {text!r} is not a YAML value") from None
    *parents, last = key.split(".")
    node = tree
    for name in parents:
        child = node.get(name)
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {words!r}: {name} is a value, not a group of settings")
        node = child
    node[last] = value


def _tree(text: str) -> Any:
    """YAML as lists and mappings. Raises `yaml.YAMLError` or `ValueError`, also for a tree without an end."""
    try:
        tree = yaml.load(text, Loader=_Loader)
        _check_depth(tree, _DEEPEST)
    except RecursionError:
        raise ValueError(f"groups stand in each other more than {_DEEPEST} deep; an alias (*name) may stand within its "
                         "own anchor (&name)") from None
    return tree


def _check_depth(value: Any, left: int) -> None:
    """Raises `RecursionError` where a tree has no end or groups are more than `left` deep."""
    if left < 0:
        raise RecursionError
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(child, left - 1)


def expand(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Puts environment variables, `${NAME}` or `${NAME:-default}`, into strings, so that a recipe names no folder of
    one machine.

    Returns:
        The tree, and a fault for each variable that is neither set nor has a default; it stays as it is written.
    """
    unset: dict[str, list[tuple[str, str]]] = {}  # variable to (setting, its value)
    tree = _expand(tree, "", unset)
    faults = []
    for name, places in unset.items():
        where, value = places[0]
        others = f" (and {', '.join(place for place, _ in places[1:])})" if places[1:] else ""
        faults.append(f"{where}{others}: is {value!r}, but the environment variable {name} is not set; export "
                      f"{name}=FOLDER, or give the setting on the command line as {where}=PATH")
    return tree, faults


def _expand(value: Any, where: str, unset: dict[str, list[tuple[str, str]]]) -> Any:
    if isinstance(value, dict):
        return {k: _expand(v, f"{where}.{k}" if where else str(k), unset) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v, where, unset) for v in value]
    if not isinstance(value, str):
        return value
    for name in dict.fromkeys(match[1] for match in _VARIABLE.finditer(value) if match[2] is None):
        if name not in os.environ:
            unset.setdefault(name, []).append((where, value))
    return _VARIABLE.sub(_value_of, value)


def _value_of(variable: re.Match[str]) -> str:
    """As a shell has it: with a default, a variable that is set to nothing counts as not set."""
    name, default = variable[1], variable[2]
    return os.environ.get(name, variable[0]) if default is None else os.environ.get(name) or default
