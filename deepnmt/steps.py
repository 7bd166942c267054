"""`deepnmt run`: every step from the texts of a recipe to its scores, with the texts that other models translate.

Each step is a command that a user could type. It finds by itself what is done already, so the same `deepnmt run`
continues where an earlier one was stopped.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from deepnmt.config import Corpus, Data, Recipe, load_recipe
from deepnmt.config.plugins import is_named
from deepnmt.data.prepared import corpora
from deepnmt.data.text import corpora_of
from deepnmt.errors import UserError
from deepnmt.files import make_parent_folder, write_json
from deepnmt.progress import print_status
from deepnmt.training.status import SIGNALS, run_status
from deepnmt.visitors import find

Start = Callable[[list[str]], int]  # runs a command, from the words after `deepnmt` to the exit code
_MAIN = Path(__file__).with_name("__main__.py")
_LAUNCHED = ("train", "translate", "evaluate")  # which take several processes


class _Job(NamedTuple):
    """A file of a corpus to be made, by the model of the recipe `maker`, from `source`; `reference`: the file of the
    real translations, "" if there is none."""

    corpus: Corpus
    maker: Recipe
    source: str
    reference: str
    made: Path


def run_steps(
    file: str, recipe: Recipe, overrides: Sequence[str], start: Start, asking: tuple[str, ...] = ()
) -> int:
    """Makes the texts that are translated, prepares, trains, averages and evaluates.

    Args:
        file: the recipe's, or a run.
        recipe: what `file` and `overrides` say.
        asking: the recipes that want translations of this one's model.

    Returns:
        0, or the exit code of the step that ended otherwise.

    Raises:
        UserError: a text cannot be translated by the model that should, or was by another one.
    """
    if file in asking:
        raise UserError(f"data.translated_by goes round in a circle, {' -> '.join((*asking, file))}; let one of these "
                        "recipes do without the other's translations")
    wanted = []
    if isinstance(recipe.data, Data):  # other tasks' have no translations
        for text in corpora(recipe).values():
            for corpus in corpora_of(text).values():
                by = corpus.translated_by
                if by:
                    wanted.append((corpus, load_recipe(by, [*_search(corpus), *_metrics(recipe)])))
    jobs: list[_Job] = []
    for corpus, maker in wanted:  # all faults come first
        jobs += _missing(recipe, corpus, maker)
    for by in dict.fromkeys(str(job.corpus.translated_by) for job in jobs):
        if not Path(by).is_dir():
            code = run_steps(by, load_recipe(by), (), start, (*asking, file))
            if code:
                return code
    for job in jobs:
        for words in _before_search(job.maker):
            code = start(words)
            if code:
                return code
        write_json(_record(job.made), _origin(job.corpus, job.source))
        references = ["--references", job.reference] if job.reference else []
        code = start(["translate", job.maker.run, "--input", job.source, "--output", str(job.made), *references,
                      *_search(job.corpus), *_metrics(recipe)])
        if code:
            return code
    for words in _steps(file, recipe, overrides):
        code = start(words)
        if not code and words[0] == "train":  # not every launcher hands on that training was stopped
            code = run_status(Path(recipe.run)).code
        if code:
            return code
    return 0


def _steps(file: str, recipe: Recipe, overrides: Sequence[str]) -> Iterator[list[str]]:
    """The commands from a recipe's texts to its scores, each when those before it are done."""
    if "folder" in type(recipe.data).model_fields:  # some tasks have nothing to prepare
        yield ["prepare", file, *overrides]
    yield ["train", file, *overrides]
    if recipe.train.ema is None:  # else each checkpoint has an average of its own
        yield ["average", recipe.run]
    if getattr(recipe.data, "test", None):
        yield from _before_search(recipe)
        yield ["evaluate", recipe.run, *_metrics(recipe)]


def _before_search(recipe: Recipe) -> list[list[str]]:
    """The commands that the search of a recipe's model needs before, by the visitor that has them."""
    before: Callable[[Recipe], list[list[str]]] | None = find("steps", "before_search")
    return before(recipe) if before else []


