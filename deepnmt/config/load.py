"""Reads a recipe: YAML, overrides from the command line, environment variables, checks.

All faults of a recipe are reported together, one sentence each. Nothing here imports torch, so that `--help` and the
report of a faulty recipe take no time.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from itertools import takewhile
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from deepnmt.config.fields import Fault, Section, SettingsError, allowed, either, fields_within, section_of, way_to
from deepnmt.config.plugins import name_commands, name_plugins
from deepnmt.config.sections import NAMED, Recipe
from deepnmt.errors import UserError, nearest
from deepnmt.shipped import find_shipped, shipped_recipes
from deepnmt.visitors import task_module

Part = TypeVar("Part", bound=BaseModel)


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Reads and checks a recipe.

    Args:
        path: a YAML file, a run folder with its `recipe.yaml`, or the name of a recipe that comes with deepnmt. A
            run's folder is the run, wherever it was moved since it was trained.
        overrides: `dotted.key=value` strings; values are read as YAML.

    Raises:
        UserError: with all faults, one a line.
    """
    file = find_shipped(path)
    of_a_run = file.is_dir()
    if of_a_run:
        if not (file / "recipe.yaml").is_file():
            raise UserError(f"{file} holds no recipe.yaml; give a recipe, or the folder of a run that was started")
        file = file / "recipe.yaml"
    tree = read_tree(file)
    if of_a_run:
        tree["run"] = str(file.parent)
    metrics: dict[str, Any] = {}  # what the overrides say of them
    for assignment in overrides or []:
        override(tree, assignment)
        if assignment.startswith("metrics"):
            override(metrics, assignment)
    name_commands(expand_variables(metrics)[0], True)
    named = {assignment.partition("=")[0] for assignment in overrides or []}
    parallel = tree.get("parallel")
    if "parallel.ds_config" in named and "parallel.precision" not in named and isinstance(parallel, dict):
        layout = parallel["ds_config"]
        if layout is None or _OLD_LAYOUT.fullmatch(str(layout)):  # either implies the precision
            parallel.pop("precision", None)
    by: Path | bool = False if of_a_run else file
    origin = f"{file} with the settings of the command line" if overrides else str(file)
    return check_recipe(tree, origin, plugins_by=True if "plugins" in named else by, commands_by=by)


def check_recipe(
    tree: dict[str, Any], origin: str, plugins_by: Path | bool = True, commands_by: Path | bool = True
) -> Recipe:
    """Checks a tree of settings. Raises `UserError` with all faults, one a line.

    Args:
        origin: names it in the error.
        plugins_by, commands_by: where its plug-ins and the commands of its metrics are named; see `name_plugins`.
    """
    tree, faults = expand_variables(tree)
    faults += name_plugins(tree, NAMED, plugins_by)
    name_commands(tree, commands_by)
    faults += _split_old_layout(tree)
    faults += find_faults(tree)
    if faults:
        head = f"{origin} has {'a fault' if len(faults) == 1 else f'{len(faults)} faults'}:"
        raise UserError("\n".join([head, *(f"  {fault}" for fault in faults)]))
    return recipe_class(tree).model_validate(tree)


def recipe_class(tree: Mapping[str, Any]) -> type[Recipe]:
    """The recipes of a tree's task: its own, `RECIPE` in the module `settings` of its folder, or those of translation.
    """
    settings = task_module(str(tree.get("task")), "settings")
    return Recipe if settings is None else settings.RECIPE


_OLD_LAYOUT = re.compile(r"(.*/|)(pipeline_|)(zero[0-3](?:_offload)?)_(fp32|bf16|fp16)\.json")


def _split_old_layout(tree: dict[str, Any]) -> list[str]:
    """Converts a `ds_config` of version 0.1 in place, and returns its faults.

    Those files were named after their precision (ds_configs/zero1_bf16.json, pipeline_zero1_fp16.json); today that is
    `parallel.precision`. If a file of such a name exists, it is the user's own and is left as it is.
    """
    parallel = tree.get("parallel")
    match = _OLD_LAYOUT.fullmatch(str(parallel.get("ds_config"))) if isinstance(parallel, dict) else None
    if not isinstance(parallel, dict) or match is None:
        return []
    folder, pipeline, zero, precision = match.groups()
    given = parallel.setdefault("precision", precision)
    if Path(match[0]).is_file():
        return []
    parallel["ds_config"] = f"{folder}{zero}.json"
    if given != precision:
        return [f"parallel.ds_config is {match[0]}, which is in {precision}, but parallel.precision is {given}; set "
                f"parallel.ds_config={folder}{zero}.json"]
    if pipeline and not parallel.get("pipeline_stages"):
        return [f"parallel.ds_config is {match[0]}, which is for pipelines, but parallel.pipeline_stages is 0; set "
                f"parallel.pipeline_stages, or use {folder}{zero}.json with parallel.precision={precision}"]
    return []


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, with every setting."""
    return yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True)


def yaml_line(value: Any) -> str:
    """A value as YAML in one line, with quotes where YAML would read it otherwise, as `no` or a name with #."""
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).removesuffix(
        "\n").removesuffix("\n...")


