"""Downloads, and what is unpacked from them: whole, of bounded size, and nothing that was not asked for.

A server may send anything in place of a corpus: an error page, half of an archive, a link out of the folder, a file
without end. What is written here is a plain file at a path that the caller has chosen.
"""

from __future__ import annotations

import codecs
import fnmatch
import os
import re
import secrets
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from gzip import BadGzipFile
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO

import requests
from xopen import xopen

from deepnmt.data.text import COMPRESSED
from deepnmt.errors import UserError
from deepnmt.progress import show_progress

SECONDS = 30.0  # without an answer of a server
LARGEST = 100 * 10**9  # bytes of a file that is downloaded or unpacked
SPARE = 10**9  # bytes of the disk that stay free
_BLOCK = 1 << 20
_NO_HEAD = (403, 405, 501)  # what servers answer that know GET alone, or have signed an address for it
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html|head|body)\b",
                   re.IGNORECASE | re.DOTALL)
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError, NotImplementedError, RuntimeError,
           ValueError, BadGzipFile)  # what the modules raise at damage, passwords and unknown methods


def size_of(url: str) -> int | None:
    """The bytes of a file on a server, None where it does not say. Raises `UserError`."""
    try:
        answer = requests.head(url, allow_redirects=True, timeout=SECONDS)
        if answer.status_code in _NO_HEAD:
            return None
        answer.raise_for_status()
        return _length(answer)
    except (requests.RequestException, EOFError) as error:
        raise unreachable(url, error) from None


def unreachable(url: str, error: Exception) -> UserError:
    return UserError(f"{url} cannot be fetched ({str(error)[:300]}); try again later, or on a machine with a network "
                     "and copy the text's folder")


def download(url: str, target: Path) -> None:
    """Downloads a whole file, or nothing.

    Raises:
        UserError: the server cannot be reached, says how much it sends and sends less, sends too much or a web page;
            or the file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".tmp-{secrets.token_hex(4)}")
    try:
        with requests.get(url, stream=True, timeout=SECONDS, headers={"Accept-Encoding": "identity"}) as answer:
            answer.raise_for_status()
            whole = _length(answer)
            done = _write(answer.iter_content(_BLOCK), part, url, whole)
        if whole is not None and done != whole:
            raise EOFError(f"{done:,} of {whole:,} bytes came")
        with part.open("rb") as file:
            require_no_page(file, url)
        os.replace(part, target)
    except (requests.RequestException, EOFError) as error:
        raise unreachable(url, error) from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}; give another folder in the "
                        "environment variable MTDATA") from None
    finally:
        part.unlink(missing_ok=True)


def _length(answer: requests.Response) -> int | None:
    """The bytes that a server announces, if it does. Raises `EOFError` where they are no number."""
    length = answer.headers.get("content-length")
    if length is None:
        return None
    if not length.isdecimal() or len(length) > 20:
        raise EOFError(f"the server says that it sends {length[:50]!r} bytes, which is no number")
    return int(length)


def _write(blocks: Iterable[bytes], target: Path, name: str, whole: int | None = None) -> int:
    """Writes a new file and returns its size. Raises `UserError` before it becomes too large, or the disk full."""
    limit = min(LARGEST, shutil.disk_usage(target.parent).free - SPARE)
    too_large = UserError(f"{name} is larger than {max(limit, 0):,} bytes, as many as the disk of {target.parent} or "
                          f"deepnmt's limit of {LARGEST:,} allows; make room, or take another corpus")
    if whole is not None and whole > limit:
        raise too_large
    done = 0
    shown = name.replace("{", "(").replace("}", ")")
    with (target.open("xb") as file,
          show_progress(f"{shown}: {{:,}} bytes", unit="B", unit_scale=True, leave=False,
                        desc=name.rpartition("/")[2], total=whole) as progress):
        for block in blocks:
            done += len(block)
            if done > limit:
                raise too_large
            file.write(block)
            progress(done)
    return done


def require_no_page(file: IO[bytes], name: str) -> None:
    """Raises `UserError` where a file begins as a web page does, which servers send in place of what has moved."""
    if _PAGE.match(file.read(2048)):
        raise UserError(f"{name} is a web page, not a corpus; open it in a browser to see where the corpus is now, and "
                        "put its files there yourself")


def require_text(file: Path, name: str, to_its_end: bool) -> None:
    """Raises `UserError` where a file, which may be packed, is a web page or not UTF-8, of which only the beginning is
    read unless `to_its_end`."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    try:
        with _opened(file) as stream:
            require_no_page(stream, name)
        with _opened(file) as stream:
            while to_its_end and (block := stream.read(_BLOCK)):
                decoder.decode(block)
                done += len(block)
                if done > LARGEST:
                    raise UserError(f"{name} unpacks to more than {LARGEST:,} bytes; take another corpus")
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not valid UTF-8 ({error.reason} after {done:,} bytes); take another corpus, or put "
                        "the text's files there yourself") from None
    except (OSError, *_BROKEN) as error:
        raise UserError(f"{name} is damaged ({error or type(error).__name__}); try again later") from None


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked as its name says."""
    with (xopen(file, "rb", threads=0) if file.suffix in COMPRESSED else file.open("rb")) as stream:
        yield stream


# -- archives ----------------------------------------------------------------------------------------------------------


def unpack(archive: Path, patterns: Sequence[str], folder: Path) -> list[Path]:
    """Unpacks the files that patterns name, and nothing else, from a ZIP or a TAR of any compression.

    Args:
        patterns: each for one file: its name, or one with * and ?.
        folder: where they are written, by their number and the last part of their name.

    Returns:
        The files, in the order of the patterns.

    Raises:
        UserError: it is no archive, or damaged; there is no such file, or more than one; it is no plain file.
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                return _unpack_zip(packed, archive, patterns, folder)
        with tarfile.open(archive) as packed:
            return _unpack_tar(packed, archive, patterns, folder)
    except (OSError, *_BROKEN) as error:
        if getattr(error, "errno", None):
            raise UserError(f"{archive} cannot be unpacked into {folder}: {error}") from None
        raise UserError(f"{archive} is no whole ZIP or TAR archive ({error or type(error).__name__}), so no "
                        f"{patterns[0]} can be unpacked from it; try again later, or put the text's files there "
                        "yourself") from None


