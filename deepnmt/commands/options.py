"""Options that several commands have, and what they stand for."""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from deepnmt.config import Recipe
from deepnmt.config.choices import FORMATS
from deepnmt.errors import UserError, nearest

if TYPE_CHECKING:
    from deepnmt.processes.ranks import Ranks

CHECKPOINT = ("best (by validation), newest, averaged, or the folder of a checkpoint (default: the run's average if "
               "there is one, else its newest checkpoint)")
ENSEMBLE = CHECKPOINT + "; repeat it for an ensemble of models with one vocabulary"


def add_format(parser: ArgumentParser, what: Literal["line", "scores"] = "line") -> None:
    """Adds `--format`, whose help says what each format has; `what`: of translations, or of scores."""
    formats = [f"{name}: {getattr(row, what)}" for name, row in FORMATS.items()]
    parser.add_argument("--format", default="text", choices=list(FORMATS), help="; ".join(formats) + " (default text)")


def checkpoint_of(name: str | None, recipe: Recipe) -> str | None:
    """The folder that `--checkpoint` names, by its path or as one of the run's."""
    if name not in ("best", "newest", "averaged"):
        if name and not Path(name).exists() and (near := nearest(name, ("best", "newest", "averaged"))):
            raise UserError(f"there is no folder {name}; did you mean --checkpoint {near}?")
        return name
    from deepnmt.checkpoint.checkpoint import Which, find_checkpoint

    return str(find_checkpoint(Path(recipe.run), cast("Which", name)))


def checkpoints_of(names: list[str] | None, recipe: Recipe) -> list[str]:
    """The folders that `--checkpoint`, which may be repeated, names."""
    return [cast(str, checkpoint_of(name, recipe)) for name in names or ()]


def processes_of(recipe: Recipe, *, group: bool = False, differ: bool = False) -> AbstractContextManager[Ranks]:
    """The processes of this start, as the recipe has them; see `deepnmt.processes.launch.processes`."""
    from deepnmt.processes.launch import processes

    settings = recipe.parallel
    return processes(settings.threads, group=group, differ=differ, device=settings.device, wait=settings.start_timeout)
