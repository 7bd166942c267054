"""Streaming readers of parallel text: pairs of plain or .gz files, or TSV. Every fault names its file and line."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path

from deepnmt.config import Corpus
from deepnmt.errors import UserError

Pair = tuple[str, str]


def input_files(corpus: Corpus) -> list[Path]:
    """The files a corpus is read from, in a fixed order. Raises `UserError` where one is not a readable file."""
    names = corpus.tsv or [name for pair in zip(corpus.src, corpus.trg) for name in pair]
    files = [Path(name) for name in names]
    for file in files:
        if not file.exists():
            raise UserError(f"there is no text file {file}; correct its path in the recipe's data section")
        if not file.is_file():
            raise UserError(f"{file} is not a file; the recipe's data section must name text, .gz or TSV files")
    return files


def read_pairs(corpus: Corpus) -> Iterator[Pair]:
    """Yields (source, target) for every line, surrounding whitespace stripped, nothing left out.

    Only "\\n" ends a line, as for `wc -l`: characters such as U+2028 stay inside the text and cannot shift one side.

    Raises:
        UserError: a file is missing, unreadable, damaged or not UTF-8; two files differ in their number of lines; a
            TSV line has too few columns; the corpus holds no line at all.
    """
    files = input_files(corpus)
    if corpus.tsv:
        streams = [_tsv_pairs(file, corpus.columns) for file in files]
    else:
        streams = [_aligned_pairs(src, trg) for src, trg in zip(files[::2], files[1::2])]
    pairs = itertools.chain.from_iterable(streams)
    first = next(pairs, None)
    if first is None:
        raise UserError(f"there is no text in {', '.join(map(str, files))}: the corpus has 0 lines; give another file")
    yield first
    yield from pairs


def _lines(file: Path) -> Iterator[str]:
    """The lines of one file without their ends; a byte order mark at the start is not text."""
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}, line {number}: not valid UTF-8 ({error.reason} at byte {error.start + 1} of the "
                        "line); convert the file, for example with iconv -t UTF-8") from None
    except EOFError:
        raise UserError(f"{file} is cut off after line {number}: the .gz stream has no end; copy it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{file} is not a sound .gz file after line {number} ({error}); copy it again, or drop .gz "
                        "from the name of a plain text file") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None


def _aligned_pairs(src_file: Path, trg_file: Path) -> Iterator[Pair]:
    sources, targets = _lines(src_file), _lines(trg_file)
    for pairs, (src, trg) in enumerate(itertools.zip_longest(sources, targets)):
        if src is None or trg is None:
            rest = 1 + sum(1 for _ in (targets if src is None else sources))
            counts = (pairs, pairs + rest) if src is None else (pairs + rest, pairs)
            raise UserError(f"{src_file} has {counts[0]} lines and {trg_file} has {counts[1]}; line N of one must "
                            "translate line N of the other, so give files of equal length")
        yield src.strip(), trg.strip()


def _tsv_pairs(file: Path, columns: list[int]) -> Iterator[Pair]:
    src, trg = (column - 1 for column in columns)
    for number, line in enumerate(_lines(file), start=1):
        cells = line.split("\t")
        if len(cells) < max(columns):
            raise UserError(f"{file}, line {number}: {len(cells)} column{'s' * (len(cells) != 1)}, but 'columns' is "
                            f"{columns} (counted from 1); mend the line or the setting")
        yield cells[src].strip(), cells[trg].strip()
