"""What a setting says of itself, beside its type: `ema: Annotated[float | None, Fact.MOMENTS, Fact.SEEN] = None`.

Whoever asks which settings may change on resuming, which ones are paths, or what a command may be given asks the
recipe, `Recipe.marked(Fact.FIXED)` or `Recipe.is_marked("train.ema", Fact.MOMENTS)`, and keeps no list. What a section
says holds for all settings in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from deepnmt.config.choices import Choices

FILE_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"  # of what deepnmt writes, and of settings' names that become part of one
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")  # what names of files end in that are read, and written, packed


class Fact(Enum):
    """What may be said of a setting."""

    PATH = "names a file or folder, whose path may differ between machines (`parallel.same_paths`)"
    FIXED = "cannot change when a run is resumed: it would be another run, or the change would have no effect"
    MICRO_BATCH = "sizes micro-batches; cannot change on resuming, unless `batch.update_tokens` says what an update has"
    MOMENTS = "decides what the optimizer keeps; cannot change on resuming if that would change"
    LOSS_SCALE = "begins the loss scale; cannot change when a run that has one is resumed"
    EPOCH = "of the training text: decides which sentences an epoch has; cannot change on resuming"
    TRAINING_ONLY = "only training uses it, so that checkpoints which differ in it hold the same model"
    PREPARED = "prepared data depends on it"
    ENDS = "may end the run (training/trainer.py, `STOP_CONDITIONS`)"
    SEEN = "changes what is learned; a rule about learning lists the values that its runs had"
    ANNOTATION = "of a corpus: further files, line by line as the corpus, which a visitor reads (data/annotations.py)"


@dataclass(frozen=True)
class For:
    """The commands on a trained model, of the core and of several tasks, that may be given the setting. Others refuse
    it, since it would change nothing; those of visitors list what they may be given."""

    commands: tuple[str, ...]

    def __init__(self, *commands: str) -> None:
        object.__setattr__(self, "commands", commands)


@dataclass(frozen=True)
class By:
    """The visitor, a folder of `deepnmt/extras`, without which the setting can only have its default."""

    visitor: str


def either(names: Sequence[str]) -> str:
    """a; a or b; a, b or c."""
    return f"{', '.join(names[:-1])} or {names[-1]}" if names[1:] else names[0]


class Fault(NamedTuple):
    """What is wrong with settings, which are named relative to the section that says so."""

    settings: tuple[str, ...]
    text: str


class SettingsError(ValueError):
    """The faults of a section."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(fault.text for fault in faults))
        self.faults = faults


