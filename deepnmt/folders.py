"""Folders that are there whole or not at all, and that can tell whether they still are.

A folder is written as `.tmp-*`: its files, each synced, then `manifest.json` with their sizes and SHA-256; then the
folder is synced and renamed, and its parent synced. What it replaces is renamed to `.before-*` until then, what is
deleted to `.trash-*`. So at any moment a folder under its own name was whole once, its manifest says whether it still
is, and `recover_after_kill` puts back what a kill left under `.before-*` alone; until then readers find it there
(`displaced`).
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

import deepnmt
from deepnmt.errors import UserError
from deepnmt.files import sha256

FORMAT = 1
MANIFEST = "manifest.json"
FAIL_POINTS = ("folder made", "folder synced", "predecessor moved", "renamed", "parent synced", "set aside", "trashed")
_HEX = "[0-9a-f]" * 8  # what `_aside` ends a name with


class CheckpointWriteError(UserError):
    """A checkpoint could not be written (full disk, read-only folder); those written before are untouched."""


class DamagedCheckpoint(UserError):  # noqa: N818 (a state of the folder, not of the program)
    """A folder is not a whole checkpoint; the message names the folder, the file and what is wrong with it."""

    def __init__(self, folder: Path, fault: str) -> None:
        super().__init__(f"checkpoint {folder} is damaged: {fault}; copy it anew from where it came, or delete it")


def fail_point(name: str) -> None:
    """For tests: kills this process here if the environment variable DEEPNMT_FAIL_POINT is `name`.

    The names are those of FAIL_POINTS and, for each file, "<file> written" and "<file> synced".
    """
    if os.environ.get("DEEPNMT_FAIL_POINT") == name:
        os.kill(os.getpid(), signal.SIGKILL)


# -- writing -----------------------------------------------------------------------------------------------------------


def commit_folder(target: Path, files: Mapping[str, Callable[[Path], object]], facts: Mapping[str, Any]) -> None:
    """Writes a folder; one already there under that name is replaced once the new one is whole.

    A full folder cannot be renamed over, so there is a moment in which neither has the name. A kill in it is made good
    by the next `recover_after_kill`, a fault at once: in both cases the one that was there is put back.

    Args:
        target: the folder. Its parent is made where it is missing.
        files: name to the function that writes that file.
        facts: what else the manifest says.

    Raises:
        CheckpointWriteError: disk full, no permission, or another fault of the file system; nothing half-made is left.
    """
    temporary, before = _aside(target, ".tmp"), _aside(target, ".before")

    def sync_file(name: str) -> None:
        fail_point(f"{name} written")
        _sync(temporary / name)
        fail_point(f"{name} synced")

    try:
        with _reporting(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            fail_point("folder made")
            entries = {}
            for name, write in files.items():
                write(temporary / name)
                sync_file(name)
                entries[name] = {"size": (temporary / name).stat().st_size, "sha256": sha256(temporary / name)}
            manifest = {"format": FORMAT, "deepnmt": deepnmt.__version__, **facts, "files": entries}
            manifest["sha256"] = _manifest_hash(manifest)
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            sync_file(MANIFEST)
            _sync(temporary)
            fail_point("folder synced")
            if target.exists():
                target.rename(before)
                fail_point("predecessor moved")
            temporary.rename(target)
            fail_point("renamed")
            _sync(target.parent)
            fail_point("parent synced")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # it stays for the next `recover_after_kill`
            _put_back(before, target)


def set_aside(folder: Path) -> None:
    """Renames a folder to `set-aside-*`. Raises `CheckpointWriteError`."""
    with _reporting(folder):
        folder.rename(_aside(folder, "set-aside"))
    fail_point("set aside")


def delete(folder: Path) -> None:
    """Deletes a folder, never leaving a part of it under its name. Raises `CheckpointWriteError`."""
    trash = _aside(folder, ".trash")
    with _reporting(folder):
        folder.rename(trash)
    fail_point("trashed")
    shutil.rmtree(trash, ignore_errors=True)


@contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    """Turns a fault of the file system into `CheckpointWriteError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointWriteError(f"checkpoint folder {folder} cannot be written: {reason}; make room or give write "
                                   "permission; the checkpoints before it are untouched") from error


def _sync(path: Path) -> None:
    """Returns when the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(folder: Path, prefix: str) -> Path:
    return folder.parent / f"{prefix}-{folder.name}-{secrets.token_hex(4)}"


# -- after a kill ------------------------------------------------------------------------------------------------------


def recover_after_kill(parent: Path, names: str) -> None:
    """Clears up after a killed `commit_folder` or `delete` of folders with such names (a glob) in `parent`.

    A folder that was moved for its successor and has none is put back; everything else is deleted. To be called before
    anybody looks for such folders in order to go on with them.

    Raises:
        CheckpointWriteError: one cannot be put back.
    """
    for path in parent.glob(f".before-{names}-{_HEX}"):
        target = parent / own_name(path)
        try:
            _put_back(path, target)
        except OSError as error:
            if not os.path.lexists(target):
                raise CheckpointWriteError(
                    f"{path} is what a kill left of {target.name} and cannot get its name back: "
                    f"{error.strerror or error}; give write permission for {parent}, or rename it yourself") from error
    for path in [*parent.glob(f".tmp-{names}-{_HEX}"), *parent.glob(f".trash-{names}-{_HEX}")]:
        shutil.rmtree(path, ignore_errors=True)


def displaced(parent: Path, names: str) -> list[Path]:
    """Folders with such names (a glob) in `parent` that were moved for a successor, which a kill kept from coming: what
    `recover_after_kill` would put back. Who only reads takes them from where they are."""
    return [path for path in sorted(parent.glob(f".before-{names}-{_HEX}"))
            if not os.path.lexists(parent / own_name(path))]


def locate(folder: Path) -> Path:
    """`folder`, or where it was moved to, if that is all there is of it (see `displaced`)."""
    return folder if os.path.lexists(folder) else next(iter(displaced(folder.parent, glob.escape(folder.name))), folder)


def own_name(folder: Path) -> str:
    """The name of a folder, moved or not."""
    moved = re.fullmatch(rf"\.before-(.+)-{_HEX}", folder.name)
    return moved[1] if moved else folder.name


def _put_back(before: Path, target: Path) -> None:
    """Gives a folder that was moved its name back if nobody has it, and deletes it otherwise. Raises `OSError`."""
    if os.path.lexists(target):
        shutil.rmtree(before, ignore_errors=True)
    elif before.exists():
        before.rename(target)
        _sync(target.parent)


# -- checking ----------------------------------------------------------------------------------------------------------


def checked_manifest(folder: Path, files: Collection[str] | None, required: Collection[str]) -> dict[str, Any]:
    """The manifest, once it and those of `files` that it lists (None: all of them) are found whole.

    Raises:
        DamagedCheckpoint: the manifest is missing, unreadable, altered or of another format; it names a file outside
            the folder or lacks one of `required`; one of `files` is missing, a link, or not as long as or not what it
            was.
    """
    file = folder / MANIFEST
    if file.is_symlink() or not file.is_file():
        raise DamagedCheckpoint(folder, f"it holds no {MANIFEST}, so it is no checkpoint or was never finished")
    manifest = read_json(folder, MANIFEST)
    if manifest.get("format") != FORMAT:
        raise DamagedCheckpoint(folder, f"its format is {manifest.get('format')!r}, this deepnmt reads {FORMAT}")
    if manifest.get("sha256") != _manifest_hash(manifest):
        raise DamagedCheckpoint(folder, f"{MANIFEST} is not what was written")
    entries = manifest.get("files")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise DamagedCheckpoint(folder, f"{MANIFEST} lists no files")
    if foreign := sorted(name for name in entries if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name)):
        raise DamagedCheckpoint(folder, f"{MANIFEST} names {foreign[0]!r}, which no checkpoint has")
    if lacking := sorted(set(required) - entries.keys()):
        raise DamagedCheckpoint(folder, f"{MANIFEST} does not name {lacking[0]}")
    for name in sorted(entries.keys() if files is None else entries.keys() & files):
        _check_file(folder, name, entries[name])
    return manifest


def _check_file(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    file = folder / name
    if file.is_symlink() or not file.is_file():
        raise DamagedCheckpoint(folder, f"{name} is {'not a plain file' if os.path.lexists(file) else 'missing'}")
    try:
        size = file.stat().st_size
        if size != entry.get("size"):
            raise DamagedCheckpoint(folder, f"{name} has {size} bytes where its manifest says {entry.get('size')}")
        if sha256(file) != entry.get("sha256"):
            raise DamagedCheckpoint(folder, f"{name} has another SHA-256 than when it was written")
    except OSError as error:
        raise DamagedCheckpoint(folder, f"{name} cannot be read ({error.strerror or error})") from None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a folder. Raises `DamagedCheckpoint` where there is none."""
    try:
        content = json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(folder, f"{name} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise DamagedCheckpoint(folder, f"{name} is not a JSON object")
    return content


def _manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Of everything but the hash itself."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
