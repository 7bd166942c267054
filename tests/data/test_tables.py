"""Sources of pairs: tables of several formats, columns by name, folders and patterns; all give the same data."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from corpus_recipes import recipe_of
from refusals import user_error
from xopen import xopen

from deepnmt.config import Corpus
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import PreparedData
from deepnmt.data.text import files_of, input_files, read_pairs

PAIRS = [(f"ein Haus {n}", f"a house {n}\twith a garden") for n in range(25)]
NAMES = ["translation.de", "translation.en"]


def _plain(folder: Path) -> dict[str, Any]:
    for side, file in enumerate(("src", "trg")):
        lines = "".join(f"{pair[side]}\n".replace("\t", " ") for pair in PAIRS)
        (folder / file).write_text(lines, encoding="utf-8")
    return {"src": str(folder / "src"), "trg": str(folder / "trg")}


def _rows() -> list[dict[str, Any]]:
    return [{"id": number, "translation": {"de": src, "en": trg.replace("\t", " ")}}
            for number, (src, trg) in enumerate(PAIRS)]


def _tsv(folder: Path) -> dict[str, Any]:
    lines = ["en\tx\tde", *("\t\t".join((trg.replace("\t", " "), src)) for src, trg in PAIRS)]
    (folder / "a.tsv").write_text("\n".join(lines), encoding="utf-8")
    return {"tsv": str(folder / "a.tsv"), "columns": ["de", "en"]}


def _tsv_files(folder: Path) -> dict[str, Any]:
    """Several, with a header each, so that units go over from one to the next; the second is packed."""
    for name, pairs in (("a.tsv", PAIRS[:9]), ("b.tsv.gz", PAIRS[9:16]), ("c.tsv", PAIRS[16:])):
        lines = ["de\ten", *(f"{src}\t{trg}".replace("\twith", " with") for src, trg in pairs)]
        write = gzip.open if name.endswith(".gz") else open
        with write(folder / name, "wt", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
    return {"tsv": str(folder / "?.tsv*"), "columns": ["de", "en"]}


def _packed(folder: Path) -> dict[str, Any]:
    """A file by each of the four packers, one after the other."""
    corpus = _plain(folder)
    files: dict[str, list[str]] = {"src": [], "trg": []}
    for side in files:
        lines = Path(corpus[side]).read_bytes().splitlines(keepends=True)
        for part, suffix in enumerate((".gz", ".bz2", ".xz", ".zst")):
            file = folder / f"{part}.{side}{suffix}"
            with xopen(file, "wb") as stream:
                stream.write(b"".join(lines[7 * part:7 * part + 7]))
            files[side].append(str(file))
    return files


def _json_packed(folder: Path) -> dict[str, Any]:
    (folder / "a.jsonl.bz2").write_bytes(bz2.compress("".join(json.dumps(row) + "\n" for row in _rows()).encode()))
    return {"tsv": str(folder / "a.jsonl.bz2"), "columns": NAMES}


def _json(folder: Path) -> dict[str, Any]:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows()), encoding="utf-8")
    return {"tsv": str(folder / "a.jsonl"), "columns": NAMES}


def _pattern(folder: Path) -> dict[str, Any]:
    corpus = _plain(folder)
    for side in ("src", "trg"):
        lines = Path(corpus[side]).read_text(encoding="utf-8").splitlines(keepends=True)
        for number, part in enumerate((lines[:9], lines[9:])):
            (folder / f"part.{number}.{side}").write_text("".join(part), encoding="utf-8")
    return {side: str(folder / f"part.*.{side}") for side in ("src", "trg")}


def _folder(folder: Path) -> dict[str, Any]:
    for name in ("tables", "tables/inside"):
        (folder / name).mkdir()
    rows = [json.dumps(row) + "\n" for row in _rows()]
    (folder / "tables" / "a.jsonl").write_text("".join(rows[:20]), encoding="utf-8")
    (folder / "tables" / "b.jsonl").write_text("".join(rows[20:]), encoding="utf-8")
    (folder / "tables" / ".hidden").write_text("x", encoding="utf-8")
    return {"tsv": str(folder / "tables"), "columns": NAMES}


def _parquet(folder: Path) -> dict[str, Any]:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'deepnmt[pyarrow]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(_rows()), folder / "a.parquet", row_group_size=4)
    return {"tsv": str(folder / "a.parquet"), "columns": NAMES}


def _datasets(folder: Path) -> dict[str, Any]:
    """As `datasets` saves one: Arrow streams, whose names and order state.json has."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'deepnmt[pyarrow]'")
    saved = folder / "saved"
    saved.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(names, (_rows()[:11], _rows()[11:]), strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(saved / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=3)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return {"tsv": str(saved), "columns": NAMES}


SOURCES = [_tsv, _tsv_files, _packed, _json, _json_packed, _pattern, _folder, _parquet, _datasets]


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_pairs_from_each_source(source: Any, prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    found = {}
    for name, train in (("plain", _plain(tmp_path / "plain")), ("other", source(tmp_path / "other"))):
        assert list(read_pairs(Corpus(**train))) == [(src, trg.replace("\t", " ")) for src, trg in PAIRS]
        for pairs in (0, 7):
            recipe = recipe_of(prepared, tmp_path / name / str(pairs), train=train, shard_pairs=pairs)
            prepare(recipe.model_copy(update={"vocab": recipe.vocab.model_copy(update={"size": 60})}))
            data = PreparedData.open(recipe.data.folder)
            found[name, pairs] = data.fingerprint, data.split("train").source_per_target
    assert found["plain", 0] == found["other", 0]
    assert found["plain", 7] == found["other", 7] and found["plain", 7][1] == found["plain", 0][1]


def test_line_ends_inside_a_text_become_spaces(tmp_path: Path) -> None:
    """Those of Windows, too; of JSON, whose texts are those of Parquet."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(json.dumps({"de": "ein\r\nHaus\n", "en": "a\nhouse\r\n"}).encode() + b"\r\n")
    assert list(read_pairs(Corpus(tsv=[str(file)], columns=["de", "en"]))) == [("ein Haus", "a house")]


@pytest.mark.parametrize("content", ["{}", "[]", "nothing", "\xff"])
def test_a_state_that_is_of_another_program(content: str, tmp_path: Path) -> None:
    """Only what `datasets` writes says which files belong to a folder."""
    (tmp_path / "a.de").touch()
    (tmp_path / "state.json").write_bytes(content.encode("latin-1"))
    assert files_of([str(tmp_path)]) == [str(tmp_path / "a.de"), str(tmp_path / "state.json")]


def test_faults_of_tables(tmp_path: Path) -> None:
    table = tmp_path / "a.tsv"
    table.write_text("de\ten\nHaus\thouse\n", encoding="utf-8")
    with user_error("a.tsv has no column 'fr'; its first line names de, en"):
        list(read_pairs(Corpus(tsv=[str(table)], columns=["de", "fr"])))
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"de": "Haus", "en": "house"}\n{"de": "Hof", "en": 3}\n', encoding="utf-8")
    with user_error(r"a.jsonl, line 2: no text in the column 'en'; 'columns' names two of its own \(de, en\)"):
        list(read_pairs(Corpus(tsv=[str(lines)], columns=["de", "en"])))
    lines.write_text('{"de": "Haus", "en": "house"}\nHof\n', encoding="utf-8")
    with user_error("a.jsonl, line 2: no JSON"):
        list(read_pairs(Corpus(tsv=[str(lines)], columns=["de", "en"])))
    lines.write_text('{"de": "Haus", "en": "house"}\n{"de": "Hof \\ud83d", "en": "yard"}\n', encoding="utf-8")
    with user_error("a.jsonl, line 2: the text in the column 'de' has half of a character"):
        list(read_pairs(Corpus(tsv=[str(lines)], columns=["de", "en"])))
    for name in ("a.src", "b.src", "a.trg"):
        (tmp_path / name).write_text("x\n", encoding="utf-8")
    with user_error(r"\*.src are 2 files, but .*\*.trg are 1; each must have its translation"):
        input_files(Corpus(src=[str(tmp_path / "*.src")], trg=[str(tmp_path / "*.trg")]))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}', encoding="utf-8")
    with user_error(r"holds several data sets \(train, test\); name one of them: .*/train"):
        files_of([str(tmp_path)])
    assert files_of([str(tmp_path / "none.*"), "x"]) == [str(tmp_path / "none.*"), "x"]
