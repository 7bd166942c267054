"""Files of runs, which studies write and go on with: a line of JSON for each run, appended when it is done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepnmt.doctor.variants import initialisation
from deepnmt.errors import UserError
from deepnmt.files import drop_partial_line
from deepnmt.model.blocks import BLOCKS

Record = dict[str, Any]


def block_pair(word: str) -> tuple[str, str]:
    """Encoder and decoder block of a word: `admin`, or `post_ln/pre_ln`. Raises `UserError` for an unknown block."""
    encoder, _, decoder = word.partition("/")
    for block in (encoder, decoder or encoder):
        if block not in BLOCKS:
            raise UserError(f"there is no block {block!r}; known: {', '.join(BLOCKS)}; two with a / between them are "
                            "encoder and decoder")
    return encoder, decoder or encoder


@dataclass(frozen=True)
class Stacks:
    """What a run's model consists of: the blocks of encoder and decoder, and the layers of each."""

    encoder: str
    decoder: str
    layers: int

    @property
    def blocks(self) -> str:
        """The blocks as one word: `admin`, or `post_ln/pre_ln` for two."""
        return self.encoder if self.encoder == self.decoder else f"{self.encoder}/{self.decoder}"

    def initialisations(self, init: Any) -> list[str]:
        """What `init` comes to in encoder and decoder: `xavier`, `xavier_separate` or `depth_scaled`."""
        return [initialisation(block, init) for block in (self.encoder, self.decoder)]


def read_runs(
    path: Path, study: str, keys: set[str], check: Callable[[Record], object], begins: str | None, unreadable: str,
    foreign: str,
) -> list[Record]:
    """The runs of a file; half a line, which a kill left, is passed over.

    Args:
        study: whose runs they are, for messages.
        keys: what every line has.
        check: raises ValueError, TypeError, KeyError or AttributeError for a record that is of something else, and may
            bring an older one up to date.
        begins: how a line of this study begins, by which half a line at the end is known; None: whatever is no JSON is
            passed over.
        unreadable, foreign: what to do about a file that cannot be read, and about one of something else.

    Raises:
        UserError: the file cannot be read, or has a line of something else.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read as lines of JSON: {reason}; {unreadable}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if begins is None or (number == len(lines) and line.startswith(begins[: len(line)])):
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


def append_runs(path: Path, done: Iterable[Sequence[Record]]) -> Iterator[Sequence[Record]]:
    """Appends the runs as they come, several at a time, and passes them on."""
    drop_partial_line(path)
    with path.open("a", encoding="utf-8") as file:
        for records in done:
            file.write(json_lines(records))
            file.flush()
            yield records


def json_lines(records: Iterable[Record]) -> str:
    """The runs as such a file holds them."""
    return "".join(json.dumps(record) + "\n" for record in records)
