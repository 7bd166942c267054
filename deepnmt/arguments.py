"""What the command lines share: a recipe with overrides, and checks of options. No torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from deepnmt.config import Admin, Model, Recipe, load_recipe, override
from deepnmt.errors import UserError


class Parser(argparse.ArgumentParser):
    """One whose faults are said as any other: in one sentence, by one of several processes."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help lists what there is")


def plain_parser(command: str, text: str, example: str, program: str = "deepnmt") -> argparse.ArgumentParser:
    """A parser that knows nothing but `--help`; commands add their own arguments."""
    return Parser(
        prog=f"{program} {command}", description=text, epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )


def recipe_parser(command: str, text: str, example: str, program: str = "deepnmt") -> argparse.ArgumentParser:
    """A parser of a recipe and overrides; commands add their own options."""
    parser = plain_parser(command, text, example, program)
    parser.add_argument("recipe", help="a recipe file, or the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE",
                        help="settings to change, for example model.encoder.layers=18 train.updates=300")
    return parser


def parse(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, Recipe]:
    """Options may stand between overrides. A run's folder is the run, wherever it was moved since it was trained."""
    args = parser.parse_intermixed_args(words)
    folder = Path(args.recipe)
    if (folder / "manifest.json").is_file():
        raise UserError(f"{folder} is no run and no recipe; give the folder of the run, and a single checkpoint of it "
                        "with --checkpoint where the command has that")
    here = [f"run={json.dumps(str(folder))}"] if folder.is_dir() else []
    return args, load_recipe(args.recipe, [*here, *args.overrides])


def expected_model(args: argparse.Namespace, recipe: Recipe, checkpoint: object) -> Model | None:
    """The recipe's model, which the one that is loaded must be; None where a checkpoint is named that may hold any."""
    named = any(words.partition("=")[0].split(".")[0] == "model" for words in args.overrides)
    return None if checkpoint and not named else recipe.model


def settable(args: argparse.Namespace, sections: Sequence[str], why: str) -> None:
    """Raises `UserError` where a setting is given on the command line that is none of these, and in none of these
    sections, since it would change nothing."""
    for words in args.overrides:
        if not f"{words.partition('=')[0]}.".startswith(tuple(f"{section}." for section in sections)):
            raise UserError(f"{words} has no say here, since {why}; leave it out (what has: {', '.join(sections)})")


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


def profiled(args: argparse.Namespace, recipe: Recipe, asked: Sequence[str] = ("tokens", "input_variance")) -> None:
    """Raises `UserError` where the command line says how Admin is profiled and nothing will be.

    On the command line alone: a recipe may say it and have its blocks changed by overrides.

    Args:
        asked: the settings that have no other use in the command.
    """
    encoder, decoder = recipe.model.encoder.block, recipe.model.decoder.block
    if "admin" not in (encoder, decoder):
        why = f"model.encoder.block is {encoder} and model.decoder.block {decoder}, neither of them admin"
    elif recipe.admin.profile is not None:
        why = f"the profile is read from admin.profile ({recipe.admin.profile})"
    else:
        return
    named = given(args)
    for name in asked:
        value = getattr(recipe.admin, name)
        if f"admin.{name}" in named and value != getattr(Admin(), name):
            raise UserError(f"admin.{name}={value} has no say here, since {why}; leave it out")


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
