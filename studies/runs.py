"""Files of runs, from which studies resume: one line of JSON for each finished run."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepnmt
from deepnmt.config import Fact, Recipe, flatten
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


def known_runs(path: Path, option: str = "--runs") -> list[Record]:
    """The runs of a file that a study adds to, whose folder is made; an unfinished line is dropped. `option` names the
    file."""
    make_parent_folder(path, option)
    drop_partial_line(path)
    return [record for _, record in read_numbered_log(path)]


def fingerprint_of(recipe: Recipe, data: str, varied: Iterable[str] = ()) -> str:
    """A hash of what a study's runs have in common: all settings that are not their default, and the prepared data.

    Run folder, seed, threads and the paths of the data are left out. A setting that a later version adds changes
    nothing while it has its default.

    Args:
        data: the fingerprint of the prepared data.
        varied: settings that the study sets for each run.
    """
    left_out = {"run", "seed", "parallel.threads", *varied}
    settings = {}
    for name, value in flatten(recipe.model_dump(mode="json", exclude_defaults=True)).items():
        is_path = name.startswith("data.") and type(recipe).is_marked(name, Fact.PATH)
        if name not in left_out and not is_path:
            settings[name] = value
    return hashlib.sha256(json.dumps([settings, data], sort_keys=True).encode()).hexdigest()[:16]


def is_of(record: Record, fingerprint: str) -> bool:
    """Whether a line's run has this fingerprint; older lines have none, and are taken to be."""
    return bool(record.get("fingerprint", fingerprint) == fingerprint)


def make_missing(
    path: Path, planned: Sequence[Record], make: Callable[[Record], Record], fingerprint: str, seconds: float,
    option: str = "--runs",
) -> list[Record]:
    """Makes the runs that a file lacks until the time is over, each a line of it; returns all its runs with this
    fingerprint.

    Args:
        planned: by what the runs are known, the first of their lines.
        make: trains one of them, and returns the rest of its line.
        seconds: after which no run is started.
        option: that names the file.
    """
    done = [record for record in known_runs(path, option) if is_of(record, fingerprint)]
    started = time.monotonic()
    for number, run in enumerate(planned, 1):
        if any(run.items() <= record.items() for record in done):
            continue
        if time.monotonic() - started > seconds:
            break
        done.append({**run, "fingerprint": fingerprint, **make(run)})
        with path.open("a", encoding="utf-8") as file:
            file.write(json_lines(done[-1:]))
        shown = {name: value for name, value in done[-1].items() if not isinstance(value, dict | list)}
        print_status(f"{number} of {len(planned)}: {shown}")
    return done


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
