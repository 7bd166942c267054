"""Evaluation: scores compared with ones computed by hand, tables, comparisons, test sets, the whole job."""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sacrebleu
import tiny_run
from ranks import played
from refusals import user_error
from sacrebleu.significance import PairedTest

from deepnmt import config
from deepnmt.arguments import expected_model
from deepnmt.checkpoint.average import average_run
from deepnmt.checkpoint.checkpoint import load_model
from deepnmt.config.choices import metrics_called
from deepnmt.data.vocab import Vocabulary, train_vocabulary
from deepnmt.decode.translate import translate_files, translate_lines
from deepnmt.evaluate.evaluate import evaluate_run, load_test_sets, read_systems, scores_file, system_names
from deepnmt.evaluate.metrics import USUAL, EvaluationSet, compare, make_scorers, score_lines, score_systems
from deepnmt.evaluate.significance import difference, score_of, sentence_statistics
from deepnmt.model.transformer import Transformer

VERSION = sacrebleu.__version__
SIGNATURES = {
    "bleu": f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{VERSION}",
    "chrf": f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{VERSION}",
    "ter": f"nrefs:1|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:{VERSION}",
}
SOURCES = ["the small dog sees a red house", "a cat runs to the old tree", "two birds sing in the green garden"]
TARGETS = ["der kleine Hund sieht ein rotes Haus", "eine Katze läuft zum alten Baum", "zwei Vögel singen im Garten"]


def _write(file: Path, lines: list[str]) -> str:
    data = "".join(f"{line}\n" for line in lines).encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return str(file)


@pytest.fixture
def recipe(tmp_path: Path) -> config.Recipe:
    """With the test sets "first" (all three lines) and "second" (two, as TSV with the target first)."""
    test = {
        "first": {"src": [_write(tmp_path / "a.en.gz", SOURCES)], "trg": [_write(tmp_path / "a.de", TARGETS)]},
        "second": {"tsv": [_write(tmp_path / "b.tsv", [f"{t}\t{s}" for s, t in zip(SOURCES[:2], TARGETS)])],
                   "columns": [2, 1]},
    }
    return tiny_run.recipe_of(tmp_path / "run", test)


# -- scores ------------------------------------------------------------------------------------------------------------


def test_scores_are_those_computed_by_hand() -> None:
    scores = score_lines(["a b c d e"], [["a b c d f"]], "de")
    assert scores.values["bleu"] == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25, abs=1e-9)
    assert scores.values["ter"] == pytest.approx(100 * 1 / 5, abs=1e-9)
    shared = [4 / 5, 3 / 4, 2 / 3, 1 / 2, 0 / 1]  # of the 1- to 5-grams of 5 letters; there is no 6-gram
    assert scores.values["chrf"] == pytest.approx(100 * sum(shared) / 5, abs=1e-9)
    assert scores.signatures == SIGNATURES and scores.sentences == 1


def test_a_perfect_translation_and_the_wrong_case() -> None:
    assert score_lines(TARGETS, [TARGETS], "de").values == pytest.approx({"bleu": 100, "chrf": 100, "ter": 0}, abs=1e-9)
    assert score_lines([t.lower() for t in TARGETS], [TARGETS], "de").values["bleu"] < 60


def test_several_references() -> None:
    scores = score_lines(TARGETS, [["nichts"] * 3, TARGETS], "de")
    assert scores.values["bleu"] == pytest.approx(100) and scores.signatures["bleu"].startswith("nrefs:2|")


def test_the_target_language_chooses_the_tokenizer() -> None:
    assert "|tok:zh|" in score_lines(["你好"], [["你好"]], "zh").signatures["bleu"]


def test_faulty_numbers_of_lines() -> None:
    with user_error("mine has 2 lines, but the reference has 3"):
        score_lines(TARGETS[:2], [TARGETS], "de", "mine")
    with user_error("mine has no lines"):
        score_lines([], [[]], "de", "mine")
    with user_error("test set t has 3 source lines and 2 reference lines"):
        EvaluationSet("t", SOURCES, [TARGETS, TARGETS[:2]])
    with user_error("test set t has no lines"):
        EvaluationSet("t", [], [[]])


