"""Metrics of other programs: their scores, bootstrap and cache; what they do wrong; in validation; whose code runs."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from refusals import Refused, user_error
from small_disk import small_disk
from warm import has_ended, waiting

from deepnmt import config
from deepnmt.checkpoint.checkpoint import load_state
from deepnmt.cli import main
from deepnmt.config import check_recipe, load_recipe
from deepnmt.evaluate.evaluate import evaluate_run
from deepnmt.extras.outside_metrics.program import Program
from deepnmt.tasks.translation.source_use import SourceUse

SOURCES = [f"a sentence with the number {number}" for number in range(40)]
REFERENCES = [f"ein Satz mit der Nummer {number}" for number in range(40)]
SYSTEMS = {"short": [line[:9 + i % 7] for i, line in enumerate(REFERENCES)],
           "long": [line + " und mehr" * (i % 3) for i, line in enumerate(REFERENCES)]}
# Prints of each line how long the translation is beside the reference, and counts how often it runs.
RATIO = """import sys
with open("runs.txt", "a") as counter:
    counter.write("x")
src, hyp, ref = (open(file, encoding="utf-8").read().split("\\n")[:-1] for file in sys.argv[1:4])
for s, h, r in zip(src, hyp, ref, strict=True):
    print(len(h) / len(r))
"""


def ratios(lines: list[str]) -> list[float]:
    return [len(line) / len(reference) for line, reference in zip(lines, REFERENCES, strict=True)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the texts and `ratio.py`."""
    monkeypatch.chdir(tmp_path)
    for name, lines in {"src": SOURCES, "ref": REFERENCES, **SYSTEMS}.items():
        Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    Path("ratio.py").write_text(RATIO, encoding="utf-8")
    return tmp_path


def with_metric(command: str, **settings: Any) -> config.Recipe:
    """A recipe with a metric, made in Python."""
    tree = tiny_run.recipe_of(Path("run"), {"t": {"src": ["src"], "trg": ["ref"]}}).model_dump()
    return check_recipe({**tree, "metrics": {"mine": {"command": command, **settings}}}, "the recipe")


def program(code: str) -> str:
    """The command of a program in Python."""
    Path("program.py").write_text(code, encoding="utf-8")
    return f"{sys.executable} program.py {{hyp}}"


COMMAND = f"{sys.executable} ratio.py {{src}} {{hyp}} {{ref}}"