class Section(BaseModel):
    """A group of settings. Unknown keys and wrong types are faults; values cannot change after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False,
                              use_attribute_docstrings=True)

    def faults(self) -> Iterator[Fault]:
        """Faults in the combination of settings."""
        return iter(())

    @model_validator(mode="after")
    def _check_combinations(self) -> Section:
        if faults := [*self.faults(), *self._misplaced_settings()]:
            raise SettingsError(faults)
        return self

    def _misplaced_settings(self) -> Iterator[Fault]:
        """Each setting that what another one chooses cannot do without, or has no use for, as `needs` and `options` in
        `choices` say."""
        for by, field in type(self).model_fields.items():
            choices = choices_of(field)
            row = choices.get(getattr(self, by)) if choices else None  # a plug-in has none
            for setting, meaning in row.needs.items() if row else ():
                if getattr(self, setting) == self.default(setting):
                    yield Fault((by, setting), f"{by}: {getattr(self, by)} needs {setting}, {meaning}")
            for setting, names in self.misplaced(by).items():
                value, default = _as_yaml(getattr(self, setting)), _as_yaml(self.default(setting))
                yield Fault((setting, by), f"{setting} ({value}) needs {by}: {either(names)}, but {by} is "
                            f"{getattr(self, by)}; remove {setting}, or set it to {default}")

    @classmethod
    def default(cls, key: str) -> Any:
        """The value of a setting that is left out, by its dotted key."""
        return way_to(cls, key)[-1].get_default(call_default_factory=True)

    def misplaced(self, by: str) -> dict[str, tuple[str, ...]]:
        """The settings that have no effect with what the setting `by` chooses, but are set; and the names with which
        they would have one. A plug-in may use any."""
        choices, chosen = choices_of(type(self).model_fields[by]), getattr(self, by)
        names_by_setting: dict[str, tuple[str, ...]] = {}
        if choices is None or chosen not in choices:
            return names_by_setting
        for setting in type(self).model_fields:
            names = choices.with_option(setting)
            if names and chosen not in names and getattr(self, setting) != self.default(setting):
                names_by_setting[setting] = names
        return names_by_setting

    @classmethod
    def marked(cls, fact: Fact | str) -> list[str]:
        """The settings and sections that say so of themselves, by their dotted keys, in the recipe's order; `fact` may
        be a command (see `For`). A mapping of sections has the name NAME."""
        keys: list[str] = []
        for key, field in fields_within(cls, ""):
            inside_another = keys and key.startswith(f"{keys[-1]}.")
            if _says(field, fact) and not inside_another:
                keys.append(key)
        return keys

    @classmethod
    def is_marked(cls, key: str, fact: Fact) -> bool:
        """Whether a setting says so, or a section that it is in."""
        return any(fact in field.metadata for field in way_to(cls, key))

    @classmethod
    def named(cls) -> dict[str, Choices[Any]]:
        """The settings that have a name, by their dotted keys, and the names."""
        named: dict[str, Choices[Any]] = {}
        for key, field in fields_within(cls, ""):
            choices = choices_of(field)
            if choices is not None:
                named[key] = choices
        return named

    def visitors(self) -> dict[str, str]:
        """The settings of this section itself that are set and need a visitor, and its name."""
        needed = {}
        for name, field in type(self).model_fields.items():
            for said in field.metadata:
                if isinstance(said, By) and getattr(self, name) != self.default(name):
                    needed[name] = said.visitor
        return needed


def _as_yaml(value: Any) -> str:
    """A setting's value as in a recipe."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def choices_of(field: FieldInfo) -> Choices[Any] | None:
    """The names that a setting may have; None if it has no name."""
    return next((said for said in field.metadata if isinstance(said, Choices)), None)


def allowed(field: FieldInfo) -> list[str]:
    """The values of a setting that has only a few: its names, or those of a `Literal`."""
    choices = choices_of(field)
    return _literals(field.annotation) if choices is None else list(choices)


def _literals(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    values: list[str] = []
    for part in get_args(kind):
        values += _literals(part)
    return values


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a setting is, or is a mapping to."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _says(field: FieldInfo, fact: Fact | str) -> bool:
    if isinstance(fact, Fact):
        return fact in field.metadata
    return any(isinstance(said, For) and fact in said.commands for said in field.metadata)


def fields_within(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every setting and section within a section, by its dotted key; a section comes before what is in it."""
    for name, field in section.model_fields.items():
        key, inside = f"{prefix}{name}", section_of(field)
        yield key, field
        if inside is not None:
            yield from fields_within(inside, f"{key}." if inside is field.annotation else f"{key}.NAME.")


def values_of(section: Any, key: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a setting, each with its dotted key: one for each in a mapping of sections, whose name is NAME."""
    name, _, rest = key.partition(".")
    inside = {}
    if name == "NAME":
        inside = section
    elif hasattr(section, name):
        inside = {name: getattr(section, name)}
    for part, value in inside.items():
        if rest:
            yield from values_of(value, rest, f"{prefix}{part}.")
        else:
            yield f"{prefix}{part}", value


def way_to(section: type[Section], key: str) -> list[FieldInfo]:
    """The sections that a setting is in, and the setting; none if there is no such setting."""
    name, _, rest = key.partition(".")
    field = section.model_fields.get(name)
    if field is None:
        return []
    inside = section_of(field)
    if inside is None or not rest:
        return [field]
    is_mapping = inside is not field.annotation
    if is_mapping:  # whose names may have dots
        while rest:
            rest = rest.partition(".")[2]
            if way := way_to(inside, rest):
                return [field, *way]
        return [field]
    return [field, *way_to(inside, rest)]
