"""Texts kept beside scores, further metrics, runs compared with each other, and the report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu.tokenizers.tokenizer_spm as tokenizer_spm
import tiny_run
from refusals import Refused, user_error

from deepnmt import config
from deepnmt.cli import main
from deepnmt.decode.translate import translate_files
from deepnmt.evaluate.evaluate import evaluate_run, texts_folder
from deepnmt.evaluate.metrics import EvaluationSet, compare, make_scorers, score_lines
from deepnmt.extras.report.page import group_of, group_words, marked, write_report

SOURCES = [*tiny_run.SENTENCES, "a dog sings", "the <red> house", "two old cats see the small tree & run"] * 3
TARGETS = ["der kleine Hund sieht ein rotes Haus", "eine Katze läuft zum alten Baum", "zwei Vögel singen im Garten",
           "ein Hund singt", "das <rote> Haus", "zwei alte Katzen sehen den kleinen Baum & laufen"] * 3


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[config.Recipe]:
    """Two untrained runs with one test set of 18 lines, and their training text."""
    monkeypatch.chdir(tmp_path)
    for name, lines in (("test.en", SOURCES), ("test.de", TARGETS), ("train.en", SOURCES), ("train.de", TARGETS)):
        Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    recipes = []
    for seed, name in enumerate(("one", "two"), start=1):
        recipe = tiny_run.recipe_of(tmp_path / name, {"mine": {"src": ["test.en"], "trg": ["test.de"]}})
        recipe = recipe.model_copy(update={"translate": config.Translate(beam=2, max_ratio=1.0, max_extra=4)})
        tiny_run.write(recipe, 1, seed=seed)
        (tmp_path / name / "recipe.yaml").write_text(config.dump_recipe(recipe), encoding="utf-8")
        recipes.append(recipe)
    return recipes


def test_texts_are_kept_as_they_were_translated(
    runs: list[config.Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepnmt.progress.PLAIN_SECONDS", 0.0)
    evaluate_run(runs[0])
    said = capsys.readouterr().err
    assert re.search(r"mine: (\d+) of \1 lines translated in \d+ s, ETA 0 s", said), said
    assert "scoring: 3 of 3 texts and metrics in " in said
    translate_files(runs[0].run, "test.en", "out", runs[0].translate)
    texts = Path(runs[0].run) / "scores"
    assert sorted(file.name for file in texts.iterdir()) == ["mine.hyp", "mine.ref", "mine.src"]
    for ending, other in (("hyp", "out"), ("src", "test.en"), ("ref", "test.de")):
        assert (texts / f"mine.{ending}").read_bytes() == (tmp_path / other).read_bytes()
    assert f"comet-score -s {texts}/mine.src -t {texts}/mine.hyp -r {texts}/mine.ref" in said
    evaluate_run(runs[0], hypotheses=["a b=out", "same=test.de"], output=tmp_path / "both")
    assert texts_folder(tmp_path / "both") == tmp_path / "both-texts"
    assert (tmp_path / "both-texts" / "mine.a_b.hyp").read_bytes() == (tmp_path / "out").read_bytes()
    both = " ".join(f"{tmp_path}/both-texts/mine.{name}.hyp" for name in ("a_b", "same"))
    assert f"-t {both} -r" in capsys.readouterr().err


def test_metrics_are_those_of_the_sacrebleu_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signatures and scores, of pieces of a small vocabulary in place of FLORES's, which would be downloaded."""
    (tmp_path / "models").mkdir()
    for name in ("sacrebleu_tokenizer_spm.model", "flores200sacrebleuspm"):
        (tmp_path / "models" / name).write_bytes(tiny_run.VOCAB)
    monkeypatch.setattr(tokenizer_spm, "SACREBLEU_DIR", str(tmp_path))
    lines = [line.replace("Hund", "Haus") for line in TARGETS]
    for name, text in (("hyp", lines), ("ref", TARGETS)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    metrics = ("bleu", "chrf++", "flores101", "flores200")
    scores = score_lines(lines, [TARGETS], "de", metrics=metrics)
    command = [sys.executable, "-m", "sacrebleu", tmp_path / "ref", "-i", tmp_path / "hyp", "-w", "6"]
    said = {}
    for tokens in ("flores101", "flores200"):
        done = subprocess.run([*command, "-m", "bleu", "chrf", "--chrf-word-order", "2", "--tokenize", tokens],
                              env={**os.environ, "SACREBLEU": str(tmp_path)}, capture_output=True, check=True)
        said[tokens], said["chrf++"] = json.loads(done.stdout)
    for metric, found in said.items():
        assert scores.signatures[metric] == found["signature"]
        assert scores.values[metric] == pytest.approx(found["score"], abs=1e-5)
    test = EvaluationSet("mine", SOURCES, [TARGETS])
    for compared in compare({"one": lines, "other": TARGETS}, test, "de", metrics):
        assert compared.difference == pytest.approx(100 - scores.values[compared.metric])
        assert {*scores.signatures[compared.metric].split("|")} < {*compared.signature.split("|")}
    assert "|tok:flores200|" in scores.signatures["flores200"] and "|nw:2|" in scores.signatures["chrf++"]


def test_a_tokenizer_that_cannot_be_had_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(tokenizer_spm, "SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizer_spm, "download_file", offline)
    with user_error(r"SacreBLEU's flores200 tokenizer is not in .*/models and cannot be downloaded \(no network\)"):
        make_scorers("de", ["flores200"])


def test_runs_are_compared_on_the_firsts_test_sets(
    runs: list[config.Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (recipe.run for recipe in runs)
    assert main("evaluate", [one, "translate.beam=2", two, "--checkpoint", "newest", "--metric", "chrf++"]) == 0
    table = capsys.readouterr().out
    assert "chrF2++" in table and "\nBLEU" not in table and ": BLEU" not in table
    assert re.search(r"mine: chrF2\+\+ of two is [+-]\d", table)
    file, = Path(one).glob("scores-*.json")
    assert file.name == "scores-update-00000001-two-chrf_.json"
    found = json.loads(file.read_text())
    assert list(found["systems"]) == ["one", "two"]
    kept = {name: (texts_folder(file) / f"mine.{name}.hyp").read_text(encoding="utf-8").splitlines()
            for name in ("one", "two")}
    assert kept["one"] != kept["two"]
    comparison, = compare(kept, EvaluationSet("mine", SOURCES, [TARGETS]), "de", ["chrf++"])
    assert found["comparisons"][0]["p_value"] == comparison.p_value
    translate_files(two, "test.en", "out", runs[1].translate)
    assert Path("out").read_text(encoding="utf-8").splitlines() == kept["two"]


def test_the_help_names_further_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("evaluate", ["--help"])
    assert "further runs, and settings" in " ".join(capsys.readouterr().out.split())


def test_runs_that_cannot_be_compared(runs: list[config.Recipe], refused: Refused) -> None:
    one, two = (recipe.run for recipe in runs)
    for words, message in (
        ([one, "nowhere"], "nowhere is neither the folder of a run nor of the form KEY=VALUE"),
        ([one, one], "a run is given twice"),
        ([one, two, "--checkpoint", two], "names checkpoints of one run, but 2 runs are given"),
        ([one, two, "--hypotheses", "a=test.de"], "would have no effect"),
    ):
        assert message in refused("evaluate", *words)
    (Path(two) / "recipe.yaml").write_text(
        f"run: {two}\ntask: speech\ndata: {{folder: a, train: a, valid: a}}\ntrain: {{updates: 1}}\n")
    assert "two has data.src_lang none and " in refused("evaluate", one, two)
    assert "two has task: speech, but" in refused("report", one, two)
    other = runs[1].model_copy(update={"data": runs[1].data.model_copy(update={"trg_lang": "fr"})})
    with user_error("has data.trg_lang fr and .* de; compare runs of one pair of languages"):
        evaluate_run(runs[0], others={two: other})


# -- the report --------------------------------------------------------------------------------------------------------


def test_a_report_of_one_run(runs: list[config.Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(runs[0].run)
    with user_error("run deepnmt evaluate .* first"):
        write_report(runs[:1], "scores.json", run / "report.html")
    evaluate_run(runs[0])
    records = [{"type": "train", "update": n, "loss": 9 - n, "learning_rate": 1e-3} for n in range(1, 5)]
    use = {"source_gain": 1.5, "encoder_common": 0.04, "decoder_common": 0.2, "cross_attention_entropy": 0.6125}
    records += [{"type": "valid", "update": 2, "loss": 6.0, **dict.fromkeys(use, 9.0)},
                {"type": "valid", "update": 1004, "loss": 5.0, **use}]
    (run / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    capsys.readouterr()
    assert main("report", [str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = (run / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=['\"](?!data:)|<script|@import|url\(", page)  # nothing from elsewhere
    for text in ("Learning curve of one", "The 9 best sentences", "The 9 worst sentences", "1 to 10", "version:",
                 "By frequency of words", "das &lt;rote&gt; Haus", "see the small tree &amp; run", "b2t 1L",
                 "one, validation at update 1,004", "1.500", "0.613"):
        assert text in page
    assert page.count("<tr class=first>") == 18 and "<rote>" not in page
    scores = json.loads((run / "scores.json").read_text())
    assert f"{scores['chrf']:.2f}" in page and scores["chrf_signature"] in page
    # a metric of the recipe's stands beside the others, or alone
    scores["sets"]["mine"] = {"comet": 0.81234, "comet_signature": "command:comet", "sentences": 18}
    scores["ensemble"] = ["another"]
    (run / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
    page = write_report(runs[:1], "scores.json", run / "report.html").read_text(encoding="utf-8")
    assert "<th>comet</th>" in page and ">0.8123<" in page and "comet|command:comet" in page
    assert "<td>another</td>" in page and "The training text is not there" not in page
    assert "<th>times in the training text</th>" in page
    Path("train.de").unlink()
    page = write_report(runs[:1], "scores.json", run / "report.html").read_text(encoding="utf-8")
    assert "The training text is not there any more, so nothing is known." in page and "By length" in page


def test_a_report_of_two_runs(
    runs: list[config.Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for recipe, lines in zip(runs, (TARGETS, [t.replace("Hund", "Haus") for t in TARGETS]), strict=True):
        Path("out").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        evaluate_run(recipe, hypotheses=[f"{Path(recipe.run).name}=out"], output=Path(recipe.run) / "scores.json")
    monkeypatch.setattr("deepnmt.progress.PLAIN_SECONDS", 0.0)
    page = write_report(runs, "scores.json", tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    said = capsys.readouterr().err
    assert "comparing: 1 of 3 test sets and metrics" in said
    assert re.search(r"counting words: (\d+) of \1 pairs in \d+ s, ETA 0 s", said), said
    for text in ("two against one", "two is better in 0 sentences of 18, worse in 6; 12 translations are the same",
                 "Where two is worse by most", "<mark>Haus</mark>", "one has no log.jsonl"):
        assert text in page
    assert "times in the training text of one<" in page and "how often they come in the training text of one." in page
    assert "is better by most" not in page and page.count("<tr class=first>") == 6
    # the words of the references: each but "Hund" is in the second's translation, and all come 1 to 9 times
    words = [word for line in TARGETS for word in re.findall(r"\w+", line)]
    often = sum(words.count(word) < 10 for word in words)
    assert f">{100 * (often - words.count('Hund')) / often:.1f} %<" in page and ">100.0 %<" in page
    with user_error("file out/page.html cannot be written: File exists; set --output"):
        write_report(runs, "scores.json", Path("out/page.html"))
    assert not capsys.readouterr().err, "it is noticed before the work"
    (tmp_path / "two" / "scores" / "mine.src").write_text("x\n" * 18, encoding="utf-8")
    with user_error("were scored on no test set in common"):
        write_report(runs, "scores.json", tmp_path / "page.html")
    (tmp_path / "two" / "scores" / "mine.hyp").write_text("x\n", encoding="utf-8")
    with user_error("mine.hyp has 1 lines, but .*/mine.src 18; run deepnmt evaluate"):
        write_report(runs, "scores.json", tmp_path / "page.html")
    (tmp_path / "two" / "scores.json").write_text('{"systems": {}}', encoding="utf-8")
    with user_error("does not hold the scores of one system"):
        write_report(runs, "scores.json", tmp_path / "page.html")


def test_groups_and_marks() -> None:
    assert [group_of(value, (0, 1, 10)) for value in (0, 1, 9, 10, 99)] == [0, 1, 1, 2, 2]
    assert [group_words(number, (0, 1, 10)) for number in range(3)] == ["0", "1 to 9", "10 or more"]
    assert group_of(0, (1, 11)) == 0
    assert marked("a x c", "a b c") == "a <mark>x</mark> c" and marked("", "a") == "<small>nothing</small>"
    assert marked("The dog & cat.", "A dog.") == "<mark>The</mark> dog <mark>&amp; cat</mark>."
