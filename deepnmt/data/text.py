"""Streaming readers of text: lines of plain or compressed files, and pairs from two such files or a TSV.

Text is UTF-8; a byte order mark is removed. Only "\\n" ends a line, as for `wc -l`: characters such as U+2028 do not,
so they cannot shift one side against the other. Error messages name file and line.
"""

from __future__ import annotations

import fcntl
import glob
import itertools
import json
import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from xopen import xopen

from deepnmt.config import Cleaning, Corpus
from deepnmt.data.tables import COMPRESSED, Columns, Pair, Row, by_rows, count_rows, kind_of, read_table
from deepnmt.errors import UserError

Line = tuple[str, int, str]  # its file, its number there, from 1, and its text

LONGEST_LINE = 2**24  # bytes
ARRIVING = 2**20  # bytes, about 10,000 sentences
# What files begin with that are no text: what they are, and the way out. Much of them may be valid UTF-8.
_COLUMNS = "write its columns as text, one sentence a line"
BINARY = {
    b"PAR1\x15": ("a Parquet file", _COLUMNS), b"ARROW1\0\0": ("an Arrow file", _COLUMNS),
    b"SQLite format 3\0": ("an SQLite database", _COLUMNS), b"\x89HDF\r": ("an HDF5 file", _COLUMNS),
    b"\x93NUMPY": ("a NumPy array", _COLUMNS), b"%PDF-1": ("a PDF", "copy its sentences into a text, one a line"),
    b"PK\x03\x04": ("a ZIP archive", "unpack it"), b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
    b"\x1f\x8b": ("compressed by gzip", "unpack it, or let its name end in .gz"),
    b"\xfd7zXZ\0": ("compressed by xz", "unpack it, or let its name end in .xz"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it, or let its name end in .zst"),
    **{b"BZh%d1AY&SY" % level: ("compressed by bzip2", "unpack it, or let its name end in .bz2")
       for level in range(1, 10)},
}


def read_lines(source: Path | None, first: int = 0, start: int = 0) -> Iterator[str]:
    """The lines of a plain or compressed file, or of standard input (None), without line ends.

    Args:
        first: how many lines to pass by.
        start: at which byte of a plain file the next begins; without it they are read.

    Raises:
        UserError: it cannot be read, is damaged, is no text or not UTF-8, or has a line that cannot be a sentence.
    """
    name = "standard input" if source is None else str(source)
    suffix = source.suffix if source and source.suffix in COMPRESSED else ""  # by its name, not by its first bytes
    number = 0
    try:
        with _opened(source, suffix) as stream:
            if start:
                stream.seek(start)
            lines = iter(partial(stream.readline, LONGEST_LINE + 1), b"")
            if first and not start:
                lines = itertools.islice(lines, first, None)
            for number, line in enumerate(lines, start=1 + first):
                yield _sentence(line, number, name)
    except EOFError:
        raise UserError(f"{name} is truncated after line {number}: the {suffix} stream has no end; copy it again"
                        ) from None
    except UserError:
        raise
    except Exception as error:
        if suffix and not getattr(error, "errno", None):  # each decompressor raises its own exceptions
            raise UserError(f"{name} is not a valid {suffix} file after line {number} ({error}); copy it again, or "
                            f"remove {suffix} from the name if it is plain text") from None
        if isinstance(error, OSError):
            raise UserError(f"{name} cannot be read: {error.strerror or error}; give an existing text file") from None
        raise


def numbered_lines(files: Iterable[str]) -> Iterator[Line]:
    """The lines of files, one after the other. Raises `UserError`, see `read_lines`."""
    for file in files:
        for number, line in enumerate(read_lines(Path(file)), start=1):
            yield file, number, line


def _opened(source: Path | None, suffix: str) -> AbstractContextManager[BinaryIO]:
    if source is None:
        return nullcontext(sys.stdin.buffer)
    return xopen(source, "rb", threads=0) if suffix else source.open("rb")


def arriving_lines(descriptor: int, name: str) -> Iterator[list[str]]:
    """The lines of a pipe or a terminal as they come: each item has all that arrived by then, `ARRIVING` or so at most.

    Args:
        descriptor: of the pipe. Nothing may have read from it through a buffer.
        name: for messages.

    Raises:
        UserError: a line is not UTF-8 or cannot be a sentence. Those before it have been yielded.
    """
    with suppress(OSError):  # it is no pipe
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, ARRIVING)  # else 64 KiB could wait, some 700 sentences
    number, rest, ended = 0, b"", False
    while not ended:
        block = os.read(descriptor, ARRIVING)
        rest, ended = rest + block, not block
        if block and len(rest) < ARRIVING and select.select([descriptor], [], [], 0)[0]:
            continue
        end = rest.rfind(b"\n") + 1
        if ended or len(rest) - end > LONGEST_LINE:
            end = len(rest)
        whole = rest[:end].split(b"\n")
        rest = rest[end:]
        if not whole[-1]:
            whole.pop()
        lines: list[str] = []
        try:
            for line in whole:
                number += 1
                lines.append(_sentence(line, number, name))
        finally:
            if lines:
                yield lines


