"""From a YAML file to a checked recipe: its text, what is changed on the command line, the environment variables in it,
and all its faults at once, each as a sentence. Nothing here imports torch, so that `--help` and a faulty recipe answer
at once.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from deepnmt.config.sections import Corpus, Recipe, Section
from deepnmt.errors import UserError, nearest

Part = TypeVar("Part", bound=BaseModel)


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Reads and checks a recipe.

    Args:
        path: a YAML file, or a run folder holding `recipe.yaml`.
        overrides: `dotted.key=value` strings; values are read as YAML.

    Raises:
        UserError: with every fault found, one a line.
    """
    file = Path(path)
    if file.is_dir():
        if not (file / "recipe.yaml").is_file():
            raise UserError(f"{file} holds no recipe.yaml; give a recipe or the folder of a run that was started")
        file = file / "recipe.yaml"
    tree = read_tree(file)
    for word in overrides or []:
        override(tree, word)
    named = {word.partition("=")[0] for word in overrides or []}
    parallel = tree.get("parallel")
    if "parallel.ds_config" in named and "parallel.precision" not in named and isinstance(parallel, dict):
        layout = parallel["ds_config"]
        if layout is None or _OLD_LAYOUT.fullmatch(str(layout)):  # either has a precision of its own
            parallel.pop("precision", None)
    return check_recipe(tree, str(file))


def check_recipe(tree: dict[str, Any], origin: str) -> Recipe:
    """Checks a tree of settings; `origin` names it in the error. Raises `UserError` with every fault, one a line."""
    tree, faults = expand(tree)
    faults += _split_old_layout(tree)
    faults += find_faults(tree)
    if faults:
        head = f"{origin} has {'a fault' if len(faults) == 1 else f'{len(faults)} faults'}:"
        raise UserError("\n".join([head, *(f"  {fault}" for fault in faults)]))
    return Recipe.model_validate(tree)


_OLD_LAYOUT = re.compile(r"(.*/|)(pipeline_|)(zero[0-3](?:_offload)?)_(fp32|bf16|fp16)\.json")


def _split_old_layout(tree: dict[str, Any]) -> list[str]:
    """Reads a `ds_config` of version 0.1, whose file was named after its precision (ds_configs/zero1_bf16.json,
    pipeline_zero1_fp16.json), as the two settings of today; a file of that name that is there is the user's own, and
    stays. Returns what is wrong with it."""
    parallel = tree.get("parallel")
    match = _OLD_LAYOUT.fullmatch(str(parallel.get("ds_config"))) if isinstance(parallel, dict) else None
    if not isinstance(parallel, dict) or match is None:
        return []
    folder, pipeline, zero, precision = match.groups()
    asked = parallel.setdefault("precision", precision)
    if Path(match[0]).is_file():
        return []
    parallel["ds_config"] = f"{folder}{zero}.json"
    if asked != precision:
        return [f"parallel.ds_config is {match[0]}, which is in {precision}, but parallel.precision is {asked}; set "
                f"parallel.ds_config={folder}{zero}.json"]
    if pipeline and not parallel.get("pipeline_stages"):
        return [f"parallel.ds_config is {match[0]}, which is for pipelines, but parallel.pipeline_stages is 0; set "
                f"parallel.pipeline_stages, or take {folder}{zero}.json with parallel.precision={precision}"]
    return []


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every setting written."""
    return yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True)


def with_settings(section: Part, changes: Mapping[str, Any]) -> Part:
    """A recipe, or a section of one, with settings changed by their dotted keys, and checked."""
    tree = section.model_dump()
    for key, value in changes.items():
        *groups, name = key.split(".")
        reduce(getitem, groups, tree)[name] = value.model_dump() if isinstance(value, BaseModel) else value
    return type(section).model_validate(tree)


def changed_settings(old: Section, new: Section) -> list[str]:
    """The settings of two recipes, or of a section of each, that differ, as `key: old -> new`."""
    before, after = _flat(old.model_dump()), _flat(new.model_dump())
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key to value."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


# -- text --------------------------------------------------------------------------------------------------------------

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

    def value_of(variable: re.Match[str]) -> str:
        """As a shell has it: with a default, a variable that is set to nothing counts as not set."""
        name, default = variable[1], variable[2]
        return os.environ.get(name, variable[0]) if default is None else os.environ.get(name) or default

    def expanded(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {k: expanded(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
        if isinstance(value, list):
            return [expanded(v, key) for v in value]
        if not isinstance(value, str):
            return value
        for name in dict.fromkeys(match[1] for match in _VARIABLE.finditer(value) if match[2] is None):
            if name not in os.environ:
                unset.setdefault(name, []).append((key, value))
        return _VARIABLE.sub(value_of, value)

    tree = expanded(tree, "")
    faults = []
    for name, ((key, value), *more) in unset.items():
        others = f" (and {', '.join(other for other, _ in more)})" if more else ""
        faults.append(f"{key}{others}: is {value!r}, but the environment variable {name} is not set; export "
                      f"{name}=FOLDER, or give the setting on the command line as {key}=PATH")
    return tree, faults


# -- faults ------------------------------------------------------------------------------------------------------------
#
# Pydantic checks how settings go together only where each of them is sound. So what is faulty is taken out or stood in
# for, and the rest is checked again, until nothing new is found.

Key = tuple[int | str, ...]
_SOUND_CORPUS = {"src": ["-"], "trg": ["-"]}  # a corpus has no settings of its own that would do


def find_faults(tree: dict[str, Any]) -> list[str]:
    """One line for each fault of a recipe's settings."""
    tree = copy.deepcopy(tree)
    lines: list[str] = []
    mended: set[Key] = set()
    while True:
        try:
            Recipe.model_validate(tree)
            return lines
        except ValidationError as error:
            faults = error.errors()
        named: set[Key] = set()
        for fault in faults:
            where = ".".join(map(str, fault["loc"]))
            for sentence, settings in _sentences(fault):
                if not settings & mended:  # else it may come of the mending
                    lines.append(f"{where}: {sentence}" if where else sentence)
                named |= settings
        if named <= mended:
            return lines
        for setting in named:
            _mend(tree, setting)
        mended |= named


