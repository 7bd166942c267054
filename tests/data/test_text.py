"""Readers: what they yield, and that every error message names its file and line."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
from refusals import user_error
from xopen import xopen

from deepnmt.config import Corpus, Filters
from deepnmt.data.filters import Rules, filter_by_length, filter_corpora, tally
from deepnmt.data.text import LONGEST_LINE, read_lines, read_pairs
from deepnmt.errors import UserError


def _aligned(folder: Path, src: bytes, trg: bytes) -> Corpus:
    (folder / "a.x").write_bytes(src)
    (folder / "a.y").write_bytes(trg)
    return Corpus(src=[str(folder / "a.x")], trg=[str(folder / "a.y")])


def _fault(corpus: Corpus) -> str:
    with pytest.raises(UserError) as error:
        list(read_pairs(corpus))
    return str(error.value)


def test_aligned_lines_are_stripped_and_only_newlines_end_them(tmp_path: Path) -> None:
    src = "\ufeff one \r\ntwo\u2028more\x85still\n\nlast".encode()
    assert list(read_pairs(_aligned(tmp_path, src, b"1\n2\n3\n4\n"))) == [
        ("one", "1"), ("two\u2028more\x85still", "2"), ("", "3"), ("last", "4")]


def _pack(file: Path, data: bytes) -> None:
    with xopen(file, "wb", threads=0) as stream:
        stream.write(data)


COMPRESSED = pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".bz2"])


@COMPRESSED
def test_a_corpus_may_mix_plain_and_compressed_files(tmp_path: Path, suffix: str) -> None:
    first = _aligned(tmp_path, b"a\nb\n", b"A\nB\n")
    for side in "xy":
        _pack(tmp_path / f"b.{side}{suffix}", f"{side}1\n{side}2\n".encode())
    both = Corpus(src=[*first.src, str(tmp_path / f"b.x{suffix}")], trg=[*first.trg, str(tmp_path / f"b.y{suffix}")])
    assert list(read_pairs(both)) == [("a", "A"), ("b", "B"), ("x1", "y1"), ("x2", "y2")]


def test_tsv_columns_count_from_one(tmp_path: Path) -> None:
    file = tmp_path / "c.tsv"
    file.write_text("one\teins\tignored\ntwo\tzwei\n", encoding="utf-8")
    assert list(read_pairs(Corpus(tsv=[str(file)], columns=[2, 1]))) == [("eins", "one"), ("zwei", "two")]


@pytest.mark.parametrize(("src", "trg", "counts"), [
    (b"a\nb\nc\n", b"1\n", ("a.x has 3 lines", "a.y has 1")),
    (b"a\n", b"1\n2\n3\n4\n", ("a.x has 1 lines", "a.y has 4")),
    (b"", b"1\n2\n", ("a.x has 0 lines", "a.y has 2")),
])
def test_misaligned_files_name_both_counts(tmp_path: Path, src: bytes, trg: bytes, counts: tuple[str, str]) -> None:
    message = _fault(_aligned(tmp_path, src, trg))
    assert all(count in message for count in counts)


def test_invalid_utf8_names_file_and_line(tmp_path: Path) -> None:
    assert "a.y, line 3: not valid UTF-8" in _fault(_aligned(tmp_path, b"a\nb\nc\n", b"1\n2\nx\xff\n"))


@pytest.mark.parametrize(("damage", "words"), [
    (lambda whole: whole[: len(whole) // 2], "is truncated after line"),
    (lambda whole: whole[:20] + bytes(60) + whole[80:], "not a valid {} file"),
    (lambda whole: b"plain text\n", "not a valid {} file after line 0"),
])
@COMPRESSED
def test_damaged_compressed_files(tmp_path: Path, damage, words: str, suffix: str) -> None:
    lines = "".join(f"{number * 7919 % 1000003}\n" for number in range(20000)).encode()
    for side in "xy":
        _pack(tmp_path / f"d.{side}{suffix}", lines)
    bad = tmp_path / f"d.y{suffix}"
    bad.write_bytes(damage(bad.read_bytes()))
    message = _fault(Corpus(src=[str(tmp_path / f"d.x{suffix}")], trg=[str(bad)]))
    assert f"d.y{suffix}" in message and words.format(suffix) in message


def test_missing_file_folder_short_row_and_empty_corpus(tmp_path: Path) -> None:
    assert f"there is no text file {tmp_path / 'none'}" in _fault(Corpus(tsv=[str(tmp_path / "none")]))
    (tmp_path / "empty").mkdir()
    assert "empty is a folder; name a text" in _fault(Corpus(tsv=[str(tmp_path / "empty")]))
    short = tmp_path / "s.tsv"
    short.write_text("a\tb\nalone\n", encoding="utf-8")
    assert "s.tsv, line 2: 1 column, but 'columns' is [1, 2]" in _fault(Corpus(tsv=[str(short)]))
    assert "the corpus has 0 lines" in _fault(_aligned(tmp_path, b"", b""))


def test_text_filters_keep_the_first_of_duplicates() -> None:
    pairs = [("a", "b"), ("", "b"), ("a", ""), ("c", "c"), ("a", "b"), ("a", "d"), ("ab", ""), ("a", "b")]
    counts = {"empty": 3, "identical": 1, "duplicate": 2, "too_long": 0, "ratio": 0}
    rows = [(*pair, None) for pair in pairs]
    codes, _ = filter_corpora([(Rules(), rows)])
    assert tally(codes) == counts
    assert np.flatnonzero(codes == 0).tolist() == [0, 5]
    lenient, _ = filter_corpora([(Rules(Filters(drop_duplicates=False, drop_identical=False)), rows)])
    assert tally(lenient) == {**counts, "identical": 0, "duplicate": 0}


def test_length_filters_at_their_bounds() -> None:
    src = np.array([10, 11, 3, 7, 1, 0, 5])
    trg = np.array([10, 1, 1, 1, 2, 4, 11])
    codes = filter_by_length(src, trg, Filters(max_tokens=10, max_ratio=3.0))
    assert codes.tolist() == [0, 4, 0, 5, 0, 1, 4]


def test_a_line_without_end_is_no_sentence(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.gz", "wb") as stream:
        stream.write(b"a dog\n" + b"x" * (LONGEST_LINE + 1))
    lines = read_lines(tmp_path / "x.gz")
    assert next(lines) == "a dog"
    with user_error(r"x\.gz, line 2: longer than 16 MiB, so it is no sentence; give a text with one sentence a line"):
        next(lines)
    with user_error(r"/dev/zero, line 1: longer than 16 MiB"):
        next(read_lines(Path("/dev/zero")))


@pytest.mark.parametrize(("begin", "said"), [
    (b"PAR1\x15\x04\x15 a text", "a Parquet file and no text; write its columns as text"),
    (b"ARROW1\0\0", "an Arrow file"), (b"PK\x03\x04 a", "a ZIP archive and no text; unpack it"),
    (gzip.compress(b"a dog\n"), "compressed by gzip and no text; "),
    (lzma.compress(b"a dog\n"), "compressed by xz"), (bz2.compress(b"a dog\n"), "compressed by bzip2"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"), (b"SQLite format 3\0", "an SQLite database"), (b"%PDF-1.7\n", "a PDF"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_files_that_are_no_text(begin: bytes, said: str, tmp_path: Path) -> None:
    """Whatever follows, which may well be valid UTF-8; also behind a compressed file's own beginning."""
    plain, packed = tmp_path / "a.de", tmp_path / "a.de.gz"
    plain.write_bytes(begin + b"\nein Hund\n")
    packed.write_bytes(gzip.compress(begin))
    for file in (plain, packed):
        with user_error(f"{file} is {said}"):
            list(read_lines(file))
        way = "unpack it once, since it is packed twice" if file == packed else "let its name end in"
        if said.startswith("compressed"):
            with user_error(way):
                list(read_lines(file))
    plain.write_text("PAR1 ist ein Gen\nPK\n", encoding="utf-8")
    assert list(read_lines(plain)) == ["PAR1 ist ein Gen", "PK"]
