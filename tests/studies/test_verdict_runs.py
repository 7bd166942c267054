"""The verdict's runs on text: their fit, its tests, and the file."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Refused
from sklearn.ensemble import RandomForestClassifier

from deepnmt.config import Recipe
from deepnmt.errors import UserError
from deepnmt.extras.doctor.outcome import OUTCOMES, Outcome
from deepnmt.extras.doctor.verdict import FEATURES, Trial, VerdictRule, with_floor
from studies import verdict_fit, verdict_text
from studies.verdict_fit import LEAST_RUNS, MOST_LEAVES, POWERS, TREES, Example, Judged, choose, crossed, fit, raised
from studies.verdict_text import Choice, depth_group, draw, examples_of, fit_runs, judge_runs, key_hash, run_all

SHIPPED_RUNS = Path(__file__).parents[2] / "studies" / "verdict_runs.jsonl"

def random_examples(count: int, seed: int = 0) -> list[Example]:
    """Random features; the outcome follows from the budget and from the trial's gain."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        values = {name: float(torch.randn((), generator=generator)) for name in FEATURES}
        outcome: Outcome = ("stuck" if values["budget"] <= -0.4 else "target only" if values["trial_gain"] < 0.0
                            else "translates")
        groups = dict.fromkeys(("text", "block"), str(number % 3))
        made.append(Example(values, outcome, 1.0 + number % 2, groups, number % 2 == 0))
    return made


def test_the_fit_finds_what_outcomes_follow_from() -> None:
    rule = fit(random_examples(400), 1.5)
    used = Counter(node.feature for tree in rule.trees for node in tree[:3] if node.feature)
    assert {name for name, _ in used.most_common(2)} == {"budget", "trial_gain"}
    assert set(rule.spans) == set(FEATURES) and len(rule.trees) == TREES and rule.power == 1.5
    tested = Judged([(rule.probabilities(example.values), example.outcome) for example in random_examples(200, seed=9)])
    assert tested.accuracy > 0.9


def test_a_rule_says_what_the_forest_of_scikit_learn_says() -> None:
    """Also where a fit never saw one of the outcomes."""
    examples = [example for example in random_examples(120) if example.outcome != "target only"]
    grown = RandomForestClassifier(7, min_samples_leaf=LEAST_RUNS, max_leaf_nodes=MOST_LEAVES, random_state=1).fit(
        [[*example.values.values()] for example in examples], [example.outcome for example in examples],
        [example.weight for example in examples])
    rule = fit(examples, trees=7)
    for example in examples:
        theirs = dict(zip(grown.classes_, grown.predict_proba([[*example.values.values()]])[0], strict=True))
        assert rule.probabilities(example.values) == pytest.approx(
            {name: 0.02 + 0.94 * theirs.get(name, 0.0) for name in OUTCOMES}, abs=1e-3)


def test_a_group_is_judged_by_a_rule_fitted_without_it() -> None:
    examples, without = random_examples(60), []

    def keep(others: Any) -> VerdictRule:
        without.append({example.groups["text"] for example in others})
        return fit(others, trees=5)

    tested = crossed(examples, "text", keep)
    assert without == [{"1", "2"}, {"0", "2"}, {"0", "1"}]
    assert len(tested.pairs) == 30  # the runs' ends alone are judged
    shares: dict[Outcome, float] = {"stuck": 0.6, "target only": 0.4, "translates": 0.0}
    modest = Judged([(with_floor(shares, 1.0), "stuck")] * 9)
    bold = Judged([(with_floor(shares, 1.0), "translates")] * 9)
    assert choose([modest]) == POWERS[-1]
    assert raised(bold, 2.0).log_loss == pytest.approx(-math.log(0.02)), "as little as a rule says, and no less"
    raised_again = raised(modest, 2.0).pairs[0][0]
    assert raised_again == pytest.approx({"stuck": 0.02 + 0.94 * 36 / 52, "target only": 0.02 + 0.94 * 16 / 52,
                                          "translates": 0.02})
    assert raised_again == pytest.approx(with_floor(shares, 2.0))


def sure(outcome: Outcome, probability: float) -> dict[Outcome, float]:
    rest = (1 - probability) / 2
    return {name: probability if name == outcome else rest for name in OUTCOMES}


