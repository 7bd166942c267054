"""The recipe that a search writes: the user's text with some settings changed, its comments kept."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from deepnmt.config import Recipe, changed_settings, check_recipe, dump_recipe, load_recipe
from deepnmt.config.load import parse_yaml, rounded_line
from deepnmt.errors import UserError
from deepnmt.files import make_parent_folder, reporting, write_text
from deepnmt.shipped import find_shipped


def file_to_write(origin: str, chosen: Path | None, written: str | None, replace: bool) -> Path:
    """The file of the tuned recipe.

    Args:
        origin: the recipe, its shipped name, or the folder of a run.
        chosen: `--write`.
        written: the text that an earlier call has written, which may be replaced.
        replace: whether any other may, too.

    Raises:
        UserError: it exists, or cannot be written.
    """
    place = Path(origin)
    folder = place.parent if place.is_file() else Path()
    name = place.name.removesuffix(".yaml").removesuffix(".yml")  # a run's may have other dots
    file = chosen or folder / f"{name}_tuned.yaml"
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"--write {file} is no name of a recipe; give one that ends in .yaml, for example {file}.yaml")
    make_parent_folder(file, "--write")
    if file.exists() and not replace and (written is None or file.read_bytes() != written.encode()):
        raise UserError(f"{file} exists already; give another name with --write, or --replace to write over it")
    return file


def write_tuned(file: Path, origin: str, tuned: Recipe) -> str:
    """Writes the recipe `tuned` as the text of `origin` with the settings that differ, and returns the text.

    Where that cannot be said in its text (aliases, a recipe that is faulty without the command line's settings), all
    settings of `tuned` are written, without comments.
    """
    source = find_shipped(origin)
    if source.is_dir():
        source /= "recipe.yaml"
    rest = source.read_text(encoding="utf-8-sig")
    head = f"# Written by `deepnmt tune {origin}`."
    if rest.startswith("# yaml-language-server"):  # which must be the first line
        first, _, rest = rest.partition("\n")
        head = f"{first}\n{head}"
    complete = f"{head}\n{dump_recipe(tuned)}"
    try:
        changes = changed_settings(load_recipe(origin), tuned)
    except UserError:
        changes = []
    text = complete
    if changes:
        edited = f"{head} Its settings that differ:"
        for change in changes:
            edited += f"\n#   {change.key}: {_line(change.old)} -> {_line(change.new)}"
        edited += f"\n{rest}"
        with suppress(yaml.YAMLError, ValueError, UserError):  # what was put before an anchor is no YAML
            edited = edited_text(edited, {change.key: change.new for change in changes})
            if not changed_settings(check_recipe(parse_yaml(edited), str(file), file, file), tuned):
                text = edited
    with reporting(str(file), "give another name with --write"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    return text


def _line(value: Any) -> str:
    return rounded_line(value, 6)


def edited_text(text: str, changes: Mapping[str, Any]) -> str:
    """A recipe's text with settings changed by their dotted keys. All else stays as it is written, comments, too, and
    a comment behind a changed value keeps its column where there is room."""
    for key, value in changes.items():
        text = _edit(text, key.split("."), value)
    return text


def _edit(text: str, way: list[str], value: Any) -> str:
    node: Any = yaml.compose(text, yaml.SafeLoader)
    while way:
        if not isinstance(node, yaml.MappingNode):  # nothing, or a value where a group is wanted
            return _replaced(text, node, _line(_nested(way, value)))
        child = None
        for key, each in node.value:
            if key.value == way[0]:
                child = each
                break
        if child is None:
            return _inserted(text, node, way[0], _line(_nested(way[1:], value)))
        node, way = child, way[1:]
    return _replaced(text, node, _line(value))


def _replaced(text: str, node: yaml.Node, value: str) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    before, after = text[:start], text[end:]
    if start == end:  # an empty value: the mark is behind the colon
        value = f" {value}"
    line = after.partition("\n")[0]
    comment = line.lstrip(" ")
    if comment.startswith("#"):
        spaces = max(1, len(line) - len(comment) + (end - start) - len(value))
        after = " " * spaces + after[len(line) - len(comment):]
    return before + value + after


def _inserted(text: str, node: yaml.MappingNode, key: str, value: str) -> str:
    """The text with a new key at the beginning of a group, or at the end of the file."""
    if node.flow_style:
        start = node.start_mark.index + 1
        comma = ", " if node.value else ""
        return f"{text[:start]}{key}: {value}{comma}{text[start:]}"
    first = node.value[0][0].start_mark
    if not first.column:
        return f"{text.rstrip()}\n{key}: {value}\n"
    return f"{text[:first.index]}{key}: {value}\n{' ' * first.column}{text[first.index:]}"


def _nested(way: list[str], value: Any) -> Any:
    for name in reversed(way):
        value = {name: value}
    return value
