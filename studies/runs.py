"""Files of runs, from which studies resume: one line of JSON for each finished run."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepnmt
from deepnmt.config import Recipe
from deepnmt.errors import UserError
from deepnmt.extras.doctor.variants import initialisation
from deepnmt.files import drop_partial_line, make_parent_folder, read_numbered_log
from deepnmt.model.blocks import BLOCKS
from deepnmt.progress import print_status

Record = dict[str, Any]


def block_pair(word: str) -> tuple[str, str]:
    """Encoder and decoder block of `admin`, `post_ln/pre_ln` and so on. Raises `UserError` for an unknown block."""
    encoder, _, decoder = word.partition("/")
    for block in (encoder, decoder or encoder):
        if block not in BLOCKS:
            raise UserError(f"unknown block {block!r}; known: {', '.join(BLOCKS)}, and pairs ENCODER/DECODER")
    return encoder, decoder or encoder


@dataclass(frozen=True)
class Stacks:
    """The stacks of a run's model: the blocks of encoder and decoder, and the layers of each."""

    encoder: str
    decoder: str
    layers: int

    @property
    def blocks(self) -> str:
        """The blocks as one word: `admin`, or `post_ln/pre_ln` for two."""
        return self.encoder if self.encoder == self.decoder else f"{self.encoder}/{self.decoder}"

    def initialisations(self, init: Any) -> list[str]:
        """The meaning of `init` in encoder and decoder: `xavier`, `xavier_separate`, `depth_scaled`, `published` or
        `fairseq`."""
        return [initialisation(block, init) for block in (self.encoder, self.decoder)]


def read_runs(
    path: Path, study: str, keys: set[str], check: Callable[[Record], object], line_start: str | None, unreadable: str,
    foreign: str,
) -> list[Record]:
    """The runs of a file; skips the partial line that a kill may leave.

    Args:
        study: the kind of study, for messages.
        keys: keys that every line must have.
        check: raises ValueError, TypeError, KeyError or AttributeError for a record of another kind; may update older
            records.
        line_start: the start of this study's lines, to recognise a partial line at the end; None: skips all lines that
            are not JSON.
        unreadable, foreign: the way out, for messages about a file that cannot be read or is of another kind.

    Raises:
        UserError: the file cannot be read, or has a line of another kind.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read as JSON lines: {reason}; {unreadable}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if line_start is None or (number == len(lines) and line.startswith(line_start[: len(line)])):
                continue
            record = None
        try:
            if not record.keys() >= keys:
                raise KeyError
            check(record)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{path}, line {number}, is not a run of {study}, which has {', '.join(sorted(keys))}; "
                            f"{foreign}") from None
        records.append(record)
    return records


def known_runs(path: Path) -> list[Record]:
    """The runs of a file that a study adds to, whose folder is made; an unfinished line is dropped."""
    make_parent_folder(path, "--runs")
    drop_partial_line(path)
    return [record for _, record in read_numbered_log(path)]


def short_run(recipe: Recipe, settings: Mapping[str, Any]) -> list[Record]:
    """Trains a recipe in a folder that is deleted; its validations. Of one that diverges, those before.

    Raises:
        UserError: training did not begin.
    """
    folder = Path(tempfile.mkdtemp(prefix="study-"))
    try:
        try:
            deepnmt.train(recipe, {**settings, "run": str(folder / "run")})
        except UserError as fault:
            if not (folder / "run/log.jsonl").exists():
                raise
            print_status(str(fault))
        return [record for _, record in read_numbered_log(folder / "run/log.jsonl") if record["type"] == "valid"]
    finally:
        shutil.rmtree(folder)


def append_runs(path: Path, done: Iterable[Sequence[Record]]) -> Iterator[Sequence[Record]]:
    """Appends the runs to the file as they finish, several at a time, and yields them."""
    drop_partial_line(path)
    with path.open("a", encoding="utf-8") as file:
        for records in done:
            file.write(json_lines(records))
            file.flush()
            yield records


def json_lines(records: Iterable[Record]) -> str:
    """The runs as lines of JSON."""
    return "".join(json.dumps(record) + "\n" for record in records)
