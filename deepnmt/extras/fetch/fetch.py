"""`deepnmt get`: fetches the texts that a recipe names through mtdata or SacreBLEU into the files where it looks.

mtdata (Gowda et al. 2021, https://github.com/thammegowda/mtdata) knows where corpora are and reads their formats. It
takes anything for a text, so what a server sends is downloaded, unpacked and checked here (`downloads.py`). It has no
checksums, so a file beside each text, `FILE.source.json`, keeps those of what was downloaded and written. Who copies it
to another machine gets the same text there, or an error. SacreBLEU has MD5 sums of its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from deepnmt.config import Corpus, Recipe
from deepnmt.data.prepared import corpora
from deepnmt.data.text import COMPRESSED, corpora_of, read_lines, write_pairs
from deepnmt.errors import UserError, nearest
from deepnmt.extras.fetch.downloads import LARGEST, download, require_text, size_of, unpack
from deepnmt.files import reporting, sha256, table, write_json
from deepnmt.progress import print_status, show_progress


class _Download(BaseModel):
    """What was downloaded: its size and SHA-256, or the MD5 that SacreBLEU knows."""

    bytes: int | None = None
    sha256: str | None = None
    md5: str | None = None


class _Origin(BaseModel):
    """Where a text comes from, as the recipe names it."""

    mtdata: list[str] = []
    sacrebleu: str | None = None

    def __str__(self) -> str:
        return ", ".join([*self.mtdata, *filter(None, [self.sacrebleu])]) or "nothing"


class _Record(BaseModel):
    """What is known of a text that was fetched: FILE.source.json. Downloads are by their URLs."""

    origin: _Origin
    lines: int
    sha256: tuple[str, str]
    downloads: dict[str, _Download]


@dataclass
class Text:
    """A text to fetch: its name in the recipe, its files, and where it comes from."""

    name: str
    corpus: Corpus
    files: tuple[Path, Path]
    sources: list[_Source] = field(default_factory=list)

    @property
    def record(self) -> Path:
        return self.files[0].with_name(self.files[0].name + ".source.json")

    @property
    def origin(self) -> _Origin:
        return _Origin(mtdata=self.corpus.mtdata, sacrebleu=self.corpus.sacrebleu)


@dataclass
class _Source:
    """A corpus of mtdata's or a test set of SacreBLEU's (`known` is what they call it inside)."""

    name: str
    known: Any
    urls: list[str]
    licence: str


def fetch_texts(recipe: Recipe, only_say: bool) -> str:
    """Says what the texts of a recipe are, how large and under which licence, and fetches those that are missing,
    unless it is to `only_say` so.

    Returns:
        A table of the texts.

    Raises:
        UserError: the recipe names nothing to fetch, or something unknown; a server cannot be reached; a checksum is
            wrong; the disk is too small; a file is there that was not fetched.
    """
    texts: list[Text] = []
    for name, whole in corpora(recipe).items():
        for part, corpus in corpora_of(whole).items():
            if corpus.mtdata or corpus.sacrebleu:
                setting = f"data.{name}.{part}" if part else f"data.{name}"
                texts.append(Text(setting, corpus, (Path(corpus.src[0]), Path(corpus.trg[0]))))
    if not texts:
        raise UserError("the recipe names nothing to fetch; give a text of its data section mtdata: [NAME, ...] or "
                        "sacrebleu: NAME, or put the files there yourself")
    missing = [text for text in texts if not is_there(text)]
    with _mtdata_is_quiet():
        for text in missing:
            if text.corpus.mtdata:
                with reporting("mtdata's folder of downloads", "name another in the environment variable MTDATA"):
                    text.sources = _mtdata_sources(text.corpus.mtdata)
            else:
                text.sources = [_sacrebleu_source(str(text.corpus.sacrebleu), recipe)]
        sizes: dict[str, int | None] = {}
        for text in missing:
            for source in text.sources:
                for url in source.urls:
                    if url not in sizes:
                        sizes[url] = size_of(url)
        _say(missing, sizes)
        if not only_say:
            _require_room(missing, sizes)
            for text in missing:
                _fetch(text, recipe)
    rows = [["text", "lines", "file", "SHA-256"]]
    for text in texts:
        record = read_record(text)
        for side, file in enumerate(text.files):
            if record is None:
                rows.append([text.name, "-", str(file), "not fetched"])
            else:
                rows.append([text.name, f"{record.lines:,}", str(file), record.sha256[side][:16]])
    return table(rows, left=4)


def read_record(text: Text) -> _Record | None:
    """The record of a text. Raises `UserError` where there is one that cannot be read."""
    try:
        return _Record.model_validate_json(text.record.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        raise UserError(f"{text.record} is no record of deepnmt get; restore it, or remove it and the text to fetch "
                        "whatever the server has now") from None


def is_there(text: Text) -> bool:
    """Whether a text was fetched already. Raises `UserError` if files are there that were not."""
    there = [file for file in text.files if file.exists()]
    record = read_record(text)
    if record and record.origin != text.origin:
        raise UserError(f"{text.files[0]} was fetched from {record.origin}, but {text.name} names {text.origin}; "
                        f"remove it and {text.record}, or name other files")
    if not there:
        return False
    if record is None:
        raise UserError(f"{there[0]} is there already, and nothing says that it was fetched; remove it, or give "
                        f"{text.name} other files")
    for file, expected in zip(text.files, record.sha256, strict=True):
        if file.exists() and sha256(file) != expected:
            raise UserError(f"{file} is not as it was fetched (SHA-256 {expected[:16]}...); remove it to fetch it "
                            "again")
    return len(there) == 2


# -- what there is -----------------------------------------------------------------------------------------------------


def _mtdata_sources(names: Iterable[str]) -> list[_Source]:
    print_status("reading mtdata's index (the first time takes half a minute)")
    from mtdata.entry import DatasetId
    from mtdata.index import INDEX

    sources = []
    for name in names:
        try:
            key = DatasetId.parse(name)
        except Exception as error:
            raise UserError(f"mtdata name {name!r} is not of the form GROUP-NAME-VERSION-LANGUAGE-LANGUAGE ({error}); "
                            "mtdata list has all") from None
        if key not in INDEX:
            near = nearest(name, (str(known) for known in INDEX.entries if known.langs == key.langs))
            hint = f"did you mean {near}?" if near else f"mtdata list --langs {key.lang_str} has those of its languages"
            raise UserError(f"mtdata has no {name}; {hint}")
        entry = INDEX[key]
        urls = [entry.url] if isinstance(entry.url, str) else list(entry.url)
        if entry.in_ext == "opus_xces":
            urls += entry.in_paths
        licence = (entry.meta or {}).get("license") or "mtdata names none"
        cited = f"; cite {', '.join(entry.cite)} (mtdata's refs.bib)" if entry.cite else ""
        sources.append(_Source(name, entry, urls, f"{licence}{cited}"))
    return sources


def _sacrebleu_source(name: str, recipe: Recipe) -> _Source:
    from sacrebleu.dataset import DATASETS

    pair = f"{recipe.data.src_lang}-{recipe.data.trg_lang}"
    if name not in DATASETS:
        near = nearest(name, DATASETS)
        hint = f"did you mean {near}? " if near else ""
        raise UserError(f"SacreBLEU has no test set {name!r}; {hint}sacrebleu --list prints all")
    known = DATASETS[name]
    if pair not in known.langpairs:
        raise UserError(f"SacreBLEU's {name} has no {pair} (data.src_lang and data.trg_lang); it has "
                        f"{', '.join(sorted(known.langpairs))}")
    return _Source(name, known, known.data or [], "SacreBLEU names none")


def _say(texts: list[Text], sizes: dict[str, int | None]) -> None:
    rows = [["text", "corpus", "size", "licence", "from"]]
    for text in texts:
        for source in text.sources:
            known = [sizes[url] for url in source.urls]
            total = sum(size or 0 for size in known)
            rows.append([text.name, source.name, "unknown" if None in known else f"{total / 1e6:,.1f} MB",
                         source.licence, source.urls[0]])
    if len(rows) > 1:
        print_status(table(rows, left=5))
        print_status(f"{len(sizes)} downloads, {sum(size or 0 for size in sizes.values()) / 1e6:,.1f} MB together; a "
                     "licence that is not named here may be on the corpus's own page")


def _require_room(texts: list[Text], sizes: dict[str, int | None]) -> None:
    """Refuses before the downloads what would end in the middle of them. Packed text is about a third of its size."""
    needed = 4 * sum(size or 0 for size in sizes.values())
    for text in texts:
        folder = next(folder for folder in text.files[0].absolute().parents if folder.exists())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise UserError(f"the texts need about {needed / 1e9:,.1f} GB with their downloads, but {folder} has "
                            f"{free / 1e9:,.1f} GB free; make room")


# -- fetching ----------------------------------------------------------------------------------------------------------


def _fetch(text: Text, recipe: Recipe) -> None:
    """Downloads a text's sources, writes its two files, and the record once both are complete."""
    record = read_record(text)
    downloads: dict[str, _Download] = {}
    # the suffix stays: it decides how a file is packed
    parts = [file.with_name(f".tmp-{secrets.token_hex(4)}-{file.name}") for file in text.files]
    try:
        for file in text.files:
            file.parent.mkdir(parents=True, exist_ok=True)
        with show_progress(f"{text.name}: {{:,}} pairs", unit=" pairs", leave=False, desc=text.name) as progress:
            def counted() -> Iterator[tuple[str, str]]:
                number = 0
                for source in text.sources:
                    if text.corpus.sacrebleu:
                        pairs = _sacrebleu_pairs(source, recipe, downloads)
                    else:
                        pairs = _mtdata_pairs(source, text, recipe, record, downloads)
                    for pair in _checked(source, pairs):
                        yield pair
                        number += 1
                        if number % 1000 == 0:
                            progress(number)

            lines = write_pairs(parts, counted())
        digests = sha256(parts[0]), sha256(parts[1])
        if record and record.sha256 != digests:
            raise UserError(f"{text.name} is not the text of {text.record}: SHA-256 {digests[0][:16]}... and "
                            f"{digests[1][:16]}..., must be {record.sha256[0][:16]}... and "
                            f"{record.sha256[1][:16]}...; remove that file to accept the new text")
        for part, file in zip(parts, text.files, strict=True):
            os.replace(part, file)
        new_record = _Record(origin=text.origin, lines=lines, sha256=digests, downloads=downloads)
        write_json(text.record, new_record.model_dump(exclude_none=True))
    except OSError as error:
        raise UserError(f"{text.files[0]} cannot be written: {error.strerror or error}; free disk space, or give "
                        f"{text.name} files in another folder") from None
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def _checked(source: _Source, pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The pairs of a source. Raises `UserError` if they are none, too many, or were decoded wrongly by somebody."""
    lines = full = replaced = size = 0
    where = f"{source.name}, from {', '.join(source.urls)},"
    for src, trg in pairs:
        lines += 1
        full += bool(src and trg)
        replaced += "\ufffd" in src or "\ufffd" in trg
        size += len(src) + len(trg)
        if size > LARGEST:
            raise UserError(f"{where} has more than {LARGEST:,} characters; take another corpus")
        yield src, trg
    if not full:
        raise UserError(f"{where} has {lines:,} lines, none of them with a text on both sides; take another corpus")
    if 1000 * replaced > lines:
        raise UserError(f"{where} has {replaced:,} of {lines:,} lines with the character U+FFFD, which stands where a "
                        "text was decoded wrongly; take another corpus, or put the text's files there yourself")


def _mtdata_pairs(
    source: _Source, text: Text, recipe: Recipe, record: _Record | None, downloads: dict[str, _Download]
) -> Iterator[tuple[str, str]]:
    """The pairs of a corpus, the recipe's source first. Writes what was downloaded into `downloads`."""
    from mtdata import cache_dir
    from mtdata.cache import Cache
    from mtdata.iso.bcp47 import BCP47Tag, bcp47
    from mtdata.parser import Parser

    class OurParser(Parser):
        """mtdata's own replaces what is not UTF-8."""

        def read_plain(self, path: Path) -> Iterator[str]:
            return read_lines(path)

        def read_tsv(self, path: Path, cols: Iterable[int] = (0, 1), **_: Any) -> Iterator[list[str]]:
            for number, line in enumerate(read_lines(path), start=1):
                cells = [cell.strip() for cell in line.split("\t")]
                if len(cells) <= max(cols):
                    raise UserError(f"line {number} has {len(cells)} columns, must have {max(cols) + 1}")
                yield [cells[column] for column in cols]

    languages = bcp47(recipe.data.src_lang), bcp47(recipe.data.trg_lang)
    fits, swapped = BCP47Tag.check_compat_swap(languages, source.known.did.langs)
    if not fits:
        raise UserError(f"{text.name} names {source.name}, which is not {recipe.data.src_lang} and "
                        f"{recipe.data.trg_lang} (data.src_lang and data.trg_lang)")
    entry, cache, of_datasets = source.known, Cache(cache_dir), source.known.ext == "hfds"
    name = entry.filename if isinstance(entry.url, str) and entry.in_ext != "opus_xces" else None
    files = [] if of_datasets else [cache.get_local_path(url, filename=name, fix_missing=False) for url in source.urls]
    try:
        for file, url in zip(files, source.urls, strict=True):
            _download_once(file, cache.get_flag_file(file), url, text, record, downloads)
        # `datasets` of Hugging Face downloads by itself
        paths = cache.get_entry(entry) if of_datasets else files
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=files[0].parent if files else None) as folder:
            if entry.is_archive and len(files) == 1:
                paths = unpack(files[0], entry.in_paths, Path(folder))
            parser = OurParser(paths, ext=entry.in_ext or None, ent=entry)
            if parser.ext not in ("opus_xces", "xlsx", "hfds"):
                for path in parser.paths:
                    by_line = any(kind in parser.ext for kind in ("tsv", "raw", "txt"))
                    require_text(path, path.name, to_its_end=not by_line)
                    if by_line and not entry.is_archive:
                        _warn_of_a_cut(path)
            for segment in parser.read_segs(show_pbar=False):
                src, trg = ((side or "").replace("\r", " ").replace("\n", " ").strip() for side in segment[:2])
                yield (trg, src) if swapped else (src, trg)
    except Exception as error:  # formats raise what they like
        for file in files:
            cache.get_flag_file(file).unlink(missing_ok=True)  # so that it is downloaded again
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{source.name}, from {', '.join(source.urls)}, is not taken: {kind}{str(error)[:600]} (the "
                        f"download is in {cache_dir})") from None