def noisy_pairs(count: int) -> tuple[list[str], list[str]]:
    """Lines and references of random words, some of them shared, with cases, signs, plurals and empty lines."""
    draw = random.Random(7)
    words = ["the", "dogs", "Dog", "runs", "running", "ran,", "prices", "price's", "1984", "U.S.", "generalisation",
             "generally", "e-mail", '"quoted"']
    lines, references = [], []
    for _ in range(count):
        reference = [draw.choice(words) for _ in range(draw.randint(0, 20))]
        line = [word if draw.random() < 0.7 else draw.choice(words) for word in reference if draw.random() < 0.9]
        lines.append(" ".join(line))
        references.append("  ".join(reference))
    return lines, references


def test_rouge_is_that_of_the_package() -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="pip install 'deepnmt[rouge]'")
    lines, references = noisy_pairs(500)
    kinds = metrics_called(["rouge"])
    scores = score_lines(lines, [references], "en", metrics=kinds)
    theirs = rouge_scorer.RougeScorer(list(kinds), use_stemmer=True)
    pairs = [theirs.score(reference, line) for reference, line in zip(references, lines, strict=True)]
    assert kinds == ("rouge1", "rouge2", "rougeL")
    for kind in kinds:
        mean = 100 * sum(pair[kind].fmeasure for pair in pairs) / len(pairs)
        assert 20 < mean < 95 and scores.values[kind] == pytest.approx(mean, abs=1e-12)
        assert scores.signatures[kind] == "nrefs:1|stem:porter|tok:rouge-score|version:0.1.2"


def test_rouge_by_hand_and_in_other_languages() -> None:
    pytest.importorskip("rouge_score", reason="pip install 'deepnmt[rouge]'")
    kinds = metrics_called(["rouge", "rouge2"])
    scores = score_lines(["a b c d"], [["a c b x y"]], "en", metrics=kinds)
    assert scores.values == pytest.approx({"rouge1": 100 * 2 * 3 / 9, "rouge2": 0, "rougeL": 100 * 2 * 2 / 9})
    assert score_lines(["Größe"], [["größe"]], "de", metrics=["rouge1"]).values["rouge1"] == pytest.approx(100)
    assert "stem:no|tok:unicode" in score_lines(["Größe"], [["Gruß"]], "de", metrics=["rouge1"]).signatures["rouge1"]
    with user_error("ROUGE counts words, but data.trg_lang is zh"):
        make_scorers("zh", ["rouge1"])
    better = score_lines(["a b c"], [["x y z"], ["a b c"]], "en", metrics=["rougeL"])
    assert better.values["rougeL"] == 100 and better.signatures["rougeL"].startswith("nrefs:2|")


def test_rouge_without_its_package() -> None:
    with patch.dict(sys.modules, {"rouge_score.rouge_scorer": None}), user_error("pip install 'deepnmt\\[rouge\\]'"):
        make_scorers("en", ["rouge2"])


def test_words_where_the_references_have_none() -> None:
    """As of recordings without speech: they are errors, as SacreBLEU's TER has it."""
    for lines, rate in ((["a b", ""], 100), (["", ""], 0)):
        scores = score_lines(lines, [["", ""]], "en", metrics=["ter", "wer", "cer"])
        assert scores.values == {"ter": rate, "wer": rate, "cer": rate}
    assert score_lines(["a b"], [[" a  b"]], "en", metrics=["wer", "cer"]).values == {"wer": 0.0, "cer": 25.0}
    assert score_lines(["a b"], [["x y z"], ["a b"]], "en", metrics=["wer"]).values == {"wer": 0.0}  # the nearest