def test_calibration_error_and_table_by_hand() -> None:
    tested = Judged([(sure("stuck", 0.9), "stuck"), (sure("stuck", 0.9), "stuck"), (sure("translates", 0.95), "stuck"),
                     (sure("target only", 0.5), "target only"), (sure("target only", 0.5), "translates")])
    assert tested.accuracy == 0.6
    # bin 0.8 to 1: said 2.75, right 2; bin 0.4 to 0.6: said 1, right 1
    assert tested.calibration_error == pytest.approx(0.75 / 5)
    assert tested.table() == [["", "predicted: stuck", "predicted: target only", "predicted: translates"],
                              ["stuck", "2", "0", "1"], ["target only", "0", "1", "0"], ["translates", "0", "1", "0"]]
    assert tested.log_loss == pytest.approx(-sum(map(math.log, (0.9, 0.9, 0.025, 0.5, 0.25))) / 5)


def test_recipes_are_drawn_alike_for_a_seed(tmp_path: Path) -> None:
    choice = Choice(texts=("toy",), depths=(2, 3), blocks=("post_ln", "admin"))
    first = draw(12, 5, choice, tmp_path)
    assert first == draw(12, 5, choice, tmp_path) != draw(12, 6, choice, tmp_path)
    assert {recipe.model.encoder.block for recipe in first} <= {"post_ln", "admin"}
    assert {recipe.model.decoder.layers for recipe in first} <= {2, 3}


def test_runs_are_made_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPNMT_CORPORA", str(tmp_path))
    verdict_text.write_toy(tmp_path / "toy")
    recipes = draw(3, 1, Choice(texts=("toy",), depths=(1,), blocks=("pre_ln", "admin"), seconds=(0.1, 0.9)), tmp_path)
    short = [recipe.model_copy(update={"train": recipe.train.model_copy(update={"updates": 88})}) for recipe in recipes]
    file = tmp_path / "runs.jsonl"
    assert run_all(short, file, (0, 2)) == 0 and len(verdict_text.read_text_runs(file)) == 2
    assert run_all(short, file) == 0
    lines = file.read_text()
    file.write_text(lines.replace('"lr_factors_until": 0, ', ""))  # of before there was this setting
    assert file.read_text() != lines and run_all(short, file) == 0
    records = verdict_text.read_text_runs(file)
    assert len(records) == 3 and len({key_hash(record) for record in records}) == 3
    for record in records:
        assert [mark["update"] for mark in record["marks"]] == [22, 44, 88] and record["text"] == "toy"
        first, last = examples_of(record)  # a quarter of the updates is less than the trial
        assert last.last and not first.last and first.weight == pytest.approx(1 / 2)
        assert last.values["budget"] > first.values["budget"]
        assert last.groups["depth"] == "up to 4" and set(last.values) == set(FEATURES)
        assert Trial(**record["trial"]).losses[0] > Trial(**record["trial"]).losses[-1]


def test_depth_groups() -> None:
    assert [depth_group(layers) for layers in (4, 5, 24, 25)] == ["up to 4", "up to 6", "up to 24", "up to 1000"]


