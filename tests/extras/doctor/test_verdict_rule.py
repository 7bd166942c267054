"""The verdict's rule, by hand and as a file; its trial and features; the measured outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepnmt.batch import Batch
from deepnmt.config import load_recipe, with_settings
from deepnmt.data.prepared import Split, open_prepared
from deepnmt.errors import UserError
from deepnmt.extras.doctor import outcome
from deepnmt.extras.doctor.diagnose import Subject, first_batch, outcome_of
from deepnmt.extras.doctor.outcome import Measured, frequencies, guess, measure_outcome
from deepnmt.extras.doctor.variants import fresh_model
from deepnmt.extras.doctor.verdict import (
    FEATURES,
    TRIAL,
    Node,
    Trial,
    VerdictRule,
    features,
    path,
    run_trial,
    trial_rates,
)
from deepnmt.tasks.translation import source_use
from deepnmt.tokens import PAD

CPU = torch.device("cpu")
PRE_LN = ["model.encoder.block=pre_ln", "model.decoder.block=pre_ln"]
# Two trees: what follows from the budget alone, and from the layers and then the budget.
FIRST = [Node([0.2, 0.5, 0.3], "budget", 1.0, 1, 2), Node([0.4, 0.6, 0.0]), Node([0.0, 0.4, 0.6])]
SECOND = [Node([0.2, 0.4, 0.4], "layers", 1.0, 1, 4), Node([0.0, 0.5, 0.5], "budget", 2.5, 2, 3), Node([0.0, 0.8, 0.2]),
          Node([0.0, 0.2, 0.8]), Node([0.5, 0.3, 0.2])]
RULE = VerdictRule([FIRST, SECOND], 2.0, {"budget": [-4.0, 3.0], "layers": [0.0, 2.0]}, {"runs": 9})
TRIED = Trial([3.0] * TRIAL, [9.0] * 30 + [0.1] * 10, 4.0, 4.01, 5.0, 0.25, 20.0, 100.0, 9000.0)


def test_rule_by_hand(tmp_path: Path) -> None:
    values = {"budget": 1.0, "layers": 1.5}  # a value on a threshold is low
    assert path(FIRST, values) == [FIRST[0], FIRST[1]] and path(SECOND, values) == [SECOND[0], SECOND[4]]
    means = {"stuck": 0.45, "target only": 0.45, "translates": 0.1}
    total = sum(share**2 for share in means.values())
    assert RULE.probabilities(values) == pytest.approx({
        name: 0.02 + 0.94 * share**2 / total for name, share in means.items()})
    verdict = RULE.judge({"budget": 5.0, "layers": 0.5})  # the budget is clipped to 3
    assert verdict.probabilities == RULE.probabilities({"budget": 3.0, "layers": 0.5})
    assert verdict.outcome == "translates" and sum(verdict.probabilities.values()) == pytest.approx(1)
    assert verdict.outside == [
        "learning rates of all updates, summed, over those of the trial is 100,000; the runs had 0.0001 to 1,000, and "
        "the nearest of these is taken"]
    assert verdict.reasons == [  # (0.3 + 0.3) / 2 and 0.1 / 2
        "learning rates of all updates, summed, over those of the trial of 100,000: +30 points",
        "layers of both stacks of 3.2: +5 points"]
    RULE.save(tmp_path / "rule.json")
    assert VerdictRule.load(tmp_path / "rule.json") == RULE


def test_the_reasons_add_up(prepared: Path) -> None:
    """With all of them the share of the average run becomes that of this one."""
    rule = VerdictRule.load()
    recipe = load_recipe(prepared / "recipe.yaml", [])
    values = features(TRIED, recipe, 300)
    start = np.mean([tree[0].shares[-1] for tree in rule.trees])
    end = np.mean([path(tree, values)[-1].shares[-1] for tree in replace(rule, spans={}).trees])
    assert start + sum(replace(rule, spans={name: [-9, 9] for name in FEATURES}).contributions(values).values()) \
        == pytest.approx(end)


def test_longer_than_any_run_of_the_fit() -> None:
    assert RULE.reaches({"budget": 3.0, "updates": 9.0}) and not RULE.reaches({"budget": 3.1, "updates": 1.0})
    assert not replace(RULE, spans={"updates": [1.0, 2.0]}).reaches({"budget": 0.0, "updates": 2.1})


def test_what_no_run_had_of_a_recipe(prepared: Path) -> None:
    recipe = load_recipe(prepared / "recipe.yaml", ["model.encoder.block=b2t", "model.decoder.block=pre_ln"])
    assert RULE.unseen(recipe) == []  # its facts list nothing
    seen = {"blocks": ["b2t", "pre_ln"], "inits": {"b2t": ["depth_scaled"], "pre_ln": ["xavier"]}, "width": [8, 16],
            "optimizer.name": ["adam"], "schedule.name": ["linear", recipe.schedule.name], "precisions": ["fp32"]}
    rule = replace(RULE, facts={"seen": {**seen, "width": [8, recipe.model.width]}})
    assert rule.unseen(recipe) == []
    other = with_settings(recipe, {"model.encoder.init": "xavier", "model.decoder.block": "fixup",
                                   "optimizer.name": "sgd", "schedule.name": "constant"})
    assert replace(RULE, facts={"seen": {**seen, "width": [8]}}).unseen(other, "bf16") == [
        "the encoder's initialisation is xavier; runs with b2t had depth_scaled",
        "no run had the decoder block fixup", "optimizer.name is sgd; the runs had adam",
        f"schedule.name is constant; the runs had linear or {recipe.schedule.name}",
        f"model.width is {recipe.model.width}; the runs had up to 8", "the precision is bf16; the runs had fp32"]


@pytest.mark.parametrize("setting", [
    "train.guided_alignment=0.05", "train.ema=0.9", "train.freeze=[encoder]", "train.grow=stack", "train.init_from=run",
    "optimizer.lr_factors={decoder: 0.1}", "model.encoder.word_dropout=0.1", "model.decoder.input_gain=true",
    "data.subword_variants=2"])
def test_the_shipped_rule_knows_which_settings_no_run_had(setting: str) -> None:
    base = ["model.encoder.layers=2", "model.decoder.layers=2", "model.width=64", "data.train.alignments=links"]
    recipe = load_recipe("recipes/demo/admin_18l-18l.yaml", base)
    known = VerdictRule.load().unseen(recipe)
    more = [setting, "train.init_from=run"] if setting == "train.grow=stack" else [setting]
    new = [line for line in VerdictRule.load().unseen(load_recipe("recipes/demo/admin_18l-18l.yaml", [*base, *more]))
           if line not in known]
    key = setting.partition("=")[0]
    assert any(line.startswith(f"{key} is ") and "; the runs had " in line for line in new), new

def test_the_shipped_rule_trusts_what_new_writes() -> None:
    """Measured on the recipe that `deepnmt new` wrote for 39,666 pairs of news and Europarl, which translates after a
    tenth of its updates (studies/results/training.md)."""
    values = {"trial_loss": -0.252, "trial_norm": 0.382, "uneven": -0.648, "trial_gain": -2.583, "below": 0.0,
              "blind": 0.0, "rate": -2.824, "budget": 2.176, "updates": 3.954, "length": 1.541,
              "frequencies": 6.764, "width": 2.408, "layers": 0.903, "batch": 3.239, "seen": 7.193,
              "encoder_common": 0.094, "decoder_common": 0.614, "attention": 0.963}
    assert VerdictRule.load().judge(values).outcome == "translates"


def rule_text(trees: str, version: int = 6) -> str:
    return (f'{{"format": "deepnmt-verdict", "version": {version}, "power": 1, "spans": {{"budget": [0, 1]}}, '
            f'"trees": {trees}}}')


@pytest.mark.parametrize("text", [
    "{}", "no json", "7", '"rule"', rule_text("[[[[0, 0, 1]]]]", 5), rule_text("{}")[:-1], rule_text("7"),
    rule_text("[[]]"), rule_text("[[[[0, 1]]]]"), rule_text('[[[[0, 0, 1], "layers", 1, 1, 1], [[0, 0, 1]]]]'),
    rule_text('[[[[0, 0, 1], "budget", 1, 0, 1], [[0, 0, 1]]]]'), rule_text('[[[[0, 0, 1], "budget", 1, 1, 2]]]'),
    None])
def test_faulty_rule_files(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "rule.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match="verdict-runs"):
        VerdictRule.load(path)


def test_a_rule_with_an_unknown_feature(tmp_path: Path) -> None:
    odd = [Node([0.0, 0.0, 1.0], "mood", 0.5, 1, 1), Node([0.0, 0.0, 1.0])]
    VerdictRule([odd], 1.0, {"mood": [0.0, 1.0]}).save(tmp_path / "rule.json")
    with pytest.raises(UserError, match="unknown features: mood; known: trial_loss"):
        VerdictRule.load(tmp_path / "rule.json")


def test_features_by_hand(prepared: Path) -> None:
    recipe = load_recipe(prepared / "recipe.yaml", [
        "optimizer.lr=0.01", "schedule.name=linear", "schedule.warmup=0", "train.updates=4", "batch.accumulation=3"])
    values = features(TRIED, recipe, 2, data_world=2)
    layers = recipe.model.encoder.layers + recipe.model.decoder.layers
    expected = {
        "trial_loss": 1.0, "trial_norm": -1.0, "uneven": -3.0, "rate": -2.0, "trial_gain": -2.0,
        "below": 1.0, "blind": 0.0, "updates": math.log10(2), "length": math.log10(20), "frequencies": 5.0,
        "budget": math.log10((0.0075 + 0.005) / 0.25), "width": math.log10(recipe.model.width),
        "layers": math.log10(layers), "batch": math.log10(100 * 3 * 2), "seen": math.log10(2 * 100 * 3 * 2),
        "encoder_common": -1.0, "decoder_common": -1.0, "attention": -1.0}  # not measured
    assert values == pytest.approx(expected, abs=1e-6) and set(values) == set(FEATURES)
    zigzag = features(replace(TRIED, losses=[3.0, 3.1] * (TRIAL // 2)), recipe, 2, data_world=2)
    assert zigzag == pytest.approx({**expected, "uneven": -1.0}, abs=1e-6)
    broken = features(replace(TRIED, losses=[math.nan] * TRIAL), recipe, 2, data_world=2)
    assert broken == pytest.approx({**expected, "trial_loss": -0.4, "trial_norm": 1.0, "uneven": 0.0,
                                    "trial_gain": -4.0, "below": 0.0, "blind": 1.0}, abs=1e-6)
    use = {"update": 40, "encoder_common": 0.3, "decoder_common": math.nan, "cross_attention_entropy": 0.9}
    seen = features(replace(TRIED, source=[{}, use]), recipe, 2, data_world=2)
    assert seen == pytest.approx({**expected, "encoder_common": 0.3, "decoder_common": 1.0, "attention": 0.9}, abs=1e-6)
    worse = features(replace(TRIED, own=9.0, shuffled=9.0001), recipe, 2, data_world=2)
    assert (worse["trial_loss"], worse["trial_gain"], worse["below"], worse["blind"]) == (-0.4, -4.0, 0.0, 1.0)


def test_a_trial_trains_the_recipe(prepared: Path) -> None:
    """Its losses are those of a run with the trial's rates, up to the batches, and fall; the warm-up is shortened."""
    recipe = load_recipe(prepared / "recipe.yaml", ["schedule.warmup=4000", "train.updates=9000"])
    assert trial_rates(recipe)[:21] == pytest.approx([recipe.optimizer.lr * min(1, n / 21) for n in range(1, 22)])
    assert trial_rates(with_settings(recipe, {"schedule.warmup": 3}))[:4] == pytest.approx(
        [recipe.optimizer.lr * n / 4 for n in range(1, 5)])
    data, counted = open_prepared(recipe), []
    source, target = (vocab.size for vocab in data.vocabs())
    model = fresh_model(with_settings(recipe, {"model.encoder.block": "pre_ln", "model.decoder.block": "pre_ln"}).model,
                        source, target, 1, [])
    made = run_trial(model, recipe, data, CPU, counted.append)
    assert counted == list(range(1, TRIAL + 1)) and len(made.losses) == len(made.norms) == TRIAL
    assert made.losses[-1] < made.losses[0] - 0.5 and made.own < made.losses[0] and min(made.norms) > 0
    assert made.rates == pytest.approx(sum(trial_rates(recipe)))