def _unpack_zip(packed: zipfile.ZipFile, archive: Path, patterns: Sequence[str], folder: Path) -> list[Path]:
    members = {member.filename: member for member in packed.infolist()}
    files: list[Path] = []
    for name in _named(members, archive, patterns):
        mode = members[name].external_attr >> 16  # 0 where a system without modes has packed it
        _require_plain(members[name].is_dir() is False and stat.S_IFMT(mode) in (0, stat.S_IFREG), archive, name)
        with packed.open(name) as stream:
            files.append(_unpacked(stream, folder, len(files), archive, name))
    return files


def _unpack_tar(packed: tarfile.TarFile, archive: Path, patterns: Sequence[str], folder: Path) -> list[Path]:
    members = {member.name.removeprefix("./"): member for member in packed}  # to its end, which may be missing
    files: list[Path] = []
    for name in _named(members, archive, patterns):
        _require_plain(members[name].isreg(), archive, name)
        stream = packed.extractfile(members[name])
        assert stream is not None, "it is a plain file"
        with stream:
            files.append(_unpacked(stream, folder, len(files), archive, name))
    return files


def _named(names: Iterable[str], archive: Path, patterns: Sequence[str]) -> Iterator[str]:
    """The name that each pattern means."""
    for pattern in patterns:
        matches = [name for name in names if name == pattern]
        matches = matches or [name for name in names if PurePosixPath(name).match(pattern)]
        matches = matches or fnmatch.filter(names, pattern)
        if len(matches) != 1:
            has = "no such file" if not matches else f"{len(matches)}: {', '.join(matches[:3])}, ..."
            raise UserError(f"{archive} should hold one file {pattern}, but has {has}; mtdata's index may be older "
                            "than the archive: try a newer mtdata, or put the text's files there yourself")
        yield matches[0]


def _require_plain(plain: bool, archive: Path, name: str) -> None:
    if not plain:
        raise UserError(f"{name} in {archive} is a link, a folder or a device, not a file, and is not unpacked; put "
                        "the text's files there yourself")


def _unpacked(stream: IO[bytes], folder: Path, number: int, archive: Path, name: str) -> Path:
    target = folder / f"{number}-{PurePosixPath(name).name}"
    _write(iter(partial(stream.read, _BLOCK), b""), target, f"{archive}/{name}")
    return target
