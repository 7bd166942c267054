"""The verdict's runs on text: their fit, its tests, and the file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Refused

from deepnmt.config import Recipe
from deepnmt.errors import UserError
from deepnmt.extras.doctor.outcome import OUTCOMES, Outcome
from deepnmt.extras.doctor.verdict import FEATURES, Trial, VerdictRule
from studies import verdict_text
from studies.verdict_fit import Example, Judged, choose, crossed, fit
from studies.verdict_text import Choice, depth_group, draw, examples_of, fit_runs, judge_runs, key_hash, run_all

SHIPPED_RUNS = Path(__file__).parents[2] / "studies" / "verdict_text.jsonl"
ONE = ["trial_gain", "budget"]


def random_examples(count: int, seed: int = 0) -> list[Example]:
    """Random features; the loss follows from the budget and its product with the width, the gain from the trial's."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        values = {name: float(torch.randn((), generator=generator)) for name in FEATURES}
        drop = 0.5 * values["budget"] + 0.3 * values["budget"] * values["width"]
        gain = math.log10(0.2) + 0.7 * values["trial_gain"]
        outcome: Outcome = "stuck" if drop <= 0.1 else "target only" if gain < math.log10(0.2) else "translates"
        group = str(number % 3)
        made.append(Example(values, (drop, gain), outcome, 1.0 + number % 2, dict.fromkeys(("text", "block"), group),
                            number % 2 == 0))
    return made


def test_the_fit_finds_what_outcomes_follow_from() -> None:
    rule = fit(random_examples(300), 0.1, ["budget", "layers", "budget*width"], ["trial_gain", "budget"])
    loss, gain = rule.loss, rule.gain
    assert [loss.weights[name] / loss.scale[name] for name in loss.weights] == pytest.approx([0.5, 0.0, 0.3], abs=0.01)
    assert gain.weights["trial_gain"] / gain.scale["trial_gain"] == pytest.approx(0.7, abs=0.01)
    assert loss.spread < 0.01 and gain.spread < 0.01 and set(rule.spans) == set(FEATURES)
    tested = Judged([(rule.probabilities(example.values), example.outcome) for example in random_examples(200, seed=9)])
    assert tested.accuracy > 0.97
    shrunk = fit(random_examples(300), 1000.0, ["budget", "layers", "budget*width"], ["trial_gain", "budget"])
    assert shrunk.loss.weights["budget"] < 0.5 * loss.weights["budget"] and shrunk.loss.spread > 0.1


def test_the_fit_against_pytorchs_loss() -> None:
    """The gradient of the weighted squared errors + decay · |weights|² is zero, and the spread is that of examples left
    out one by one."""
    examples = [replace(e, reached=(e.reached[0] + 0.5 * e.values["layers"], 0.0)) for e in random_examples(24)]
    line = fit(examples, 0.7, ONE, ONE).loss
    x = torch.tensor([[e.values[name] for name in ONE] for e in examples], dtype=torch.float64)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    y = torch.tensor([e.reached[0] for e in examples], dtype=torch.float64)
    weight = torch.tensor([e.weight for e in examples], dtype=torch.float64)
    fitted = torch.tensor([line.constant, *line.weights.values()], dtype=torch.float64, requires_grad=True)
    loss = (weight * (fitted[0] + z @ fitted[1:] - y).square()).sum() + 0.7 * fitted[1:].square().sum()
    loss.backward()
    assert fitted.grad is not None and float(fitted.grad.abs().max()) < 1e-3
    columns = torch.hstack([torch.ones(24, 1, dtype=torch.float64), z])
    penalty = torch.diag(torch.tensor([0.0, 0.7, 0.7], dtype=torch.float64))
    errors = []
    for out in range(24):
        kept = torch.arange(24) != out
        scaled = columns[kept].T * weight[kept]
        without = torch.linalg.solve(scaled @ columns[kept] + penalty, scaled @ y[kept])
        errors.append(float(y[out] - columns[out] @ without))
    distances = torch.tensor(errors, dtype=torch.float64).abs().repeat_interleave(weight.long())
    assert line.spread == pytest.approx(1.4826 * float(distances.median()), rel=1e-4)


