"""What the command lines share: a recipe with overrides, and checks of options. No torch."""

from __future__ import annotations

import argparse
import json
import re
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

    def error(self, message: str) -> NoReturn:
        see = f"see {self.prog} --help"
        if missing := _after("the following arguments are required: ", message):
            # argparse counts KEY=VALUE, of which there may be none, among them
            names = [_NEEDED.get(name, name) for name in missing.split(", ") if name != "KEY=VALUE"]
            raise UserError(f"{self.prog.split()[-1]} needs {' and '.join(names)}, for example: "
                            f"{self.examples.splitlines()[0]}; {see}")
        if unknown := _after("unrecognized arguments: ", message):
            word = next((word for word in unknown.split() if word.startswith("-")), "").partition("=")[0]
            near = nearest(word, self._option_string_actions) if word else None
            what = f"unknown option {word}" if word else f"unexpected argument {unknown.split()[0]}"
            raise UserError(f"{what}; did you mean {near}? {see}" if near else f"{what}; {see}")
        if choice := re.fullmatch(r"argument (.+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            option, value, choices = choice[1].partition("/")[0], choice[2], choice[3].replace("'", "")
            near = nearest(value, choices.split(", "))
            hint = f"did you mean {near}? {see}" if near else see
            raise UserError(f"{option} is {value!r}, must be one of {choices}; {hint}")
        if number := re.fullmatch(r"argument (.+): invalid (int|float) value: (.*)", message):
            kind = {"int": "a whole number", "float": "a number"}[number[2]]
            raise UserError(f"{number[1]} is {number[3]}, must be {kind}; {see}")
        raise UserError(f"{message.removeprefix('argument ')}; {see}")


_NEEDED = {"RECIPE": "a recipe (a YAML file) or the folder of a run"}


def _after(start: str, message: str) -> str:
    """What follows `start` in a message; nothing where the message begins otherwise."""
    return message.removeprefix(start) if message.startswith(start) else ""


def plain_parser(command: str, text: str, examples: str, program: str = "deepnmt") -> Parser:
    """A parser that knows nothing but `--help`; commands add their own arguments. `examples`: one a line."""
    lines = [line.strip() for line in examples.splitlines()]
    parser = Parser(
        prog=f"{program} {command}", description=text, epilog="\n  ".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    parser.examples = "\n".join(lines)
    return parser


def recipe_parser(command: str, text: str, examples: str, program: str = "deepnmt",
                  default: str | None = None, more: str = "") -> Parser:
    """A parser of a recipe and overrides; commands add their own options.

    Args:
        default: the recipe if none is given.
        more: what else may stand between overrides: folders of further runs, which `parse` puts into `runs`.
    """
    parser = plain_parser(command, text, examples, program)
    what = "a recipe (a YAML file, or a name that `deepnmt recipes` lists), or the folder of a run"
    parser.add_argument("recipe", metavar="RECIPE", nargs="?" if default else None, default=default,
                        help=f"{what} (default {default})" if default else what)
    if more:
        parser.set_defaults(runs=[])
    parser.add_argument("overrides", nargs="*", metavar=f"{more} KEY=VALUE".strip(),
                        help="settings of the recipe to change, for example model.encoder.layers=18 train.updates=300")
    return parser


def parse(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, Recipe]:
    """Options may stand between overrides. A run's folder is the run, wherever it was moved since it was trained."""
    args = parser.parse_intermixed_args(words)
    if (default := parser.get_default("recipe")) and "=" in args.recipe:  # the recipe was left out, a setting was not
        args.recipe, args.overrides = default, [args.recipe, *args.overrides]
    if parser.get_default("runs") is not None:
        args.runs = [word for word in args.overrides if "=" not in word]
        args.overrides = [word for word in args.overrides if "=" in word]
        for run in args.runs:
            if not Path(run).is_dir():
                raise UserError(f"{run} is neither the folder of a run nor of the form KEY=VALUE; give one of the two")
    folder = Path(args.recipe)
    if (folder / "manifest.json").is_file():
        raise UserError(f"{folder} is a checkpoint, not a recipe or a run; give the folder of the run, and name the "
                        "checkpoint with --checkpoint where the command has that option")
    here = [f"run={json.dumps(str(folder))}"] if folder.is_dir() else []
    return args, load_recipe(args.recipe, [*here, *args.overrides])


def expected_model(args: argparse.Namespace, recipe: Recipe, checkpoint: object) -> Model | None:
    """The recipe's model, which the one that is loaded must be; None where a checkpoint is named that may hold any."""
    named = any(words.partition("=")[0].split(".")[0] == "model" for words in args.overrides)
    return None if checkpoint and not named else recipe.model


def settable(args: argparse.Namespace, command: str, why: str, without: Sequence[str] = ()) -> None:
    """Raises `UserError` where a setting is given on the command line that has no effect in this command, see
    `config.fields.For`.

    Args:
        without: settings that have none this time.
    """
    for words in args.overrides:
        key = words.partition("=")[0]
        if key in without or not (Recipe.is_marked(key, command) or key.split(".")[0] == "plugins"):
            known = [name for name in Recipe.marked(command) if name not in without]
            raise UserError(f"{words} has no effect here because {why}; remove it (these have one: "
                            f"{', '.join(known)})")


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
        value = vars(args)[name]
        for number in value if isinstance(value, list) else [value]:
            if number < 1:
                raise UserError(f"--{name.replace('_', '-')} is {number}, must be 1 or more")