def test_error_rates_are_jiwers() -> None:
    lines, references = noisy_pairs(200)
    kept = [number for number, reference in enumerate(references) if reference]
    lines, references = [lines[number] for number in kept], [references[number] for number in kept]
    scores = score_lines(lines, [references], "en", metrics=["wer", "cer"])

    def distance(one: list[str], other: list[str]) -> int:  # by its recursion alone
        last = {(i, j): max(i, j) for i in range(len(one) + 1) for j in range(len(other) + 1)}
        for i, j in itertools.product(range(1, len(one) + 1), range(1, len(other) + 1)):
            last[i, j] = min(last[i - 1, j] + 1, last[i, j - 1] + 1, last[i - 1, j - 1] + (one[i - 1] != other[j - 1]))
        return last[len(one), len(other)]

    for metric, units in (("wer", str.split), ("cer", list)):
        wrong = sum(distance(units(line), units(reference)) for line, reference in zip(lines, references, strict=True))
        assert scores.values[metric] == pytest.approx(100 * wrong / sum(map(len, map(units, references))), abs=1e-12)
        assert 10 < scores.values[metric] < 90
    jiwer = pytest.importorskip("jiwer", reason="pip install jiwer")
    assert scores.values["wer"] == pytest.approx(100 * jiwer.wer(references, lines), abs=1e-12)
    assert scores.values["cer"] == pytest.approx(100 * jiwer.cer(references, lines), abs=1e-12)


def test_the_tests_of_significance_take_rouge_and_error_rates() -> None:
    pytest.importorskip("rouge_score", reason="pip install 'deepnmt[rouge]'")
    lines, references = noisy_pairs(60)
    metrics = metrics_called(["rouge", "wer"])
    systems = {"noisy": lines, "equal": lines, "perfect": references}
    found = compare(systems, EvaluationSet("t", ["x"] * 60, [references]), "en", metrics)
    for metric in metrics:
        same, better = (c for c in found if c.metric == metric)
        assert same.difference == 0 and same.p_value == 1 and better.p_value < 0.001
        assert (better.difference < 0) == (metric == "wer") and "bs:1000" in better.signature


# -- tables and comparisons --------------------------------------------------------------------------------------------


def test_the_table_has_a_row_a_system_a_column_a_set_and_the_average() -> None:
    sets = [EvaluationSet("one", SOURCES, [TARGETS]), EvaluationSet("newstest2014", SOURCES[:1], [["a b c d f"]])]
    report = score_systems({"18L-18L": [TARGETS, ["a b c d e"]]}, sets, "de")
    blocks = report.table().split("\n\n")
    assert blocks[0] == (
        "BLEU        one  newstest2014  average\n"
        "18L-18L  100.00         66.87    83.44\n"
        f"BLEU|{SIGNATURES['bleu']}"
    )
    assert [block.split()[0] for block in blocks] == ["BLEU", "chrF2", "TER"]
    assert report.average("18L-18L", "ter") == pytest.approx(10)
    assert "average" not in score_systems({"s": [TARGETS]}, sets[:1], "de").table()


def _texts(lines: int) -> tuple[EvaluationSet, list[str], list[str]]:
    """A test set; a good system, wrong in a word of each third line; a bad one, wrong in a word of each line."""
    reference = [f"{TARGETS[i % 3]} {i}" for i in range(lines)]
    good = [line.replace(" ", " falsch ", 1) if i % 3 == 0 else line for i, line in enumerate(reference)]
    bad = [line.replace(" ", " falsch ", 1) for line in reference]
    return EvaluationSet("t", list(reference), [reference]), good, bad


def test_a_test_distinguishes_better_from_equal() -> None:
    test, good, bad = _texts(60)
    report = score_systems({"bad": [bad], "good": [good], "again": [bad]}, [test], "de")
    found = {(c.metric, c.system): c for c in report.comparisons}
    assert len(found) == len(report.comparisons) == 6 and {c.baseline for c in report.comparisons} == {"bad"}
    for metric, sign in (("bleu", 1), ("chrf", 1), ("ter", -1)):
        better, same = found[metric, "good"], found[metric, "again"]
        values = {system: report.scores[system]["t"].values[metric] for system in ("good", "bad")}
        assert better.difference == pytest.approx(values["good"] - values["bad"], abs=1e-9)
        assert better.difference * sign > 1 and better.p_value < 0.01 and better.sacrebleu_p_value < 0.01
        assert abs(better.mean - values["good"]) < better.interval
        assert (same.difference, same.p_value) == (0.0, 1.0)
    assert "|bs:1000|seed:12345|" in found["bleu", "good"].signature
    assert report.table().count("*") == 4  # one in the heading, one a metric


