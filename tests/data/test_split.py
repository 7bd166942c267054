"""Splitting a corpus so that no test sentence was trained on."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from refusals import user_error

from deepnmt.cli import main
from deepnmt.data.split import normalised, split_of, split_tsv


def _corpus(file: Path, sentences: int) -> None:
    """Each English sentence in two spellings, and some German sentences with two English ones each."""
    lines = []
    for n in range(sentences):
        source = n // 10 if n % 10 < 2 else 1000 + n
        lines += [f"Word {n} is here.\tWort {source} da.", f"word {n} IS here!\tHier, {n}."]
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        stream.write("".join(f"{line}\n" for line in lines))


def _read(folder: Path) -> dict[str, list[tuple[str, str]]]:
    def lines(name: str) -> list[str]:
        return (folder / name).read_text(encoding="utf-8").splitlines()

    return {name: list(zip(lines(f"{name}.de"), lines(f"{name}.en"), strict=True))
            for name in ("train", "valid", "test")}


def test_texts_share_no_sentence(tmp_path: Path) -> None:
    _corpus(tmp_path / "pairs.tsv.gz", 2000)
    counts = split_tsv(tmp_path / "pairs.tsv.gz", tmp_path / "text", (2, 1), ("de", "en"), valid=50, test=100)
    texts = _read(tmp_path / "text")
    assert counts == {name: len(pairs) for name, pairs in texts.items()}
    for side in (0, 1):
        kinds = {name: {normalised(pair[side]) for pair in pairs} for name, pairs in texts.items()}
        assert not kinds["train"] & kinds["valid"] and not kinds["train"] & kinds["test"]
        assert not kinds["valid"] & kinds["test"]
    for name, share in (("valid", 50), ("test", 100)):
        assert len({normalised(trg) for _, trg in texts[name]}) == len(texts[name])  # one pair a sentence
        assert abs(len(texts[name]) - 2 * share) < 5 * (2 * share) ** 0.5  # five standard deviations of 2,000 samples
    assert 3200 < len(texts["train"]) < 3600


def test_the_text_for_a_sentence_depends_on_the_sentence_alone() -> None:
    assert normalised("Ja, Tom!") == normalised("ja tom") and normalised("...") == "..."
    assert split_of("Go on.", 100, 200) == split_of("go on", 100, 200)
    names = [split_of(f"sentence {n}", 100, 200) for n in range(3000)]
    assert abs(names.count("test") - 600) < 110 and abs(names.count("valid") - 300) < 85


@pytest.mark.parametrize(("valid", "test"), [(0, 20), (10, 0), (500, 500)])
def test_shares_out_of_range(tmp_path: Path, valid: int, test: int) -> None:
    with user_error(rf"{valid} \+ {test} of 1,000"):
        split_tsv(tmp_path / "none", tmp_path / "text", (1, 2), ("a", "b"), valid, test)


def test_too_few_sentences(tmp_path: Path) -> None:
    (tmp_path / "few.tsv").write_text("a\tb\n", encoding="utf-8")
    with user_error(r"few\.tsv has too few sentences"):
        split_tsv(tmp_path / "few.tsv", tmp_path / "text", (1, 2), ("a", "b"))
    assert not (tmp_path / "text").exists()


def test_nothing_left_to_train_on(tmp_path: Path) -> None:
    tsv = tmp_path / "all.tsv"
    tsv.write_text("".join(f"source {number} a\ttarget {number} b\n" for number in range(40)))
    with user_error(r"all\.tsv has no pair left to train on if 499 \+ 500 of 1,000 sent"):
        split_tsv(tsv, tmp_path, (1, 2), ("en", "de"), 499, 500)
    assert list(tmp_path.iterdir()) == [tsv]


@pytest.mark.parametrize(("words", "message"), [
    ("--columns 0 1", "--columns is 0 1, must be two different columns counted from 1"),
    ("--columns 2 -1", "--columns is 2 -1, must be two different columns counted from 1"),
    ("--columns 1 1", "--columns is 1 1, must be two different columns counted from 1"),
    ("--langs de de", "--langs is 'de' 'de', must be two different file suffixes without a /"),
    ("--langs de ../en", "--langs is 'de' '../en', must be two different file suffixes without a /"),
])
def test_the_two_sides_must_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    _corpus(tmp_path / "pairs.tsv.gz", 2000)
    line = [str(tmp_path / "pairs.tsv.gz"), str(tmp_path / "text"), "--langs", "de", "en", *words.split()]
    assert main("split", line) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "text").exists()


@pytest.mark.parametrize("corpus", ["pairs.tsv.gz", "train.de"])
def test_what_is_there_is_not_overwritten(tmp_path: Path, corpus: str) -> None:
    """Neither another text nor the corpus itself."""
    _corpus(tmp_path / "pairs.tsv.gz", 2000)
    kept = gzip.decompress((tmp_path / "pairs.tsv.gz").read_bytes())
    (tmp_path / "train.de").write_bytes(kept)
    with user_error(r"train\.de exists already; name another folder"):
        split_tsv(tmp_path / corpus, tmp_path, (2, 1), ("de", "en"), valid=50, test=100)
    assert (tmp_path / "train.de").read_bytes() == kept and len(list(tmp_path.iterdir())) == 2
