"""`deepnmt get`: fetches the texts that a recipe names through mtdata or SacreBLEU into the files where it looks.

mtdata (Gowda et al. 2021, https://github.com/thammegowda/mtdata) knows where corpora are and how they are packed. It
has no checksums, so a file beside each text, `FILE.source.json`, keeps those of what was downloaded and written. Who
copies it to another machine gets the same text there, or an error. SacreBLEU has MD5 sums of its own.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepnmt.config import Corpus, Recipe
from deepnmt.data.prepared import corpora
from deepnmt.data.text import corpora_of, read_lines, write_pairs
from deepnmt.errors import UserError, nearest
from deepnmt.files import sha256, table, write_json
from deepnmt.progress import print_status, show_progress

SECONDS = 30.0  # without an answer of a server

Sums = dict[str, dict[str, Any]]  # bytes and SHA-256 of what was downloaded, by its URL


@dataclass
class _Text:
    """A text to fetch: its name in the recipe, its files, and where it comes from."""

    name: str
    corpus: Corpus
    files: tuple[Path, Path]
    sources: list[_Source] = field(default_factory=list)

    @property
    def record(self) -> Path:
        return self.files[0].with_name(self.files[0].name + ".source.json")

    @property
    def origin(self) -> dict[str, Any]:
        return {"mtdata": self.corpus.mtdata, "sacrebleu": self.corpus.sacrebleu}


@dataclass
class _Source:
    """A corpus of mtdata's or a test set of SacreBLEU's (`known` is what they call it inside)."""

    name: str
    known: Any
    urls: list[str]
    licence: str


def fetch_texts(recipe: Recipe, only_say: bool = False) -> str:
    """Says what the texts of a recipe are, how large and under which licence, and fetches those that are missing.

    Returns:
        A table of the texts.

    Raises:
        UserError: the recipe names nothing to fetch, or something unknown; a server cannot be reached; a checksum is
            wrong; the disk is too small; a file is there that was not fetched.
    """
    texts = [_Text(f"data.{name}{part and '.' + part}", corpus, (Path(corpus.src[0]), Path(corpus.trg[0])))
             for name, text in corpora(recipe).items() for part, corpus in corpora_of(text).items()
             if corpus.mtdata or corpus.sacrebleu]
    if not texts:
        raise UserError("the recipe names nothing to fetch; give a text of its data section mtdata: [NAME, ...] or "
                        "sacrebleu: NAME, or put the files there yourself")
    missing = [text for text in texts if not _is_there(text)]
    with _mtdata_is_quiet():
        for text in missing:
            text.sources = (_mtdata_sources(text.corpus.mtdata) if text.corpus.mtdata else
                            [_sacrebleu_source(str(text.corpus.sacrebleu), recipe)])
        sizes = {url: _size(url) for url in dict.fromkeys(
            url for text in missing for source in text.sources for url in source.urls)}
        _say(missing, sizes)
        if not only_say:
            _require_room(missing, sizes)
            for text in missing:
                _fetch(text, recipe)
    rows = [["text", "lines", "file", "SHA-256"]]
    for text in texts:
        record = _read_record(text)
        rows += [[text.name, f"{record['lines']:,}" if record else "-", str(file),
                  record["sha256"][side][:16] if record else "not fetched"] for side, file in enumerate(text.files)]
    return table(rows, left=4)


def _read_record(text: _Text) -> dict[str, Any] | None:
    try:
        record = json.loads(text.record.read_bytes())
        return record if {"lines", "sha256", "downloads", "origin"} <= record.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _is_there(text: _Text) -> bool:
    """Whether a text was fetched already. Raises `UserError` if files are there that were not."""
    there = [file for file in text.files if file.exists()]
    record = _read_record(text)
    if record and record["origin"] != text.origin:
        raise UserError(f"{text.files[0]} was fetched from {_named(record['origin'])}, but {text.name} names "
                        f"{_named(text.origin)}; remove it and {text.record}, or name other files")
    if not there:
        return False
    if record is None:
        raise UserError(f"{there[0]} is there already, and nothing says that it was fetched; remove it, or give "
                        f"{text.name} other files")
    for file, expected in zip(text.files, record["sha256"], strict=True):
        if file.exists() and sha256(file) != expected:
            raise UserError(f"{file} is not as it was fetched (SHA-256 {expected[:16]}...); remove it to fetch it "
                            "again")
    return len(there) == 2


def _named(origin: dict[str, Any]) -> str:
    return ", ".join([*(origin.get("mtdata") or []), *filter(None, [origin.get("sacrebleu")])]) or "nothing"


# -- what there is -----------------------------------------------------------------------------------------------------


def _mtdata_sources(names: Iterable[str]) -> list[_Source]:
    print_status("reading mtdata's index (the first time takes half a minute)")
    from mtdata.entry import DatasetId
    from mtdata.index import INDEX

    found = []
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
        found.append(_Source(name, entry, urls, f"{licence}{cited}"))
    return found


def _sacrebleu_source(name: str, recipe: Recipe) -> _Source:
    from sacrebleu.dataset import DATASETS

    pair = f"{recipe.data.src_lang}-{recipe.data.trg_lang}"
    if name not in DATASETS:
        hint = f"did you mean {near}? " if (near := nearest(name, DATASETS)) else ""
        raise UserError(f"SacreBLEU has no test set {name!r}; {hint}sacrebleu --list prints all")
    known = DATASETS[name]
    if pair not in known.langpairs:
        raise UserError(f"SacreBLEU's {name} has no {pair} (data.src_lang and data.trg_lang); it has "
                        f"{', '.join(sorted(known.langpairs))}")
    return _Source(name, known, known.data or [], "SacreBLEU names none")


def _size(url: str) -> int | None:
    """The bytes of a file on a server, None where it does not say."""
    import requests

    try:
        answer = requests.head(url, allow_redirects=True, timeout=SECONDS)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise _unreachable(url, error) from None
    length = answer.headers.get("content-length", "")
    return int(length) if length.isdigit() else None


def _unreachable(url: str, error: Exception) -> UserError:
    return UserError(f"{url} cannot be fetched ({str(error)[:300]}); try again later, or on a machine with a network "
                     "and copy the text's folder")


def _say(texts: list[_Text], sizes: dict[str, int | None]) -> None:
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


def _require_room(texts: list[_Text], sizes: dict[str, int | None]) -> None:
    """Refuses before the downloads what would end in the middle of them. Packed text is about a third of its size."""
    needed = 4 * sum(size or 0 for size in sizes.values())
    for text in texts:
        folder = next(folder for folder in text.files[0].absolute().parents if folder.exists())
        if (free := shutil.disk_usage(folder).free) < needed:
            raise UserError(f"the texts need about {needed / 1e9:,.1f} GB with their downloads, but {folder} has "
                            f"{free / 1e9:,.1f} GB free; make room")


# -- fetching ----------------------------------------------------------------------------------------------------------


def _fetch(text: _Text, recipe: Recipe) -> None:
    """Downloads a text's sources, writes its two files, and the record once both are complete."""
    record = _read_record(text)
    sums: Sums = {}
    pairs = (_sacrebleu_pairs(text.sources[0], recipe, sums) if text.corpus.sacrebleu else
             _mtdata_pairs(text, recipe, record["downloads"] if record else {}, sums))
    for file in text.files:
        file.parent.mkdir(parents=True, exist_ok=True)
    # the suffix stays: it decides how a file is packed
    parts = [file.with_name(f".tmp-{secrets.token_hex(4)}-{file.name}") for file in text.files]
    try:
        with show_progress(f"{text.name}: {{:,}} pairs", unit=" pairs", leave=False, desc=text.name) as progress:
            def counted() -> Iterator[tuple[str, str]]:
                for number, pair in enumerate(pairs, start=1):
                    yield pair
                    if number % 1000 == 0:
                        progress(number)

            lines = write_pairs(parts, counted())
        digests = [sha256(part) for part in parts]
        if record and record["sha256"] != digests:
            raise UserError(f"{text.name} is not the text of {text.record}: SHA-256 {digests[0][:16]}... and "
                            f"{digests[1][:16]}..., must be {record['sha256'][0][:16]}... and "
                            f"{record['sha256'][1][:16]}...; remove that file to accept the new text")
        for part, file in zip(parts, text.files, strict=True):
            os.replace(part, file)
        write_json(text.record, {"origin": text.origin, "lines": lines, "sha256": digests, "downloads": sums})
    except OSError as error:
        raise UserError(f"{text.files[0]} cannot be written: {error.strerror or error}") from None
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def _mtdata_pairs(text: _Text, recipe: Recipe, expected: Sums, sums: Sums) -> Iterator[tuple[str, str]]:
    """The pairs of a text's corpora, in the recipe's order of corpora and with its source first."""
    from mtdata import cache_dir
    from mtdata.cache import Cache
    from mtdata.iso.bcp47 import BCP47Tag, bcp47
    from mtdata.parser import Parser

    class Checked(Cache):
        """mtdata's folder of downloads. Its own download accepts half a file, and a server without a certificate."""

        def download(self, url: str, save_at: Path, timeout: Any = None, entry: Any = None) -> Path:
            flag = self.get_flag_file(save_at)
            if not (flag.exists() and save_at.exists()):
                _download(url, save_at)
                flag.touch()
            sums[url] = {"bytes": save_at.stat().st_size, "sha256": sha256(save_at)}
            if url in expected and sums[url] != expected[url]:
                raise UserError(f"{save_at}, from {url}, is not the file of {text.record}: its SHA-256 is "
                                f"{sums[url]['sha256'][:16]}..., must be {expected[url]['sha256'][:16]}...; remove "
                                "it to download it again, or the record to accept it")
            return save_at

    languages = bcp47(recipe.data.src_lang), bcp47(recipe.data.trg_lang)
    cache = Checked(cache_dir)
    for source in text.sources:
        fits, swapped = BCP47Tag.check_compat_swap(languages, source.known.did.langs)
        if not fits:
            raise UserError(f"{text.name} names {source.name}, which is not {recipe.data.src_lang} and "
                            f"{recipe.data.trg_lang} (data.src_lang and data.trg_lang)")
        try:
            paths = cache.get_entry(source.known)
            for found in Parser(paths, ext=source.known.in_ext or None, ent=source.known).read_segs(show_pbar=False):
                src, trg = (" ".join((side or "").replace("\r", " ").split("\n")).strip() for side in found[:2])
                yield (trg, src) if swapped else (src, trg)
        except (UserError, GeneratorExit):
            raise
        except Exception as error:  # archives and formats raise what they like
            raise UserError(f"{source.name} cannot be read from {', '.join(source.urls)} ({type(error).__name__}: "
                            f"{str(error)[:300]}); mtdata cache has the download in {cache_dir}") from None


