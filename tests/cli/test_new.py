"""`deepnmt new`: a recipe for a text, which is accepted as it is."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import Refused, contents
from small_disk import small_disk

from deepnmt.cli import main
from deepnmt.config import Corpus, load_recipe
from deepnmt.new import TABLE, Hardware, survey, table, try_vocabulary

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["haus", "baum", "kind", "weg", "tag", "see", "licht", "stein", "berg", "wind", "wald", "tier"]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """a.de and a.en in the current folder, the second half of whose pairs repeats sentences of the first."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(1)
    sources = [" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) + "." for _ in range(600)]
    pairs = [(source, source[::-1].upper()) for source in sources + sources[:100]]
    pairs += [("gleich", "gleich"), ("leer", "")]
    for side, name in enumerate(("a.de", "a.en")):
        Path(name).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    return pairs


def test_the_recipe_is_accepted_as_it_is(text: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main("new", ["my.yaml", "--src", "a.de", "--trg", "a.en", "--machine", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "701 pairs (1 more with an empty side), 100 of them repeated, 1 with equal sides" in said
    recipe = load_recipe(Path("my.yaml"), [])
    assert (recipe.data.src_lang, recipe.data.trg_lang, recipe.model.encoder.layers) == ("de", "en", 4)
    texts = {part: Path(f"data/my/text/{part}.de").read_text().splitlines() for part in ("train", "valid", "test")}
    assert all(texts.values()) and not set(texts["test"]) & {*texts["train"], *texts["valid"]}
    body = Path("my.yaml").read_text().partition("\nrun:")[2].splitlines()[1:]
    assert not [line for line in body if line.strip() and line[-1] != ":" and "# " not in line], "each line says why"
    assert main("prepare", ["my.yaml"]) == 0
    prepared = capsys.readouterr().err
    assert "exchange" not in prepared
    assert main("prepare", ["my.yaml", "data.src_lang=en", "data.trg_lang=de", "data.folder=data/other"]) == 0
    assert "train reads data/my/text/train.de as en and data/my/text/train.en as de" in capsys.readouterr().err
    real, said = (int(re.search(rf"epoch{form} ([\d,]+) micro-batches", text)[1].replace(",", "")) for form, text in (
        (" is", prepared), ("s of about", Path("my.yaml").read_text())))
    assert abs(said - real) <= 1, "both are rounded up"
    assert main("train", ["my.yaml", "--dry-run"]) == 0
    assert "4L-4L, t_fixup / t_fixup, width 128" in capsys.readouterr().out


def test_texts_of_ones_own_and_a_larger_machine(text: list[tuple[str, str]]) -> None:
    words = ["big.yaml", "--src", "a.de", "--trg", "a.en", "--langs", "xx", "yy", "--machine", "gpu"]
    assert main("new", [*words, "--valid", "a.de", "a.en", "--test", "a.de", "a.en"]) == 0
    recipe = load_recipe(Path("big.yaml"), [])
    assert recipe.data.valid.src == ["a.de"] and recipe.data.train.trg == ["a.en"] and not Path("data").exists()
    assert recipe.data.src_lang == "xx" and recipe.parallel.ds_config and recipe.model.width == 256
    assert recipe.vocab.size < 2000, "the text has too few different pieces"


def test_a_table_is_the_same_text(text: list[tuple[str, str]]) -> None:
    Path("a.tsv").write_text("".join(f"0.5\t{src}\t{trg}\n" for src, trg in text), encoding="utf-8")
    for words in ("a.yaml --src a.de --trg a.en", "b.yaml --tsv a.tsv --columns 2 3 --langs de en"):
        assert main("new", words.split()) == 0
    assert contents(Path("data/a")) == contents(Path("data/b"))
    assert Path("a.yaml").read_text().replace("data/a", "data/b").replace("runs/a ", "runs/b ") == Path(
        "b.yaml").read_text()


def test_a_language_of_thousands_of_characters(text: list[tuple[str, str]]) -> None:
    """More pieces than the table has, and all characters of the training text among them, of language models, too."""
    draw = random.Random(1)
    letters = [chr(0x4E00 + number) for number in range(2600)]
    lines = ["".join(draw.choices(letters, k=20)) for _ in range(600)]
    Path("b.zh").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    Path("b.en").write_text("".join(f"{' '.join(draw.choices(WORDS, k=9))}\n" for _ in lines), encoding="utf-8")
    assert main("new", ["zh.yaml", "--src", "b.zh", "--trg", "b.en", "--machine", "cpu"]) == 0
    assert load_recipe(Path("zh.yaml"), []).vocab.size > 1.5 * 2600
    assert main("new", ["lm.yaml", "--text", "b.zh", "--machine", "cpu"]) == 0
    assert main("prepare", ["zh.yaml"]) == 0 and main("prepare", ["lm.yaml"]) == 0


def test_lengths_by_hand() -> None:
    seen = try_vocabulary([("aa bb", "aa bb aa bb"), ("bb", "aa")] * 50, 12)
    assert seen.size == 12 and seen.ratio < 0 < seen.tokens <= seen.longer <= min(seen.longest, seen.sampled)


def test_the_sample_is_spread_over_the_text(text: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnmt.new.SAMPLE", 50)
    seen = survey(Corpus(src=["a.de"], trg=["a.en"]))
    assert seen.sample == text[7:701:8][:len(seen.sample)] and 50 <= len(seen.sample) < 100


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "guide" / "new_recipe.md").read_text(encoding="utf-8")
    for hardware, rows in TABLE.items():
        assert table(hardware) in page
        assert [row.pairs for row in rows] == sorted(row.pairs for row in rows) and rows[-1].pairs == float("inf")


@pytest.mark.parametrize(("words", "message"), [
    ("my.yaml --src a.de --trg none.en", "there is no text file none.en"),
    ("my.yaml --src a.en --trg a.de --langs de en", "--langs de en is the other way round than a.en and a.de"),
    ("my.txt --src a.de --trg a.en", "my.txt is no name of a recipe; give one that ends in .yaml"),
    ("a.yaml --src a.de --trg a.en", "a.yaml exists already"),
    ("my.yaml --src text --trg a.en", "text does not end in a language such as .de; add --langs"),
    ("my.yaml --src a.de --trg a.en --valid a.de a.en", "--valid and --test go together"),
    ("my.yaml --src a.de --trg a.en --valid a.de a.en --test a.de few.de", "a.de has 702 lines and few.de has 1;"),
    ("my.yaml --src empty.de --trg empty.de --langs de en", "empty.de has no pair with text on both sides"),
    ("old.yaml --src a.de --trg a.en", "data/old/text, where the texts would go, exists already"),
    ("my.yaml --src few.de --trg few.de --langs de en", "few.de has"),
    ("my.yaml --src a.tsv --trg a.en --langs de en", "a.tsv is a table; give it as --tsv a.tsv"),
    ("my.yaml --src a.de --tsv a.tsv", "give the text as --src and --trg, two files, or as --tsv, one table"),
    ("my.yaml --tsv a.tsv", "a.tsv does not name the languages; add --langs"),
    ("my.yaml --tsv a.tsv --langs de en --columns 0 1", "--columns 0 1 has 0, but columns are counted from 1"),
    ("my.yaml --src a.de --trg a.en --columns 1 2", "--columns are those of a table"),
])
def test_mistakes(
    words: str, message: str, text: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.yaml").touch()
    Path("data/old/text").mkdir(parents=True)
    Path("empty.de").write_text("\n\n")
    Path("few.de").write_text("ein Satz\n")
    assert main("new", words.split()) == 2
    assert message in capsys.readouterr().err and not Path("my.yaml").exists() and not Path("data/my").exists()


@pytest.mark.parametrize(("file", "most"), [("my.yaml", 5_000), ("a.de/my.yaml", 10**6)])
def test_nothing_is_left_where_the_disk_is_full(file: str, most: int, text: list[tuple[str, str]],
                                                refused: Refused) -> None:
    """Neither if a text does not fit nor if the recipe cannot be written."""
    before = contents(Path())
    with small_disk(most):
        said = refused("new", file, "--src", "a.de", "--trg", "a.en", "--machine", "cpu")
    assert "cannot be written" in said and "tmp" not in said and contents(Path()) == before
    assert main("new", ["my.yaml", "--src", "a.de", "--trg", "a.en", "--machine", "cpu"]) == 0


@pytest.mark.parametrize("name", ["a #b", "a: b", "{a}", "*a", "a,b"])
def test_names_that_yaml_reads_otherwise(name: str, text: list[tuple[str, str]],
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe of "a #b" had the run folder of "a"."""
    words = ["--src", "a.de", "--trg", "a.en", "--machine", "cpu"]
    assert main("new", [f"{name}.yaml", *words]) == 2 and not Path("data").exists()
    assert "the folders of data and run get the recipe's name" in capsys.readouterr().err
    assert main("new", ["my été-2.1.yaml", *words]) == 0
    assert load_recipe(Path("my été-2.1.yaml"), []).run == "runs/my été-2.1"


def test_norwegian_and_files_that_yaml_reads_otherwise(text: list[tuple[str, str]]) -> None:
    """YAML takes `no` for false, and of "a # 1.no" the first letter."""
    Path("a.en").rename("b: x.en")
    Path("a.de").rename("a # 1.no")
    words = ["--src", "a # 1.no", "--trg", "b: x.en", "--machine", "cpu"]
    assert main("new", ["one.yaml", *words]) == 0
    own = [*words[1:4:2]]
    assert main("new", ["two.yaml", *words, "--valid", *own, "--test", *own]) == 0
    for name in ("one", "two"):
        recipe = load_recipe(Path(f"{name}.yaml"), [])
        assert (recipe.data.src_lang, recipe.data.trg_lang) == ("no", "en")
    assert [*recipe.data.train.src, *recipe.data.train.trg] == own == [*recipe.data.valid.src, *recipe.data.valid.trg]


@pytest.mark.parametrize(("hardware", "number"), [(name, n) for name, rows in TABLE.items() for n in range(len(rows))])
def test_every_row_makes_a_recipe_that_is_accepted(
    hardware: Hardware, number: int, text: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:
    row = TABLE[hardware][number]
    monkeypatch.setitem(TABLE, hardware, (replace(row, pairs=len(text)),))
    assert main("new", ["my.yaml", "--src", "a.de", "--trg", "a.en", "--machine", hardware]) == 0
    recipe = load_recipe(Path("my.yaml"), [])
    assert (recipe.batch.tokens, recipe.optimizer.lr, recipe.model.dropout) == (row.tokens, row.rate, row.dropout)
    assert row.updates[0] <= recipe.train.updates <= row.updates[1]
    slow = row.encoder_rate < 1
    assert recipe.optimizer.lr_factors == ({"encoder": row.encoder_rate} if slow else {})
    assert recipe.optimizer.lr_factors_until == (recipe.train.updates // 4 if slow else 0)
    assert main("train", ["my.yaml", "--dry-run", *(["--card=a100-40"] if hardware == "gpu" else [])]) == 0
    said = capsys.readouterr().out
    assert f"{row.encoder}L-{row.decoder}L, {row.block} / {row.block}, width {row.width}" in said
    assert "too much memory" not in said