def test_a_trial_reads_the_text_as_training_does(prepared: Path) -> None:
    """Of text that `data.modify` has changed, as the first batch of a diagnosis is."""
    plain = load_recipe(prepared / "recipe.yaml", PRE_LN)
    modified = with_settings(plain, {"data.modify.drop_words": 0.8})
    data = open_prepared(plain)
    source, target = (vocab.size for vocab in data.vocabs())
    losses = []
    for recipe in (plain, modified):
        losses.append(run_trial(fresh_model(recipe.model, source, target, 1, []), recipe, data, CPU).losses)
    assert losses[0] != losses[1]
    one, other = (first_batch(recipe, data, 256, CPU)["src"] for recipe in (plain, modified))
    assert other.size(1) < one.size(1) / 2
    words = "data.modify changes the training text; the runs read theirs as it is prepared"
    assert words in VerdictRule.load().unseen(modified) and words not in VerdictRule.load().unseen(plain)


def test_outcomes_by_hand() -> None:
    assert [Measured(own, shuffled, 5.0).outcome for own, shuffled in (
        (5.0, 9.0), (math.nan, 5.0), (4.91, 9.0), (4.89, 5.0), (4.8, 5.0001), (3.0, 3.15))] == [
        "stuck", "stuck", "stuck", "target only", "translates", "target only"]
    assert Measured(4.0, 4.5, 5.0).gain == 0.5