def _download(url: str, target: Path) -> None:
    """Downloads a whole file, or nothing."""
    import requests

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".tmp-{secrets.token_hex(4)}")
    try:
        with requests.get(url, stream=True, timeout=SECONDS, headers={"Accept-Encoding": "identity"}) as answer:
            answer.raise_for_status()
            whole, done = int(answer.headers.get("content-length", 0)), 0
            bar = {"unit": "B", "unit_scale": True, "leave": False, "desc": target.name, "total": whole or None}
            with part.open("wb") as file, show_progress(f"{target.name}: {{:,}} bytes", **bar) as progress:
                for block in answer.iter_content(1 << 20):
                    done += file.write(block)
                    progress(done)
            if whole and done != whole:
                raise _unreachable(url, EOFError(f"{done:,} of {whole:,} bytes came"))
        os.replace(part, target)
    except requests.RequestException as error:
        raise _unreachable(url, error) from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}; give another folder in the "
                        "environment variable MTDATA") from None
    finally:
        part.unlink(missing_ok=True)


def _sacrebleu_pairs(source: _Source, recipe: Recipe, sums: Sums) -> Iterator[tuple[str, str]]:
    """The sources and first references of a test set, which SacreBLEU downloads and checks."""
    from sacrebleu.utils import SACREBLEU_DIR

    pair = f"{recipe.data.src_lang}-{recipe.data.trg_lang}"
    try:
        files = [source.known.get_source_file(pair), *source.known.get_reference_files(pair)]
    except (OSError, SystemExit) as error:  # it exits the process where a download has the wrong sum
        raise UserError(f"SacreBLEU's {source.name} cannot be fetched from {source.urls[0]} ({error}; 1 is a wrong "
                        f"MD5 sum); remove {SACREBLEU_DIR}/{source.name} and try again") from None
    md5 = source.known.md5 or [None] * len(source.urls)
    sums.update({url: {"md5": expected} for url, expected in zip(source.urls, md5)})
    if len(files) > 2:
        print_status(f"{source.name} has {len(files) - 1} references; the file gets the first, and deepnmt evaluate "
                     f"--test {source.name} uses all")
    sides = [[line.strip() for line in read_lines(Path(file))] for file in files[:2]]
    yield from zip(*sides, strict=True)


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
