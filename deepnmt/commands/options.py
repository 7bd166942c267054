"""Options that several commands have, and what they stand for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from deepnmt.arguments import expected_model
from deepnmt.config import Recipe
from deepnmt.config.choices import FORMATS, METRIC_FAMILIES, METRICS, metrics_called
from deepnmt.errors import UserError
from deepnmt.folders import locate

if TYPE_CHECKING:
    from deepnmt.processes.ranks import Ranks

CHECKPOINT = ("best (by validation), newest, averaged, or the folder of a checkpoint (default: the run's average if "
               "there is one, else its newest checkpoint)")
ENSEMBLE = CHECKPOINT + "; repeat it for an ensemble of models with one vocabulary"


def add_files(parser: ArgumentParser, text: str, result: str) -> None:
    """Adds `--input` and `--output`, whose help says what they hold."""
    add = parser.add_argument
    add("--input", default="-", metavar="FILE", help=f"{text} (default: standard input)")
    add("--output", default="-", metavar="FILE", help=f"{result} (default: standard output)")


def add_checkpoint(parser: ArgumentParser) -> None:
    """Adds `--checkpoint`, which names one."""
    parser.add_argument("--checkpoint", metavar="WHICH", help=CHECKPOINT)


def add_checkpoints(parser: ArgumentParser, text: str = ENSEMBLE) -> None:
    """Adds `--checkpoint`, which may be repeated."""
    parser.add_argument("--checkpoint", action="append", metavar="WHICH", help=text)


def add_format(parser: ArgumentParser, what: Literal["line", "scores"] = "line") -> None:
    """Adds `--format`, whose help says what each format has; `what`: of translations, or of scores."""
    formats = [f"{name}: {getattr(row, what)}" for name, row in FORMATS.items()]
    parser.add_argument("--format", default="text", choices=list(FORMATS), help="; ".join(formats) + " (default text)")


def checkpoint_of(name: str | None, recipe: Recipe) -> str | None:
    """The folder that `--checkpoint` names, by its path or as one of the run's."""
    if name not in ("best", "newest", "averaged"):
        if name and not locate(Path(name)).exists():
            raise UserError(f"--checkpoint is {name}, but there is no such folder; give best, newest, averaged or the "
                            f"folder of a checkpoint, such as those in {recipe.run}/checkpoints")
        return name
    from deepnmt.checkpoint.checkpoint import Which, find_checkpoint

    return str(find_checkpoint(Path(recipe.run), cast("Which", name)))


def checkpoints_of(names: list[str] | None, recipe: Recipe) -> list[str]:
    """The folders that `--checkpoint`, which may be repeated, names."""
    return [cast(str, checkpoint_of(name, recipe)) for name in names or ()]


def metrics_of(names: Sequence[str] | None, recipe: Recipe, usual: Sequence[str]) -> tuple[str, ...]:
    """What `--metric` names, by default the `usual` ones. Raises `UserError` for an unknown one."""
    known = (*METRICS, *METRIC_FAMILIES, *recipe.metrics)
    for name in names or ():
        if name not in known:
            raise UserError(f"--metric is {name!r}, must be one of {', '.join(known)}")
    return metrics_called(names or usual)


def translate_text(args: Namespace, recipe: Recipe) -> None:
    """Translates `--input` with a trained model, as the options of `translate` say."""
    checkpoints = checkpoints_of(args.checkpoint, recipe)
    from deepnmt.data.parts import WHOLE, Part
    from deepnmt.decode.translate import judge_of, translate_files

    part = Part.parse(args.part) if args.part else WHOLE
    with processes_of(recipe) as ranks:
        translate_files(checkpoints or recipe.run, args.input, args.output, recipe.translate, prefixes=args.prefix,
                        references=args.references, judge=judge_of(recipe), alignments=args.alignments,
                        output_format=args.format, seed=recipe.seed, part=part, ranks=ranks,
                        expected=expected_model(args, recipe, checkpoints))


def processes_of(recipe: Recipe, *, group: bool = False, differ: bool = False) -> AbstractContextManager[Ranks]:
    """The processes of this start, as the recipe has them; see `deepnmt.processes.process_group.processes`."""
    from deepnmt.processes.process_group import processes

    settings = recipe.parallel
    return processes(settings.threads, group=group, differ=differ, device=settings.device, wait=settings.start_timeout)