def with_settings(section: Part, changes: Mapping[str, Any]) -> Part:
    """A copy of a recipe, or of a section, with settings changed by their dotted keys; it is checked again."""
    tree = section.model_dump()
    for key, value in changes.items():
        *groups, name = key.split(".")
        reduce(getitem, groups, tree)[name] = value.model_dump() if isinstance(value, BaseModel) else value
    return type(section).model_validate(tree)


def rounded_line(value: Any, digits: int) -> str:
    """A value as YAML in one line, its numbers with so many significant digits. Keys with a `*` have double quotes,
    since a shell's are single ones."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, dict):
        quoted = {f'"{key}"' if "*" in key else key: each for key, each in value.items()}
        return "{" + ", ".join(f"{key}: {rounded_line(each, digits)}" for key, each in quoted.items()) + "}"
    return yaml_line(value)


def on_command_line(settings: Mapping[str, Any]) -> str:
    """Settings, by their dotted keys, as a user types them into a shell."""
    return shlex.join(f"{name}={rounded_line(value, 3)}" for name, value in settings.items())


class Change(NamedTuple):
    """A setting, by its dotted key, or another fact of a run, and its two values; None where there was none."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def changed_settings(old: Section, new: Section) -> list[Change]:
    """The settings that differ between two recipes, or between two sections."""
    before, after = flatten(old.model_dump()), flatten(new.model_dump())
    changes = [Change(key, before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())]
    return [change for change in changes if change.old != change.new]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


# -- text --------------------------------------------------------------------------------------------------------------

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")  # ${NAME} or ${NAME:-default}
_MAX_NESTING = 50  # groups within groups; a recipe has five
_MAX_VALUES = 100_000  # aliases counted each time, which can stand for billions in a few lines
_MAX_BYTES = 2**18  # parsing that takes three seconds


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that 1e-3 is a number and not text, and that a repeated key is an error."""

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
    """The settings in a YAML file, unchecked. Raises `UserError` if it cannot be read or is not a mapping."""
    try:
        with file.open("rb") as stream:  # which may be a device without end
            text = stream.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise UserError(f"recipe {file} has more than {_MAX_BYTES:,} bytes, so it is no recipe; give another file")
        tree = parse_yaml(text.decode())
    except FileNotFoundError:
        near = nearest(str(file).removeprefix("recipes/").removesuffix(".yaml"), shipped_recipes())
        hint = f"did you mean {near}? " if near else ""
        what = "recipe" if file.suffix else "recipe or run folder"
        raise UserError(f"there is no {what} {file}; {hint}deepnmt new writes a recipe for your text, and "
                        "deepnmt recipes lists those that come with deepnmt") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {file} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: for example the date 2026-13-01
        raise UserError(f"recipe {file} is not valid YAML: {_yaml_fault(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"recipe {file} must be a mapping of settings, not {type(tree).__name__}; give a YAML "
                        "file such as deepnmt new writes")
    return tree


def _yaml_fault(error: Exception) -> str:
    """What is wrong with a YAML text, in a line: the parser's own words without its excerpt."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    fault = f"line {error.problem_mark.line + 1}: {error.problem}"
    if error.context and error.context_mark:
        fault += f" ({error.context} in line {error.context_mark.line + 1})"
    return fault


def override(tree: dict[str, Any], assignment: str) -> None:
    """Applies `key.key=value` to a tree; the value is read as YAML. Raises `UserError` if it has another form."""
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise UserError(f"override {assignment!r} is not of the form key.key=value, for example train.updates=300")
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"override {assignment!r}: {text!r} is not a YAML value; one with spaces needs quotes around "
                        "it all, for example 'optimizer.lr_factors={encoder: 0.2}'") from None
    *parents, last = key.split(".")
    node = tree
    for name in parents:
        child = node.get(name)
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {assignment!r}: {name} is a value, not a group of settings")
        node = child
    node[last] = value


def parse_yaml(text: str) -> Any:
    """YAML as lists and mappings. Raises `yaml.YAMLError` or `ValueError`, also if an alias contains itself, or aliases
    of aliases stand for too much."""
    too_deep = ValueError(f"groups are nested more than {_MAX_NESTING} deep; check for an alias (*name) inside its own "
                          "anchor (&name)")
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        waiting = [(root, 0)] if root else []
        for count in itertools.count(1):  # depth first, so that no more than a file's values wait at once
            if not waiting:
                return loader.construct_document(root) if root else None
            node, depth = waiting.pop()
            if depth > _MAX_NESTING:
                raise too_deep
            if count > _MAX_VALUES:
                raise ValueError(f"it has more than {_MAX_VALUES:,} values, those of aliases (*name) counted")
            if isinstance(node, yaml.MappingNode):
                waiting += [(child, depth + 1) for child in itertools.chain.from_iterable(node.value)]
            elif isinstance(node, yaml.SequenceNode):
                waiting += [(child, depth + 1) for child in node.value]
    except RecursionError:
        raise too_deep from None
    finally:
        loader.dispose()


