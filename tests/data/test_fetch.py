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
    """Serves a folder; of a file in `cut` it sends half."""

    asked: ClassVar[list[str]] = []
    cut: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

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


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").split("\n")


def test_texts_come_in_order_after_their_sizes_and_licences(
    place: Path, files: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("get", ["my.yaml", "--dry-run"]) == 0 and not (place / "text").exists() and not Handler.asked
    said = capsys.readouterr().err
    for name, licence in (("Mine-more-1-eng-deu", "CC-BY 2.0"), ("wmt14/full", "SacreBLEU names none"),
                          ("Statmt-mine-1-deu-eng", "mtdata names none; cite bojar")):
        row = next(line for line in said.splitlines() if name in line)
        assert licence in row and " MB" in row and files[1] in row
    assert main("get", ["my.yaml"]) == 0
    assert "train" in capsys.readouterr().out
    assert lines(place / "text/train.en") == ["the dog", "the  \xa0cat", *EN, ""]
    assert lines(place / "text/train.de") == ["der Hund", "die Katze", *DE, ""]
    assert lines(place / "text/news.en") == ["a tree", "a child", ""]
    assert lines(place / "text/news.de") == ["ein Baum", "ein Kind", ""]
    record = json.loads((place / "text/train.en.source.json").read_text())
    assert record["lines"] == 5 and record["downloads"][f"{files[1]}/more.tsv"] == {
        "bytes": len(TSV.encode()), "sha256": hashlib.sha256(TSV.encode()).hexdigest()}
    assert sorted(Handler.asked) == ["/corpus.tgz", "/more.tsv", "/test.tgz"]
    assert main("get", ["my.yaml"]) == 0 and len(Handler.asked) == 3, "nothing is fetched twice"


def test_a_record_from_elsewhere_holds(place: Path, files: tuple[Path, str], refused: Refused) -> None:
    """Here the server's corpus has changed since."""
    assert main("get", ["my.yaml"]) == 0
    record = place / "text/train.en.source.json"
    (place / "text/train.de").unlink()
    assert main("get", ["my.yaml"]) == 0 and lines(place / "text/train.de")[0] == "der Hund"
    for file in (place / "text/train.en", place / "text/train.de", *(place / "cache").rglob("more.tsv")):
        file.unlink()
    (files[0] / "more.tsv").write_text(TSV.replace("dog", "cow"), encoding="utf-8")
    try:
        assert "is not the file of text/train.en.source.json: its SHA-256 is" in refused("get", "my.yaml")
        assert not (place / "text/train.en").exists() and not list((place / "text").glob(".tmp*"))
        record.unlink()
        assert main("get", ["my.yaml"]) == 0 and lines(place / "text/train.en")[0] == "the cow"
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
    (", sacrebleu: wmt14/full", "", ""),
    ("sacrebleu: wmt14/full", "mtdata: [A-b-1-deu-eng], sacrebleu: wmt14/full", "either 'mtdata' or 'sacrebleu'"),
    ("text/news.de,", "text/news.de.gz,", "fetched into two plain files"),
    ("mtdata: [Mine-more-1-eng-deu, Statmt-mine-1-deu-eng]}", "}", ""),
])
def test_mistakes(place: Path, refused: Refused, old: str, new: str, said: str) -> None:
    recipe = place / "my.yaml"
    text = recipe.read_text(encoding="utf-8")
    assert old in text
    recipe.write_text(text.replace(old, new), encoding="utf-8")
    if said:
        assert said in refused("get", "my.yaml") and not (place / "text").exists()
    else:
        assert main("get", ["my.yaml"]) == 0


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


def test_a_recipe_that_names_nothing(place: Path, refused: Refused) -> None:
    assert "names nothing to fetch" in refused("get", "demo/admin_18l-18l")
