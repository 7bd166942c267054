"""Cleaning of corpora: each rule beside a reference of a few lines, on planted faults; counts by rule and corpus."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpus_recipes import text, tree_of
from refusals import contents, user_error

from deepnmt.config import Cleaning, Filters, Recipe, check_recipe, dump_recipe, load_recipe, plugins
from deepnmt.config.plugins import name_plugins
from deepnmt.config.sections import NAMED, WeightedCorpus
from deepnmt.data import parts
from deepnmt.data.filters import KEPT, Row, Rules, code_of, filter_corpora, fold
from deepnmt.data.parts import Part
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import open_prepared
from deepnmt.data.text import read_rows

PLUGIN = """
def label(lines, side):
    return ["xx" if "¤" in line else {"src": "en", "trg": "de"}[side] for line in lines]


def score(lines, side):
    return [0.2 if "¤" in line else 0.9 for line in lines]


LANGUAGE_IDS = {"label": label, "score": score, "short": lambda lines, side: [], "none": lambda lines, side: lines and
                [None] * len(lines), "broken": lambda lines, side: lines.nothing, "five": 5}
"""

# -- each rule ---------------------------------------------------------------------------------------------------------


def _word(number: int, letters: str) -> str:
    return "".join(letters[int(digit)] for digit in str(number))


def _clean(n: int) -> Row:
    return f"das {_word(n, 'abdefghikl')} hat {n % 7} Türen", f"у {_word(n, 'абвгдежзик')} есть {n % 7} двери", 0.9


# Rule to its settings, and what makes a fault of a clean row n
RULES: dict[str, tuple[Filters | Cleaning, Callable[[int, Row], Row]]] = {
    "identical": (Filters(), lambda n, row: (row[0], row[0], 0.9)),
    "overlap": (Filters(drop_overlap=True), lambda n, row: (row[0], "проверка", 0.9) if n % 20 == 7 else (
        "Probe", row[1], 0.9)),
    "scripts": (Cleaning(scripts=["Latin", "Cyrillic"]), lambda n, row: (row[0], f"the house {n} has 3 doors", 0.9)),
    "same_digits": (Cleaning(same_digits=True), lambda n, row: (row[0], f"{row[1]} {n}", 0.9)),
    "max_length_ratio": (Cleaning(max_length_ratio=4.0), lambda n, row: (row[0] * 5, row[1], 0.9)),
    "min_letters": (Cleaning(min_letters=0.5), lambda n, row: (f"{row[0]} {'=#' * 20}", row[1], 0.9)),
    "drop_same_letters": (Cleaning(drop_same_letters=True), lambda n, row: (f"{row[1].upper()} !", row[1], 0.9)),
    "min_score": (Cleaning(score="score", min_score=0.5), lambda n, row: (row[0], row[1], 0.499)),
    "language_id": (Cleaning(language_id="label"), lambda n, row: (row[0], f"{row[1]} ¤", 0.9)),
    "drop_near_duplicates": (Cleaning(drop_near_duplicates=True), lambda n, row: (
        re.sub(r"\d", "12", _clean(n - 1)[0].upper()) + "!", re.sub(r"\d", "3.4", _clean(n - 1)[1]) + " …", 0.9)),
}


def _reference(rule: str, rows: list[Row]) -> list[bool]:
    """What each rule says, in other words than the filters."""
    if rule == "identical":
        return [not (src > trg or src < trg) for src, trg, _ in rows]
    if rule == "overlap":
        return [src == "Probe" or trg == "проверка" for src, trg, _ in rows]
    if rule == "scripts":
        return [sum("a" <= c.lower() <= "z" or c in "äöüß" for c in src) * 2 < sum(c.isalpha() for c in src) or (
            sum("\u0400" <= c <= "\u04ff" for c in trg) * 2 < sum(c.isalpha() for c in trg)) for src, trg, _ in rows]
    if rule == "same_digits":
        return [len({tuple(sorted(filter(None, re.split(r"\D+", side)))) for side in row[:2]}) == 2 for row in rows]
    if rule == "max_length_ratio":
        return [len(src) > 4 * len(trg) or len(trg) > 4 * len(src) for src, trg, _ in rows]
    if rule == "min_letters":
        return [any(len([c for c in side if c.isalpha()]) / len(side.replace(" ", "")) < 0.5 for side in row[:2])
                for row in rows]
    if rule == "drop_same_letters":
        return [[c for c in src.lower() if c.isalnum()] == [c for c in trg.lower() if c.isalnum()]
                for src, trg, _ in rows]
    if rule == "min_score":
        return [not score >= 0.5 for *_, score in rows]
    if rule == "language_id":
        return [src.count("¤") + trg.count("¤") > 0 for src, trg, _ in rows]
    same = [tuple(re.sub(r"[\W_]", "", re.sub(r"[\d.,]+", "0", side)).lower() for side in row[:2]) for row in rows]
    return [pair in same[max(0, n - 5):n] for n, pair in enumerate(same)]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(plugins, "_plugins", {})
    (tmp_path / "languages.py").write_text(PLUGIN, encoding="utf-8")
    assert not name_plugins({"plugins": str(tmp_path / "languages.py")}, NAMED, True)
    return str(tmp_path / "languages.py")


def test_a_script_that_no_letter_has_is_refused() -> None:
    rules = Rules(clean=Cleaning(scripts=["Latin", "Han"]))
    with user_error("cleaning.scripts has Han, with which no letter's name in Unicode begins; give such as .* CJK"):
        filter_corpora([(rules, [("one", "一", None)])])


@pytest.mark.parametrize("rule", list(RULES))
def test_each_rule_leaves_out_what_was_planted_and_nothing_else(rule: str, plugin: str) -> None:
    """10,000 pairs, a tenth of them faulty; and another corpus that this rule does not clean."""
    settings, plant = RULES[rule]
    planted = [n % 10 == 7 for n in range(10_000)]
    rows = [plant(n, _clean(n)) if faulty else _clean(n) for n, faulty in enumerate(planted)]
    assert _reference(rule, rows) == planted
    filters = settings if isinstance(settings, Filters) else Filters(drop_duplicates=False, drop_identical=False)
    cleaning = settings if isinstance(settings, Cleaning) else Cleaning()
    rules = Rules(filters, cleaning, ("en", "de"), {"проверка", "Probe"}, rule == "drop_near_duplicates")
    found, overlaps = filter_corpora([(rules, rows)])
    assert found.tolist() == [code_of(rule) if faulty else KEPT for faulty in planted]
    assert overlaps == [1000 if rule == "overlap" else 0]
    if isinstance(settings, Cleaning):
        found, _ = filter_corpora([(rules._replace(clean=Cleaning()), rows), (rules, rows[:7])])
        assert not found[:10_000].any()
        assert found[10_000:].tolist() == [code_of(rule) if rule == "drop_near_duplicates" else KEPT] * 7


@pytest.mark.parametrize("rule", [*RULES, "empty"])
def test_tags_in_the_text_are_no_words(rule: str, plugin: str) -> None:
    """Each rule leaves out the same of sources that begin with tags, whose letters and digits are of no language."""
    settings, plant = RULES.get(rule, (Filters(), lambda n, row: ("", row[1], 0.9)))
    rows = [plant(n, _clean(n)) if n % 10 == 7 else _clean(n) for n in range(100)]
    tagged = [(f"<BT2> <¤¤¤¤¤¤¤¤¤¤¤¤¤¤¤¤>  {src}".strip(), trg, score) for src, trg, score in rows]
    filters, cleaning = (settings, Cleaning()) if isinstance(settings, Filters) else (Filters(), settings)
    rules = Rules(filters, cleaning, ("en", "de"), {"проверка", "Probe"}, rule == "drop_near_duplicates",
                  ["<BT2>", "<¤¤¤¤¤¤¤¤¤¤¤¤¤¤¤¤>"])
    found, overlaps = filter_corpora([(rules, tagged)])
    assert found.tolist() == [code_of(rule) if n % 10 == 7 else KEPT for n in range(100)]
    assert overlaps == [10 if rule == "overlap" else 0]
    same = [("<BT2> das", "у", None), ("das", "у", None), ("<BT2> das", "у", None)]
    found, _ = filter_corpora([(Rules(tags=["<BT2>"]), same)])
    assert found.tolist() == [KEPT, KEPT, code_of("duplicate")], "what is written differs in the tag"


@pytest.mark.parametrize(("src", "trg", "same"), [
    ("2 Türen, 3 Uhr", "at 3 the 2 doors", True), ("2 und 2", "2 and 2", True), ("2 und 2", "2 and two", False),
    ("1 1 2", "1 2 2", False), ("12 3", "1 23", False), ("1.000 km", "1,000 km", True), ("1000 km", "1,000 km", False),
    ("keine", "none", True), ("007", "7", False), ("im Jahr 12", "\u0639\u0627\u0645 \u0661\u0662", True)])
def test_numbers_are_compared_as_often_as_they_stand_there(src: str, trg: str, same: bool) -> None:
    [code], _ = filter_corpora([(Rules(Filters(), Cleaning(same_digits=True)), [(src, trg, None)])])
    assert code == (KEPT if same else code_of("same_digits"))


def test_what_near_duplicates_have_in_common() -> None:
    for one, other in (("Am 3. Mai: 12 °C!", "am 27 mai 8 c"), ("ＡＢＣ １２", "abc 3"), ("Cafe\u0301", "CAFÉ"),
                       ("Straße", "STRASSE"), ("x ² y", "x2y")):
        assert fold(one) == fold(other), (one, other)
    for one, other in (("हिन्दी", "हन्द"), ("!!!", "???"), ("ein Haus", "ein Maus"), ("Haus 3", "Haus")):
        assert fold(one) != fold(other), (one, other)


def test_language_scores(plugin: str) -> None:
    rows = [_clean(n) for n in range(3)] + [("¤", "дом", None)]
    for lowest, due in ((0.5, [0, 0, 0, 1]), (0.1, [0] * 4), (0.95, [1] * 4)):
        clean = Cleaning(language_id="score", min_language_score=lowest)
        assert (filter_corpora([(Rules(clean=clean, languages=("de", "ru")), rows)])[0] > 0).tolist() == due


@pytest.mark.parametrize("kind", ["tsv", "jsonl", "parquet"])
def test_scores_of_each_kind_of_table(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.{kind}"
    rows = [{"q": {"x": 0.25}, "de": "Haus", "en": "house"}, {"q": {"x": 3.0}, "de": "Hof", "en": "yard"}]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'deepnmt[pyarrow]'")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), file)
    elif kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        file.write_text("q.x\tde\ten\n0.25\tHaus\thouse\n3\tHof\tyard\n", encoding="utf-8")
    cleaning = Cleaning(score="q.x", min_score=0.5)
    corpus = WeightedCorpus(tsv=[str(file)], columns=["de", "en"], cleaning=cleaning)
    assert list(read_rows(corpus)) == [("Haus", "house", 0.25), ("Hof", "yard", 3.0)]
    assert (filter_corpora([(Rules(clean=cleaning), read_rows(corpus))])[0] > 0).tolist() == [True, False]


# -- the whole of prepare ----------------------------------------------------------------------------------------------


def _tables(prepared: Path, folder: Path, tsv: bool = False) -> dict[str, Any]:
    """Two corpora with a score column, `news` of 90 pairs and `web` of 230, as JSON lines or with tabs. A quarter of
    each scores 0.1, five pairs of `news` have a ¤, and `web` has 20 of `news` in capitals."""
    folder.mkdir()
    files = text(prepared, "train")
    sides = [Path(files[side]).read_text(encoding="utf-8").splitlines() for side in ("src", "trg")]
    rows = [(src, trg, 0.9 if n % 4 else 0.1) for n, (src, trg) in enumerate(zip(*sides))][:300]
    rows[20:25] = [(f"¤ {src}", trg, 0.9) for src, trg, _ in rows[20:25]]
    near = [(src.upper(), f"{trg} !", 0.9) for src, trg, _ in rows[:20]]
    corpora: dict[str, Any] = {}
    for name, part in (("news", rows[:90]), ("web", [*rows[90:], *near])):
        if tsv:
            lines = ["de\tquality\ten", *(f"{trg}\t{score}\t{src}" for src, trg, score in part)]
        else:
            lines = [json.dumps({"en": src, "de": trg, "quality": score}) for src, trg, score in part]
        file = folder / f"{name}.{'tsv' if tsv else 'jsonl'}"
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        corpora[name] = {"tsv": str(file), "columns": ["en", "de"]}
    corpora["web"]["cleaning"] = {"drop_near_duplicates": True, "min_score": 0.05}
    return {**corpora, "cleaning": {"score": "quality", "min_score": 0.5, "language_id": "label"}}


def _recipe(prepared: Path, folder: Path, plugin: str, train: dict[str, Any], **data: Any) -> Recipe:
    tree = tree_of(prepared, folder, **{"train": train, "src_lang": "en", "trg_lang": "de", "shard_pairs": 40,
                                        "workers": 1, **data})
    tree["plugins"] = [plugin]
    tree["vocab"]["size"] = 100
    return check_recipe(tree, "recipe")


def test_counts_by_rule_and_corpus(prepared: Path, tmp_path: Path, plugin: str, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    """The same in one piece, in shards, in parts in any order, in two processes, and of tabs."""
    monkeypatch.setattr(parts, "BUCKET", 50)

    def make(name: str, train: dict[str, Any], *order: int, **data: Any) -> dict[str, bytes]:
        recipe = _recipe(prepared, tmp_path / name, plugin, train, **data)
        for number in order:
            prepare(recipe, Part(number, 3))
        prepare(recipe)
        open_prepared(recipe)
        return {file: content for file, content in contents(Path(recipe.data.folder)).items() if file != "deepnmt.json"}

    train = _tables(prepared, tmp_path / "json")
    whole = make("whole", train)
    said = capsys.readouterr().err
    split = json.loads(whole["manifest.json"])["splits"]["train"]
    news, web = split["by_corpus"]["news"], split["by_corpus"]["web"]
    assert (news["read"], news["left_out"]["min_score"], news["left_out"]["language_id"]) == (90, 21, 5)
    assert web["read"] == 230 and "min_score" not in web["left_out"] and "language_id" not in web["left_out"]
    assert "drop_near_duplicates" not in news["left_out"] and web["left_out"]["drop_near_duplicates"] >= 10
    for figure in ("read", "pairs", "overlap"):
        assert news[figure] + web[figure] == split[figure]
    for reason, count in split["left_out"].items():
        assert count == news["left_out"].get(reason, 0) + web["left_out"].get(reason, 0)
    assert f"\ntrain, news: {news['pairs']} of 90 pairs; left out: " in said and "min_score 21, language_id 5\n" in said
    assert f"\ntrain, web: {web['pairs']} of 230 pairs; left out: " in said

    assert whole == make("parts", train, 3, 1, 2) == make("two", train, workers=2)
    tabs = make("tabs", _tables(prepared, tmp_path / "tabs", tsv=True))
    assert {file for file in whole if whole[file] != tabs[file]} <= {file for file in whole if file.endswith(".json")}
    one = make("one", train, shard_pairs=0)
    assert json.loads(one["manifest.json"])["splits"] == json.loads(tabs["manifest.json"])["splits"] | {"train": split}
    assert b"".join(whole[file] for file in sorted(whole) if file.endswith("/train.src.tokens")) == one[
        "train.src.tokens"]


def test_the_overlap_is_counted_by_corpus_and_a_warning_by_default(
    prepared: Path, tmp_path: Path, plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train = _tables(prepared, tmp_path / "json")
    splits = []
    for name, pairs in (("one", 0), ("many", 40)):
        recipe = _recipe(prepared, tmp_path / name, plugin, train, shard_pairs=pairs,
                         valid={"tsv": train["news"]["tsv"], "columns": ["en", "de"]})
        prepare(recipe)
        splits.append(json.loads((tmp_path / name / "data" / "manifest.json").read_text())["splits"]["train"])
        overlap = splits[-1]["overlap"]
        assert re.search(rf"warning: {overlap} of 320 training pairs have a sentence of the validation or a test text "
                         r"\(news \d+(, web \d+)?\); to leave them out, set data.filters.drop_overlap=true",
                         capsys.readouterr().err)
    assert splits[0] == splits[1] and splits[0]["by_corpus"]["news"]["overlap"] == 90
    assert splits[0]["overlap"] == sum(part["overlap"] for part in splits[0]["by_corpus"].values())


def test_a_corpus_has_the_common_settings_but_for_its_own(prepared: Path, tmp_path: Path, plugin: str) -> None:
    recipe = _recipe(prepared, tmp_path, plugin, _tables(prepared, tmp_path / "json"))
    news, web = (corpus.cleaning for corpus in recipe.data.train.corpora.values())
    assert news == Cleaning(score="quality", min_score=0.5, language_id="label")
    assert web == Cleaning(score="quality", min_score=0.05, language_id="label", drop_near_duplicates=True)
    tree = recipe.model_dump()
    assert check_recipe(tree, "again") == recipe, "as a run's folder has it"
    tree["data"]["train"]["cleaning"]["same_digits"] = True
    assert all(corpus.cleaning.same_digits for corpus in check_recipe(tree, "again").data.train.corpora.values())


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cleaning", "fault"), [
    ({"min_score": 0.5}, r"cleaning.min_score \(0.5\) needs 'score', the column that has the scores"),
    ({"score": "quality"}, r"cleaning.score \(quality\) has no effect without 'min_score'"),
    ({"languages": ["en", "de"]}, "cleaning.languages has no effect without 'language_id'"),
    ({"languages": ["en"], "language_id": "label"}, "'languages' names one language"),
    ({"language_id": "labl"}, "cleaning.language_id: is 'labl', must be one of label, score, .*did you mean label?"),
])
def test_settings_that_do_not_fit(cleaning: dict[str, Any], fault: str, prepared: Path, tmp_path: Path, plugin: str
                                  ) -> None:
    train = _tables(prepared, tmp_path / "json")
    for where in (train["news"], train["web"]):
        where["cleaning"] = cleaning
    del train["cleaning"]
    with user_error(fault):
        _recipe(prepared, tmp_path, plugin, train)
    with user_error(fault):
        _recipe(prepared, tmp_path, plugin, {**train["news"], "cleaning": cleaning})


def test_a_score_needs_a_column(prepared: Path, tmp_path: Path, plugin: str) -> None:
    train = {"news": text(prepared, "train"), "cleaning": {"score": "quality", "min_score": 1.0}}
    with user_error(r"corpora.news.cleaning.score \(quality\) is a column of 'tsv' files, but this corpus is"):
        _recipe(prepared, tmp_path, plugin, train)
    train["news"]["cleaning"] = {"score": None, "min_score": None}
    assert _recipe(prepared, tmp_path, plugin, train).data.train.corpora["news"].cleaning == Cleaning()


@pytest.mark.parametrize("pairs", [0, 40])
@pytest.mark.parametrize(("name", "content", "fault"), [
    ("a.tsv", "en\tde\tquality\na\tb\t0.5\na\tb\tgood\n", "a.tsv, line 3: the score in the column 3 is 'good', must "
     "be a number; correct it, or name another column in cleaning.score"),
    ("a.tsv", "en\tde\tquality\na\tb\tnan\n", "a.tsv, line 2: the score in the column 3 is 'nan'"),
    ("a.tsv", "en\tde\na\tb\n", "a.tsv has no column 'quality'; its first line names en, de"),
    ("a.jsonl", '{"en": "a", "de": "b", "quality": "0.5"}\n{"en": "a", "de": "b"}\n',
     "a.jsonl, line 2: the score in the column 'quality' is None, must be a number"),
    ("a.jsonl", '{"en": "a", "de": "b", "quality": true}\n', "a.jsonl, line 1: .* is True, must be a number"),
])
def test_scores_that_are_no_numbers(name: str, content: str, fault: str, pairs: int, prepared: Path, tmp_path: Path,
                                    plugin: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    train = {"tsv": str(tmp_path / name), "columns": ["en", "de"], "cleaning": {"score": "quality", "min_score": 0.5}}
    with user_error(fault):
        prepare(_recipe(prepared, tmp_path / "run", plugin, train, shard_pairs=pairs))


@pytest.mark.parametrize(("name", "fault"), [
    ("short", "the language identifier short gives 0 labels for 1 sentences of src; it must give one for each"),
    ("none", "the language identifier none gives None for 'a'; it must give a label, such as 'de', or a score"),
    ("broken", "the language identifier broken fails on 1 sentences of src, of which the first is 'a': AttributeError"),
    ("five", "the language identifier five of .*languages.py is 5, must be a function of sentences and a side"),
])
def test_plug_ins_that_fail(name: str, fault: str, plugin: str) -> None:
    with user_error(fault):
        filter_corpora([(Rules(clean=Cleaning(language_id=name), languages=("en", "de")), [("a", "b", None)])])


def test_the_model_and_its_training_do_not_need_the_plug_in(prepared: Path, tmp_path: Path, plugin: str) -> None:
    """It runs again only to prepare; a run's recipe has its hash."""
    recipe = _recipe(prepared, tmp_path, plugin, _tables(prepared, tmp_path / "json"))
    prepare(recipe)
    plugins._plugins.clear()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    trained = load_recipe(tmp_path / "run")
    assert not plugins._plugins and not trained.model_has_plugins
    open_prepared(trained)
    foreign = trained.model_copy(update={"schedule": trained.schedule.model_copy(update={"name": "mine"})})
    assert foreign.model_has_plugins


def test_another_plug_in_is_other_data(prepared: Path, tmp_path: Path, plugin: str) -> None:
    train = _tables(prepared, tmp_path / "json")
    recipe = _recipe(prepared, tmp_path, plugin, train)
    prepare(recipe)
    with user_error("was made with data.train.news.cleaning .*, but the recipe has None; set data.folder to a new"):
        open_prepared(_recipe(prepared, tmp_path, plugin, {"news": train["news"], "web": text(prepared, "test")}))
    Path(plugin).write_text(PLUGIN.replace('"¤" in', '"x" in'), encoding="utf-8")
    with user_error("was made with data.train.news.cleaning .*, but the recipe has .*; set data.folder to a new"):
        open_prepared(_recipe(prepared, tmp_path, plugin, train))
