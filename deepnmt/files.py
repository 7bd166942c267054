"""Plain files: written aside and renamed into place, folders that can be written to, hashes, lines of JSON; tables
of text."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tabulate import tabulate

from deepnmt.errors import UserError


@contextmanager
def replacing(target: Path) -> Iterator[TextIO]:
    """A UTF-8 file that gets its name, in place of one that has it, when it is complete: neither a fault nor a kill
    leaves a part of it there.

    A device or fifo is written into and stays. So does a link: what it leads to is written.

    Raises:
        OSError: it cannot be written.
    """
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8", newline="\n") as stream:
            yield stream
        return
    whole = Path(os.path.realpath(target))
    aside = whole.with_name(f".tmp-{whole.name}-{secrets.token_hex(4)}")
    # in a folder that others may write to, a link of that name would lead elsewhere
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="\n") as stream:
            yield stream
        os.replace(aside, whole)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, content: str) -> None:
    """Writes a text file, see `replacing`."""
    with replacing(path) as stream:
        stream.write(content)


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Writes JSON, see `replacing`."""
    write_text(path, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")


def sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def make_run_folder(folder: Path, option: str = "run") -> None:
    """Makes a run folder, or the one that another option names, where there is none.

    Args:
        option: the setting or option that the user changes to name another folder.

    Raises:
        UserError: it cannot be written to.
    """
    what = "run folder" if option == "run" else "folder"
    _require_writable(folder, f"{what} {folder}", f"{option} to a folder that can be")


def make_folder_of(file: Path, option: str = "--output") -> None:
    """Makes the folder of a file that `option` names, ahead of the work whose outcome the file is to hold.

    Raises:
        UserError: it cannot be written to, or the file is a folder.
    """
    _require_writable(file.parent, f"file {file}", f"{option} to a file that can be", file)


def _require_writable(folder: Path, what: str, remedy: str, file: Path | None = None) -> None:
    try:
        if file is not None and file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror or error}; set {remedy}") from None


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a `log.jsonl`; a half-written last line is left out. Raises `UserError`."""
    return [record for _, record in numbered_log(path)]


def numbered_log(path: Path) -> list[tuple[int, Any]]:
    """What the lines of a file of JSON lines hold, with their numbers from 1; a half-written line is left out.

    Raises:
        UserError: it cannot be read.
    """
    records = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                records.append((number, json.loads(line)))
            except ValueError:
                continue
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{path} cannot be read as lines of JSON: {reason}; mend it, or give another folder") from None
    return records


def drop_partial_line(path: Path) -> None:
    """Takes away half a last line of JSON, which a kill left, and ends a whole one without an end, so that what comes
    next stands by itself.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with open(path, "a+b") as file:
            file.seek(0)
            text = file.read()
            start = text.rfind(b"\n") + 1
            try:
                json.loads(text[start:])
            except ValueError:
                file.truncate(start)
            else:
                file.write(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; name another") from None


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of text under each other, the first `left` columns flush left and the others flush right."""
    sides = [*["left"] * left, *["right"] * (len(rows[0]) - left)]
    return tabulate(rows, tablefmt="plain", colalign=sides, disable_numparse=True)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The same as a table of Markdown, whose head is the first row."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
