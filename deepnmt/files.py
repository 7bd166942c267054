"""Plain files: folders that can be written to, files renamed into place, lines of JSON."""

from __future__ import annotations

import errno
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from deepnmt.errors import UserError


def make_run_folder(folder: Path, option: str = "run") -> None:
    """Makes a run folder, or the one that another option names, where there is none.

    Args:
        option: the setting or option that the user changes to name another folder.

    Raises:
        UserError: it cannot be written to.
    """
    try:
        _make_writable(folder)
    except OSError as error:
        what = "run folder" if option == "run" else "folder"
        raise UserError(f"{what} {folder} cannot be written: {error.strerror or error}; set {option} to a folder that "
                        "can be") from None


def make_folder_of(file: Path, option: str = "--output") -> None:
    """Makes the folder of a file that `option` names, ahead of the work whose outcome the file is to hold.

    Raises:
        UserError: it cannot be written to, or the file is a folder.
    """
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _make_writable(file.parent)
    except OSError as error:
        raise UserError(f"file {file} cannot be written: {error.strerror or error}; set {option} to a file that can "
                        "be") from None


def _make_writable(folder: Path) -> None:
    """Makes a folder where there is none. Raises `OSError` where nothing can be written into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a `log.jsonl`; a half-written last line is left out."""
    return [record for _, record in _numbered(path)]


def numbered_log(path: Path) -> list[tuple[int, Any]]:
    """What the lines of a user's file of JSON lines hold, with their numbers; a half-written line is left out.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return list(_numbered(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{path} cannot be read as lines of JSON: {reason}; mend it, or give another folder") from None


def _numbered(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield number, json.loads(line)
        except ValueError:
            continue


def cut_half_line(path: Path) -> None:
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


def write_json(path: Path, content: Any) -> None:
    """Writes JSON aside and renames it into place."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def replacing(target: Path) -> Iterator[TextIO]:
    """A UTF-8 file that gets its name, in place of one that has it, when it is complete; else nothing is left of it.

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
    """Writes a file aside and renames it into place, so that a kill never leaves a part of it under its name."""
    with replacing(path) as stream:
        stream.write(content)