def _sentence(line: bytes, number: int, name: str) -> str:
    """Line `number` of a text as text, without its end. Raises `UserError`."""
    if number == 1:
        for begin, (what, way) in BINARY.items():
            if line.startswith(begin):
                if what.startswith("compressed") and name.endswith(COMPRESSED):
                    way = "unpack it once, since it is packed twice"
                raise UserError(f"{name} is {what} and no text; {way}")
    if len(line) > LONGEST_LINE:
        raise UserError(f"{name}, line {number}: longer than {LONGEST_LINE >> 20} MiB, so it is no sentence; give a "
                        "text with one sentence a line")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}, line {number}: not valid UTF-8 ({error.reason} at byte {error.start + 1} of the "
                        "line); convert the text, for example with iconv -t UTF-8") from None


def ending(file: str) -> str:
    """What a file's name ends in, such as `de`, packed or not."""
    return kind_of(Path(file)).removeprefix(".")


def corpora_of(text: Corpus) -> dict[str, Corpus]:
    """The corpora of a text by name; a single one has an empty name."""
    return getattr(text, "corpora", None) or {"": text}


def cleaning_of(corpus: Corpus) -> Cleaning:
    """Which pairs of a corpus are left out."""
    return getattr(corpus, "cleaning", Cleaning())


def columns_of(corpus: Corpus) -> Columns:
    """The columns that are read of a corpus's tables, see `tables.py`."""
    score = cleaning_of(corpus).score
    return corpus.columns if score is None else [*corpus.columns, score]


def files_of(names: Sequence[str]) -> list[str]:
    """The files that a setting names: those of a folder and those that fit a pattern, in the order of their names.

    A folder that the package `datasets` saved is its Arrow files. A name that fits nothing stays as it is. Raises
    `UserError` where a folder has several data sets.
    """
    files: list[str] = []
    for name in names:
        path = Path(name)
        state, parts = path / "state.json", path / "dataset_dict.json"
        if parts.is_file():
            one = _json_of(parts).get("splits") or ["train"]
            raise UserError(f"{name} holds several data sets ({', '.join(one)}); name one of them: {path / one[0]}")
        if listed := _json_of(state).get("_data_files"):  # else it is a file of that name
            files += [str(path / entry["filename"]) for entry in listed]
        elif path.is_dir():
            inside = [file for file in path.iterdir() if file.is_file() and file.name[0] not in "._"]
            files += sorted(map(str, inside)) or [name]
        elif not path.exists() and glob.has_magic(name):
            files += sorted(glob.glob(name)) or [name]
        else:
            files.append(name)
    return files