def expand_variables(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replaces environment variables in strings, `${NAME}` or `${NAME:-default}`, so that a recipe suits any machine.

    Returns:
        The tree, and a fault for each variable that is neither set nor has a default; it is left as written.
    """
    unset: dict[str, list[tuple[str, str]]] = {}  # variable to (setting, its value)

    def value_of(variable: re.Match[str]) -> str:
        """As in a shell: with a default, a variable that is set but empty counts as unset."""
        name, default = variable[1], variable[2]
        return os.environ.get(name, variable[0]) if default is None else os.environ.get(name) or default

    def expanded(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            prefix = f"{key}." if key else ""
            return {name: expanded(inside, f"{prefix}{name}") for name, inside in value.items()}
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


def find_faults(tree: dict[str, Any]) -> list[str]:
    """The faults of a recipe's settings, one line each.

    Pydantic checks combinations of settings only where each of them is valid. So what is faulty is left out and the
    rest is checked again, until there is nothing new; what contradicts a setting that was left out is nothing new.
    Where a setting without a default is missing, combinations of different sections wait until it is there.
    """
    faults: list[Fault] = []
    while True:
        faulty = {key for fault in faults for key in fault.settings}
        new = [fault for fault in _faults_of(_without(tree, faulty)) if faulty.isdisjoint(fault.settings)]
        if not new:
            return [fault.text for fault in faults]
        faults += new


def _faults_of(tree: dict[str, Any]) -> Iterator[Fault]:
    """The faults that one check finds, with the dotted keys of their settings."""
    recipe = recipe_class(tree)
    try:
        recipe.model_validate(tree)
        return
    except ValidationError as error:
        errors = error.errors()
    for fault in errors:
        way = fault["loc"]
        if way[-1:] == ("[key]",):  # before it Pydantic has what it made of the key
            way = (*way[:-2], str(fault["input"]))
        where = ".".join(map(str, way))
        if fault["type"] == "value_error" and isinstance(inner := fault["ctx"]["error"], SettingsError):
            for settings, text in inner.faults:
                yield _within(where, settings, text)
        else:
            setting = takewhile(lambda part: isinstance(part, str), fault["loc"])  # of a list's item: the list
            text = _sentence(fault, recipe)
            yield Fault((".".join(map(str, setting)),), f"{where}: {text}" if where else text)


def _within(where: str, settings: Iterable[str], text: str) -> Fault:
    """The fault of a section that is at `where` in the recipe; "" is the recipe itself."""
    if not where:
        return Fault(tuple(settings), text)
    return Fault(tuple(f"{where}.{name}" for name in settings), f"{where}: {text}")


def _sentence(fault: ErrorDetails, recipe: type[Recipe]) -> str:
    """One of Pydantic's errors of a recipe of this class as a sentence."""
    kind, value, way = fault["type"], fault["input"], [str(part) for part in fault["loc"]]
    if kind == "missing":
        return "is missing; this setting has no default"
    if kind == "extra_forbidden":
        known = list(_known_at(recipe, way[:-1]))
        meant = [key for key, _ in fields_within(recipe, "") if key.split(".")[-1] == way[-1]]  # of other sections
        meant = [key for key in meant if key.count(".") == min(other.count(".") for other in meant)]
        if near := nearest(way[-1], known):
            meant = [".".join([*way[:-1], near])]
        return "unknown setting; " + (f"did you mean {either(meant)}?" if meant else f"known: {', '.join(known)}")
    if kind == "literal_error":
        choices = allowed(way_to(recipe, ".".join(way))[-1])
        near = nearest(str(value), choices)
        return f"is {value!r}, must be one of {', '.join(choices)}" + (f"; did you mean {near}?" if near else "")
    if kind == "model_type":
        return f"is {value!r}, must be a group of settings; known: {', '.join(_known_at(recipe, way))}"
    message = re.sub(r"^(Input|List|String|Dictionary) should", "must", fault["msg"])
    if kind == "string_type" and isinstance(value, bool | int | float):  # such as no for Norwegian, or 2014
        message += "; YAML reads it as that, write it in quotes"
    return f"is {value!r}, {message.replace(' after validation', '').replace('dictionary', 'mapping')}"


def _known_at(recipe: type[Recipe], way: list[str]) -> Iterable[str]:
    """The settings of the section at a path."""
    fields = way_to(recipe, ".".join(way))
    section = section_of(fields[-1]) if fields else recipe
    return section.model_fields if section else []


def _without(tree: Mapping[str, Any], keys: Collection[str], prefix: str = "") -> dict[str, Any]:
    """The tree without some settings."""
    rest: dict[str, Any] = {}
    for name, value in tree.items():
        if f"{prefix}{name}" in keys:
            continue
        rest[name] = _without(value, keys, f"{prefix}{name}.") if isinstance(value, dict) else value
    return rest
