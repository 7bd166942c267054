"""The verdict's rule, by hand and as a file, and its features."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from deepnmt.config import with_settings
from deepnmt.doctor.variants import fresh_model
from deepnmt.doctor.verdict import FEATURES, TRIAL, VerdictRule, features, precision_features, trial
from deepnmt.errors import UserError
from deepnmt.model.init import new_model
from studies.verdict_grid import PROBE, Point, Settings, measure_points

TINY = Settings(width=8, heads=2, ffn=8, updates=4, warmup=2)


def test_logistic_rule_by_hand(tmp_path: Path) -> None:
    body = {"centre": [1.0, 0.0], "scale": [2.0, 1.0], "weights": [3.0, -1.0], "squares": [0.0, 0.25],
            "by_rate": [0.0, 0.5], "bias": 0.5}
    rule = VerdictRule("logistic", ["rate", "layers"], body, {"rate": [-4.0, -2.0], "layers": [0.0, 2.0]}, {"runs": 9})
    values = {"rate": -3.0, "layers": 1.5}
    rate = (-3.0 - 1) / 2
    expected = 1 / (1 + math.exp(-(3.0 * rate - 1.5 + 0.25 * 1.5**2 + 0.5 * 1.5 * rate + 0.5)))
    assert rule.probability(values) == pytest.approx(expected)
    verdict = rule.judge({"rate": -1.0, "layers": 1.5})
    assert not verdict.trains and verdict.reasons[0].startswith(
        "peak learning rate: 0.1 (clipped to 0.01, the nearest value among the rule's runs) counts against training (-")
    assert verdict.outside == ["peak learning rate is 0.1; the runs had 0.0001 to 0.01"]
    assert verdict.reasons[1].startswith("layers of both stacks: 32 counts against training (-")
    assert verdict.probability == rule.probability({"rate": -2.0, "layers": 1.5})  # clipped to the spans
    rule.save(tmp_path / "rule.json")
    assert VerdictRule.load(tmp_path / "rule.json") == rule
    fixed = replace(rule, spans={**rule.spans, "rate": [-2.0, -2.0]})
    assert fixed.judge({"rate": -1.0, "layers": 1.5}).outside == [] and fixed.unvaried == {"rate": -2.0}


def test_what_no_run_had_of_a_recipe() -> None:
    rule = VerdictRule.load()
    plain = Point("post_ln", "pre_ln", 2, 1e-3, True).recipe(TINY)
    assert rule.unseen(plain) == []  # among the rule's pairs, by Adam, with init: auto
    assert rule.unseen(Point("b2t", "b2t", 2, 1e-3, True).recipe(TINY)) == []  # its auto is depth_scaled
    scaled = with_settings(plain, {"model.encoder.init": "depth_scaled", "model.decoder.init": "depth_scaled"})
    assert rule.unseen(scaled) == ["the initialisation is depth_scaled/depth_scaled (encoder/decoder); runs of these "
                                   "blocks had xavier/xavier"]
    theirs = with_settings(Point("b2t", "b2t", 2, 1e-3, True).recipe(TINY), {"model.encoder.init": "published"})
    assert rule.unseen(theirs) == ["the initialisation is published/depth_scaled (encoder/decoder); runs of these "
                                   "blocks had depth_scaled/depth_scaled"]
    assert rule.unseen(with_settings(plain, {"model.encoder.init": "published"})) == []  # Post-LN's is xavier
    rule = replace(rule, facts={**rule.facts, "inits": {"post_ln/pre_ln": ["xavier/xavier", "xavier_separate/xavier"]}})
    [answers] = rule.unseen(Point("pre_ln", "post_ln", 2, 1e-3, True).recipe(TINY))
    assert answers == ("no run had the blocks pre_ln/post_ln; on pairs of blocks left out of its fit, the rule was "
                       "right on 61 to 94 % of the runs")
    scaled = with_settings(scaled, {"optimizer.name": "sgd"})
    assert rule.unseen(scaled) == [
        "optimizer.name is sgd; all runs had adam",
        "the initialisation is depth_scaled/depth_scaled (encoder/decoder); runs of these blocks had xavier/xavier or "
        "xavier_separate/xavier"]
    assert replace(rule, facts={}).unseen(scaled) == []
    facts = {"schedule": "linear", "dropout": 0.0, "label_smoothing": 0.0, "clip": 0.0, "weight_decay": 0.0,
             "attention_dropout": 0.0, "activation_dropout": 0.0, "precisions": ["bf16", "fp32"]}
    ours = with_settings(scaled, {
        "schedule.name": "inverse_sqrt", "model.dropout": 0.1, "model.attention_dropout": 0.3,
        "model.activation_dropout": 0.4, "optimizer.weight_decay": 0.01, "optimizer.decay_norms_and_biases": False,
        "train.label_smoothing": 0.2, "train.clip": 1.0})
    assert replace(rule, facts=facts).unseen(ours, "fp16") == [
        "schedule.name is inverse_sqrt; all runs had linear", "model.dropout is 0.1; all runs had 0.0",
        "model.attention_dropout is 0.3; all runs had 0.0", "model.activation_dropout is 0.4; all runs had 0.0",
        "optimizer.weight_decay is 0.01; all runs had 0.0", "train.clip is 1.0; all runs had 0.0",
        "train.label_smoothing is 0.2; all runs had 0.0", "the precision is fp16; the runs had bf16 or fp32"]
    assert replace(rule, facts=facts).unseen(plain, "bf16") == []


def test_tree_rule_by_hand() -> None:
    body = {"feature": "rate", "threshold": -2.5, "low": {"probability": 0.9, "runs": 5},
            "high": {"feature": "warmup", "threshold": 0.5, "low": {"probability": 0.1, "runs": 6},
                     "high": {"probability": 0.6, "runs": 7}}}
    rule = VerdictRule("tree", ["rate", "warmup"], body, {"rate": [-4, -2]})
    answers = [rule.probability({"rate": r, "warmup": w}) for r, w in ((-3, 0), (-2, 0), (-2, 1), (-2.5, 0))]
    assert answers == [0.9, 0.1, 0.6, 0.9]
    assert rule.judge({"rate": -2, "warmup": 1}).reasons == [
        f"{FEATURES['rate']}: -2 > -2.5", f"{FEATURES['warmup']}: 1 > 0.5"]


HEAD = '{"format": "deepnmt-verdict", "version": 3, "kind": "logistic", "names": ["rate"], '


@pytest.mark.parametrize("text", ["{}", "no json", "7", '"rule"', '{"format": "deepnmt-verdict", "version": 1}',
                                  HEAD + '"body": {}, "spans": {"rate": [0, 1]}}', HEAD + '"body": [], "spans": {}}',
                                  None])
def test_faulty_rule_files(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "rule.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match="verdict-grid"):
        VerdictRule.load(path)


def test_the_doctor_measures_what_the_grid_measured() -> None:
    """The features of `measure_points`, on which the rule is fitted, equal those of `diagnose`."""
    points = [Point("post_ln", "admin", 2, 3e-3, warm, 3, precision="bf16") for warm in (True, False)]
    batch, first, size = TINY.task.batch(0, PROBE), TINY.task.batch(0, 3), TINY.task.vocabulary
    for point, found in zip(points, measure_points(points, TINY), strict=True):
        recipe = point.recipe(TINY)
        model = fresh_model(recipe.model, size, size, point.seed, [first])
        asked = {**features(model, batch, recipe, first.tokens), **precision_features("bf16")}
        assert asked.keys() == found.keys() == FEATURES.keys()
        assert asked == pytest.approx(found, rel=1e-3, abs=1e-3)


def test_a_trial_updates_as_training_does() -> None:
    """Every update has its own dropout masks, and Adam replaces RAdam."""
    recipe = Point("pre_ln", "pre_ln", 1, 1e-3, True).recipe(TINY)
    size, batch = TINY.task.vocabulary, TINY.task.batch(0, 3)
    still = with_settings(recipe, {"optimizer.lr": 1e-30, "model.dropout": 0.3})  # a rate that moves no weight
    during = trial(new_model(still.model, size, size, 1), still, batch)[:TRIAL]
    assert len(set(during)) == TRIAL
    by = {name: trial(new_model(recipe.model, size, size, 1), with_settings(
        recipe, {"optimizer.name": name}), batch) for name in ("adam", "radam")}
    assert by["radam"] == by["adam"]