def _json_of(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def named_files(text: Corpus) -> list[Path]:
    """The files of a text, in a fixed order, annotations after each corpus, whether they exist or not."""
    files: list[str] = []
    for corpus in corpora_of(text).values():
        files += pair_files(corpus)
        files += itertools.chain(*(files_of(named) for named in corpus.annotations.values()))
    return [Path(name) for name in files]


def pair_files(corpus: Corpus) -> list[str]:
    """The files of a corpus, without annotations: tables, or source and target in turn. Raises `UserError` if there are
    more of one than of the other."""
    if corpus.tsv:
        return files_of(corpus.tsv)
    src, trg = files_of(corpus.src), files_of(corpus.trg)
    if len(src) != len(trg):
        raise UserError(f"{', '.join(corpus.src)} are {len(src)} files, but {', '.join(corpus.trg)} are {len(trg)}; "
                        "each must have its translation, in the order of the names")
    return list(itertools.chain(*zip(src, trg)))


def input_files(text: Corpus) -> list[Path]:
    """`named_files`. Raises `UserError` if one does not exist or is not a file."""
    files = named_files(text)
    made = any(corpus.translated_by for corpus in corpora_of(text).values())
    for file in files:
        if not file.exists():
            raise UserError(f"there is no text file {file}; correct its path, in the recipe's data section or on the "
                            "command line"
                            + made * ", or let deepnmt run make it, if it is what translated_by writes")
        if not file.is_file():
            what = "a folder" if file.is_dir() else "a pipe or a device, and no file"
            raise UserError(f"{file} is {what}; name a text or a TSV file in its place")
    return files


def files_by_corpus(text: Corpus) -> Iterator[tuple[str, Path]]:
    """`input_files`, each with the name of its corpus. Raises `UserError`."""
    for name, corpus in corpora_of(text).items():
        for file in input_files(corpus):
            yield name, file


def count_pairs(text: Corpus) -> int | None:
    """How many pairs a text has, by the line ends of its files, which is soon done; None if some are compressed, or
    cannot be read."""
    files: list[Path] = []
    for corpus in corpora_of(text).values():
        files += map(Path, files_of(corpus.tsv or corpus.src))
    if any(file.suffix in COMPRESSED for file in files):
        return None
    count = 0
    for file in files:
        if by_rows(file):
            count += count_rows(file)
            continue
        try:
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    count += block.count(b"\n")
        except OSError:
            return None
    return count


def read_pairs(text: Corpus, tags: bool = True) -> Iterator[Pair]:
    """The pairs of `read_rows`. Raises `UserError`."""
    for src, trg, _ in read_rows(text, tags):
        yield src, trg


def read_rows(text: Corpus, tags: bool = True) -> Iterator[Row]:
    """Yields source, target and score for every line of every corpus, without surrounding whitespace.

    Args:
        tags: put a corpus's tag, and a space, in front of its sources.

    Raises:
        UserError: a file is missing; see `read_lines`; two files differ in their number of lines; a TSV line has too
            few columns, or a score that is no number; the corpus has no lines.
    """
    for corpus in corpora_of(text).values():
        files = input_files(corpus)[:len(pair_files(corpus))]
        empty = True
        tag = f"{corpus.tag} " if corpus.tag and tags else ""
        rows = _rows_of_tables(files, corpus) if corpus.tsv else _rows_of_two(files)
        for src, trg, score in rows:
            empty = False
            yield tag + src.strip(), trg.strip(), score
        if empty:
            raise UserError(f"there is no text in {', '.join(map(str, files))}: the corpus has 0 lines; give another "
                            "file")


def write_pairs(files: Sequence[Path], pairs: Iterable[Pair]) -> int:
    """Writes the sources into one file and the targets into another, one a line; returns the number of pairs."""
    count = 0
    with (open(files[0], "w", encoding="utf-8", newline="\n") as src_file,
          open(files[1], "w", encoding="utf-8", newline="\n") as trg_file):
        for src, trg in pairs:
            src_file.write(f"{src}\n")
            trg_file.write(f"{trg}\n")
            count += 1
    return count


def _rows_of_two(files: list[Path]) -> Iterator[Row]:
    for src_file, trg_file in zip(files[::2], files[1::2]):
        for src, trg in side_by_side(read_lines(src_file), read_lines(trg_file), src_file, trg_file):
            yield src, trg, None


def side_by_side(lines: Iterator[str], others: Iterator[str], name: str | Path, other: str | Path) -> Iterator[Pair]:
    """Line N of a text with line N of another. Raises `UserError` if one has more."""
    for count, (one, two) in enumerate(itertools.zip_longest(lines, others)):
        if one is None or two is None:
            rest = count + 1 + sum(1 for _ in itertools.chain(lines, others))
            counts = (count, rest) if one is None else (rest, count)
            raise unequal_lines(name, counts[0], other, counts[1])
        yield one, two


def unequal_lines(src: str | Path, src_lines: int, trg: str | Path, trg_lines: int) -> UserError:
    """The error if two files of one corpus have different numbers of lines."""
    return UserError(f"{src} has {src_lines} lines and {trg} has {trg_lines}; line N of one must belong to line N of "
                     "the other, so give files of equal length")


def _rows_of_tables(files: list[Path], corpus: Corpus) -> Iterator[Row]:
    return itertools.chain.from_iterable(read_table(file, columns_of(corpus), read_lines) for file in files)
