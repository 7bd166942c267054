"""Sources of pairs: tables of several formats, columns by name, folders and patterns; all give the same data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from corpus_recipes import recipe_of
from refusals import user_error

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


SOURCES = [_tsv, _json, _pattern, _folder, _parquet, _datasets]


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
    assert found["plain", 7][1] == found["other", 7][1] == found["plain", 0][1]
    if source not in (_tsv,):  # whose first line, the header, is one of the seven of its first unit
        assert found["plain", 7] == found["other", 7]


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
    for name in ("a.src", "b.src", "a.trg"):
        (tmp_path / name).write_text("x\n", encoding="utf-8")
    with user_error(r"\*.src are 2 files, but .*\*.trg are 1; each must have its translation"):
        input_files(Corpus(src=[str(tmp_path / "*.src")], trg=[str(tmp_path / "*.trg")]))
    assert files_of([str(tmp_path / "none.*"), "x"]) == [str(tmp_path / "none.*"), "x"]
