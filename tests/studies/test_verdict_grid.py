"""The verdict: its toy task, its grid of runs, and the fits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Refused

from deepnmt.config import LossScale
from deepnmt.doctor.variants import fresh_model
from deepnmt.doctor.verdict import FEATURES, VerdictRule
from deepnmt.errors import UserError
from deepnmt.model.init import new_model
from deepnmt.optim import learning_rate
from deepnmt.parallel.local import LocalEngine
from studies import verdict_fit
from studies.side_by_side import _Scales, train_side_by_side
from studies.toy_task import ToyTask
from studies.verdict_fit import confusion, fit_logistic, fit_rule, fit_tree, held_out
from studies.verdict_grid import Point, Settings, digest, fit_grid, grid, judge_runs, measure_again, read_grid, run_grid

BLOCKS = ("post_ln", "pre_ln", "b2t")
TINY = Settings(width=8, heads=2, ffn=8, updates=4, warmup=2)


def test_toy_task_is_a_permuted_walk() -> None:
    task = ToyTask(symbols=6, successors=2, shortest=3, longest=5, seed=4)
    batch = task.batch(7, 200)
    assert all(torch.equal(a, b) for a, b in zip(task.batch(7, 200).tensors, batch.tensors, strict=True))
    src, lengths, trg_in, trg_out = batch.tensors
    assert not torch.equal(task.batch(8, 200).tensors[0][:, :3], src[:, :3]) and batch.key == 7
    assert batch.tokens == int(lengths.sum())
    pairs, follows = set(), set()
    rows = zip(src.tolist(), lengths.tolist(), trg_in.tolist(), trg_out.tolist(), strict=True)
    for row, length, inputs, outputs in rows:
        walk, written = row[: length - 1], outputs[: length - 1]
        assert row[length - 1:] == outputs[length - 1:] == [2] + [3] * (6 - length) and 4 <= length <= 6
        assert inputs[:length] == [1, *written] and set(inputs[length:]) <= {3}
        pairs |= set(zip(walk, written, strict=True))
        follows |= set(pairwise(walk))
    assert len(pairs) == 6 and len({target for _, target in pairs}) == 6  # a permutation
    assert len(follows) == 6 * 2
    assert task.vocabulary == 10 and task.frequencies_only == pytest.approx(math.log(6) * 4 / 5)
    assert task.target_only == pytest.approx((math.log(6) + 3 * math.log(2)) / 5)


def records_of(
    count: int, seed: int = 0,
    learns: Callable[[dict[str, float]], bool] = lambda features: features["rate"] + features["layers"] < 0.2,
) -> list[dict[str, Any]]:
    """Runs with random features that learn exactly where `learns` is true of them."""
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for number in range(count):
        values = {name: float(torch.randn((), generator=generator)) for name in FEATURES}
        runs.append({"point": {"encoder": BLOCKS[number % 3], "decoder": "admin", "layers": 6,
                                "rate": 1e-3 * (number + 1), "warmup": bool(number % 2)},
                      "settings": asdict(Settings()), "features": values,
                      "learned": learns(values), "final": 0.1 if learns(values) else 9.0, "bar": 1.0})
    return runs


def test_logistic_finds_the_deciding_features() -> None:
    records = records_of(300)
    rule = fit_logistic(records, 0.3, ["rate", "layers", "noise_encoder"])
    rate, layers, noise = rule.body["weights"]
    assert rate < -1 and layers < -1 and abs(noise) < 0.3 * abs(rate)
    assert confusion(rule, records_of(300, seed=9)).accuracy > 0.93
    again = fit_logistic(records, 30.0, ["rate", "layers", "noise_encoder"])
    assert abs(again.body["weights"][0]) < 0.5 * abs(rate)


def test_logistic_against_pytorchs_loss() -> None:
    """The gradient of the summed log loss + decay / 2 · |weights|² is zero at the fitted weights."""
    records = records_of(80)
    rule = fit_logistic(records, 0.7, ["rate", "warmup"])
    body = {name: torch.tensor(rule.body[name], dtype=torch.float64) for name in ("weights", "squares", "bias")}
    for tensor in body.values():
        tensor.requires_grad_()
    x = torch.tensor([[record["features"][name] for name in rule.names] for record in records], dtype=torch.float64)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    score = z @ body["weights"] + z.square() @ body["squares"] + body["bias"]
    y = torch.tensor([float(record["learned"]) for record in records], dtype=torch.float64)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(score, y, reduction="sum")
    (loss + 0.35 * (body["weights"].square().sum() + body["squares"].square().sum())).backward()
    gradients = torch.cat([body["weights"].grad, body["squares"].grad[:1], body["bias"].grad[None]])
    assert gradients.abs().max() < 1e-4 and float(body["squares"][1].detach()) == 0.0
    for record, expected in zip(records, score.sigmoid().tolist(), strict=True):
        assert rule.probability(record["features"]) == pytest.approx(expected)


def test_logistic_finds_a_middle() -> None:
    records = records_of(300, learns=lambda features: abs(features["rate"]) < 0.7)
    rule = fit_logistic(records, 0.3, ["rate", "layers"])
    assert rule.body["squares"][0] < -2 and abs(rule.body["squares"][1]) < 0.5
    assert confusion(rule, records).accuracy > 0.95


def test_the_effect_of_a_feature_may_depend_on_the_rate() -> None:
    records = records_of(300, learns=lambda features: features["rate"] * features["layers"] > 0)
    rule, flat = (fit_logistic(records, 0.3, ["rate", "layers"], by_rate=by_rate) for by_rate in (True, False))
    assert rule.body["by_rate"][0] == 0.0 and rule.body["by_rate"][1] > 3 and flat.body["by_rate"] == [0.0, 0.0]
    assert confusion(rule, records).accuracy > 0.95 > 0.7 > confusion(flat, records).accuracy


def test_runs_that_differ_only_in_precision_stay_together() -> None:
    records = records_of(60)
    twins = [{**record, "point": {**record["point"], "precision": "bf16"}} for record in records]
    sides = [held_out(record, 0.3) for record in records]
    assert sides == [held_out(record, 0.3) for record in twins] and len(set(sides)) == 2
    judged = []

    def keep(train: Sequence[dict[str, Any]]) -> VerdictRule:
        judged.append({json.dumps(record["point"]["rate"]) for record in train})
        return fit_logistic(train, 1.0, ["rate"])

    verdict_fit.cross_validated_loss([*records, *twins], keep)
    assert len(judged) == 5 and all(len(rates) == 48 for rates in judged)  # of 60, each with its twin


def test_tree_splits_at_the_gini_optimum() -> None:
    records = records_of(60, learns=lambda features: features["rate"] > 0.3)
    rule = fit_tree(records, 3, ["layers", "rate"])
    below = max(r["features"]["rate"] for r in records if not r["learned"])
    above = min(r["features"]["rate"] for r in records if r["learned"])
    assert rule.body["feature"] == "rate" and rule.body["threshold"] == pytest.approx((below + above) / 2)
    assert confusion(rule, records).accuracy == 1.0
    assert rule.body["low"] == {"probability": pytest.approx(1 / (rule.body["low"]["runs"] + 2)),
                                "runs": rule.body["low"]["runs"]}
    assert verdict_fit.choose(records).startswith("tree")


def test_best_split_against_all_splits() -> None:
    records = records_of(30)
    values = torch.tensor([record["features"]["layers"] for record in records], dtype=torch.float64)
    y = torch.tensor([float(record["learned"]) for record in records])

    def impurity(part: torch.Tensor) -> float:
        return float(len(part) * part.mean() * (1 - part.mean()))

    ordered = values.sort().values
    splits = [float((ordered[i] + ordered[i + 1]) / 2) for i in range(4, 25)]
    expected = min(splits, key=lambda split: impurity(y[values <= split]) + impurity(y[values > split]))
    assert fit_tree(records, 1, ["layers"]).body["threshold"] == pytest.approx(expected)


def test_fit_rule_holds_runs_out_and_rejects_too_few() -> None:
    records = records_of(240)
    fitted = fit_rule(records, splits=2)
    held = fitted.held
    assert held.total == sum(held_out(record, 0.3) for record in records) and 45 < held.total < 100
    assert held.accuracy > 0.8 and set(fitted.unseen) == {f"{block}/admin" for block in BLOCKS}
    assert fitted.recipe in verdict_fit.FITTERS and len(fitted.splits) == 2 and 0.7 < sum(fitted.splits) / 2 <= 1
    with pytest.raises(UserError, match="too few"):
        fit_rule(records[:30])
    alone = [record for record in records if record["point"]["encoder"] == BLOCKS[1]]
    assert fit_rule(alone, splits=1).unseen == {}  # without the only block nothing is left
    with pytest.raises(UserError, match="too similar"):
        fit_rule(records_of(240, learns=lambda _: True))


def test_grid_is_resumed(tmp_path: Path) -> None:
    points = grid(["post_ln", "pre_ln/admin"], [1], [1e-3], [2], [1])
    assert len(points) == 4 and {p.blocks for p in points} == {"post_ln", "pre_ln/admin"}
    more = grid(["post_ln", "pre_ln/admin"], [1], [1e-3], [2], [1], ["fp32", "fp16"], ["auto", "depth_scaled"])
    assert len(more) == 16 and sum(p in points for p in more) == 4
    assert {p.initialisation for p in more} == {"xavier/xavier", "depth_scaled/depth_scaled"}
    scaled = Point("pre_ln", "admin", 4, 1e-3, True, init="depth_scaled").recipe(TINY).model
    assert scaled.encoder.init == scaled.decoder.init == "depth_scaled"
    file = tmp_path / "runs.jsonl"
    assert run_grid(points[:1], TINY, file) == 0
    with file.open("a") as out:
        out.write('{"point": {"enc')  # the partial line of a kill
    first = read_grid(file)
    assert len(first) == 1
    whole = file.read_text().splitlines()[0]
    for end in (1, 30, whole.index("}") + 1, -1):
        (tmp_path / "partial.jsonl").write_text(f"{whole}\n{whole[:end]}")
        assert read_grid(tmp_path / "partial.jsonl") == first
    assert run_grid(points, TINY, file, max_seconds=-1.0) == 3 and run_grid(points, TINY, file) == 0
    records = read_grid(file)
    assert len(records) == 4 and records[0] == first[0]
    assert set(records[1]["features"]) == set(FEATURES) and len(records[1]["losses"]) == 1
    assert all(math.isfinite(value) for record in records for value in record["features"].values())
    old = json.loads(json.dumps(records))
    del old[2]["features"]["trial_source"]
    old[2]["features"]["layers"] = 9.0
    del old[0]["features"]["fp16"]  # the point determines it, so nothing is measured
    file.write_text("".join(json.dumps(record) + "\n" for record in old))
    assert measure_again(file) == 1 and measure_again(file) == 0
    for again, record in zip(read_grid(file), records, strict=True):
        assert again["features"] == pytest.approx(record["features"], rel=1e-4, abs=1e-4)
        assert again["losses"] == record["losses"]
    with pytest.raises(UserError, match="unknown block 'nonsense'"):
        grid(["nonsense"], [1], [1e-3], [2], [1])


@pytest.mark.parametrize("blocks", ["pre_ln", "post_ln/dlcl", "admin", "fixup"])
def test_side_by_side_is_one_by_one(blocks: str) -> None:
    encoder, _, decoder = blocks.partition("/")
    task = ToyTask()
    points = [Point(encoder, decoder or encoder, 2, rate, warm) for rate, warm in ((1e-3, True), (1e-2, False))]
    recipes = [point.recipe(TINY) for point in points]
    models = [fresh_model(r.model, task.vocabulary, task.vocabulary, 1, [task.batch(0, 3)]) for r in recipes]
    rates = [[learning_rate(r.optimizer.lr, r.schedule, update, 4) for r in recipes] for update in range(1, 5)]
    together = list(train_side_by_side(models, (task.batch(u, 3) for u in range(4)), rates, recipes[0].optimizer))
    for place, (model, recipe) in enumerate(zip(models, recipes, strict=True)):
        engine = LocalEngine(model, recipe, torch.device("cpu"))
        for update in range(4):
            batch = task.batch(update, 3)
            alone = engine.train_step([batch], batch.tokens, rates[update][place]).nll / batch.tokens
            assert together[update][place] == pytest.approx(alone, rel=2e-4)


def test_each_model_has_its_own_loss_scale() -> None:
    """Halved by an overflow, doubled after some updates without; an update with an overflow changes nothing."""
    rule = LossScale(initial_power=20, window=2, floor=2.0**10)
    scales = _Scales(3, rule)
    gradient = torch.tensor([[1.0, 2.0], [math.inf, 0.0], [math.nan, 1.0]]) * 2.0**20
    assert scales.unscale(gradient).tolist() == [True, False, False] and gradient[0].tolist() == [1.0, 2.0]
    assert scales.scales.tolist() == [2.0**20, 2.0**19, 2.0**19]
    assert scales.unscale(torch.ones(3, 2)).all() and scales.scales.tolist() == [2.0**21, 2.0**19, 2.0**19]
    for _ in range(20):
        scales.unscale(torch.full((3, 2), math.nan))
    assert scales.scales.tolist() == [2.0**10] * 3
    task = ToyTask()
    recipe = Point("pre_ln", "pre_ln", 1, 1e-3, True).recipe(TINY)
    models = [new_model(recipe.model, task.vocabulary, task.vocabulary, 1) for _ in range(2)]
    batches = [task.batch(1, 3)] * 12
    scaled = list(train_side_by_side(models, batches, [[1e-2, 0.0]] * 12, recipe.optimizer, "fp16", rule))
    first = [losses[0] for losses in scaled]
    dropped = sum(a == b for a, b in pairwise(first))  # at 2^20 the loss's gradient overflows in fp16
    plain = list(train_side_by_side(models[:1], batches, [[1e-2]] * 12, recipe.optimizer))
    assert 0 < dropped < 8 and first[-1] < first[0] - 0.3
    assert first[-1] == pytest.approx(plain[11 - dropped][0], abs=2e-3)
    assert len({losses[1] for losses in scaled}) == 1  # at a rate of 0


def test_a_run_learns_or_not_by_its_final_loss(tmp_path: Path) -> None:
    task = ToyTask(symbols=4, successors=1, shortest=3, longest=3)
    easy = Settings(width=16, heads=2, ffn=16, updates=120, warmup=5, task=task)
    assert run_grid([Point("pre_ln", "pre_ln", 1, 1e-2, True, 16), Point("pre_ln", "pre_ln", 1, 1e-7, True, 16)], easy,
                    tmp_path / "runs.jsonl") == 0
    learned, stuck = read_grid(tmp_path / "runs.jsonl")
    assert learned["learned"] and learned["final"] < learned["bar"] < stuck["final"] and not stuck["learned"]
    assert easy.bars == pytest.approx({"source": math.log(4) / 4, "context": math.log(4) * 3 / 4})


def test_fit_writes_rule_table_and_picture(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records_of(120)))
    text = fit_grid(file, ship=False, splits=1)
    assert "held-out" in text and (tmp_path / "verdict.md").read_text().strip() == text
    assert (tmp_path / "verdict.png").stat().st_size > 5000
    rule = VerdictRule.load(tmp_path / "verdict.json")
    assert rule.facts["runs"] + rule.facts["held_out_runs"] == 120
    assert rule.facts["inits"]["b2t/admin"] == ["depth_scaled/xavier"]


def test_judging_fresh_runs_by_a_finished_rule(tmp_path: Path) -> None:
    """Two batch sizes and three runs that learned; the rule predicts that runs with 8 sentences train and those with 2
    fail. A sixth run, which it was fitted on, does not count."""
    file, settings = tmp_path / "fresh.jsonl", asdict(Settings())
    bar, low, high = Settings().bars["source"], 1.0, 2.0
    ended = [(8, low, bar - 0.1), (8, low, bar + 0.1), (8, low, bar - 0.2), (2, high, bar + 0.3), (2, high, bar - 0.3),
             (2, low, bar - 0.1)]
    file.write_text("".join(json.dumps({
        "point": {"encoder": "admin", "decoder": "admin", "layers": 6, "rate": 1e-3, "warmup": True,
                  "sentences": sentences, "seed": seed},
        "settings": settings, "features": {"tokens": tokens}, "final": final, "learned": None,
    }) + "\n" for seed, (sentences, tokens, final) in enumerate(ended)))
    body = {"feature": "tokens", "threshold": 1.5, "low": {"probability": 0.9, "runs": 5},
            "high": {"probability": 0.1, "runs": 5}}
    *fresh, old = read_grid(file)
    twin = {**old, "point": {**old["point"], "precision": "bf16"}}
    assert digest(twin) == digest(old) != digest(fresh[0])  # another precision is not another point
    rule = VerdictRule("tree", ["tokens"], body, {"tokens": [0.0, 2.0]}, {"mark": "source"})

    def judged(rule: VerdictRule, **facts: Any) -> str:
        replace(rule, facts={**rule.facts, **facts}).save(tmp_path / "rule.json")
        return judge_runs(file, tmp_path / "rule.json")

    assert judged(rule).startswith("the rule does not record which runs it was fitted on; some ")
    text = judged(rule, fitted_points=[digest(old)])
    assert text.startswith("left out: 1 runs that the rule was fitted on\nlearned: 3 of 5 runs\naccuracy: 60.0 %\n")
    assert re.search(r"learned +2 +1\ndid not +1 +1\n", text)
    assert re.search(r"by sentences per batch:\n  8 +66\.7 % of 3\n  2 +50\.0 % of 2\nby layers", text)
    assert re.search(r"by blocks:\n  admin +60\.0 % of 5$", text)
    with pytest.raises(UserError, match=r"^the rule was fitted on all 6 runs of .*fresh.jsonl, so they cannot test it"):
        judged(rule, fitted_points=[digest(run) for run in (*fresh, old)])
    with pytest.raises(UserError, match="has runs without layers; add what is missing, without training again, with "
                                        "python -m studies verdict-grid measure"):
        judged(replace(rule, names=["layers", "tokens"], spans={**rule.spans, "layers": [0.0, 2.0]}))
    with pytest.raises(UserError, match="has runs without "):
        fit_grid(file, ship=False)


MISTAKES = [
    ("verdict-grid judge none.jsonl", "no file none.jsonl; make runs with python -m studies verdict-grid run none"),
    ("verdict-grid fit none.jsonl", "no file none.jsonl; make runs with python -m studies verdict-grid run none"),
    ("verdict-grid measure none.jsonl", "no file none.jsonl; make runs with python -m studies verdict-grid run no"),
    ("verdict-grid run notes.md", "notes.md, line 1, is not a run of a verdict grid, which has features, final, point"),
    ("verdict-grid judge foreign.jsonl", "foreign.jsonl, line 1, is not a run of a verdict grid"),
    ("verdict-grid judge empty.jsonl", "empty.jsonl has no runs; make runs with python -m studies verdict-grid run"),
    ("verdict-grid judge other.jsonl", "other.jsonl, line 1, is not a run of a verdict grid"),
    ("reproduce corollaries --width 6", "--width is 6, must be a multiple of 4, the number of heads"),
    ("reproduce vanishing --trials 0", "--trials is 0, must be 1 or more"),
    ("reproduce last_ffn --threads 0", "--threads is 0, must be 1 or more"),
    ("reproduce last_ffn --deepest 1", "--deepest is 1, must be 6 or more for last_ffn"),
    ("reproduce vanishing --deepest 1", "--deepest is 1, must be 2 or more for vanishing"),
    ("verdict-grid run runs.jsonl --threads 0", "--threads is 0, must be 1 or more"),
    ("verdict-grid run runs.jsonl --depths 6 0", "--depths has 0, but all values must be above 0"),
    ("verdict-grid run runs.jsonl --rates 1e-3 0", "--rates has 0.0, but all values must be above 0"),
    ("verdict-grid run runs.jsonl --rates 1e-3 nan", "--rates has nan, but all values must be above 0 and finite"),
    ("verdict-grid run runs.jsonl --seeds 1 -1", "--seeds has -1, but all values must be 0 or more"),
    ("verdict-grid run runs.jsonl --seeds 2147483648", "a point of the grid has a fault:\n  seed: is 2147483648, must"),
    ("verdict-grid run runs.jsonl --mark context",
     "--mark has no effect here because it belongs to verdict-grid fit; remove it"),
    ("verdict-grid fit other.jsonl --seeds 2",
     "--seeds has no effect here because it belongs to verdict-grid run; remove it"),
    ("verdict-grid judge other.jsonl --ship",
     "--ship has no effect here because it belongs to verdict-grid fit; remove it"),
    ("verdict-grid measure other.jsonl --rule a",
     "--rule has no effect here because it belongs to verdict-grid judge; remove it"),
    ("verdict-grid run other.jsonl/runs.jsonl", "file other.jsonl/runs.jsonl cannot be written: "),
    ("verdict-grid run .", ". cannot be read as JSON lines: "),
    ("verdict-grid fit other.jsonl", "other.jsonl, line 1, is not a run of a verdict grid, which has f"),
    ("verdict-grid measure other.jsonl", "other.jsonl, line 1, is not a run of a verdict grid"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistakes(line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"update": 1, "loss": 2.0}\n')
    (tmp_path / "notes.md").write_text("# Notes\nof mine")
    (tmp_path / "empty.jsonl").write_text("")
    foreign = {"point": {"city": "Rome"}, "settings": {}, "features": {}, "final": 1.0}
    (tmp_path / "foreign.jsonl").write_text(json.dumps(foreign) + "\n")
    assert message in refused(*line.split()) and not (tmp_path / "runs.jsonl").exists()
    assert (tmp_path / "notes.md").read_text() == "# Notes\nof mine"


def test_the_shipped_rule_is_fitted_on_the_shipped_runs() -> None:
    rule = VerdictRule.load()
    assert set(rule.names) <= set(FEATURES) and set(rule.spans) == set(rule.names)
    records = read_grid(Path(__file__).parents[2] / "studies" / "verdict_runs.jsonl")
    assert all(set(record["features"]) == set(FEATURES) for record in records)
    test = [record for record in records if held_out(record, 0.3)]
    result = confusion(rule, test)
    assert result.total == rule.facts["held_out_runs"] and len(records) - result.total == rule.facts["runs"]
    assert result == verdict_fit.Confusion(**rule.facts["confusion"]) and result.accuracy >= 0.9
    train = [record for record in records if not held_out(record, 0.3)]
    assert rule.facts["fitted_points"] == sorted(set(map(digest, train))) and rule.unvaried == {}
    again = verdict_fit.FITTERS[rule.facts["fit"]](train)
    for record in test:
        assert again.probability(record["features"]) == pytest.approx(rule.probability(record["features"]), abs=1e-6)