def _download_once(
    file: Path, flag: Path, url: str, text: Text, record: _Record | None, downloads: dict[str, _Download]
) -> None:
    """Downloads a file into mtdata's folder unless it is there, as a flag beside it says. Raises `UserError` if the
    record of the text names another one."""
    if not (flag.exists() and file.exists()):
        download(url, file)
        flag.touch()
    downloads[url] = _Download(bytes=file.stat().st_size, sha256=sha256(file))
    expected = record.downloads.get(url) if record else None
    if expected and expected != downloads[url]:
        raise UserError(f"{file} is not the file of {text.record}: its SHA-256 is {downloads[url].sha256}, must be "
                        f"{expected.sha256}; try again later, or remove the record to accept what the server has now")


def _warn_of_a_cut(file: Path) -> None:
    """Says that a plain file ends within a line, as it does where a server announces fewer bytes than it has."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 1))
        if stream.read() not in (b"\n", b"") and file.suffix not in COMPRESSED:
            print_status(f"{file.name} ends without a line break; it may have been cut, so look at its last line")


def _sacrebleu_pairs(
    source: _Source, recipe: Recipe, downloads: dict[str, _Download]
) -> Iterator[tuple[str, str]]:
    """The sources and first references of a test set, which SacreBLEU downloads and checks."""
    from sacrebleu.utils import SACREBLEU_DIR

    pair = f"{recipe.data.src_lang}-{recipe.data.trg_lang}"
    try:
        with _no_links_out_of_archives():
            files = [source.known.get_source_file(pair), *source.known.get_reference_files(pair)]
    except (OSError, SystemExit, tarfile.TarError) as error:  # it exits the process where a download has the wrong sum
        raise UserError(f"SacreBLEU's {source.name} cannot be fetched from {source.urls[0]} ({error}; 1 is a wrong "
                        f"MD5 sum); remove {SACREBLEU_DIR}/{source.name} and try again") from None
    md5 = source.known.md5 or [None] * len(source.urls)
    downloads.update({url: _Download(md5=expected) for url, expected in zip(source.urls, md5)})
    if len(files) > 2:
        print_status(f"{source.name} has {len(files) - 1} references; the file gets the first, and deepnmt evaluate "
                     f"--test {source.name} uses all")
    sides = [[line.strip() for line in read_lines(Path(file))] for file in files[:2]]
    yield from zip(*sides, strict=True)


@contextmanager
def _no_links_out_of_archives() -> Iterator[None]:
    """SacreBLEU unpacks whole TAR files; Python before 3.14 lets them write anywhere unless it is told otherwise."""
    before = tarfile.TarFile.__dict__.get("extraction_filter")
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
    try:
        yield
    finally:
        tarfile.TarFile.extraction_filter = before


@contextmanager
def _mtdata_is_quiet() -> Iterator[None]:
    """mtdata takes over the root logger when it is imported."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers = [logging.NullHandler()]
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)
