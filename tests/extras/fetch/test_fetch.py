"""`deepnmt get` from a file server on this machine: mtdata's and SacreBLEU's own code, with corpora of ours."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import io
import json
import logging
import sys
import tarfile
import threading
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from refusals import Refused

from deepnmt.cli import main

pytest.importorskip("mtdata", reason="mtdata is not installed; pip install 'deepnmt[mtdata]'")

DE, EN = ["ein Haus", "zwei\u2028Katzen", ""], ["a house", "two cats", "nothing"]
TSV = "the dog\tder Hund\nthe  \xa0cat \tdie Katze\n"


def pack(file: Path, **members: str) -> None:
    with tarfile.open(file, "w:gz") as archive:
        for name, text in members.items():
            data = text.encode()
            info = tarfile.TarInfo(name.replace("__", "/").replace("_", "."))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def sgm(texts: list[str]) -> str:
    return "<srcset>\n" + "".join(f'<seg id="{n}">{text}</seg>\n' for n, text in enumerate(texts, 1)) + "</srcset>\n"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; of a file in `cut` it sends half, and a path in `raw` gets those bytes as the whole answer. With
    `no_head` it refuses to tell sizes."""

    no_head: ClassVar[int] = 0
    asked: ClassVar[list[str]] = []
    cut: ClassVar[set[str]] = set()
    raw: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path in self.raw:
            with contextlib.suppress(OSError):  # the client may have seen enough
                self.wfile.write(self.raw[self.path])
            return
        super().do_GET()

    def do_HEAD(self) -> None:
        if self.no_head:
            self.send_error(self.no_head)
        else:
            super().do_HEAD()

    def copyfile(self, source: io.BufferedIOBase, outputfile: io.BufferedIOBase) -> None:  # type: ignore[override]
        data = source.read()
        outputfile.write(data[: len(data) // 2] if self.path in self.cut else data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder and the address it is served at."""
    folder = tmp_path_factory.mktemp("server")
    pack(folder / "corpus.tgz", training__a_de="\n".join(DE) + "\n", training__a_en="\n".join(EN) + "\n")
    (folder / "more.tsv").write_text(TSV, encoding="utf-8")
    pack(folder / "test.tgz", test__src_en=sgm(["a tree", "a child"]), test__ref_de=sgm(["ein Baum", "ein Kind"]))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module", autouse=True)
def index(files: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """mtdata's index holds two corpora of this server alone: its own of 290,000 takes half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTDATA", str(tmp_path_factory.mktemp("mtdata")))
        handlers = list(logging.getLogger().handlers)
        import mtdata

        logging.getLogger().handlers[:] = handlers
        patch.chdir(tmp_path_factory.mktemp("empty"))
        for file in (Path(mtdata.__file__).parent / "index").rglob("[!_]*.py"):
            parts = file.relative_to(Path(mtdata.__file__).parent).with_suffix("").parts
            patch.setitem(sys.modules, ".".join(["mtdata", *parts]), types.ModuleType(parts[-1]))
        patch.setitem(sys.modules, "mtdata.index.opus", types.ModuleType("opus"))
        with contextlib.redirect_stderr(io.StringIO()):
            from mtdata.index import INDEX, Entry
    address = files[1]
    INDEX.add_entry(Entry("Statmt-mine-1-deu-eng", f"{address}/corpus.tgz", in_ext="txt",
                          in_paths=["training/a.de", "training/a.en"], cite=("bojar-etal-2018-findings",)))
    INDEX.add_entry(Entry("Mine-more-1-eng-deu", f"{address}/more.tsv", meta={"license": "CC-BY 2.0"}))
    INDEX.add_entry(Entry("Mine-absent-1-eng-deu", f"{address}/absent.tsv"))


@pytest.fixture
def place(files: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe; mtdata and SacreBLEU have downloaded nothing."""
    import mtdata
    from sacrebleu.dataset import DATASETS

    folder, address = files
    monkeypatch.setattr(mtdata, "cache_dir", tmp_path / "cache")
    known = DATASETS["wmt14/full"]
    sum_of = hashlib.md5((folder / "test.tgz").read_bytes()).hexdigest()
    for name, value in {"data": [f"{address}/test.tgz"], "md5": [sum_of], "_outdir": str(tmp_path / "bleu"),
                        "_rawdir": str(tmp_path / "bleu" / "raw"),
                        "langpairs": {"en-de": ["test/src.en", "test/ref.de"]}}.items():
        monkeypatch.setattr(known, name, value)
    monkeypatch.setattr(Handler, "asked", [])
    monkeypatch.setattr(Handler, "cut", set())
    monkeypatch.setattr(Handler, "raw", {})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("""
run: runs/my
data:
  folder: data
  src_lang: en
  trg_lang: de
  train: {src: text/train.en, trg: text/train.de, mtdata: [Mine-more-1-eng-deu, Statmt-mine-1-deu-eng]}
  valid: {src: own.en, trg: own.de}
  test: {news: {src: text/news.en, trg: text/news.de, sacrebleu: wmt14/full}}
train: {updates: 1}
""", encoding="utf-8")
    return tmp_path


def get() -> None:
    assert main("get", ["my.yaml"]) == 0


def lines(text: str) -> list[str]:
    return Path("text", text).read_text(encoding="utf-8").split("\n")


def test_texts_come_in_order_after_their_sizes_and_licences(
    place: Path, files: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("get", ["my.yaml", "--dry-run"]) == 0 and not (place / "text").exists() and not Handler.asked
    said = capsys.readouterr().err
    for name, licence in (("Mine-more-1-eng-deu", "CC-BY 2.0"), ("wmt14/full", "SacreBLEU names none"),
                          ("Statmt-mine-1-deu-eng", "mtdata names none; cite bojar")):
        row = next(line for line in said.splitlines() if name in line)
        assert licence in row and " MB" in row and files[1] in row
    get()
    assert "train" in capsys.readouterr().out
    assert lines("train.en") == ["the dog", "the  \xa0cat", *EN, ""]
    assert lines("train.de") == ["der Hund", "die Katze", *DE, ""]
    assert lines("news.en") == ["a tree", "a child", ""]
    assert lines("news.de") == ["ein Baum", "ein Kind", ""]
    record = json.loads((place / "text/train.en.source.json").read_text())
    assert record["lines"] == 5 and record["downloads"][f"{files[1]}/more.tsv"] == {
        "bytes": len(TSV.encode()), "sha256": hashlib.sha256(TSV.encode()).hexdigest()}
    assert sorted(Handler.asked) == ["/corpus.tgz", "/more.tsv", "/test.tgz"]
    get()
    assert len(Handler.asked) == 3, "nothing is fetched twice"


@pytest.mark.parametrize("status", [403, 405, 501])
def test_a_server_that_tells_no_sizes(
    place: Path, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Handler, "no_head", status)
    get()
    assert len(lines("train.en")) == 6
    assert "unknown" in capsys.readouterr().err


def test_a_record_from_elsewhere_holds(place: Path, files: tuple[Path, str], refused: Refused) -> None:
    """Here the server's corpus has changed since."""
    get()
    record = place / "text/train.en.source.json"
    (place / "text/train.de").unlink()
    get()
    assert lines("train.de")[0] == "der Hund"
    for file in (place / "text/train.en", place / "text/train.de", *(place / "cache").rglob("more.tsv")):
        file.unlink()
    (files[0] / "more.tsv").write_text(TSV.replace("dog", "cow"), encoding="utf-8")
    try:
        assert "is not the file of text/train.en.source.json: its SHA-256 is" in refused("get", "my.yaml")
        assert not (place / "text/train.en").exists() and not list((place / "text").glob(".tmp*"))
        record.unlink()
        get()
        assert lines("train.en")[0] == "the cow"
    finally:
        (files[0] / "more.tsv").write_text(TSV, encoding="utf-8")
    (place / "text/train.en").write_text("other\n", encoding="utf-8")
    assert "train.en is not as it was fetched" in refused("get", "my.yaml")
    record.unlink()
    assert "is there already, and nothing says that it was fetched" in refused("get", "my.yaml")


@pytest.mark.parametrize(("old", "new", "said"), [
    ("Mine-more-1-eng-deu", "Mine-moer-1-eng-deu", "did you mean Mine-more-1-eng-deu?"),
    ("Mine-more-1-eng-deu", "news", "not of the form GROUP-NAME-VERSION-LANGUAGE-LANGUAGE"),
    ("Mine-more-1-eng-deu", "Mine-absent-1-eng-deu", "absent.tsv cannot be fetched (404"),
    ("wmt14/full", "wmt14/ful", "did you mean wmt14/full?"),
    ("trg_lang: de", "trg_lang: cs", "SacreBLEU's wmt14/full has no en-cs"),
    ("text/train.en", "link/a.en", "link/a.en cannot be written: File exists; "),
    (", sacrebleu: wmt14/full", "", ""),
    ("sacrebleu: wmt14/full", "mtdata: [A-b-1-deu-eng], sacrebleu: wmt14/full", "either 'mtdata' or 'sacrebleu'"),
    ("text/news.de,", "text/news.de.gz,", "fetched into two plain files"),
    ("mtdata: [Mine-more-1-eng-deu, Statmt-mine-1-deu-eng]}", "}", ""),
])
def test_mistakes(place: Path, refused: Refused, old: str, new: str, said: str) -> None:
    (place / "link").symlink_to("none")
    recipe = place / "my.yaml"
    text = recipe.read_text(encoding="utf-8")
    assert old in text
    recipe.write_text(text.replace(old, new), encoding="utf-8")
    if said:
        assert said in refused("get", "my.yaml") and not (place / "text").exists()
    else:
        get()


def test_downloads_have_no_folder(place: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnmt.extras.fetch.fetch._mtdata_sources", lambda _: Path("my.yaml/x").mkdir())
    assert "mtdata's folder of downloads cannot be written: Not a directory; name" in refused("get", "my.yaml")


def test_half_a_download_and_a_wrong_sum(place: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    from sacrebleu.dataset import DATASETS

    Handler.cut.add("/corpus.tgz")
    said = refused("get", "my.yaml")
    assert "corpus.tgz cannot be fetched" in said and not list((place / "cache").rglob("*.tgz*"))
    assert not list((place / "text").iterdir())
    Handler.cut.clear()
    monkeypatch.setattr(DATASETS["wmt14/full"], "md5", ["0" * 32])
    assert "SacreBLEU's wmt14/full cannot be fetched" in refused("get", "my.yaml")
    assert {file.name for file in (place / "text").iterdir()} == {"train.en", "train.de", "train.en.source.json"}
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=10))
    assert "make room" in refused("get", "my.yaml")


# -- what servers send in place of a corpus


def answer(body: bytes, **headers: str) -> bytes:
    """A whole HTTP answer; without a Content-Length it ends with the connection."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(["HTTP/1.0 200 OK", *lines, "", ""]).encode() + body


def tar_of(*members: tuple[str, bytes, str]) -> bytes:
    """A TAR of names, types and, for links, where they lead; for files, their text."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(content.encode())
                archive.addfile(info, io.BytesIO(content.encode()))
            else:
                info.linkname = content
                archive.addfile(info)
    return packed.getvalue()


def zip_of(**members: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), text)
    return packed.getvalue()


PAGE = b"<!DOCTYPE html>\n<html><head><title>Moved</title></head><body>We have moved.</body></html>\n"
DE_FILE, EN_FILE = ("training/a.de", tarfile.REGTYPE, "ein Haus\n"), ("training/a.en", tarfile.REGTYPE, "a house\n")
WHOLE = tar_of(DE_FILE, EN_FILE)


@pytest.mark.parametrize(("path", "sent", "said"), [
    ("/corpus.tgz", answer(PAGE), "is a web page, not a corpus"),
    ("/more.tsv", answer(b"\xef\xbb\xbf  " + PAGE.replace(b"\n", b"\t")), "is a web page, not a corpus"),
    ("/corpus.tgz", answer(b"ein Haus\n"), "is no whole ZIP or TAR archive"),
    ("/corpus.tgz", answer(b""), "is no whole ZIP or TAR archive"),
    ("/corpus.tgz", answer(WHOLE[:-60]), "is no whole ZIP or TAR archive"),
    ("/corpus.tgz", answer(zip_of(training__a_de="ein Haus\n", training__a_en="a house\n")[:-40]),
     "is no whole ZIP or TAR archive"),
    ("/corpus.tgz", answer(tar_of(DE_FILE)), "should hold one file training/a.en, but has no such file"),
    ("/corpus.tgz", answer(tar_of(DE_FILE, ("x/training/a.en", tarfile.REGTYPE, "a"),
                                  ("y/training/a.en", tarfile.REGTYPE, "a"))), "but has 2: x/training/a.en, y/"),
    ("/corpus.tgz", answer(tar_of(DE_FILE, ("training/a.en", tarfile.FIFOTYPE, ""))), "is a link, a folder"),
    ("/corpus.tgz", answer(tar_of(DE_FILE, ("training/a.en", tarfile.SYMTYPE, "/etc/passwd"))), "is a link, a folder"),
    ("/corpus.tgz", answer(tar_of(DE_FILE, ("training/a.en", tarfile.LNKTYPE, "training/a.de"))), "is a link"),
    ("/corpus.tgz", answer(tar_of(DE_FILE, ("training/a.en", tarfile.CHRTYPE, ""))), "is a link, a folder"),
    ("/more.tsv", answer(b""), "has 0 lines, none of them with a text on both sides"),
    ("/more.tsv", answer(b"\t\n" * 9), "has 9 lines, none of them with a text on both sides"),
    ("/more.tsv", answer("gr\xfce\u00dfe\tgreetings\n".encode("latin-1")), "line 1: not valid UTF-8"),
    ("/more.tsv", answer("gr\ufffd\ufffde\tgreetings\n".encode()), "1 of 1 lines with the character U+FFFD"),
    ("/more.tsv", answer(b"a dog\n"), "line 1 has 1 columns, must have 2"),
    ("/more.tsv", answer(TSV.encode(), Content_Length="many"), "it sends 'many' bytes, which is no number"),
    ("/more.tsv", answer(TSV.encode(), Content_Length="9" * 5000), "which is no number"),
    ("/more.tsv", answer(TSV.encode() * 500), "more.tsv is larger than 5,000 bytes"),
    ("/more.tsv", answer(b"", Content_Length="200000"), "more.tsv is larger than 5,000 bytes"),
    ("/corpus.tgz", answer(tar_of((DE_FILE[0], DE_FILE[1], "a" * 10**6), EN_FILE)), "a.de is larger than 5,000 bytes"),
    ("/more.tsv", b"HTTP/1.0 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "cannot be fetched"),
], ids=range(23))
def test_what_is_no_corpus(place: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, path: str, sent: bytes,
                           said: str) -> None:
    """It is refused, and nothing of it is kept."""
    from deepnmt.extras.fetch import downloads

    if "larger" in said:
        monkeypatch.setattr(downloads, "LARGEST", 5000)
    Handler.raw[path] = sent
    assert said in refused("get", "my.yaml")
    assert not list((place / "text").iterdir())
    assert not [file for file in (place / "cache").rglob("*") if file.name.startswith(".tmp") or file.is_symlink()]


def test_a_text_comes_again_after_a_refusal(place: Path, refused: Refused) -> None:
    Handler.raw["/corpus.tgz"] = answer(WHOLE[:-60])
    assert "is no whole" in refused("get", "my.yaml")
    Handler.raw.clear()
    get()
    assert lines("train.en") == ["the dog", "the  \xa0cat", *EN, ""]


def test_an_archive_writes_nowhere_else(place: Path) -> None:
    """Neither through a link in it, nor by names that lead out; what was not asked for is not unpacked at all."""
    outside = place / "outside"
    outside.mkdir()
    (place / "fifo").mkdir()
    Handler.raw["/corpus.tgz"] = answer(tar_of(
        ("training", tarfile.SYMTYPE, str(outside)), ("training/evil", tarfile.REGTYPE, "x"),
        ("../../../evil", tarfile.REGTYPE, "x"), (str(outside / "evil"), tarfile.REGTYPE, "x"),
        ("fifo", tarfile.FIFOTYPE, ""), DE_FILE, EN_FILE))
    get()
    assert lines("train.en") == ["the dog", "the  \xa0cat", "a house", ""]
    assert not list(outside.iterdir()) and not list(place.rglob("evil"))


def test_a_zip_and_a_name_in_it(place: Path, refused: Refused) -> None:
    """A link in a ZIP is a file whose mode says so."""
    Handler.raw["/corpus.tgz"] = answer(zip_of(training__a_de="ein Haus\n", training__a_en="a house\n"))
    get()
    assert lines("train.de")[2:] == ["ein Haus", ""]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("training/a.de", "ein Haus\n")
        link = zipfile.ZipInfo("training/a.en")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    Handler.raw["/corpus.tgz"] = answer(packed.getvalue())
    for file in (*(place / "text").iterdir(), *(place / "cache").rglob("*_valid")):
        file.unlink()
    assert "training/a.en in" in refused("get", "my.yaml")


def test_a_text_that_may_be_cut_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Content-Length below what the server sends: HTTP ends the body there."""
    Handler.raw["/more.tsv"] = answer(TSV.encode(), Content_Length=str(len(TSV.encode()) - 4))
    get()
    assert "more.tsv ends without a line break; it may have been cut" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{}", '{"origin": {"mtdata": 3}, "lines": 1}', "\xff",
                                     '{"origin": {}, "lines": [], "sha256": ["a"], "downloads": {}}'])
def test_records_that_are_none(place: Path, refused: Refused, content: str) -> None:
    (place / "text").mkdir()
    (place / "text/train.en.source.json").write_text(content, encoding="latin-1")
    assert "train.en.source.json is no record of deepnmt get; restore it" in refused("get", "my.yaml")
    assert not Handler.asked


def test_sacrebleu_unpacks_no_link(place: Path, files: tuple[Path, str], refused: Refused,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    from sacrebleu.dataset import DATASETS

    (place / "outside").mkdir()
    evil = tar_of(("test", tarfile.SYMTYPE, str(place / "outside")), ("test/src.en", tarfile.REGTYPE, sgm(["a"])),
                  ("test/ref.de", tarfile.REGTYPE, sgm(["b"])))
    Handler.raw["/test.tgz"] = answer(evil)
    monkeypatch.setattr(DATASETS["wmt14/full"], "md5", [hashlib.md5(evil).hexdigest()])
    assert "SacreBLEU's wmt14/full cannot be fetched" in refused("get", "my.yaml")
    assert not list((place / "outside").iterdir())


def test_a_recipe_that_names_nothing(place: Path, refused: Refused) -> None:
    assert "names nothing to fetch" in refused("get", "demo/admin_18l-18l")
