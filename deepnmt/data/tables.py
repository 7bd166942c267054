"""Pairs in the columns of a file: text with tabs, JSON lines, Parquet, and the Arrow files of the package `datasets`.

A column is a number, from 1, or a name: of the first line of a text with tabs, of a key of JSON, of a column of the
others. A name with dots leads inside: `translation.de`. The columns are those of source and target, and a third has the
score of a pair.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deepnmt.config.fields import COMPRESSED
from deepnmt.errors import UserError

PARQUET, ARROW, JSON = ".parquet", ".arrow", (".jsonl", ".ndjson", ".json")
BATCH = 10_000  # rows that are read at a time
Columns = Sequence[int | str]
Pair = tuple[str, str]
Row = tuple[str, str, float | None]  # a pair and its score; None where no column has one
Lines = Callable[[Path, int, int], Iterator[str]]  # `text.read_lines`


def kind_of(file: Path) -> str:
    """The suffix that says how a file is read, packed or not."""
    return (file.with_suffix("") if file.suffix in COMPRESSED else file).suffix


def by_rows(file: Path) -> bool:
    """Whether a file is read by rows of its own, and not by lines."""
    return kind_of(file) in (PARQUET, ARROW)


def has_header(file: Path, columns: Columns) -> bool:
    """Whether the first line of a file names its columns."""
    return kind_of(file) not in (PARQUET, ARROW, *JSON) and any(isinstance(column, str) for column in columns)


def count_rows(file: Path) -> int:
    """The rows of a file that is read `by_rows`. Raises `UserError`."""
    if kind_of(file) == PARQUET:
        return int(_parquet(file).metadata.num_rows)
    return sum(batch.num_rows for batch in _arrow_batches(file))


def read_table(file: Path, columns: Columns, read_lines: Lines, first: int = 0, start: int = 0,
               rows: int | None = None) -> Iterator[Row]:
    """The rows of a file, a header not among them.

    Args:
        read_lines: what reads lines.
        first: how many rows to pass by; `start`: see `read_lines`.
        rows: how many to read; None: all.

    Raises:
        UserError: the file cannot be read, or has not these columns; or a score is no number.
    """
    if by_rows(file):
        yield from itertools.islice(_read_rows(file, columns, first), rows)
        return
    places: list[int] = []
    if kind_of(file) not in JSON:
        named = has_header(file, columns)
        header = next(read_lines(file, 0, 0), "").split("\t") if named else []
        places = [_place(file, header, column) for column in columns]
        first += named
    for number, line in enumerate(itertools.islice(read_lines(file, first, start), rows), start=first + 1):
        if places:
            yield _of_cells(line, file, number, places)
        else:
            yield _of_json(line, file, number, columns)


def _place(file: Path, header: list[str], column: int | str) -> int:
    if isinstance(column, str) and column not in header:
        raise UserError(f"{file} has no column {column!r}; its first line names {', '.join(header)}")
    return header.index(column) + 1 if isinstance(column, str) else column


def _of_cells(line: str, file: Path, number: int, places: Sequence[int]) -> Row:
    cells = line.split("\t")
    if len(cells) < max(places):
        columns = "column" if len(cells) == 1 else "columns"
        raise UserError(f"{file}, line {number}: {len(cells)} {columns}, but 'columns' is "
                        f"{list(places)} (counted from 1); correct the line or the setting")
    score = None
    if places[2:]:
        score = _score(cells[places[2] - 1], f"{file}, line {number}", places[2])
    return cells[places[0] - 1], cells[places[1] - 1], score


def _score(value: Any, where: str, column: int | str) -> float:
    """A score as a number. Raises `UserError` if it is none."""
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if math.isnan(score):
        raise UserError(f"{where}: the score in the column {column!r} is {value!r}, must be a number; correct it, or "
                        "name another column in cleaning.score")
    return score


def _of_json(line: str, file: Path, number: int, columns: Columns) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}, line {number}: no JSON ({error}); write an object a line") from None
    return _values(value, f"{file}, line {number}", columns)


def is_whole(text: str) -> bool:
    """Whether a text has no half of a character, as JSON may have one: `"\\ud83d"`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _values(row: Any, where: str, columns: Columns) -> Row:
    """The columns of a JSON object or a row."""
    values = []
    for column in columns:
        value = row
        for key in str(column).split("."):
            value = value.get(key) if isinstance(value, dict) else None
        values.append(value)
    for column, value in zip(columns[:2], values):
        if not isinstance(value, str):
            named = ", ".join(map(str, row)) if isinstance(row, dict) else "none"
            raise UserError(f"{where}: no text in the column {column!r}; 'columns' names two of its own ({named})")
        if not is_whole(value):
            raise UserError(f"{where}: the text in the column {column!r} has half of a character (a lone surrogate); "
                            "correct the line, or leave it out")
    src, trg = (text.replace("\r\n", " ").replace("\n", " ") for text in values[:2])
    return src, trg, _score(values[2], where, columns[2]) if columns[2:] else None


def _read_rows(file: Path, columns: Columns, first: int) -> Iterator[Row]:
    passed = 0
    if kind_of(file) == PARQUET:
        parquet = _parquet(file)
        groups: list[int] = []
        for group in range(parquet.metadata.num_row_groups):
            size = parquet.metadata.row_group(group).num_rows
            if groups or passed + size > first:
                groups.append(group)
            else:
                passed += size
        batches = parquet.iter_batches(BATCH, groups, [str(column).split(".")[0] for column in columns])
    else:
        batches = _arrow_batches(file)
    for batch in batches:
        begin = max(0, first - passed)
        passed += batch.num_rows
        if begin < batch.num_rows:
            for number, row in enumerate(batch.slice(begin).to_pylist(), start=passed - batch.num_rows + begin + 1):
                yield _values(row, f"{file}, row {number}", columns)


def _parquet(file: Path) -> Any:
    pyarrow = _pyarrow(file)
    try:
        return pyarrow.parquet.ParquetFile(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{file} cannot be read as Parquet ({error}); copy it again") from None


def _arrow_batches(file: Path) -> Iterator[Any]:
    pyarrow = _pyarrow(file)
    try:
        with pyarrow.memory_map(str(file)) as source:
            yield from pyarrow.ipc.open_stream(source)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{file} cannot be read as an Arrow stream ({error}); copy it again") from None


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{file} needs pyarrow, which is not installed: pip install 'deepnmt[pyarrow]'; or write its "
                        "columns as text") from None
    return pyarrow