def write_runs(file: Path, count: int, first: int = 0) -> None:
    """Runs of the same recipe but for the seed, whose outcome follows from the trial."""
    lines = []
    [recipe] = draw(1, 1, Choice(texts=("toy",), blocks=("pre_ln",)), Path())
    for number in range(first, first + count):
        kind = OUTCOMES[number % 3]
        own = 5.3 if kind == "stuck" else 3.0
        shuffled = own + (1.0 if kind == "translates" else 1e-5)
        trial = Trial([5.0] * 40, [1.0] * 40, own, shuffled, 5.0, 0.1, 6.0, 300.0, 9000.0)
        marks = [{"update": 60, "own": own, "shuffled": shuffled, "frequencies": 5.0, "outcome": kind}]
        tree = verdict_text.kept(recipe.model_copy(update={"seed": number}))
        lines.append({"text": f"text {number % 4}", "recipe": tree, "trial": asdict(trial),
                      "marks": marks, "losses": [], "seconds": 1.0})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_fit_and_judge_files(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    write_runs(tmp_path / "runs.jsonl", 48)
    text = fit_runs(tmp_path / "runs.jsonl", ship=False)
    assert text.startswith("48 runs, 48 measured outcomes, power ") and "held out by text: {'runs': 48" in text
    rule = VerdictRule.load(tmp_path / "verdict.json")
    assert rule.facts["outcomes"] == {"stuck": 16, "target only": 16, "translates": 16}
    assert rule.facts["seen"]["texts"] == ["text 0", "text 1", "text 2", "text 3"]
    write_runs(tmp_path / "fresh.jsonl", 12, first=45)  # 3 of which are among those of the fit
    text = judge_runs(tmp_path / "fresh.jsonl", tmp_path / "verdict.json")
    assert text.startswith("{'runs': 9, 'right': 1.0") and (tmp_path / "fresh.png").stat().st_size > 5000
    assert "where it is sure, from 0.8 on: 100 % of " in text
    monkeypatch.setattr(verdict_text, "SHIPPED", tmp_path / "verdict.json")
    judge_runs(tmp_path / "fresh.jsonl", ship=True)
    fresh = VerdictRule.load(tmp_path / "verdict.json").facts["fresh"]
    assert (fresh["runs"], fresh["right"], fresh["sure_right"]) == (9, 1.0, 1.0)
    assert "--ship notes what deepnmt's own rule was right on, but --rule is " in refused(
        "verdict-runs", "judge", tmp_path / "fresh.jsonl", "--ship", "--rule", tmp_path / "verdict.json")
    assert "has no runs that the rule was not fitted on" in refused(
        "verdict-runs", "judge", tmp_path / "runs.jsonl", "--rule", tmp_path / "verdict.json")
    write_runs(tmp_path / "few.jsonl", 9)
    assert "few.jsonl has 9 runs; a rule needs 40 or more" in refused("verdict-runs", "fit", tmp_path / "few.jsonl")


def test_a_rule_that_learns_from_more_runs_is_more_often_right(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs that every rule learns from know but one outcome, a third of those asked about."""
    file = tmp_path / "runs.jsonl"
    write_runs(file, 48)
    assert "runs.jsonl has 0 runs in which the use of the source was measured; a learning curve needs 40" in refused(
        "verdict-runs", "learn", file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[:42]:
        line["trial"]["source"] = [{"update": 40, "source_gain": 0.0, "encoder_common": 0.5, "decoder_common": 0.5,
                                    "cross_attention_entropy": 0.9}]
    lines[2]["marks"][0]["shuffled"] = lines[2]["marks"][0]["own"] + 0.3  # near the mark
    lines[42:] = [line for line in lines[42:] if line["marks"][0]["outcome"] == "stuck"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(verdict_fit, "ORDERS", 1)
    table, text = verdict_text.learn_runs(file).split("\n\n")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert [row[0] for row in rows] == ["0", "9", "18", "27", "37"]
    assert rows[0][1] == "33.3 %" and rows[-1][1] == "100.0 %"
    assert text.splitlines() == [
        "right, of the 1 that end with a gain between 0.1 and 0.4 nats: 100.0 %",
        "right, of the 41 that end with a gain not between 0.1 and 0.4 nats: 100.0 %"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:42]))
    rows = verdict_text.learn_runs(file).split("\n\n")[0].splitlines()[2:]
    counts = [row.split("|")[1].strip() for row in rows]
    assert counts == ["9", "18", "27", "37"], "without others there is no rule of 0"


def test_the_best_rated_alternative_of_runs_that_failed_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_runs(tmp_path / "made.jsonl", 9)
    lines = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    for line in lines:
        line["text"] = line["recipe"]["text"] = "toy"
        line["recipe"]["train"]["updates"] = 120
    failed, output = tmp_path / "failed.jsonl", tmp_path / "tried.jsonl"
    failed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trained: list[str] = []

    def trial_of(recipe: Recipe) -> Trial:  # good at a tenth of the rate only
        rate = recipe.optimizer.lr
        good = rate < lines[0]["recipe"]["optimizer"]["lr"] / 5
        own, shuffled = (3.0, 6.0) if good else (5.2, 5.2)
        return Trial([5.0] * 40, [1.0] * 40, own, shuffled, 5.0, 40 * rate, 6.0, 300.0, 9000.0)

    def run_recipe(recipe: Recipe) -> dict[str, Any]:
        trained.append(f"optimizer.lr={recipe.optimizer.lr:.3g}")
        return {**lines[0], "recipe": verdict_text.kept(recipe), "marks": lines[2]["marks"]}

    monkeypatch.setattr(verdict_text, "_trial_of", trial_of)
    monkeypatch.setattr(verdict_text, "run_recipe", run_recipe)
    table = verdict_text.propose_all(failed, output, 4, 1, tmp_path)
    made = verdict_text.read_text_runs(output)
    known = {json.dumps(line["recipe"]): line["marks"][-1]["outcome"] for line in lines}
    assert len({json.dumps(line["of"]) for line in made}) == 4
    assert all(line["was"] == known[json.dumps(line["of"])] != "translates" for line in made)
    assert [line["proposal"] for line in made] == trained == [
        f"optimizer.lr={line['of']['optimizer']['lr'] / 10:.3g}" for line in made]
    assert table.count("| translates ") >= 4 and " to 3.0" in table
    assert verdict_text.propose_all(failed, output, 4, 1, tmp_path) == table and len(trained) == 4
    with pytest.raises(UserError, match=r"has 6 runs that failed, of 100 updates .* set --count to 6 or less"):
        verdict_text.propose_all(failed, output, 7, 1, tmp_path)


def test_runs_with_another_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of nine ends otherwise; a second time nothing is trained."""
    write_runs(tmp_path / "made.jsonl", 9)
    lines = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    for seed, line in enumerate(lines):
        line["text"] = line["recipe"]["text"] = "toy"
        line["recipe"]["seed"] = seed
    firsts = tmp_path / "first.jsonl"
    firsts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seeds: list[int] = []

    def run_recipe(recipe: Recipe) -> dict[str, Any]:
        seeds.append(recipe.seed)
        return {**lines[3 if recipe.seed == 1002 else recipe.seed - 1000], "recipe": verdict_text.kept(recipe)}

    monkeypatch.setattr(verdict_text, "run_recipe", run_recipe)
    said = verdict_text.run_again(firsts, tmp_path / "again.jsonl", tmp_path)
    assert seeds == [1000 + seed for seed in range(9)] and said.startswith("8 of 9 ended as before, 88.9 %")
    assert lines[2]["marks"][-1]["outcome"] != lines[3]["marks"][-1]["outcome"] and "| 1 " in said
    assert verdict_text.run_again(firsts, tmp_path / "again.jsonl", tmp_path) == said and len(seeds) == 9


@pytest.mark.parametrize(("line", "message"), [
    ("run runs.jsonl --count 0", "--count is 0, must be 1 or more"),
    ("run runs.jsonl --depths 0", "--depths is 0, must be 1 or more"),
    ("run runs.jsonl --texts bible", "unknown text 'bible'; known: multi30k"),
    ("run runs.jsonl --blocks new_ln", "model.encoder.block"),
    ("run runs.jsonl --share 2 2", "--share is 2 2, must be two numbers, the first from 0 and below the second"),
    ("learn none.jsonl --ship", "--ship has no effect here because it belongs to verdict-runs fit or judge; remove it"),
    ("fit none.jsonl --rule a", "--rule has no effect here because it belongs to verdict-runs judge; remove it"),
    ("judge none.jsonl --count 3", "--count has no effect here because it belongs to verdict-runs run or propose"),
    ("propose runs.jsonl", "verdict-runs propose needs other runs; give their file with --of, for example"),
    ("fit notes.md", "notes.md, line 1, is not a run of the verdict's runs, which has marks, recipe, text, trial"),
])
def test_mistakes(line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("# Notes\nof mine")
    assert message in refused("verdict-runs", *line.split()) and not (tmp_path / "runs.jsonl").exists()


def test_the_shipped_rule_is_fitted_on_the_shipped_runs() -> None:
    rule = VerdictRule.load()
    records = verdict_text.read_text_runs(SHIPPED_RUNS)
    assert {key_hash(record) for record in records} == set(rule.facts["fitted_on"])
    examples = [example for record in records for example in examples_of(record)]
    again = fit(examples, rule.power)
    assert again.spans.keys() == rule.spans.keys() and len(examples) == rule.facts["examples"]
    assert all(again.spans[name] == pytest.approx(span) for name, span in rule.spans.items())
    for example in examples[::10]:
        assert again.probabilities(example.values) == pytest.approx(rule.probabilities(example.values), abs=0.01)
