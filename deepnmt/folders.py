"""Folders that appear complete or not at all, with a manifest to detect later damage: checkpoints, prepared data and
exported models.

A folder is written as `.tmp-*`: first its files, each synced to disk, then the manifest with their sizes and
SHA-256. Then the folder is synced and renamed, and its parent synced. A folder that it replaces is renamed to
`.before-*` first; a folder to be deleted is renamed to `.trash-*`. So a folder under its own name was complete when it
got that name, and its manifest shows whether it still is. If a kill leaves only the `.before-*`, `recover_after_kill`
renames it back; until then readers find it with `displaced`.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from deepnmt.config.fields import FILE_NAME
from deepnmt.errors import UserError
from deepnmt.files import sha256
from deepnmt.version import __version__

Buffer = bytes | memoryview
Entry = dict[str, int | str]  # of a file in the manifest: its "size" in bytes and its "sha256"

FORMAT, SHARDED = 1, 2  # of the manifest; the second where the tensors are in shards, see `checkpoint/tensors.py`
_BLOCK = 8 << 20  # bytes that are hashed and written at a time
MANIFEST = "manifest.json"
_HEX = "[0-9a-f]" * 8  # the end of names made by `_temporary_name`


@dataclass(frozen=True)
class Kind:
    """A kind of such folders.

    Attributes:
        name: in messages.
        formats: of its manifest that can be read; none: all.
        damaged: what to do about a damaged one.
        unwritable: what to do where one cannot be written.
        manifest: the name of the manifest's file.
    """

    name: str
    formats: tuple[int | str, ...]
    damaged: str
    unwritable: str
    manifest: str = MANIFEST


CHECKPOINT = Kind("checkpoint", (FORMAT, SHARDED), "restore it from a copy, or delete it",
                  "free disk space or give write permission; earlier checkpoints are untouched")


class FolderWriteError(UserError):
    """A folder could not be written (full disk, no permission); those that were there are untouched."""


class DamagedFolder(UserError):  # noqa: N818 (a state of the folder, not of the program)
    """A folder is not complete; the message names the folder, the file and the damage."""

    def __init__(self, folder: Path, damage: str, kind: Kind = CHECKPOINT) -> None:
        super().__init__(f"{kind.name} {folder} is damaged: {damage}; {kind.damaged}")


# -- writing -----------------------------------------------------------------------------------------------------------


def commit_folder(target: Path, files: Mapping[str, Iterable[Buffer]], facts: Mapping[str, Any]) -> None:
    """Writes a checkpoint, and replaces an existing folder of that name when the new one is complete.

    Args:
        target: the folder. Its parent is made if it does not exist.
        files: name of each file, and its content, piece by piece.
        facts: further entries of the manifest.

    Raises:
        FolderWriteError: disk full, no permission, or another error of the file system; no partial folder is left.
    """
    with new_folder(target) as temporary:
        entries = {name: write_file(temporary / name, content, target) for name, content in files.items()}
        publish(temporary, target, entries, facts)


@contextmanager
def new_folder(target: Path, kind: Kind = CHECKPOINT) -> Iterator[Path]:
    """Makes the folder under whose temporary name the files of `target` are written, by this process or others, until
    `publish`. Without that it is removed at the end. Raises `FolderWriteError`."""
    temporary = _temporary_name(target, ".tmp")
    try:
        with reporting(target, kind):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # then the next `recover_after_kill` tries again
            _restore_or_discard(_before(temporary), target)


@contextmanager
def whole_folder(target: Path, kind: Kind) -> Iterator[Path]:
    """Makes a folder without a manifest, whose files are written under a temporary name. It gets its own at the end of
    the block, and after an exception there is nothing, nor the folders that were made for it. `target` must not exist.
    Raises `FolderWriteError`."""
    recover(target)
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        with new_folder(target, kind) as temporary, reporting(target, kind):
            yield temporary
            for path in (*temporary.iterdir(), temporary):
                _sync(path)
            temporary.rename(target)
            _sync(target.parent)
    finally:
        with suppress(OSError):  # the first is not empty if all went well
            for parent in made:
                parent.rmdir()


def write_file(file: Path, content: Iterable[Buffer], target: Path, kind: Kind = CHECKPOINT) -> Entry:
    """Writes a file and waits until it is on disk; returns its entry in the manifest of the folder `target`. The hash
    is of what was to be written, so it also tells whether that is what the disk holds. Raises `FolderWriteError`.
    """
    digest = hashlib.sha256()
    size = 0
    with reporting(target, kind):
        with open(file, "xb", buffering=0) as stream:
            for piece in content:
                rest = memoryview(piece).cast("B")
                size += len(rest)
                while rest:
                    block, rest = rest[:_BLOCK], rest[_BLOCK:]
                    digest.update(block)
                    while block:
                        block = block[stream.write(block):]
            os.fsync(stream.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def entries_of(temporary: Path, target: Path, kind: Kind) -> dict[str, Entry]:
    """Waits until the files in a folder are on disk, whoever wrote them; returns the entries of all for the manifest.
    Folders in it have manifests of their own. Raises `FolderWriteError`."""
    entries: dict[str, Entry] = {}
    with reporting(target, kind):
        for file in sorted(temporary.iterdir()):
            if file.is_dir():
                continue
            _sync(file)
            entries[file.name] = {"size": file.stat().st_size, "sha256": sha256(file)}
    return entries


def publish(temporary: Path, target: Path, entries: Mapping[str, Entry], facts: Mapping[str, Any],
            kind: Kind = CHECKPOINT) -> None:
    """Completes a folder, whose files have these entries, with its manifest, and gives it the name `target`.

    A folder that is not empty cannot be renamed over, so for a moment neither folder has the name. If the process is
    killed then, the next `recover_after_kill` renames the old folder back; after an exception `new_folder` does at
    once. Raises `FolderWriteError`.
    """
    manifest: dict[str, Any] = {"format": FORMAT, "deepnmt": __version__, **facts, "files": dict(entries)}
    manifest["sha256"] = _manifest_hash(manifest)
    write_file(temporary / kind.manifest, [json.dumps(manifest, indent=1).encode()], target, kind)
    with reporting(target, kind):
        _sync(temporary)
        if target.exists():
            target.rename(_before(temporary))
        temporary.rename(target)
        _sync(target.parent)


def set_aside(folder: Path) -> None:
    """Renames a folder to `set-aside-*`. Raises `FolderWriteError`."""
    with reporting(folder):
        folder.rename(_temporary_name(folder, "set-aside"))


def delete(folder: Path) -> None:
    """Deletes a folder without ever leaving a part of it under its name. Raises `FolderWriteError`."""
    trash = _temporary_name(folder, ".trash")
    with reporting(folder):
        folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


@contextmanager
def reporting(folder: Path, kind: Kind = CHECKPOINT) -> Iterator[None]:
    """Turns errors of the file system into `FolderWriteError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FolderWriteError(f"{kind.name} folder {folder} cannot be written: {reason}; {kind.unwritable}",
                               getattr(error, "errno", None)) from error


def _sync(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems know it of files
            raise
    finally:
        os.close(descriptor)


def _temporary_name(folder: Path, prefix: str) -> Path:
    return folder.parent / f"{prefix}-{folder.name}-{secrets.token_hex(4)}"


def _before(temporary: Path) -> Path:
    """Where `publish` moves the folder that it replaces."""
    return temporary.with_name(temporary.name.replace(".tmp", ".before", 1))


# -- after a kill ------------------------------------------------------------------------------------------------------


def recover_after_kill(parent: Path, names: str) -> None:
    """Cleans up after a killed `commit_folder` or `delete` of folders in `parent` whose names match the glob `names`.

    A folder that was renamed to make way for a new one gets its name back if the new one is missing. Everything else
    is deleted. Call this before looking for such folders to resume from.

    Raises:
        FolderWriteError: a folder cannot be renamed back.
    """
    for path in parent.glob(f".before-{names}-{_HEX}"):
        target = parent / original_name(path)
        try:
            _restore_or_discard(path, target)
        except OSError as error:
            if not os.path.lexists(target):
                raise FolderWriteError(
                    f"{path} is {target.name}, displaced by a killed process, and cannot be renamed back: "
                    f"{error.strerror or error}; give write permission for {parent}, or rename it yourself",
                    error.errno) from error
    for path in [*parent.glob(f".tmp-{names}-{_HEX}"), *parent.glob(f".trash-{names}-{_HEX}")]:
        shutil.rmtree(path, ignore_errors=True)


def displaced(parent: Path, names: str) -> list[Path]:
    """Folders in `parent`, by a glob of their names, that a killed `commit_folder` left under `.before-*` only.

    `recover_after_kill` would rename them back. Code that only reads uses them where they are.
    """
    paths = sorted(parent.glob(f".before-{names}-{_HEX}"))
    return [path for path in paths if not os.path.lexists(parent / original_name(path))]


def recover(target: Path) -> None:
    """`recover_after_kill` of this folder alone. Raises `FolderWriteError`."""
    recover_after_kill(target.parent, glob.escape(target.name))


def locate(folder: Path) -> Path:
    """`folder`, or its present path if it is `displaced`."""
    if os.path.lexists(folder):
        return folder
    paths = displaced(folder.parent, glob.escape(folder.name))
    return paths[0] if paths else folder


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


def read_manifest(folder: Path, kind: Kind = CHECKPOINT) -> dict[str, Any]:
    """A folder's manifest.

    Raises:
        DamagedFolder: it is missing, unreadable, altered or of another format, or names a file outside the folder.
    """
    name = kind.manifest
    file = folder / name
    if file.is_symlink() or not file.is_file():
        raise DamagedFolder(folder, f"{name} is missing, so it is no {kind.name} or was not completed", kind)
    manifest = read_json(folder, name, kind)
    if kind.formats and manifest.get("format") not in kind.formats:
        raise DamagedFolder(folder, f"its format is {manifest.get('format')!r}, but this deepnmt reads "
                                    f"{' and '.join(map(str, kind.formats))}", kind)
    if manifest.get("sha256") != _manifest_hash(manifest):
        raise DamagedFolder(folder, f"{name} has been altered", kind)
    entries = manifest.get("files")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise DamagedFolder(folder, f"{name} lists no files", kind)
    for entry in sorted(entries):
        if not re.fullmatch(FILE_NAME, entry):
            raise DamagedFolder(folder, f"{name} names {entry!r}, which is not a valid file name", kind)
    return manifest


def check_files(
    folder: Path, manifest: Mapping[str, Any], files: Collection[str] | None, required: Collection[str],
    kind: Kind = CHECKPOINT,
) -> None:
    """Checks those of `files` that a folder's manifest lists (None: all that it lists).

    Raises:
        DamagedFolder: the manifest lacks one of `required`; or one of `files` is missing, is a link, or has another
            size or hash.
    """
    entries = manifest["files"]
    for name in sorted(required):
        require_named(folder, manifest, name, kind)
    checked = sorted(entries)
    if files is not None:
        checked = [name for name in checked if name in files]
    check_sizes(folder, manifest, checked, kind)
    with ThreadPoolExecutor() as pool:  # hashing lets the others run
        hashes = pool.map(lambda name: _hash(folder, name, kind), checked)
        for name, digest in zip(checked, hashes, strict=True):
            if digest != entries[name].get("sha256"):
                raise DamagedFolder(folder, f"the SHA-256 of {name} differs from that in {kind.manifest}", kind)


def require_named(folder: Path, manifest: Mapping[str, Any], name: str, kind: Kind = CHECKPOINT) -> Path:
    """The path of a file that the manifest names. Others that lie beside them, say of a run that was copied over an
    older one, are nobody's. Raises `DamagedFolder`."""
    if name not in manifest["files"]:
        raise DamagedFolder(folder, f"{kind.manifest} does not name {name}", kind)
    return folder / name


def check_sizes(folder: Path, manifest: Mapping[str, Any], files: Iterable[str], kind: Kind = CHECKPOINT) -> None:
    """Compares the sizes of files with the manifest, which is done at once. Raises `DamagedFolder`, see
    `check_files`."""
    for name in files:
        file, entry = folder / name, manifest["files"][name]
        if not os.path.lexists(file):
            raise DamagedFolder(folder, f"{name} is missing", kind)
        if file.is_symlink() or not file.is_file():
            raise DamagedFolder(folder, f"{name} is not a plain file", kind)
        size = file.stat().st_size
        if size != entry.get("size"):
            raise DamagedFolder(folder, f"{name} has {size} bytes, but {entry.get('size')} according to "
                                        f"{kind.manifest}", kind)


def _hash(folder: Path, name: str, kind: Kind) -> str:
    try:
        return sha256(folder / name)
    except OSError as error:
        raise DamagedFolder(folder, f"{name} cannot be read ({error.strerror or error})", kind) from None


def read_json(folder: Path, name: str, kind: Kind = CHECKPOINT) -> dict[str, Any]:
    """The JSON object in a file of a folder. Raises `DamagedFolder` if it cannot be read."""
    try:
        content = json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFolder(folder, f"{name} cannot be read ({error})", kind) from None
    if not isinstance(content, dict):
        raise DamagedFolder(folder, f"{name} is not a JSON object", kind)
    return content


def _manifest_hash(manifest: Mapping[str, Any]) -> str:
    """The hash of a manifest without its own `sha256` entry."""
    return hash_of({key: value for key, value in manifest.items() if key != "sha256"})


def hash_of(content: Any) -> str:
    """The SHA-256 of what JSON can say, in any order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
