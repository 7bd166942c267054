"""Where the lines of a corpus lie: its units, of so many lines each, which are read without what lies before them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deepnmt.config import Corpus
from deepnmt.data.tables import COMPRESSED, Pair, Row, by_rows, count_rows, read_table
from deepnmt.data.text import Line, columns_of, files_of, pair_files, read_lines, unequal_lines
from deepnmt.errors import UserError
from deepnmt.progress import Progress, no_progress

BLOCK = 1 << 22  # bytes that are read at a time


class Scan(NamedTuple):
    """What one pass over a file finds.

    Attributes:
        bytes, sha256: of the file as it is, packed or not.
        lines: a last one without an end included, a header not.
        marks: the byte at which every `step`-th line begins, from that on which was asked for; none of packed files.
    """

    bytes: int
    sha256: str
    lines: int
    marks: dict[int, int]


class Span(NamedTuple):
    """Lines of a file: from line `first` on, from 0 after a header, which begins at byte `start`; 0: not known."""

    file: str
    first: int
    lines: int
    start: int


class Unit(NamedTuple):
    """The lines of a corpus that a shard is made from.

    Attributes:
        corpus: its name.
        number: of the unit in its corpus, from 0.
        place: its number in the whole text, from 0.
        lines: how many.
        columns: where they are, by the settings of the corpus that name the files.
    """

    corpus: str
    number: int
    place: int
    lines: int
    columns: dict[str, list[Span]]


def scan(file: Path, before: int, step: int, header: bool = False, progress: Progress = no_progress) -> Scan:
    """Counts and hashes a file whose first line, after a header, is number `before` of its corpus; `progress` is called
    with the bytes. Raises `UserError`."""
    digest = hashlib.sha256()
    marks: dict[int, int] = {}
    size, last = 0, b"\n"  # bytes read, and the last of them
    lines = -1 if header else 0  # that have ended
    packed = file.suffix in COMPRESSED
    try:
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                ends = 0 if packed else block.count(b"\n")
                if (before + lines) // step != (before + lines + ends) // step:  # a mark is in this block
                    end = -1
                    for number in range(lines + 1, lines + ends + 1):
                        end = block.index(b"\n", end + 1)
                        if (before + number) % step == 0:
                            marks[number] = size + end + 1
                size += len(block)
                lines += ends
                last = block[-1:]
                progress(size)
        if by_rows(file):
            return Scan(size, digest.hexdigest(), count_rows(file), {})
        if packed:
            lines += sum(1 for _ in read_lines(file))
        elif last != b"\n":
            lines += 1
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}; give an existing text file") from None
    return Scan(size, digest.hexdigest(), max(0, lines), marks)


def sides_of(corpus: Corpus) -> dict[str, list[str]]:
    """The files of a corpus by the settings that name them."""
    files = pair_files(corpus)
    sides = {"tsv": files} if corpus.tsv else {"src": files[::2], "trg": files[1::2]}
    return {**sides, **{name: files_of(named) for name, named in corpus.annotations.items()}}


def units_of(name: str, corpus: Corpus, scans: Mapping[str, Sequence[Scan]], step: int, place: int
             ) -> list[Unit]:
    """The units of a corpus, of `step` lines each, the last of fewer.

    Args:
        scans: of the files of each of `sides_of`.
        place: of the first.

    Raises:
        UserError: two files that belong together have different numbers of lines, or there are none.
    """
    columns = sides_of(corpus)
    if not corpus.tsv:
        for src, trg, one, other in zip(columns["src"], columns["trg"], scans["src"], scans["trg"]):
            if one.lines != other.lines:
                raise unequal_lines(src, one.lines, trg, other.lines)
    totals = {column: sum(scan.lines for scan in column_scans) for column, column_scans in scans.items()}
    lines = totals[next(iter(columns))]
    if not lines:
        raise UserError(f"there is no text in {', '.join(itertools.chain(*columns.values()))}: the corpus has 0 lines; "
                        "give another file")
    for column, total in totals.items():
        if total != lines:
            raise UserError(f"{', '.join(columns[column])}: {total} lines of {column} for {lines} sentence pairs; line "
                            "N of one must belong to line N of the other")
    units: list[Unit] = []
    for number, first in enumerate(range(0, lines, step)):
        spans = {column: list(_spans(files, scans[column], first, first + step)) for column, files in columns.items()}
        units.append(Unit(name, number, place + number, min(step, lines - first), spans))
    return units


def _spans(files: Sequence[str], scans: Sequence[Scan], start: int, stop: int) -> Iterator[Span]:
    """The lines `start` to `stop` of files that follow each other."""
    begin = 0
    for file, scan in zip(files, scans, strict=True):
        first, last = max(0, start - begin), min(scan.lines, stop - begin)
        if first < last:
            yield Span(file, first, last - first, scan.marks.get(first, 0))
        begin += scan.lines


def lines_of(unit: Unit, column: str) -> Iterator[Line]:
    """The lines of a unit in a column; none if its corpus has no such column. Raises `UserError`, see `read_lines`."""
    for file, first, lines, start in unit.columns.get(column, ()):
        for number, line in enumerate(itertools.islice(read_lines(Path(file), first, start), lines), start=first + 1):
            yield file, number, line


def pairs_of(unit: Unit, corpus: Corpus) -> Iterator[Pair]:
    """The sentence pairs of a unit, without tags. Raises `UserError`."""
    for src, trg, _ in rows_of(unit, corpus):
        yield src, trg


def rows_of(unit: Unit, corpus: Corpus) -> Iterator[Row]:
    """The rows of a unit, as `read_rows` gives those of a text, without tags. Raises `UserError`."""
    if "tsv" in unit.columns:
        for file, first, lines, start in unit.columns["tsv"]:
            for src, trg, score in read_table(Path(file), columns_of(corpus), read_lines, first, start, lines):
                yield src.strip(), trg.strip(), score
    else:
        for (_, _, src), (_, _, trg) in zip(lines_of(unit, "src"), lines_of(unit, "trg"), strict=True):
            yield src.strip(), trg.strip(), None