def test_a_difference_in_one_line_of_many_is_chance() -> None:
    test, good, _ = _texts(60)
    (bleu, *_) = compare({"a": good, "b": [good[0].replace("Hund", "Hut"), *good[1:]]}, test, "de")
    assert bleu.difference < 0 and bleu.p_value > 0.05


@pytest.mark.slow
def test_p_is_the_chance_of_equal_systems() -> None:
    """Of 300 pairs of equal systems 15 should have p < 0.05, by chance 5 to 27; SacreBLEU's bootstrap gives it to
    more. `python -m studies equal-systems` does the same with all trials on a real text."""
    scorer, stars, bootstrap = make_scorers("en")["bleu"], 0, 0
    words = ["a", "man", "in", "red", "walks", "his", "dog", "along", "the", "beach"]
    for pair in range(300):
        draw = random.Random(pair)
        references = [" ".join(draw.choices(words, k=9))
                      for _ in range(40)]
        systems = [[" ".join(word for word in line.split() if draw.random() > 0.2) for line in references]
                   for _ in range(2)]
        one, other = (sentence_statistics(scorer, lines, [references]) for lines in systems)
        stars += difference(one, other, score_of(scorer), trials=100).p < 0.05
        test = PairedTest(list(zip("ab", systems, strict=True)), {"m": scorer}, [references], "bs", n_samples=100)
        bootstrap += test()[1]["BLEU"][1].p_value < 0.05
    assert 5 <= stars <= 27 < bootstrap, (stars, bootstrap)


def test_p_is_that_of_sacrebleus_approximate_randomization() -> None:
    """Two generators of random numbers, 10,000 trials each: three standard deviations are 0.02 at most."""
    test, good, _ = _texts(60)
    other = [line.replace("das", "die") if i % 7 else line.replace(" ", " sehr ", 1) for i, line in enumerate(good)]
    systems = {"good": good, "other": other}
    for metric, scorer in make_scorers("de").items():
        _, scored = PairedTest(list(systems.items()), {"m": scorer}, test.references, test_type="ar")()
        theirs = [results[1].p_value for name, results in scored.items() if name != "System"]
        found, = compare(systems, test, "de", [metric])
        assert [found.p_value] == pytest.approx(theirs, abs=0.02), metric


# -- test sets ---------------------------------------------------------------------------------------------------------


def test_test_sets_by_name_and_by_files(recipe: config.Recipe, tmp_path: Path) -> None:
    assert load_test_sets(recipe, None) == [
        EvaluationSet("first", SOURCES, [TARGETS]), EvaluationSet("second", SOURCES[:2], [TARGETS[:2]])]
    files = f"mine={tmp_path / 'a.en.gz'},{tmp_path / 'a.de'}"
    assert load_test_sets(recipe, [files, "second"])[0] == EvaluationSet("mine", SOURCES, [TARGETS])
    short = _write(tmp_path / "short", TARGETS[:2])
    empty = _write(tmp_path / "empty", [])
    for spec, fault in (
        ("frist", "there is no test set 'frist'; did you mean first\\? give a name of data.test \\(first, second\\)"),
        ("wmt14/ful", "did you mean wmt14/full"),
        ("multi30k/2016=x", "not of the form NAME=SRC,REF"),
        (f"m={tmp_path / 'none'},{short}", "none cannot be read: No such file"),
        (f"m={tmp_path / 'a.en.gz'},{short}", "test set m has 3 source lines and 2 reference lines"),
        (f"m={empty},{empty}", "test set m has no lines"),
    ):
        with user_error(fault):
            load_test_sets(recipe, [spec])
    with user_error("have the same name"):
        load_test_sets(recipe, ["first", "first"])
    with user_error(r"no data\.test"):
        load_test_sets(tiny_run.recipe_of(tmp_path), None)
    german = recipe.model_copy(update={"data": recipe.data.model_copy(update={"src_lang": "deu"})})
    with user_error(r"SacreBLEU's multi30k/2017 has no deu-de .*; it has en-de, en-fr"):
        load_test_sets(german, ["multi30k/2017"])