def test_scores_and_bootstrap_are_those_of_the_segments(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = evaluate_run(with_metric(COMMAND, lower_is_better=True), hypotheses=[f"{name}={name}" for name in SYSTEMS],
                         metrics=["chrf", "mine"])
    written = json.loads(next(Path("run").glob("scores*.json")).read_text())
    for name, lines in SYSTEMS.items():
        assert written["systems"][name]["mine"] == pytest.approx(np.mean(ratios(lines)), abs=1e-12)
        assert written["systems"][name]["mine_signature"] == f"command:{COMMAND}"
    found, = (c for c in written["comparisons"] if c["metric"] == "mine")
    rows = np.random.default_rng(12345).choice(40, size=(1000, 40), replace=True)
    short, long = (np.array(ratios(SYSTEMS[name]))[rows].mean(1) for name in SYSTEMS)
    assert found["mean"] == pytest.approx(long.mean(), abs=1e-6)
    assert found["interval"] == pytest.approx((np.sort(long)[974] - np.sort(long)[25]) / 2, abs=1e-6)
    assert found["difference"] == pytest.approx(np.mean(ratios(SYSTEMS["long"])) - np.mean(ratios(SYSTEMS["short"])))
    gains = np.abs(long - short)
    expected = (1 + np.sum(gains - gains.mean() > found["difference"])) / 1001
    assert found["sacrebleu_p_value"] == pytest.approx(expected) and found["p_value"] < 0.001
    assert "\nmine (lower is better)" in table and f"mine|command:{COMMAND}" in table and "mine of long is +" in table
    assert Path("runs.txt").read_text() == "xx", "each system is scored once"


def test_what_failed_is_repeated_by_the_same_command(place: Path) -> None:
    """No text is left where there are no scores, which would look like somebody else's."""
    recipe = with_metric(program("raise SystemExit(3)"))
    with user_error("ended with exit code 3"):
        evaluate_run(recipe, hypotheses=["mine=short"], metrics=["mine"], output=place / "scores.json")
    program("import sys\nfor line in open(sys.argv[1]): print(1)")
    evaluate_run(recipe, hypotheses=["mine=short"], metrics=["mine"], output=place / "scores.json")
    assert Path("scores.json").is_file() and Path("scores/t.hyp").is_file()


def test_what_was_scored_is_not_scored_again(place: Path) -> None:
    def scored(command: str, *lines: str) -> int:
        made = Program(with_metric(command), "mine").scores({"src": SOURCES, "hyp": lines or SOURCES, "ref": SOURCES})
        assert len(made) == 40
        return len(Path("runs.txt").read_text())

    assert [scored(COMMAND), scored(COMMAND)] == [1, 1]
    assert scored(COMMAND, *REFERENCES) == 2, "another text"
    assert scored(COMMAND + " more") == 3, "another command"
    time.sleep(0.01)
    Path("ratio.py").write_text(RATIO + "\n", encoding="utf-8")
    assert scored(COMMAND) == 4, "another program"
    kept = sorted(Path("run/metrics").iterdir())
    for file in kept:
        file.write_text("damaged")
    assert len(kept) == 4 and scored(COMMAND) == 5


@pytest.mark.parametrize(("code", "fault"), [
    ("for _ in range(39): print(1)", "printed 39 lines for 40 translations, and must print a number for each"),
    ("for _ in range(41): print(1)", "printed 41 lines for 40 translations"),
    ("for _ in range(39): print(1)\nprint('score: 1')", r"printed 'score: 1' in line 40, which is no number"),
    ("for _ in range(40): print('nan')", "printed 'nan' in line 1, which is no finite number"),
    ("import sys\nprint('no model', file=sys.stderr)\nsys.exit(3)", "ended with exit code 3: no model"),
    ("import time\ntime.sleep(60)", r"took more than 0.5 s \(metrics.mine.seconds\)"),
])
def test_a_program_that_fails_is_a_sentence(code: str, fault: str, place: Path) -> None:
    began = time.monotonic()
    recipe = with_metric(program(code), **({"seconds": 0.5} if "sleep" in code else {}))
    for metrics in (["chrf", "mine"], ["mine"]):
        with user_error(f"the program of metrics.mine {fault}"):
            evaluate_run(recipe, hypotheses=["short=short"], metrics=metrics)
    assert time.monotonic() - began < 30
    assert json.loads(Path("run/scores-short-chrf-mine.json").read_text())["chrf"] > 0, "the other scores are there"
    assert not Path("run/metrics").exists()


def test_what_a_slow_program_has_started_ends_with_it(place: Path) -> None:
    Path("program.sh").write_text("sleep 600 & echo $! > started; wait\n", encoding="utf-8")
    with user_error("took more than 1 s"):
        Program(with_metric("sh program.sh {hyp}", seconds=1.0), "mine").scores({"hyp": ["x"]})
    for _ in waiting(60, "what it has started to end"):
        if has_ended(int(Path("started").read_text())):
            break


def test_texts_for_which_there_is_no_room(place: Path) -> None:
    with small_disk(9), user_error("the texts for the program of metrics.mine cannot be written: File too large; fre"):
        Program(with_metric(COMMAND), "mine").scores({"src": SOURCES, "hyp": SOURCES, "ref": SOURCES})


def test_a_program_reads_sources_without_their_tags(place: Path) -> None:
    code = "import sys\nfor line in open(sys.argv[1]): print(len(line))"
    recipe = with_metric(program(code).replace("{hyp}", "{src} {hyp}"))
    recipe = recipe.model_copy(update={"vocab": recipe.vocab.model_copy(update={"tags": ["<2de>"]})})
    assert Program(recipe, "mine").scores({"src": ["<2de> a dog", "a dog"], "hyp": ["x", "y"]}) == [6.0, 6.0]


def test_a_line_break_within_a_line_shifts_no_other(place: Path) -> None:
    """Python, for one, reads a lone carriage return as the end of a line."""
    code = "import sys\nfor s, h in zip(open(sys.argv[1]), open(sys.argv[2])): print(int(s == h))"
    recipe = with_metric(program(code).replace("{hyp}", "{src} {hyp}"))
    lines = ["o\rne", "two", "three\x85four", "five"]
    assert Program(recipe, "mine").scores({"src": lines, "hyp": lines}) == [1.0] * 4
    evaluate_run(recipe, hypotheses=["mine=src"], output=place / "scores.json")
    assert len(Path("scores/t.src").read_bytes().splitlines()) == len(SOURCES)


def test_a_program_gets_nothing_of_the_launcher(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    code = "import os\nprint(int('WORLD_SIZE' in os.environ))"
    assert Program(with_metric(program(code)), "mine").scores({"hyp": ["x"]}) == [0.0]


def test_a_command_runs_only_if_the_user_named_it(
    place: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run.write(tiny_run.recipe_of(Path("run"), {"t": {"src": ["src"], "trg": ["ref"]}}), 1)
    command = f"{COMMAND} never-named"
    saved = config.dump_recipe(with_metric("true {hyp}")).replace("true {hyp}", command)
    Path("run/recipe.yaml").write_text(saved, encoding="utf-8")
    words = ["evaluate", "run", "--hypotheses", "short=short"]
    assert "is code in a recipe that lies with a run or a model" in refused(*words, "--metric", "mine")
    Path("beside.yaml").write_text(saved, encoding="utf-8")
    assert "is code in a recipe that lies" in refused("evaluate", "beside.yaml", *words[2:], "--metric", "mine")
    assert "--metric is 'yours', must be one of bleu," in refused(*words, "--metric", "yours")
    assert main(words[0], words[1:]) == 0 and not Path("runs.txt").exists()
    assert "metrics.mine is left out: beside a run a recipe's command is code" in capsys.readouterr().err
    assert main(words[0], [*words[1:], f"metrics.mine.command={command}"]) == 0
    assert Path("runs.txt").read_text() == "x"
    assert "there is no such program here" in refused(*words, "metrics.mine.command=absent-program {hyp}")


def test_a_validation_is_the_best_by_a_metric(
    prepared: Path, place: Path, threads: None, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program says 0.1, 0.9, fails, 0.5; the second validation is the best, and the run ends for want of patience.
    It is another program each time, so that nothing is taken from before where the translations are the same."""
    command = program("import os, sys\nlines = open(sys.argv[1]).read().split('\\n')[:-1]\n"
                      "os.utime('program.py')\n"
                      "with open('runs.txt', 'a') as counter: counter.write('x')\n"
                      "value = [0.1, 0.9, None, 0.5][os.path.getsize('runs.txt') - 1]\n"
                      "assert value is not None and len(lines) == 2\nfor _ in lines: print(value)\n")
    recipe = [str(prepared / "recipe.yaml"), "run=run", "train.validate_every=1", "train.save_every=100",
              "train.keep_last=1", "average_last=1", "train.updates=9", "train.patience=2", "train.best_by=mine",
              "train.valid_bleu=false", "train.valid_sentences=2", "model.encoder.block=pre_ln",
              "model.decoder.block=pre_ln", f"metrics.mine.command={command}"]
    assert "train.best_by: mine needs metrics.mine.in_validation: true" in refused("train", *recipe)
    assert "must be loss, bleu or mine, or the name of one of metrics" in refused(
        "train", *recipe, "train.best_by=min")
    assert "there is no such program here" in refused(
        "train", *recipe[:-1], "metrics.mine={in_validation: true, command: 'absent-program {hyp}'}")
    assert main("train", [*recipe, "metrics.mine.in_validation=true"]) == 0
    said = capsys.readouterr()
    assert "the program of metrics.mine ended with exit code 1: AssertionError" in said.err
    assert " mine 0.9000" in said.out + said.err
    records = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert [record.get("mine") for record in records if record["type"] == "valid"] == [0.1, 0.9, None, 0.5]
    assert load_state(Path("run/checkpoints/update-00000004")).best == {"value": -0.9, "update": 2, "waited": 2}
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["update-00000002", "update-00000004"]
    turned = "metrics.mine={in_validation: true, lower_is_better: true, command: 'true {hyp}'}"
    assert "  metrics.mine.lower_is_better: False -> True\n" in refused("train", *recipe[:-1], turned)
    assert "  train.valid_sentences: 2 -> 3\n" in refused(
        "train", *recipe, "metrics.mine.in_validation=true", "train.valid_sentences=3")


def test_a_program_chooses_among_candidates(place: Path, refused: Refused) -> None:
    """The longest, or with lower_is_better the shortest, of three samples; the program is started once."""
    recipe = tiny_run.recipe_of(Path("run"))
    tiny_run.write(recipe, 1)
    Path("run/recipe.yaml").write_text(config.dump_recipe(recipe), encoding="utf-8")
    command = program("import sys\nopen('runs.txt', 'a').write('x')\n"
                      "for line in open(sys.argv[1]).read().split('\\n')[:-1]: print(len(line))\n")
    Path("few").write_text("a dog\n\ntwo cats\n" * 4, encoding="utf-8")
    words = ["run", "--input", "few", "translate.method=sample", "translate.max_ratio=1.0"]
    assert main("translate", [*words, "translate.nbest=3", "--format", "jsonl", "--output", "all"]) == 0
    lists = [[h["text"] for h in json.loads(line)["hypotheses"]] for line in Path("all").read_text().splitlines()]
    for choice, lower in ((max, "false"), (min, "true")):
        assert main("translate", [*words, "translate.candidates=3", "translate.choose=mine", "--output", "out",
                                  f"metrics.mine.command={command}", f"metrics.mine.lower_is_better={lower}"]) == 0
        assert [len(line) for line in Path("out").read_text(encoding="utf-8").split("\n")[:-1]] == [
            len(choice(texts, key=len)) for texts in lists]
        assert main("translate", [*words, "translate.candidates=3", "translate.choose=mine", "--output", "scored.tsv",
                                  "--format", "tsv", f"metrics.mine.command={command}",
                                  f"metrics.mine.lower_is_better={lower}"]) == 0
        first = Path("scored.tsv").read_text(encoding="utf-8").splitlines()[0]
        assert f"{float(len(choice(lists[0], key=len))):.6f}" in first.split("\t"), first
    assert Path("runs.txt").read_text() == "xxxx"
    choosing = [*words, "translate.candidates=3", "translate.choose=mine", "--output", "other"]
    assert "whose command reads references, {ref}; name their file with --references" in refused(
        "translate", *choosing, f"metrics.mine.command={COMMAND}")
    assert "references (few) have no effect because translate.choose is mine" in refused(
        "translate", *choosing, f"metrics.mine.command={command}", "--references", "few")
    assert "translate.choose: is 'mine', must be score, mbr or chrf, or the name of one of metrics" in refused(
        "translate", *words, "translate.candidates=3", "translate.choose=mine")
    assert "choose (mbr) and candidates (1) do not fit" in refused("translate", *words, "translate.choose=mbr")
    assert "candidates (9) must not be above beam (5)" in refused(
        "translate", *words[:3], "translate.choose=mbr", "translate.candidates=9")


def test_settings(place: Path) -> None:
    for change, fault in (
        ({"command": "score {ref}"}, r"has no \{hyp\}"), ({"command": "score '{hyp}"}, "cannot be split into words"),
        ({"seconds": 3000.0, "in_validation": True}, r"seconds \(3000\) must be at most 1200 with in_validation"),
    ):
        with user_error(fault):
            with_metric(**{"command": "true {hyp}", **change})
    figures = [field.name for field in fields(SourceUse)]
    for name in ("bleu", "type", "update", "value", "metrics", "training_seconds", *figures):
        with user_error(f"metrics.{name} has the name of something else"):
            load_recipe("demo/admin_18l-18l", [f"metrics.{name}.command={shlex.quote('x {hyp}')}"])
