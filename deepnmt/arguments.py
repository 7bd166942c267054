"""What the command lines share: a recipe with overrides, and checks of options. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from deepnmt.config import Admin, Model, Recipe, load_recipe, override
from deepnmt.config.choices import BLOCKS
from deepnmt.errors import UserError, nearest


class Parser(argparse.ArgumentParser):
    """Its errors are `UserError`s, so that one of several processes prints them, as a sentence.

    `examples`: the command lines that `--help` ends with, one a line.
    """

    examples: str = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._given: set[argparse.Action] = set()
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            where = f"{error.argument_name}: " if error.argument_name else ""
            raise UserError(f"{where}{error.message}; {self._see}") from None

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._without_unknown(*self.parse_known_args(args, namespace))

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._without_unknown(*self.parse_known_intermixed_args(args, namespace))

    def error(self, message: str) -> NoReturn:
        """What argparse raises no exception for: arguments are missing, or those of a group."""
        missing = [action for action in self._actions if action.required and action not in self._given]
        names = [_NEEDED.get(_name(action), _name(action)) for action in missing if action.nargs != "*"]
        if names:
            raise UserError(f"{self.prog.split()[-1]} needs {' and '.join(names)}, for example: "
                            f"{self.examples.splitlines()[0]}; {self._see}")
        raise UserError(f"{message}; {self._see}")

    @property
    def _see(self) -> str:
        return f"see {self.prog} --help"

    def _without_unknown(self, args: argparse.Namespace, unknown: list[str]) -> argparse.Namespace:
        """The arguments. Raises `UserError` if there are others that no option is for."""
        if not unknown:
            return args
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not options:
            raise UserError(f"unexpected argument {unknown[0]}; {self._see}")
        near = nearest(options[0], self._option_string_actions)
        hint = f"did you mean {near}? " if near else ""
        raise UserError(f"unknown option {options[0]}; {hint}{self._see}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self._given.add(action)
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        kind: Any = action.type
        if kind not in _NUMBERS:
            return super()._get_value(action, arg_string)
        try:
            return kind(arg_string)
        except ValueError:
            raise UserError(f"{_name(action)} is {arg_string!r}, must be {_NUMBERS[kind]}; {self._see}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = nearest(str(value), choices)
        hint = f"did you mean {near}? " if near else ""
        raise UserError(f"{_name(action)} is {value!r}, must be one of {', '.join(choices)}; {hint}{self._see}")


_NEEDED = {"RECIPE": "a recipe (a YAML file) or the folder of a run"}
_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


def _name(action: argparse.Action) -> str:
    """What a user calls an argument."""
    if action.option_strings:
        return action.option_strings[0]
    return str(action.metavar or action.dest)


def plain_parser(command: str, text: str, examples: str, program: str = "deepnmt") -> Parser:
    """A parser that knows nothing but `--help`; commands add their own arguments. `examples`: one a line."""
    lines = [line.strip() for line in examples.splitlines()]
    parser = Parser(
        prog=f"{program} {command}", description=text, epilog="\n  ".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, exit_on_error=False,
    )
    parser.examples = "\n".join(lines)
    return parser


def recipe_parser(command: str, text: str, examples: str, program: str = "deepnmt", *,
                  setting: str = "run=runs/other", default: str | None = None, more: str = "") -> Parser:
    """A parser of a recipe and overrides; commands add their own options.

    Args:
        setting: an override that the command takes, for its help.
        default: the recipe if none is given.
        more: what else may stand between overrides: folders of further runs, which `parse` puts into `runs`.
    """
    parser = plain_parser(command, text, examples, program)
    what = "a recipe (a YAML file, or a name that `deepnmt recipes` lists), or the folder of a run"
    if default:
        parser.add_argument("recipe", metavar="RECIPE", nargs="?", default=default, help=f"{what} (default {default})")
    else:
        parser.add_argument("recipe", metavar="RECIPE", help=what)
    if more:
        parser.set_defaults(runs=[])
    parser.add_argument("overrides", nargs="*", metavar=f"{more} KEY=VALUE".strip(),
                        help=f"{'further runs, and ' if more else ''}settings of the recipe to change, for example "
                             f"{setting}")
    return parser


def parse(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, Recipe]:
    """Options may stand between overrides."""
    args = parser.parse_intermixed_args(words)
    default = parser.get_default("recipe")
    if default and "=" in args.recipe:  # the recipe was left out, a setting was not
        args.overrides = [args.recipe, *args.overrides]
        args.recipe = default
    if parser.get_default("runs") == []:
        args.runs = [word for word in args.overrides if "=" not in word]
        args.overrides = [word for word in args.overrides if "=" in word]
        for run in args.runs:
            if not Path(run).is_dir():
                raise UserError(f"{run} is neither the folder of a run nor of the form KEY=VALUE; give one of the two")
    folder = Path(args.recipe)
    if (folder / "state.json").is_file():
        raise UserError(f"{folder} is a checkpoint, not a recipe or a run; give the folder of the run, and name the "
                        "checkpoint with --checkpoint where the command has that option")
    return args, load_recipe(args.recipe, args.overrides)


def expected_model(args: argparse.Namespace, recipe: Recipe, checkpoint: object) -> Model | None:
    """The recipe's model, which the one that is loaded must be; None where a checkpoint is named that may hold any."""
    changed = any(_section(words) == "model" for words in args.overrides)
    return recipe.model if changed or not checkpoint else None


