"""Streaming readers of text: lines of plain and packed files, and pairs of two such files or of a TSV.

Text is UTF-8 without its byte order mark. Only "\\n" ends a line, as for `wc -l`: characters such as U+2028 stay inside
the text and cannot shift one side. Every fault names its file and line.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from xopen import xopen

from deepnmt.config import Corpus
from deepnmt.errors import UserError

Pair = tuple[str, str]
PACKED = (".gz", ".xz", ".zst", ".bz2")


def read_lines(source: Path | None) -> Iterator[str]:
    """The lines of a plain or packed file, or of standard input (None), without their ends.

    Raises:
        UserError: it cannot be read, is damaged, or is not UTF-8.
    """
    name = "standard input" if source is None else str(source)
    suffix = source.suffix if source and source.suffix in PACKED else ""  # the name decides, not the first bytes
    number = 0
    try:
        with (nullcontext(sys.stdin.buffer) if source is None else
              xopen(source, "rb", threads=0) if suffix else source.open("rb")) as stream:
            for number, line in enumerate(stream, start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}, line {number}: not valid UTF-8 ({error.reason} at byte {error.start + 1} of the "
                        "line); convert the text, for example with iconv -t UTF-8") from None
    except EOFError:
        raise UserError(f"{name} is cut off after line {number}: the {suffix} stream has no end; copy it again"
                        ) from None
    except Exception as error:
        if suffix and not getattr(error, "errno", None):  # each unpacker has an exception of its own
            raise UserError(f"{name} is not a sound {suffix} file after line {number} ({error}); copy it again, or "
                            f"drop {suffix} from the name of a plain text file") from None
        if isinstance(error, OSError):
            raise UserError(f"{name} cannot be read: {error.strerror or error}; give an existing text file") from None
        raise


def input_files(corpus: Corpus) -> list[Path]:
    """The files a corpus is read from, in a fixed order. Raises `UserError` where one is not a readable file."""
    files = [Path(name) for name in corpus.tsv or itertools.chain(*zip(corpus.src, corpus.trg))]
    for file in files:
        if not file.exists():
            raise UserError(f"there is no text file {file}; correct its path in the recipe's data section")
        if not file.is_file():
            raise UserError(f"{file} is not a file; the recipe's data section must name text, .gz or TSV files")
    return files


def read_pairs(corpus: Corpus) -> Iterator[Pair]:
    """Yields (source, target) for every line, surrounding whitespace stripped, nothing left out.

    Raises:
        UserError: a file is missing or as `read_lines` says; two files differ in their number of lines; a TSV line has
            too few columns; the corpus holds no line at all.
    """
    files = input_files(corpus)
    empty = True
    for src, trg in (_tsv_pairs(files, corpus.columns) if corpus.tsv else _aligned_pairs(files)):
        empty = False
        yield src.strip(), trg.strip()
    if empty:
        raise UserError(f"there is no text in {', '.join(map(str, files))}: the corpus has 0 lines; give another file")


def write_pairs(files: Sequence[Path], pairs: Iterable[Pair]) -> int:
    """Writes the sentences of each side into a file of their own, one a line; returns how many pairs there were."""
    count = 0
    with (open(files[0], "w", encoding="utf-8", newline="\n") as src_file,
          open(files[1], "w", encoding="utf-8", newline="\n") as trg_file):
        for src, trg in pairs:
            src_file.write(f"{src}\n")
            trg_file.write(f"{trg}\n")
            count += 1
    return count


def _aligned_pairs(files: list[Path]) -> Iterator[Pair]:
    for pair in zip(files[::2], files[1::2]):
        sides = [read_lines(file) for file in pair]
        for count, (src, trg) in enumerate(itertools.zip_longest(*sides)):
            if src is None or trg is None:
                rest = count + 1 + sum(1 for _ in itertools.chain(*sides))
                counts = (count, rest) if src is None else (rest, count)
                raise UserError(f"{pair[0]} has {counts[0]} lines and {pair[1]} has {counts[1]}; line N of one must "
                                "translate line N of the other, so give files of equal length")
            yield src, trg


def _tsv_pairs(files: list[Path], columns: list[int]) -> Iterator[Pair]:
    for file in files:
        for number, line in enumerate(read_lines(file), start=1):
            cells = line.split("\t")
            if len(cells) < max(columns):
                raise UserError(f"{file}, line {number}: {len(cells)} column{'s' * (len(cells) != 1)}, but 'columns' "
                                f"is {columns} (counted from 1); mend the line or the setting")
            yield cells[columns[0] - 1], cells[columns[1] - 1]