def test_shuffled_sources_are_those_of_another_sentence(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, passed = open_prepared(load_recipe(prepared / "recipe.yaml", [])), []
    valid, surprise = data.split("valid"), torch.full((data.vocabs()[1].size,), 3.0)

    def evaluate(batches: Sequence[Batch]) -> list[tuple[float, float]]:
        passed.append(batches)
        return [(0.0, 2.0 * batch.tokens) for batch in batches]

    monkeypatch.setattr(outcome, "BATCH", 60)
    measured = measure_outcome(evaluate, valid, [range(len(valid))], surprise, CPU)
    own, shuffled = passed
    assert measured == Measured(2.0, 2.0, pytest.approx(3.0)) and len(own) > 1
    assert sum(len(batch["src"]) for batch in own) == len(valid) and valid.src_lengths.sum() == sum(
        int(batch["src_lengths"].sum()) for batch in shuffled)
    for a, b in zip(own, shuffled, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("trg_in", "trg_out"))

    def sources(batches: Sequence[Batch]) -> list[list[int]]:
        return [row[:length] for batch in batches
                for row, length in zip(batch["src"].tolist(), batch["src_lengths"].tolist(), strict=True)]

    assert sources(shuffled) == [sources(own)[-1], *sources(own)[:-1]] != sources(own)
    monkeypatch.setattr(outcome, "SENTENCES", 5)
    measure_outcome(evaluate, valid, [range(len(valid))], surprise, CPU)
    assert sum(len(batch["src"]) for batch in passed[2]) == 5


def test_sources_are_shuffled_within_a_corpus(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another corpus may have another language, and a model that reads its tag alone would count as translating."""
    recipe, seen = load_recipe(prepared / "recipe.yaml", PRE_LN), []
    data = open_prepared(recipe)
    sizes = {"train": data.corpora("train"), "valid": {"one": 12, "line": 1, "two": 7}}
    monkeypatch.setattr(data, "corpora", sizes.__getitem__)
    plain = source_use.paired_batches

    def watched(split: Split, rows: range, sentences: int, *rest: Any) -> Any:
        seen.append((rows, sentences))
        return plain(split, rows, sentences, *rest)

    monkeypatch.setattr(outcome, "paired_batches", watched)
    monkeypatch.setattr(source_use, "paired_batches", watched)
    source, target = (vocab.size for vocab in data.vocabs())
    model = fresh_model(recipe.model, source, target, 1, [])
    run_trial(model, recipe, data, CPU)
    corpora = [range(12), range(13, 20)]
    assert seen == 5 * [(rows, 10) for rows in corpora] + [(rows, 42) for rows in corpora]
    seen.clear()
    outcome_of(Subject(recipe, data, model, first_batch(recipe, data, 64, CPU), (source, target), None))
    assert seen == 2 * [(rows, 42) for rows in corpora]


def test_frequencies_by_hand(prepared: Path) -> None:
    data = open_prepared(load_recipe(prepared / "recipe.yaml", []))
    size, train = data.vocabs()[1].size, data.split("train")
    counts = np.ones(size)
    for i in range(len(train)):
        np.add.at(counts, train.targets.with_eos(np.array([i]))[0], 1)
    surprise = frequencies(train, size)
    assert surprise.numpy() == pytest.approx(-np.log(counts / counts.sum()))
    targeted = torch.tensor([[5, 2, PAD], [7, 7, 2]])
    assert guess(surprise, targeted) == pytest.approx(float(surprise[[5, 2, 7, 7, 2]].mean()))


def test_the_shipped_rule_can_be_read() -> None:
    rule = VerdictRule.load()
    assert set(rule.spans) == set(FEATURES) and rule.facts["runs"] >= 40