def _section(words: str) -> str:
    """The section of a recipe that an override KEY=VALUE changes."""
    key, _, _ = words.partition("=")
    return key.split(".")[0]


def settable(args: argparse.Namespace, settings: Sequence[str], why: str) -> None:
    """Raises `UserError` where a setting is given on the command line that is none of these, nor in a section that is.
    """
    for words in args.overrides:
        key = words.partition("=")[0]
        if not any(f"{key}.".startswith(f"{name}.") for name in (*settings, "plugins")):
            raise UserError(f"{words} has no effect here because {why}; remove it (these have one: "
                            f"{', '.join(settings)})")


def given(args: argparse.Namespace) -> set[str]:
    """The dotted names of all settings, and groups of them, on the command line."""
    tree: dict[str, Any] = {}
    for words in args.overrides:
        override(tree, words)

    def names(group: dict[str, Any], prefix: str) -> Iterator[str]:
        for name, value in group.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from names(value, f"{prefix}{name}.")

    return set(names(tree, ""))


def profiled(
    args: argparse.Namespace, recipe: Recipe,
    asked: Sequence[str] = ("tokens", "method", "count_padding", "input_variance"),
) -> None:
    """Raises `UserError` where the command line says how Admin is profiled and nothing will be.

    On the command line alone: a recipe may say it and have its blocks changed by overrides.

    Args:
        asked: the settings that have no other use in the command.
    """
    if not recipe.model.profiled:
        admin = " or ".join(BLOCKS.where(lambda block: block.profiled))
        why = f"{recipe.model.blocks}, neither of them {admin}"
    elif recipe.admin.profile is not None:
        why = f"the profile is read from admin.profile ({recipe.admin.profile})"
    else:
        return
    named = given(args)
    for name in asked:
        value = getattr(recipe.admin, name)
        if f"admin.{name}" in named and value != getattr(Admin(), name):
            raise UserError(f"admin.{name}={value} has no effect here because {why}; remove it")


def numbers(option: str, text: str | None, separator: str) -> list[int] | None:
    """The whole numbers in an option's text. Raises `UserError` where it holds anything else."""
    if text is None:
        return None
    try:
        return [int(n) for n in text.split(separator)]
    except ValueError:
        raise UserError(f"{option} is {text!r}, must be whole numbers with {separator!r} between, for example "
                        f"800{separator}1000") from None


def positive(args: argparse.Namespace, *names: str) -> None:
    """Raises `UserError` for an option whose number, or one of whose numbers, is below 1."""
    for name in names:
        values = vars(args)[name]
        if not isinstance(values, list):
            values = [values]
        for number in values:
            if number < 1:
                raise UserError(f"--{name.replace('_', '-')} is {number}, must be 1 or more")