def _sentences(fault: ErrorDetails) -> Iterator[tuple[str, set[Key]]]:
    """What is wrong, and the settings it speaks of; several where one check found several."""
    path, kind = fault["loc"], fault["type"]
    if kind == "value_error":
        for sentence in str(fault["ctx"]["error"]).split("\n"):
            keys = [(*path, *word.split(".")) for word in re.findall(r"\w+(?:\.\w+)*", sentence)]
            yield sentence, {key for key in keys if key[-1] in _known_at(key[:-1])} or {path}
    elif kind == "missing":
        yield "missing; this setting has no default", {path}
    elif kind == "extra_forbidden":
        known = _known_at(path[:-1])
        if near := nearest(str(path[-1]), known):
            yield f"unknown setting; did you mean {'.'.join(map(str, (*path[:-1], near)))}?", {path}
        else:
            yield f"unknown setting; known: {', '.join(known)}", {path}
    elif kind == "literal_error":
        choices = re.findall(r"'([^']*)'", fault["ctx"]["expected"])
        near = nearest(str(fault["input"]), choices)
        hint = f"; did you mean {near}?" if near else ""
        yield f"is {fault['input']!r}, must be one of {', '.join(choices)}{hint}", {path}
    elif kind == "model_type":
        yield f"is {fault['input']!r}, must be a group of settings; known: {', '.join(_known_at(path))}", {path}
    else:
        message = re.sub(r"^(Input|List|String) should", "must", fault["msg"])
        yield (f"is {fault['input']!r}, {message.replace(' after validation', '').replace('dictionary', 'mapping')}",
               {path})


def _known_at(path: Key) -> dict[str, FieldInfo]:
    """The settings of the section at a path, none where there is no section."""
    section = _section_at(path)
    return section.model_fields if section else {}


def _section_at(path: Key) -> type[BaseModel] | None:
    """The section at a path, or None where there is none. A mapping of sections has one at every name."""
    kind: Any = Recipe
    for name in path:
        if _is_section(kind):
            field = kind.model_fields.get(str(name))
            kind = field.annotation if field else None
        else:
            kind = next(filter(_is_section, get_args(kind)), None)
    return kind if _is_section(kind) else None


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _mend(tree: dict[str, Any], path: Key) -> None:
    """Takes the setting at a path out of the tree, or puts a stand-in where it cannot be missing."""
    for depth in range(1, len(path)):  # a corpus is stood in for as a whole, and a list goes with its item
        if _section_at(path[:depth]) is Corpus or isinstance(path[depth], int):
            path = path[:depth]
            break
    *groups, name = path
    node: Any = tree
    for group in groups:
        node = node.get(group) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return  # mended with a section above it, or never written
    field = _known_at(tuple(groups)).get(str(name))
    if _section_at(path) is Corpus or (field is not None and field.is_required()):
        node[name] = _stand_in(field.annotation if field else Corpus)
    else:
        node.pop(name, None)


def _stand_in(kind: Any) -> Any:
    """A sound value of a setting without default: a large number or a text, or a section of such."""
    if kind is Corpus:
        return dict(_SOUND_CORPUS)
    if not _is_section(kind):
        return "-" if kind is str else 10**9
    return {name: _stand_in(field.annotation) for name, field in kind.model_fields.items() if field.is_required()}
