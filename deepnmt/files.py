"""Plain files: atomic writes, checks that a folder is writable, hashes, JSON lines; and tables of text."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tabulate import tabulate

from deepnmt.errors import UserError


@contextmanager
def atomic_write(target: Path) -> Iterator[TextIO]:
    """Opens a UTF-8 file for writing under a temporary name and renames it to `target` at the end.

    An exception or a kill leaves the old `target` untouched. A device or a fifo is written to directly; a link is
    followed and stays a link. So this is for a file that the user named; `write_bytes` and those after it are for the
    files of a folder.

    Raises:
        OSError: the file cannot be written.
    """
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8", newline="\n") as stream:
            yield stream
        return
    with (_renamed_to(Path(os.path.realpath(target))) as descriptor,
          open(descriptor, "w", encoding="utf-8", newline="\n") as stream):
        yield stream


@contextmanager
def _renamed_to(final: Path) -> Iterator[int]:
    """The descriptor of a new file, which the caller closes and which is then renamed to `final`."""
    temporary = final.with_name(f".tmp-{final.name}-{secrets.token_hex(4)}")
    # O_NOFOLLOW: in a folder that others may write to, somebody could have put a link there
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        yield descriptor
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file as `atomic_write` does, but replaces a link, device or fifo: in a folder that came from elsewhere
    it would lead outside."""
    with _renamed_to(path) as descriptor, open(descriptor, "wb") as stream:
        stream.write(content)


def write_text(path: Path, content: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, content.encode())


def as_json(content: Any, indent: int = 2) -> str:
    """JSON as deepnmt's files hold it, which end in a newline."""
    return json.dumps(content, indent=indent, ensure_ascii=False) + "\n"


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """`write_text` of JSON."""
    write_text(path, as_json(content, indent))


def sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def reporting(what: str, remedy: str) -> Iterator[None]:
    """Turns an error of the file system while `what` is written into a `UserError` that ends with the remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror or error}; {remedy}", error.errno) from None


def make_run_folder(folder: Path, option: str = "run") -> None:
    """Makes a run folder, or another output folder, if it does not exist.

    Args:
        option: the setting or command-line option that names the folder.

    Raises:
        UserError: the folder cannot be written to.
    """
    what = "run folder" if option == "run" else "folder"
    _require_writable(folder, f"{what} {folder}", f"{option} to a folder that can be")


def make_parent_folder(file: Path, option: str = "--output") -> None:
    """Makes the folder of an output file, so that an unwritable one is noticed before the work begins.

    Args:
        option: the command-line option that names the file.

    Raises:
        UserError: the folder cannot be written to, or `file` is a folder.
    """
    _require_writable(file.parent, f"file {file}", f"{option} to a file that can be", file)


def _require_writable(folder: Path, what: str, remedy: str, file: Path | None = None) -> None:
    with reporting(what, f"set {remedy}"):
        if file is not None and file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a `log.jsonl`, without damaged lines. Raises `UserError` if it cannot be read."""
    return [record for _, record in read_numbered_log(path) if is_record(record)]


def is_record(value: Any) -> bool:
    """Whether this is what a line of a `log.jsonl` holds."""
    return isinstance(value, dict) and isinstance(value.get("type"), str) and type(value.get("update")) is int


def read_numbered_log(path: Path) -> list[tuple[int, Any]]:
    """The values in a file of JSON lines with their line numbers, counted from 1. Lines that are not JSON, such as a
    half-written one, are left out.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; give another folder") from None
    records = []
    for number, line in enumerate(lines, 1):
        with suppress(ValueError, RecursionError):
            records.append((number, json.loads(line)))
    return records


def drop_partial_line(path: Path) -> None:
    """Removes a half-written last line of JSON and ends a complete one with a newline, so that more can be appended.

    A kill leaves either. The file is made if it does not exist.

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
        raise UserError(f"{path} cannot be written: {error.strerror or error}; name another file") from None


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A text table: the first `left` columns are aligned left, the others right."""
    sides = [*["left"] * left, *["right"] * (len(rows[0]) - left)]
    return tabulate(rows, tablefmt="plain", colalign=sides, disable_numparse=True)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, whose header is the first row."""
    head, *body = rows
    lines = []
    for row in (head, ["---"] * len(head), *body):
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