def test_a_group_is_judged_by_a_rule_fitted_without_it() -> None:
    examples, without = random_examples(60), []

    def keep(others: Any) -> VerdictRule:
        without.append({example.groups["text"] for example in others})
        return fit(others, 1.0, ONE, ONE)

    tested = crossed(examples, "text", keep)
    assert without == [{"1", "2"}, {"0", "2"}, {"0", "1"}]
    assert len(tested.pairs) == 30  # the runs' ends alone are judged
    assert choose(examples) in (0.1, 0.3, 1.0, 3.0)


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
    assert run_all(short, file) == 0 and run_all(short, file) == 0
    records = verdict_text.read_text_runs(file)
    assert len(records) == 3 and len({key_hash(record) for record in records}) == 3
    for record in records:
        assert [mark["update"] for mark in record["marks"]] == [22, 44, 88] and record["text"] == "toy"
        first, last = examples_of(record)  # a quarter of the updates is less than the trial
        assert last.last and not first.last and first.weight == pytest.approx(1 / 2)
        assert last.values["budget"] > first.values["budget"] and last.reached[0] >= -0.4
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


def test_fit_and_judge_files(tmp_path: Path, refused: Refused) -> None:
    write_runs(tmp_path / "runs.jsonl", 48)
    text = fit_runs(tmp_path / "runs.jsonl", ship=False)
    assert text.startswith("48 runs, 48 measured outcomes, decay ") and "held out by text: {'runs': 48" in text
    rule = VerdictRule.load(tmp_path / "verdict.json")
    assert rule.facts["outcomes"] == {"stuck": 16, "target only": 16, "translates": 16}
    assert rule.facts["seen"]["texts"] == ["text 0", "text 1", "text 2", "text 3"]
    write_runs(tmp_path / "fresh.jsonl", 12, first=45)  # 3 of which are among those of the fit
    text = judge_runs(tmp_path / "fresh.jsonl", tmp_path / "verdict.json")
    assert text.startswith("{'runs': 9, 'right': 1.0") and (tmp_path / "fresh.png").stat().st_size > 5000
    assert "has no runs that the rule was not fitted on" in refused(
        "verdict-runs", "judge", tmp_path / "runs.jsonl", "--rule", tmp_path / "verdict.json")
    write_runs(tmp_path / "few.jsonl", 9)
    assert "few.jsonl has 9 runs; a rule needs 40 or more" in refused("verdict-runs", "fit", tmp_path / "few.jsonl")


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


@pytest.mark.parametrize(("line", "message"), [
    ("run runs.jsonl --count 0", "--count is 0, must be 1 or more"),
    ("run runs.jsonl --depths 0", "--depths is 0, must be 1 or more"),
    ("run runs.jsonl --texts bible", "unknown text 'bible'; known: multi30k"),
    ("run runs.jsonl --blocks new_ln", "model.encoder.block"),
    ("run runs.jsonl --share 2 2", "--share is 2 2, must be two numbers, the first from 0 and below the second"),
    ("judge none.jsonl --ship", "--ship has no effect here because it belongs to verdict-runs fit; remove it"),
    ("fit none.jsonl --rule a", "--rule has no effect here because it belongs to verdict-runs judge; remove it"),
    ("judge none.jsonl --count 3", "--count has no effect here because it belongs to verdict-runs run; remove it"),
    ("propose runs.jsonl", "verdict-runs propose needs runs that failed; give their file with --failed, for example"),
    ("fit notes.md", "notes.md, line 1, is not a run of the verdict's runs, which has marks, recipe, text, trial"),
])
def test_mistakes(line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("# Notes\nof mine")
    assert message in refused("verdict-runs", *line.split()) and not (tmp_path / "runs.jsonl").exists()


def test_the_shipped_rule_is_fitted_on_the_shipped_runs() -> None:
    rule = VerdictRule.load()
    records = verdict_text.read_text_runs(SHIPPED_RUNS)
    fitted = [record for record in records if key_hash(record) in set(rule.facts["fitted_on"])]
    assert len(fitted) == rule.facts["runs"]
    again = fit([example for record in fitted for example in examples_of(record)], rule.facts["decay"])
    for ours, theirs in ((again.loss, rule.loss), (again.gain, rule.gain)):
        assert ours.weights == pytest.approx(theirs.weights, abs=1e-4)
        assert (ours.constant, ours.spread) == pytest.approx((theirs.constant, theirs.spread), abs=1e-4)