_SACREBLEU_SETS = """
import sys
import tiny_run
from pathlib import Path
from deepnmt.errors import UserError
from deepnmt.evaluate.evaluate import load_test_sets
recipe = tiny_run.recipe_of(Path("run"))
(found,) = load_test_sets(recipe, ["wmt14/full"])
assert (found.name, found.sources, found.references) == ("wmt14/full", ["a b", "c"], [["d", "e f"]]), found
try:
    load_test_sets(recipe, ["multi30k/2016"])
except UserError as error:
    print(error)
"""


def test_sacrebleus_test_sets_from_its_folder_without_a_network(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "wmt14" / "full"
    folder.mkdir(parents=True)
    for kind in ("src", "ref", "docid", "genre", "origlang"):
        _write(folder / f"wmt14_full.en-de.{kind}", {"src": ["a b", "c"], "ref": ["d", "e f"]}.get(kind, ["x", "x"]))
    refused = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    paths = os.pathsep.join([str(Path(tiny_run.__file__).parent), str(Path(config.__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", _SACREBLEU_SETS], capture_output=True, text=True, timeout=600, check=True, cwd=tmp_path,
        env={**os.environ, **refused, "no_proxy": "", "SACREBLEU": str(tmp_path / "cache"), "PYTHONPATH": paths},
    )
    assert done.stdout.startswith(f"SacreBLEU's multi30k/2016 is not in {tmp_path / 'cache'} and cannot be downloaded")
    assert "sacrebleu --download multi30k/2016 -l en-de" in done.stdout and done.stdout.count("\n") == 1


# -- the job -----------------------------------------------------------------------------------------------------------


def test_a_runs_model_is_translated_and_scored(recipe: config.Recipe, tmp_path: Path) -> None:
    tiny_run.write(recipe, 10)
    settings = config.Translate(beam=2, max_ratio=1.0, max_extra=3, nbest=2)
    recipe = recipe.model_copy(update={"translate": settings})
    table = evaluate_run(recipe)
    written = json.loads((tmp_path / "run" / "scores.json").read_text())
    loaded = load_model(Path(recipe.run))
    vocabs = (loaded.src_vocab, loaded.trg_vocab)
    for name, count in (("first", 3), ("second", 2)):
        lines = [best[0].text for best in translate_lines(loaded.model, vocabs, SOURCES[:count], settings)]
        assert written["sets"][name] == score_lines(lines, [TARGETS[:count]], "de").as_json()
    assert written["average"]["chrf"] == (written["sets"]["first"]["chrf"] + written["sets"]["second"]["chrf"]) / 2
    assert (written["system"], written["update"], written["averaged_updates"]) == ("run", 10, [])
    assert written["checkpoint"].endswith("update-00000010") and written["translate"] == settings.model_dump()
    assert "bleu" not in written and table.startswith("BLEU")


def test_each_test_set_has_its_own_tag_and_language(tmp_path: Path) -> None:
    vocab = train_vocabulary(tiny_run.SENTENCES * 3, config.Vocab(size=40), ["<2de>", "<2zh>"])
    text = {"src": [_write(tmp_path / "a.en", SOURCES)], "trg": [_write(tmp_path / "a.de", TARGETS)]}
    recipe = tiny_run.recipe_of(tmp_path / "run", {
        lang: {**text, "tag": f"<2{lang}>", "trg_lang": lang} for lang in ("de", "zh")})
    recipe = recipe.model_copy(update={"translate": config.Translate(beam=1, max_ratio=1.0, max_extra=3)})
    tiny_run.write(recipe, 10, vocabs={"src.spm": vocab, "trg.spm": vocab})
    with patch.object(Transformer, "encode", autospec=True, side_effect=Transformer.encode) as read:
        evaluate_run(recipe)
    scores, tags = json.loads((tmp_path / "run" / "scores.json").read_text())["sets"], Vocabulary(vocab).tags
    for call, lang, tokenizer in zip(read.call_args_list, ("de", "zh"), ("13a", "zh"), strict=True):
        assert call.args[1][:, 0].tolist() == [tags[f"<2{lang}>"]] * 3
        assert f"|tok:{tokenizer}|" in scores[lang]["bleu_signature"]
        assert (tmp_path / "run" / "scores" / f"{lang}.src").read_text().splitlines() == SOURCES, "without the tag"
    with patch.object(Transformer, "encode") as read, user_error("ROUGE"):  # of Chinese; it costs no translation
        evaluate_run(recipe, metrics=["rouge1"])
    read.assert_not_called()


def test_other_scores_do_not_overwrite_the_runs_own(
    recipe: config.Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, checkpoint = Path(recipe.run), tiny_run.write(recipe, 10)
    recipe = recipe.model_copy(update={"translate": config.Translate(beam=1, max_ratio=1.0, max_extra=3)})
    (run / "recipe.yaml").write_text(config.dump_recipe(recipe), encoding="utf-8")
    evaluate_run(recipe, metrics=[*USUAL, "wer"])
    own = (run / "scores.json").read_bytes()
    assert capsys.readouterr().err.splitlines()[:1] == [f"scoring the model of {checkpoint}"]
    good = _write(tmp_path / "good.de", TARGETS)
    mine = f"mine/1={tmp_path}/a.en.gz,{good}"
    evaluate_run(recipe, tests=["first", mine])
    evaluate_run(recipe, checkpoints=[checkpoint])
    evaluate_run(recipe, metrics=["wer", "chrf++"])
    evaluate_run(config.load_recipe(run, ["translate.max_extra=2"]))
    evaluate_run(recipe)
    evaluate_run(recipe, ["first"], [f"a={good}", f"b={good}"])
    assert f"scores are in {run}/scores-a-b-first.json" in capsys.readouterr().err
    assert {file.name for file in run.glob("*.json*")} == {
        "scores.json", "scores-first-mine_1_814f71.json", "scores-update-00000010.json", "scores-max_extra_2.json",
        "scores-a-b-first.json", "scores-wer-chrf_.json"}
    assert (run / "scores.json").read_bytes() == own
    for line in (b'"update": ', b'"chrf": '):  # of another model, or of other translations
        (run / "scores.json").write_bytes(own.replace(line, line + b"1", 1))
        evaluate_run(recipe)
        assert b'"wer"' not in (run / "scores.json").read_bytes()


def test_names_of_other_scores(recipe: config.Recipe, tmp_path: Path) -> None:
    run = Path(recipe.run)
    for folder in (run, tmp_path / "other"):
        (folder / "checkpoints").mkdir(parents=True)
    (run / "recipe.yaml").write_text(config.dump_recipe(recipe), encoding="utf-8")
    lines, less = _write(tmp_path / "c.en", SOURCES[:2]), _write(tmp_path / "less.de", TARGETS[:2])

    def name(*overrides: str, tests: list[str] | None = None, **given: Any) -> str:
        asked = config.load_recipe(run, list(overrides))
        file = scores_file(asked, load_test_sets(asked, tests), tests, **given)
        assert file.parent == run
        return file.name

    other = [f"data.test.first.src=[{lines}]", f"data.test.first.trg=[{less}]"]
    assert name() == name(checkpoints=[run]) == name("run=" + str(run)) == "scores.json"
    assert name("translate.beam=1", "seed=7") == "scores-seed_7-beam_1.json"
    assert name(metrics=["wer", "ter", "chrf", "bleu"]) == "scores.json" and name(metrics=["ter"]) == "scores-ter.json"
    assert name("translate.beam=1", hypotheses=["a b=x,y"]) == "scores-a_b.json"  # no search
    assert name("data.trg_lang=fr", hypotheses=["a=x,y"]) == "scores-a-trg_lang_fr.json"
    assert name(*other) == "scores-first_5e5bf1-second.json"
    assert name(*other, tests=["second"]) == "scores-second.json"
    assert name(*other, tests=["first"]) == name(tests=[f"first={lines},{less}"]) == "scores-first_5e5bf1.json"
    assert name(tests=["first"]) == "scores-first.json"
    assert name(f"data.test.v.src=[{lines}]", f"data.test.v.trg=[{less}]") == "scores-first-second-v_5e5bf1.json"
    for checkpoint, found in (("run/checkpoints/update-00000024", "update-00000024"), ("run/averaged", "averaged"),
                              ("other/checkpoints/update-00000024", "other-update-00000024"), ("other", "other"),
                              ("other/averaged", "other-averaged"), ("run/../other/mean", "other-mean")):
        assert name(checkpoints=[tmp_path / checkpoint]) == f"scores-{found}.json"


def test_every_command_that_uses_the_average_warns_if_it_is_outdated(
    recipe: config.Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe.model_copy(update={"translate": config.Translate(beam=1, max_ratio=1.0, max_extra=3)})
    tiny_run.write(recipe, 10)
    folder, newest = average_run(recipe), tiny_run.write(recipe, 20)
    source, out = str(tmp_path / "a.en.gz"), str(tmp_path / "out")
    translate_files(Path(recipe.run), source, "-", recipe.translate, ranks=played(1, 2))
    assert caplog.messages == []
    translate_files(Path(recipe.run), source, out, recipe.translate)
    evaluate_run(recipe)
    assert len(caplog.messages) == 2
    assert all(message.startswith(f"{folder} was averaged") and str(newest) in message for message in caplog.messages)


def test_existing_translations_are_scored_and_compared(recipe: config.Recipe, tmp_path: Path) -> None:
    good, bad = _write(tmp_path / "good.de", TARGETS), _write(tmp_path / "bad.de", [t[::-1] for t in TARGETS])
    evaluate_run(recipe, tests=["first"], hypotheses=[f"good={good}"], output=tmp_path / "new" / "one.json")
    one = json.loads((tmp_path / "new" / "one.json").read_text())
    assert (one["system"], one["bleu"], one["ter"]) == ("good", pytest.approx(100), 0)
    assert one["bleu_signature"] == SIGNATURES["bleu"] and one["chrf_signature"] == SIGNATURES["chrf"]
    assert one["sets"]["first"]["sentences"] == 3

    (tmp_path / "two").mkdir()
    (tmp_path / "two.json").write_text("{}")
    old = _write(tmp_path / "two" / "first.ref2", TARGETS)  # of an earlier text
    table = evaluate_run(recipe, ["first"], [f"bad={bad}", f"good={good}"], output=tmp_path / "two.json")
    assert not Path(old).exists() and (tmp_path / "two" / "first.ref").is_file()
    two = json.loads((tmp_path / "two.json").read_text())
    assert list(two["systems"]) == ["bad", "good"] and two["systems"]["good"]["bleu"] == pytest.approx(100)
    assert [c["metric"] for c in two["comparisons"]] == ["bleu", "chrf", "ter"]
    assert "first: BLEU of good is +" in table


def test_runs_are_called_by_their_folders_wherever_one_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert system_names([".", "runs/a/", "../b"]) == [tmp_path.name, "a", "b"]


def test_scores_can_be_written_to_a_device_and_through_a_link(recipe: config.Recipe, tmp_path: Path) -> None:
    null, link = tmp_path / "null", tmp_path / "link.json"
    null.symlink_to("/dev/null")
    link.symlink_to("scores.json")
    good = Path(_write(tmp_path / "good.de", TARGETS))
    text = good.read_bytes()
    (tmp_path / "scores.json.part").symlink_to(good)
    for output in (null, link):
        evaluate_run(recipe, ["first"], [f"good={good}"], output=output)
    assert null.is_char_device() and link.is_symlink() and good.read_bytes() == text
    assert json.loads((tmp_path / "scores.json").read_text())["system"] == "good"


def test_faulty_hypotheses(recipe: config.Recipe, tmp_path: Path) -> None:
    good, short = _write(tmp_path / "good.de", TARGETS), _write(tmp_path / "short.de", TARGETS[:1])
    sets = load_test_sets(recipe, None)
    with user_error("not of the form SYSTEM=FILE"):
        read_systems([good], sets)
    with user_error(r"system s has 1 files for 2 test sets \(first, second\)"):
        read_systems([f"s={good}"], sets)
    with user_error("system s is given twice"):
        read_systems([f"s={good},{good}"] * 2, sets)
    with user_error("system a_b is given twice"):  # in the names of files
        read_systems([f"{name}={good},{good}" for name in ("a b", "a_b")], sets)
    with user_error("two of the test sets x/y, x_y have the same name"):
        load_test_sets(recipe, [f"{name}={good},{good}" for name in ("x/y", "x_y")])
    with user_error("s on second has 3 lines, but the reference has 2"):
        evaluate_run(recipe, hypotheses=[f"s={good},{good}"])
    with user_error("s on first has 1 lines, but the reference has 3"):
        evaluate_run(recipe, ["first"], hypotheses=[f"s={short}"])
    with user_error(r"good\.de/x cannot be written: .*; set --output to a file that can be"):  # nor is here
        evaluate_run(recipe, ["first"], output=f"{good}/x")
    for text in (good, Path(recipe.data.test["first"].src[0])):
        with user_error(r"scores cannot be written to .*, which is one of the texts"):
            evaluate_run(recipe, ["first"], [f"good={good}"], output=text)
    with user_error(r"the texts of .*\.json would go into .*, from which texts are read; give another file"):
        evaluate_run(recipe, ["first"], [f"good={good}"], output=Path(good).parent.with_suffix(".json"))
    (tmp_path / "mine").mkdir()
    with user_error(r"would go into .*/mine, which exists already; give another file, or remove that folder"):
        evaluate_run(recipe, ["first"], [f"good={good}"], output=tmp_path / "mine.json")
    with user_error(r"scores cannot be written to .*, which is a folder"):  # before a model is looked for
        evaluate_run(recipe, ["first"], output=tmp_path)
    with user_error(r"so the checkpoint c would have no effect; give one of the two"):
        evaluate_run(recipe, ["first"], hypotheses=[f"s={good}"], checkpoints=["c"])


def test_another_model_than_requested_is_rejected_with_the_setting(recipe: config.Recipe, tmp_path: Path) -> None:
    tiny_run.write(recipe, 10)
    asked = config.Model.model_validate({**recipe.model.model_dump(), "heads": 4, "dropout": 0.2})
    fault = r"update-00000010 holds another model .*:\n  model.dropout: 0.1 -> 0.2\n  model.heads: 2 -> 4\n"
    with user_error(fault):
        evaluate_run(recipe, expected=asked)
    with user_error(fault):
        average_run(recipe, last=1, model=asked)
    with user_error(fault):
        translate_files(Path(recipe.run), str(tmp_path / "a.en.gz"), str(tmp_path / "out"), recipe.translate,
                        expected=asked)
    assert not (tmp_path / "out").exists() and not (tmp_path / "run" / "averaged").exists()
    average_run(recipe, last=1, model=recipe.model)


def test_the_model_that_a_command_line_requests(recipe: config.Recipe) -> None:
    def asked(checkpoint: str | None, *overrides: str) -> config.Model | None:
        return expected_model(argparse.Namespace(overrides=overrides), recipe, checkpoint)

    assert asked(None) == asked(None, "run=x") == asked("folded", "model.heads=2") == recipe.model
    assert asked("folded") is asked("folded", "translate.beam=2", "modelled=1") is None


def test_processes_share_the_lines_and_the_first_scores(recipe: config.Recipe, tmp_path: Path) -> None:
    tiny_run.write(recipe, 10)
    parts: list[bytes] = []

    def later(data: bytes) -> None:
        parts.append(data)

    def first(data: bytes) -> list[bytes]:
        return [data, parts.pop(0)]

    alone = evaluate_run(recipe, output=tmp_path / "alone.json")
    assert evaluate_run(recipe, output=tmp_path / "no.json", ranks=played(1, 2, later)) == ""
    assert evaluate_run(recipe, output=tmp_path / "two.json", ranks=played(0, 2, first)) == alone
    assert not (tmp_path / "no.json").exists() and not parts
    assert (tmp_path / "two.json").read_bytes() == (tmp_path / "alone.json").read_bytes()
