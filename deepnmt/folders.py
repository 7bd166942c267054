"""Folders that appear complete or not at all, with a manifest to detect later damage.

A folder is written as `.tmp-*`: first its files, each synced to disk, then `manifest.json` with their sizes and
SHA-256. Then the folder is synced and renamed, and its parent synced. A folder that it replaces is renamed to
`.before-*` first; a folder to be deleted is renamed to `.trash-*`. So a folder under its own name was complete when it
got that name, and its manifest shows whether it still is. If a kill leaves only the `.before-*`, `recover_after_kill`
renames it back; until then readers find it with `displaced`.
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
_HEX = "[0-9a-f]" * 8  # the end of names made by `_temporary_name`


class CheckpointWriteError(UserError):
    """A checkpoint could not be written (full disk, read-only folder); earlier ones are untouched."""


class DamagedCheckpoint(UserError):  # noqa: N818 (a state of the folder, not of the program)
    """A folder is not a complete checkpoint; the message names the folder, the file and the damage."""

    def __init__(self, folder: Path, damage: str) -> None:
        super().__init__(f"checkpoint {folder} is damaged: {damage}; restore it from a copy, or delete it")


def fail_point(name: str) -> None:
    """For tests: kills this process here if the environment variable DEEPNMT_FAIL_POINT is `name`.

    The names are those of FAIL_POINTS and, for each file, "<file> written" and "<file> synced".
    """
    if os.environ.get("DEEPNMT_FAIL_POINT") == name:
        os.kill(os.getpid(), signal.SIGKILL)


# -- writing -----------------------------------------------------------------------------------------------------------


def commit_folder(target: Path, files: Mapping[str, Callable[[Path], object]], facts: Mapping[str, Any]) -> None:
    """Writes a folder, and replaces an existing one of that name when the new one is complete.

    A folder that is not empty cannot be renamed over, so for a moment neither folder has the name. If the process is
    killed then, the next `recover_after_kill` renames the old folder back; after an exception that happens at once.

    Args:
        target: the folder. Its parent is made if it does not exist.
        files: name of each file, and the function that writes it.
        facts: further entries of the manifest.

    Raises:
        CheckpointWriteError: disk full, no permission, or another error of the file system; no partial folder is left.
    """
    temporary, before = _temporary_name(target, ".tmp"), _temporary_name(target, ".before")

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
        with suppress(OSError):  # then the next `recover_after_kill` tries again
            _restore_or_discard(before, target)


def set_aside(folder: Path) -> None:
    """Renames a folder to `set-aside-*`. Raises `CheckpointWriteError`."""
    with _reporting(folder):
        folder.rename(_temporary_name(folder, "set-aside"))
    fail_point("set aside")


def delete(folder: Path) -> None:
    """Deletes a folder without ever leaving a part of it under its name. Raises `CheckpointWriteError`."""
    trash = _temporary_name(folder, ".trash")
    with _reporting(folder):
        folder.rename(trash)
    fail_point("trashed")
    shutil.rmtree(trash, ignore_errors=True)


@contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    """Turns errors of the file system into `CheckpointWriteError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointWriteError(f"checkpoint folder {folder} cannot be written: {reason}; free disk space or give "
                                   "write permission; earlier checkpoints are untouched") from error


def _sync(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_name(folder: Path, prefix: str) -> Path:
    return folder.parent / f"{prefix}-{folder.name}-{secrets.token_hex(4)}"


# -- after a kill ------------------------------------------------------------------------------------------------------


def recover_after_kill(parent: Path, names: str) -> None:
    """Cleans up after a killed `commit_folder` or `delete` of folders in `parent` whose names match the glob `names`.

    A folder that was renamed to make way for a new one gets its name back if the new one is missing. Everything else
    is deleted. Call this before looking for such folders to resume from.

    Raises:
        CheckpointWriteError: a folder cannot be renamed back.
    """
    for path in parent.glob(f".before-{names}-{_HEX}"):
        target = parent / original_name(path)
        try:
            _restore_or_discard(path, target)
        except OSError as error:
            if not os.path.lexists(target):
                raise CheckpointWriteError(
                    f"{path} is {target.name}, displaced by a killed process, and cannot be renamed back: "
                    f"{error.strerror or error}; give write permission for {parent}, or rename it yourself") from error
    for path in [*parent.glob(f".tmp-{names}-{_HEX}"), *parent.glob(f".trash-{names}-{_HEX}")]:
        shutil.rmtree(path, ignore_errors=True)


def displaced(parent: Path, names: str) -> list[Path]:
    """Folders in `parent`, by a glob of their names, that a killed `commit_folder` left under `.before-*` only.

    `recover_after_kill` would rename them back. Code that only reads uses them where they are.
    """
    return [path for path in sorted(parent.glob(f".before-{names}-{_HEX}"))
            if not os.path.lexists(parent / original_name(path))]


def locate(folder: Path) -> Path:
    """`folder`, or its present path if it is `displaced`."""
    return folder if os.path.lexists(folder) else next(iter(displaced(folder.parent, glob.escape(folder.name))), folder)


def original_name(folder: Path) -> str:
    """The name of a folder, without the prefix and suffix of a `displaced` one."""
    moved = re.fullmatch(rf"\.before-(.+)-{_HEX}", folder.name)
    return moved[1] if moved else folder.name


def _restore_or_discard(before: Path, target: Path) -> None:
    """Renames a displaced folder to `target`, or deletes it if `target` exists. Raises `OSError`."""
    if os.path.lexists(target):
        shutil.rmtree(before, ignore_errors=True)
    elif before.exists():
        before.rename(target)
        _sync(target.parent)


# -- checking ----------------------------------------------------------------------------------------------------------


def verify_manifest(folder: Path, files: Collection[str] | None, required: Collection[str]) -> dict[str, Any]:
    """Checks a folder's manifest and those of `files` that it lists (None: all files), and returns the manifest.

    Raises:
        DamagedCheckpoint: the manifest is missing, unreadable, altered or of another format, names a file outside the
            folder, or lacks one of `required`; or one of `files` is missing, is a link, or has another size or hash.
    """
    file = folder / MANIFEST
    if file.is_symlink() or not file.is_file():
        raise DamagedCheckpoint(folder, f"{MANIFEST} is missing, so it is no checkpoint or was not completed")
    manifest = read_json(folder, MANIFEST)
    if manifest.get("format") != FORMAT:
        raise DamagedCheckpoint(folder, f"its format is {manifest.get('format')!r}, but this deepnmt reads {FORMAT}")
    if manifest.get("sha256") != _manifest_hash(manifest):
        raise DamagedCheckpoint(folder, f"{MANIFEST} has been altered")
    entries = manifest.get("files")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise DamagedCheckpoint(folder, f"{MANIFEST} lists no files")
    if foreign := sorted(name for name in entries if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name)):
        raise DamagedCheckpoint(folder, f"{MANIFEST} names {foreign[0]!r}, which is not a valid file name")
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
            raise DamagedCheckpoint(folder, f"{name} has {size} bytes, but {entry.get('size')} according to {MANIFEST}")
        if sha256(file) != entry.get("sha256"):
            raise DamagedCheckpoint(folder, f"the SHA-256 of {name} differs from that in {MANIFEST}")
    except OSError as error:
        raise DamagedCheckpoint(folder, f"{name} cannot be read ({error.strerror or error})") from None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a folder. Raises `DamagedCheckpoint` if it cannot be read."""
    try:
        content = json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(folder, f"{name} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise DamagedCheckpoint(folder, f"{name} is not a JSON object")
    return content


def _manifest_hash(manifest: Mapping[str, Any]) -> str:
    """The hash of a manifest without its own `sha256` entry."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