def _search(corpus: Corpus) -> list[str]:
    """What a corpus changes in the recipe of the model that translates it."""
    return [f"translate.{name}={json.dumps(value)}" for name, value in corpus.translate.items()]


def _metrics(recipe: Recipe) -> list[str]:
    """The recipe's metrics for another command; its user has named their commands."""
    metrics = {name: metric.model_dump() for name, metric in recipe.metrics.items() if is_named(metric.command)}
    return [f"metrics={json.dumps(metrics)}"] if metrics else []


def _missing(recipe: Recipe, corpus: Corpus, maker: Recipe) -> list[_Job]:
    """The files of a corpus that `maker` has still to write.

    Raises:
        UserError: it translates between other languages; a file was translated otherwise.
    """
    ours = (recipe.data.src_lang, recipe.data.trg_lang)
    theirs = tuple(getattr(maker.data, name, "") for name in ("src_lang", "trg_lang"))
    if sorted(ours) != sorted(theirs):
        does = f"translates {theirs[0]} to {theirs[1]}" if all(theirs) else f"has task: {maker.task}"
        raise UserError(f"{corpus.translated_by} (data.translated_by) {does}, but the recipe is for {ours[0]} and "
                        f"{ours[1]}; name a model of these, in either direction")
    sources, files = corpus.src, corpus.trg
    if ours != theirs:  # the other direction
        sources, files = files, sources
    jobs = []
    references = corpus.references or [""] * len(files)
    for source, reference, made in zip(sources, references, map(Path, files), strict=True):
        if not made.exists():
            if not Path(source).is_file():
                raise UserError(f"there is no text file {source}, which {corpus.translated_by} is to translate; "
                                "correct its path in the recipe's data section")
            make_parent_folder(made, "its path in the recipe's data section")
            jobs.append(_Job(corpus, maker, source, reference, made))
        elif _record(made).is_file() and json.loads(_record(made).read_bytes()) != _origin(corpus, source):
            raise UserError(f"{made} was translated from another text, by another model or with other settings "
                            f"({_record(made)}); remove it to have it made again, or name another file")
        else:
            print_status(f"{made} is there already; remove it to have it made again")
    return jobs


def _record(made: Path) -> Path:
    """Says of what is translated where it comes from."""
    return made.with_name(f"{made.name}.source.json")


def _origin(corpus: Corpus, source: str) -> dict[str, Any]:
    return {"source": source, "translated_by": corpus.translated_by, "translate": corpus.translate}


def starter(launcher: str | None) -> Start:
    """Runs each command in a process of its own; those that take several, with `launcher`, which ends in deepnmt. The
    exit code of one that a signal has ended is 128 and its number. Raises `UserError` if the launcher is no command."""
    launching: list[str] = []
    if launcher is not None:
        with suppress(ValueError):  # an open quotation mark
            launching = shlex.split(launcher)
        if not launching or shutil.which(launching[0]) is None:
            raise UserError(f"--launcher is {launcher!r}, which begins with no program on the PATH; give a "
                            'command that ends in deepnmt, such as "torchrun --nproc_per_node 2 -m deepnmt"')

    def start(words: list[str]) -> int:
        program, command = "deepnmt", [sys.executable, str(_MAIN)]
        if launcher is not None and words[0] in _LAUNCHED:
            program, command = launcher, launching
        print_status(f"$ {program} {shlex.join(words)}")
        with subprocess.Popen([*command, *words]) as process:

            def hand_on(number: int, _: object) -> None:
                if number != signal.SIGINT or not _has_terminal():  # the terminal sends Ctrl-C to the step, too
                    process.send_signal(number)

            # so that training saves: subprocess.run would kill it
            before = {number: signal.signal(number, hand_on) for number in SIGNALS}
            try:
                code = process.wait()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        if code >= 0:
            return code
        print_status(f"{words[0]} was ended by {_name(-code)}")
        return 128 - code  # as a shell has it

    return start


def _has_terminal() -> bool:
    """Whether this process, and so a step, is what the terminal's Ctrl-C is for."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is none
        return False


def _name(number: int) -> str:
    """SIGKILL for 9; those without a name as a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
