"""All the faults of a recipe at once, each as a sentence.

Pydantic checks how settings go together only where each of them is sound. So what is faulty is taken out or stood in
for, and the rest is checked again, until nothing new is found.
"""

from __future__ import annotations

import copy
import difflib
import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Key = tuple[int | str, ...]


def find_faults(root: type[BaseModel], tree: dict[str, Any], stand_ins: dict[type[BaseModel], Any]) -> list[str]:
    """One line for each fault of a tree of settings.

    Args:
        root: the section the whole tree is checked as.
        stand_ins: sound settings for sections that cannot do with their defaults.
    """
    tree = copy.deepcopy(tree)
    lines: list[str] = []
    mended: set[Key] = set()
    while True:
        try:
            root.model_validate(tree)
            return lines
        except ValidationError as error:
            faults = error.errors()
        spoken = [each for fault in faults for each in _speak(root, fault)]
        for key, line, settings in spoken:
            if not settings & mended:  # else it may come of the mending
                lines.append(f"{'.'.join(map(str, key))}: {line}" if key else line)
        named = set().union(*(settings for _, _, settings in spoken))
        if named <= mended:
            return lines
        for setting in named:
            _mend(root, tree, setting, stand_ins)
        mended |= named


def _speak(root: type[BaseModel], fault: ErrorDetails) -> list[tuple[Key, str, set[Key]]]:
    """Where a fault is, what is wrong, and the settings it speaks of; several where one check found several."""
    path, kind = fault["loc"], fault["type"]
    if kind == "value_error":
        lines = str(fault["ctx"]["error"]).split("\n")
        return [(path, line, _named_in(root, path, line)) for line in lines]
    return [(path, _sentence(root, fault), {path})]


def _sentence(root: type[BaseModel], fault: ErrorDetails) -> str:
    path, kind = fault["loc"], fault["type"]
    if kind == "missing":
        return "missing; this setting has no default"
    if kind == "extra_forbidden":
        section = _section_at(root, path[:-1])
        known = list(section.model_fields) if section else []
        near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
        if near:
            return f"unknown setting; did you mean {'.'.join(map(str, (*path[:-1], near[0])))}?"
        return f"unknown setting; known: {', '.join(known)}"
    if kind == "model_type":
        section = _section_at(root, path)
        known = list(section.model_fields) if section else []
        return f"is {fault['input']!r}, must be a group of settings; known: {', '.join(known)}"
    message = re.sub(r"^(Input|List|String) should", "must", fault["msg"])
    return f"is {fault['input']!r}, {message.replace(' after validation', '').replace('dictionary', 'mapping')}"


def _named_in(root: type[BaseModel], path: Key, line: str) -> set[Key]:
    """The settings a sentence about a section names, by their dotted keys below it; the section itself if none."""
    found: set[Key] = set()
    for word in re.findall(r"\w+(?:\.\w+)*", line):
        names = word.split(".")
        section = _section_at(root, (*path, *names[:-1]))
        if section is not None and names[-1] in section.model_fields:
            found.add((*path, *names))
    return found or {path}


def _section_at(root: type[BaseModel], path: Key) -> type[BaseModel] | None:
    """The section at a path, or None where there is none. A mapping of sections has one at every name."""
    section: type[BaseModel] | None = root
    mapped: type[BaseModel] | None = None
    for name in path:
        if mapped is not None:
            section, mapped = mapped, None
            continue
        field = section.model_fields.get(str(name)) if section else None
        if field is None:
            return None
        section = _as_section(field.annotation)
        mapped = next((kind for kind in map(_as_section, get_args(field.annotation)) if kind), None)
    return section


def _as_section(kind: Any) -> type[BaseModel] | None:
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _mend(root: type[BaseModel], tree: dict[str, Any], path: Key, stand_ins: dict[type[BaseModel], Any]) -> None:
    """Takes the setting at a path out of the tree, or puts a stand-in where it cannot be missing."""
    for depth in range(1, len(path)):  # such a section is stood in for as a whole, and a list goes with its item
        if _section_at(root, path[:depth]) in stand_ins or isinstance(path[depth], int):
            path = path[:depth]
            break
    *parents, name = path
    node: Any = tree
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return  # mended with a section above it, or never written
    section, around = _section_at(root, path), _section_at(root, tuple(parents))
    field = around.model_fields.get(str(name)) if around else None
    if section in stand_ins:
        node[name] = copy.deepcopy(stand_ins[section])
    elif field is not None and field.is_required():
        node[name] = _stand_in(field.annotation, stand_ins)
    else:
        node.pop(name, None)


def _stand_in(kind: Any, stand_ins: dict[type[BaseModel], Any]) -> Any:
    """A sound value of a setting without default: a large number or a text, or a section of such."""
    section = _as_section(kind)
    if section is None:
        return "-" if kind is str else 10**9
    if section in stand_ins:
        return copy.deepcopy(stand_ins[section])
    required = {name: field for name, field in section.model_fields.items() if field.is_required()}
    return {name: _stand_in(field.annotation, stand_ins) for name, field in required.items()}
