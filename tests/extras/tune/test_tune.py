"""`deepnmt tune`: what it chooses, what it costs, how it goes on after a kill, and the recipe that it writes."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import Refused
from small_disk import small_disk
from small_text import tree as language_model_tree
from small_text import write_texts

import deepnmt.extras.tune.trials
import deepnmt.extras.tune.tune
from deepnmt import config
from deepnmt.api import prepare, read_recipe
from deepnmt.cli import main
from deepnmt.config import Recipe, changed_settings, dump_recipe, load_recipe
from deepnmt.data.prepared import open_prepared
from deepnmt.extras.tune.plan import Budget, anchors, box_of, fitting, own_point, settings_of, spread, stages
from deepnmt.extras.tune.trials import Trials, alive, result
from deepnmt.extras.tune.tune import carries, choose, search, sentences, small_copy
from deepnmt.extras.tune.written import edited_text, file_to_write
from deepnmt.training.divergence import Diverged
from deepnmt.training.task import prepare as prepare_task

TEXT = """\
# My recipe.
run: {folder}/run   # where it goes
seed: 7
data:
  folder: {folder}/data
  src_lang: en
  trg_lang: de
  train: {{src: {folder}/train.en, trg: {folder}/train.de}}
  valid: {{src: {folder}/valid.en, trg: {folder}/valid.de}}
  filters: {{max_tokens: 30}}
  workers: 1
vocab: {{size: 60}}
batch: {{tokens: 256}}
model:
  width: 16
  heads: 2
  ffn: 32
  dropout: 0.0
  max_length: 32
  encoder: {{block: dlcl, layers: 4}}
  decoder: {{block: dlcl, layers: 4}}
optimizer:
  name: adam
  lr: 2.0e-2     # too high
schedule: {{name: linear, warmup: 40}} # falls to 0
train:
  updates: 400
  clip: 1.0
parallel: {{threads: 1}}
average_last: 1
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and prepared data: every source word has one translation."""
    import random

    folder, draw = tmp_path_factory.mktemp("tune"), random.Random(3)
    words = {"red": "rot", "dog": "hund", "cat": "katze", "sees": "sieht", "house": "haus", "tree": "baum"}
    for name, count in (("train", 300), ("valid", 40)):
        lines = [draw.choices(list(words), k=draw.randint(3, 6)) for _ in range(count)]
        (folder / f"{name}.en").write_text("".join(f"{' '.join(line)}\n" for line in lines))
        (folder / f"{name}.de").write_text("".join(f"{' '.join(map(words.__getitem__, line))}\n" for line in lines))
    (folder / "recipe.yaml").write_text(TEXT.format(folder=folder))
    prepare(folder / "recipe.yaml")
    return folder


@pytest.fixture
def recipe_file(corpus: Path, tmp_path: Path) -> Path:
    """The recipe with a run folder of its own."""
    file = tmp_path / "my.yaml"
    file.write_text(TEXT.format(folder=corpus).replace(f"{corpus}/run", str(tmp_path / "run")))
    return file


def figures(gain: float, loss: float, common: float = 0.3) -> dict[str, Any]:
    return {"diverged": False, "loss": loss, "source_gain": gain, "encoder_common": common,
            "collapsed": common > 0.9 and gain < 0.1}


Said = Callable[[Recipe, Path], dict[str, Any]]


def pretend(monkeypatch: pytest.MonkeyPatch, said: Said, picture: bool = False) -> list[Recipe]:
    """Trials have these figures without being trained; returns the list of their recipes."""
    if not picture:
        monkeypatch.setattr(deepnmt.extras.tune.tune, "plot_trials", lambda *arguments: None)
    trained: list[Recipe] = []

    def train(recipe: Recipe, log: Path) -> dict[str, Any]:
        trained.append(recipe)
        return said(recipe, log)

    monkeypatch.setattr(deepnmt.extras.tune.trials, "_train", train)
    return trained


def as_measured(recipe: Recipe, log: Path) -> dict[str, Any]:
    """As Admin, B2T and DeepNorm were: at high rates the encoder collapses and the loss is lower; deep models collapse
    at half of the rate. The source is worth most below that."""
    optimizer, layers = recipe.optimizer, recipe.model.encoder.layers
    encoder = optimizer.lr * optimizer.lr_factors.get("encoder", 1.0)
    if encoder > (0.004 if layers < 4 else 0.002):
        return figures(0.0, 3.0 - optimizer.lr, 0.99)
    return figures(0.5 - abs(math.log(encoder / 0.0019)) / 10 - abs(math.log(optimizer.lr / 0.01)) / 20, 4.0)


def tune(file: Path, *words: str, runs: str = "12") -> None:
    """The command, which succeeds."""
    assert main("tune", [str(file), "--runs", runs, *words]) == 0


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tune" / "trials.jsonl").read_text().splitlines()]


def test_a_trial_ends_by_its_updates_alone_and_keeps_its_last_checkpoint() -> None:
    """Whatever else may end the recipe's run, or keeps more."""
    recipe = load_recipe("recipes/demo/admin_18l-18l.yaml", [
        "train.epochs=2", "train.max_seconds=9.0", "train.patience=3", "train.keep_every=150"])
    trial = config.with_settings(recipe, deepnmt.extras.tune.trials._alone(recipe, 200, 1)).train
    assert (trial.updates, trial.epochs, trial.max_seconds, trial.patience) == (200, None, None, 0)
    assert (trial.keep_last, trial.keep_best, trial.keep_every, trial.save_every) == (1, 0, 0, 200)


def test_a_trial_has_its_share_of_all_that_the_recipe_counts_in_updates(recipe_file: Path) -> None:
    changes: dict[str, Any] = {"train.updates": 1000, "optimizer.lr_factors": {"encoder": 0.2}, "schedule.warmup": 50,
                               "optimizer.lr_factors_until": 250, "model.decoder.ramp": 30,
                               "schedule.name": "inverse_sqrt_decay", "schedule.decay_period": 400}
    recipe = read_recipe(recipe_file, changes)
    trial = config.with_settings(recipe, deepnmt.extras.tune.trials._alone(recipe, 100, 1))
    assert (trial.optimizer.lr_factors_until, trial.model.decoder.ramp, trial.schedule.decay_period) == (25, 3, 40)


def test_a_trial_has_its_share_of_each_stage_of_the_text(recipe_file: Path, refused: Refused) -> None:
    """A shorter trial would end within the first."""
    text = yaml.safe_load(recipe_file.read_text())["data"]["train"]
    stages = [{"mix": {"a": 1.0}, "until": {"updates": 300}}, {"mix": {"a": 1.0, "b": 2.0}}]
    staged = read_recipe(recipe_file, {"data.train": {"a": text, "b": text}, "data.stages": stages})
    trial = config.with_settings(staged, deepnmt.extras.tune.trials._alone(staged, 100, 1))
    assert [(stage.mix, stage.until.updates) for stage in trial.data.stages] == [
        ({"a": 1.0}, 75), ({"a": 1.0, "b": 2.0}, None)]
    for name in ("epochs", "patience"):
        stages[0]["until"] = {"updates": 300, name: 2}
        recipe_file.write_text(dump_recipe(read_recipe(staged, {"data.stages": stages})))
        assert refused("tune", str(recipe_file)).startswith(
            f"deepnmt: data.stages.0.until.{name} is 2, but the trials of tune are shorter than the run")


def test_the_source_decides_and_no_collapsed_run_with_a_lower_loss(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, as_measured, picture=True)
    tune(recipe_file, runs="40")
    said, records = capsys.readouterr(), lines(recipe_file.parent / "run")
    lowest = min(records, key=lambda record: record["loss"])
    assert lowest["collapsed"]  # by the loss it would be chosen
    tuned = load_recipe(recipe_file.with_name("my_tuned.yaml"))
    rate = tuned.optimizer.lr * tuned.optimizer.lr_factors["encoder"]
    assert 0.0005 < rate <= 0.002  # on the deep model, where 0.004 of the small one collapses
    deep = [record for record in records if record["stage"] == "deep"]
    best = max((record for record in deep if not record["collapsed"]), key=lambda record: record["source_gain"])
    assert best["point"]["lr"] == tuned.optimizer.lr and best["model"] == "4L-4L"
    assert "Chosen by what the source is worth" in said.out and "Seeds on the small copy differ by" in said.out
    assert re.search(r"^trial 3\d of 40, about \d+:\d\d left: rate 0\.\d+, encoder x ", said.err, flags=re.MULTILINE)
    assert (recipe_file.parent / "run" / "tune" / "tune.png").read_bytes().startswith(b"\x89PNG")


def test_the_written_recipe_differs_in_its_rates_alone_and_keeps_comments(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    pretend(monkeypatch, as_measured)
    before, file = recipe_file.read_text(), recipe_file.with_name("my_tuned.yaml")
    tune(recipe_file)
    assert recipe_file.read_text() == before
    keys = {change.key for change in changed_settings(load_recipe(recipe_file), load_recipe(file))}
    assert {"run", "optimizer.lr_factors.encoder"} <= keys <= {
        "run", "optimizer.lr", "optimizer.lr_factors.encoder", "optimizer.lr_factors.decoder", "schedule.warmup"}
    text = file.read_text()
    comments = [line.partition("#")[2] for line in before.splitlines() if "#" in line]
    assert all(f"#{comment}" in text for comment in comments) and "run_tuned # where it goes" in text
    tune(recipe_file)  # its own file, which nobody has changed
    file.write_text(f"{text}# mine\n")
    assert f"{file} exists already" in refused("tune", str(recipe_file), "--runs", "12")
    assert file.read_text().endswith("# mine\n")
    tune(recipe_file, "--replace")
    assert file.read_text() == text


def test_editing_a_recipes_text() -> None:
    text = "# a\nrun: x # b\noptimizer: {lr: 1e-3}   # c\nschedule:\n  # d\n  name: linear\ntrain:\n"
    edited = edited_text(text, {"run": "y z", "optimizer.lr": 0.25, "optimizer.lr_factors.encoder": 0.1,
                                "schedule.warmup": 5, "train.clip": 1.0, "batch.tokens": 10})
    assert edited == ("# a\nrun: y z # b\noptimizer: {lr_factors: {encoder: 0.1}, lr: 0.25}   # c\nschedule:\n  # d\n"
                      "  warmup: 5\n  name: linear\ntrain: {clip: 1}\nbatch: {tokens: 10}\n")


def test_a_recipe_whose_text_cannot_say_it_is_written_whole(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("lr: 2.0e-2 ", "lr: &rate 2.0e-2 ").replace(
        "  name: adam\n", "").replace("clip: 1.0", "max_seconds: *rate"))
    pretend(monkeypatch, as_measured)
    tune(recipe_file)
    tuned = load_recipe(recipe_file.with_name("my_tuned.yaml"))
    assert tuned.train.max_seconds == 0.02 and tuned.optimizer.lr_factors["encoder"] < 1


@pytest.mark.parametrize("begin", ["optimizer: &them {{{}}}", "optimizer: !!map {{{}}}", "\ufeff\noptimizer: {{{}}}"])
def test_a_recipe_with_an_anchor_a_tag_or_a_byte_order_mark(
    begin: str, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = recipe_file.read_text().replace("optimizer:\n  name: adam\n  lr: 2.0e-2     # too high\n", "").lstrip()
    recipe_file.write_text(f"{begin.format('name: adam, lr: 2.0e-2')}\n{rest}", encoding="utf-8")
    pretend(monkeypatch, as_measured)
    tune(recipe_file)
    assert load_recipe(recipe_file.with_name("my_tuned.yaml")).optimizer.lr_factors["encoder"] < 1


def test_the_budget(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    for runs in range(8, 60):
        assert stages(runs, 3, 3.0).runs == runs == stages(runs, 3, 1.0).runs
    plan = fitting(Budget(200, 600.0, 300, 3), 8, 3.0, 5.0)
    assert plan.cost * 5.0 <= 600 < stages(plan.runs + 1, 3, 3.0).cost * 5.0
    trained = pretend(monkeypatch, as_measured)
    tune(recipe_file, runs="13")
    assert len(trained) <= 13 and {recipe.train.updates for recipe in trained} == {150, 300}
    now = [0.0]

    def slowly(recipe: Recipe, log: Path) -> dict[str, Any]:
        now[0] += 10.0 * recipe.train.updates / 150 * recipe.model.encoder.layers / 2
        return as_measured(recipe, log)

    pretend(monkeypatch, slowly)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    words = [str(recipe_file), f"run={recipe_file.parent / 'other'}", "--replace", "--minutes"]
    assert main("tune", [*words, "5"]) == 0
    assert 200 < now[0] <= 300 and len(lines(recipe_file.parent / "other")) > 10
    spent = now[0]
    assert main("tune", [*words, "5"]) == 0 and now[0] == spent


def test_when_the_minutes_are_over(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]

    def slowly(recipe: Recipe, log: Path) -> dict[str, Any]:
        now[0] += 20.0
        return as_measured(recipe, log)

    pretend(monkeypatch, slowly)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert main("tune", [str(recipe_file), "--minutes", "1.1"]) == 0
    said = capsys.readouterr().out
    assert now[0] == 60 and "The 1.1 minutes are over after 3 of 8 trials" in said
    assert "They were not tried on the deep model" in said
    assert load_recipe(recipe_file.with_name("my_tuned.yaml")).optimizer.lr_factors["encoder"] <= 0.1


def test_a_trial_that_was_stopped_counts_with_what_it_had_taken(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = Path(__file__).resolve().parents[2] / "fixtures/run_of_0_1/run/checkpoints"

    def stopped(recipe: Recipe, log: Path) -> dict[str, Any]:
        shutil.copytree(kept, Path(recipe.run) / "checkpoints")
        raise KeyboardInterrupt

    recipe = read_recipe(recipe_file)
    trials = Trials(recipe, recipe, tmp_path, "", Budget(8, math.inf, 20, 3), processes=1)
    pretend(monkeypatch, stopped)
    with pytest.raises(KeyboardInterrupt):
        trials.run("search", own_point(recipe), 20, 7)
    pretend(monkeypatch, as_measured)
    assert trials.run("search", own_point(recipe), 20, 7)["seconds"] > 7  # of that run


def test_no_recipe_is_written_where_no_source_is_used(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    pretend(monkeypatch, lambda recipe, log: figures(0.0, 2.0, 0.99))
    said = refused("tune", str(recipe_file), "--runs", "8")
    assert "no trial on the deep model used its source, so no recipe is written" in said and "--updates 400" in said
    assert not recipe_file.with_name("my_tuned.yaml").exists()
    diverged = {"diverged": True, "loss": None, "source_gain": None, "encoder_common": None, "collapsed": False}
    pretend(monkeypatch, lambda recipe, log: diverged)
    assert "no trial had a finite loss" in refused("tune", str(recipe_file), "train.clip=0.5", "--runs", "8")


def test_a_damaged_summary_and_a_full_disk(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    pretend(monkeypatch, as_measured)
    (recipe_file.parent / "run/tune").mkdir(parents=True)
    (recipe_file.parent / "run/tune/tune.json").write_text("{")
    with small_disk(9):
        assert "trials.jsonl cannot be written: File too large; free" in refused("tune", recipe_file)
    monkeypatch.undo()
    (recipe_file.parent / "run/tune/training.log").mkdir()
    assert "training.log cannot be written: Is a directory; free disk" in refused("tune", recipe_file)


@pytest.mark.parametrize(("origin", "name"), [("runs/my.v1", "my.v1"), ("at/my.v1.yaml", "my.v1"), ("demo/a", "a")])
def test_its_name_is_that_of_the_recipe_or_run(origin: str, name: str) -> None:
    assert file_to_write(origin, None, None, False) == Path(f"{name}_tuned.yaml")


def test_the_recipe_as_it_is_may_be_the_best(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, lambda recipe, log: figures(
        0.5 if recipe.optimizer.lr == 0.02 and not recipe.optimizer.lr_factors else 0.2, 4.0))
    tune(recipe_file)
    assert "are the best of those tried, so no recipe is written" in capsys.readouterr().out
    assert not recipe_file.with_name("my_tuned.yaml").exists()


def test_points(recipe_file: Path) -> None:
    recipe = read_recipe(recipe_file, {"optimizer.lr_factors": {"encoder.layers.0": 0.5}})
    own, *slow = anchors(recipe)
    assert own == {"lr": 0.02, "encoder": 1.0, "decoder": 1.0, "warmup": 0.1}
    assert [(point["encoder"], point["decoder"]) for point in slow] == [(0.1, 1.0), (0.05, 0.2)]
    assert settings_of(recipe, own, 400)["schedule.warmup"] == 40
    settings = settings_of(recipe, slow[1], 100)
    factors = {"encoder": 0.05, "decoder": 0.2, "encoder.layers.0": 0.025}  # half of the encoder's, as in the recipe
    assert list(settings["optimizer.lr_factors"].items()) == list(factors.items()), "the last counts"
    assert settings["schedule.warmup"] == 10
    box = box_of(recipe)
    points = [spread(box, number) for number in range(32)]
    assert all(0.995 * low <= point[name] <= 1.005 * high for point in points for name, (low, high) in box.items())
    for name, (low, high) in box.items():  # Sobol: as many in each half
        assert sum(point[name] < math.sqrt(low * high) for point in points) in range(15, 18)
    near = [spread(box, number, {**own, "encoder": 0.1}) for number in range(32)]
    assert max(point["lr"] for point in near) <= 0.02 * 16 ** 0.26 and min(p["lr"] for p in near) >= 0.02 / 16 ** 0.26
    frozen = read_recipe(recipe_file, {"train.freeze": ["encoder.layers.*"]})
    assert "encoder" not in anchors(frozen)[0]


def test_the_small_copy_and_large_updates(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = read_recipe(recipe_file, {"model.encoder.layers": 60, "model.decoder.layers": 12})
    small = small_copy(deep)
    assert (small.model.encoder.layers, small.model.decoder.layers) == (20, 4)
    parts = {"encoder.layers.0": 0.5, "encoder.layers.59.ffn": 0.1, "*.layers.11": 0.2, "encoder.layers.3*": 2.0}
    named = read_recipe(deep, {"optimizer.lr_factors": parts, "train.freeze": ["decoder.layers.0", "decoder.layers.1"]})
    copy = small_copy(named)
    assert copy.optimizer.lr_factors == {
        "encoder.layers.0": 0.5, "encoder.layers.19.ffn": 0.1, "*.layers.3": 0.2, "encoder.layers.3*": 2.0}
    assert copy.train.freeze == ["decoder.layers.0"]
    shallow = read_recipe(recipe_file, {"model.encoder.layers": 2, "model.decoder.layers": 1})
    assert small_copy(shallow) is shallow
    trained = pretend(monkeypatch, as_measured)
    trials = Trials(shallow, shallow, tmp_path, "", Budget(12, math.inf, 20, 3), processes=4)
    search(trials)
    assert {recipe.batch.accumulation for recipe in trained} == {4}
    assert {record["stage"] for record in trials.done} == {"search", "longer", "seeds"}
    assert choose(trials) is not None


def test_a_rule_carries_the_rates_where_there_is_one(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("dlcl", "pre_ln"))
    trained = pretend(monkeypatch, as_measured)
    tune(recipe_file, runs="32")
    deep = [recipe.model.tuned_at for recipe in trained if recipe.model.encoder.layers == 4]
    assert [(at.encoder_layers, at.decoder_layers) for at in deep] == [(2, 2), (None, None), (2, 2)]
    file = recipe_file.with_name("my_tuned.yaml")
    assert load_recipe(file).model.tuned_at.encoder_layers == 2
    changes = changed_settings(load_recipe(recipe_file), load_recipe(file))
    assert {change.key for change in changes} >= {"model.tuned_at.encoder_layers", "model.tuned_at.decoder_layers"}
    said = capsys.readouterr().out
    assert "model.tuned_at carries the rates from fewer layers to these (docs/guide/new_recipe.md)" in said
    own = read_recipe(recipe_file, {"model.tuned_at.encoder_layers": 3})
    assert not carries(own) and small_copy(own).model.tuned_at == own.model.tuned_at
    assert not carries(read_recipe(recipe_file, {"model.encoder.block": "admin"}))


@pytest.mark.parametrize(("loss", "gain", "common", "came"), [
    (2.0, 0.3, 0.4, "source +0.300, loss 2.000, one vector 0.40"),
    (1.5, 0.0, 0.99, "source +0.000, loss 1.500, one vector 0.99: collapsed"),
    (14503.0, 80.0, 0.4, "diverged"),  # T-Fixup at 1.6e-2: wrong of every source, so that another costs much more
    ("nan", "nan", "nan", "diverged"),
    (None, None, None, "diverged"),
])
def test_what_came_of_a_trial(
    loss: Any, gain: Any, common: Any, came: str, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(recipe: Recipe) -> None:
        if loss is None:
            raise Diverged("gradients stay non-finite")
        use = {"source_gain": gain, "encoder_common": common, "decoder_common": 0.2, "cross_attention_entropy": 0.8}
        perplexity = math.exp(min(float(loss), 50.0))
        Path(recipe.run).mkdir()
        (Path(recipe.run) / "log.jsonl").write_text(json.dumps(
            {"type": "valid", "update": 20, "loss": loss, "perplexity": perplexity, **use}) + "\n")

    monkeypatch.setattr(deepnmt.extras.tune.trials, "run_training", train)
    recipe = read_recipe(recipe_file)
    trials = Trials(recipe, recipe, tmp_path, "", Budget(8, math.inf, 20, 3), processes=1)
    record = trials.run("search", anchors(recipe)[0], 20, 7)
    assert result(record) == came and alive(record) == (gain == 0.3)


@pytest.mark.parametrize(("deep", "leads"), [
    (False, [(0.070, False), (0.073, True)]),  # three seeds each: t of 4 degrees 2.776 x 0.0316 x √(2/3) = 0.0717
    (True, [(0.12, False), (0.13, True)]),  # one seed each: 2.776 x 0.0316 x √2 = 0.124
])
def test_which_lead_is_more_than_the_noise_of_seeds(
        deep: bool, leads: list[tuple[float, bool]], recipe_file: Path, tmp_path: Path) -> None:
    recipe = read_recipe(recipe_file, {})
    own, slow, _ = anchors(recipe)

    def record(stage: str, point: Any, gain: float) -> dict[str, Any]:
        return {"stage": stage, "point": point, **figures(gain, 3.0)}

    for lead, told in leads:
        trials = Trials(recipe, small_copy(recipe), tmp_path, "", Budget(12, math.inf, 20, 3), 1)
        trials.done = [record("longer", own, 1.0 + lead + seed) for seed in (-0.02, 0.0, 0.02)]  # deviation 0.02
        trials.done += [record("longer", slow, 1.0 + seed) for seed in (-0.04, 0.0, 0.04)]  # 0.04; pooled 0.0316
        if deep:
            trials.done += [record("deep", own, 1.0 + lead), record("deep", slow, 1.0)]
        best = choose(trials)
        assert best is not None and best.point == own
        said = "\n".join(sentences(trials, best))
        assert "Seeds on the small copy differ by ± 0.032." in said and ("not to be told from it" in said) != told


def test_trials_of_another_recipe_do_not_count(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = pretend(monkeypatch, as_measured)
    words = [str(recipe_file), "--runs", "8"]
    assert main("tune", words) == 0
    count = len(trained)
    assert main("tune", words) == 0 and len(trained) == count
    assert main("tune", [*words, "model.dropout=0.1"]) == 0 and len(trained) == 2 * count


def test_after_a_kill_the_same_command_goes_on(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real training, and kill -9 in the middle of a trial: no trial is repeated, and that one ends as without."""
    words = ["model.encoder.layers=2", "model.decoder.layers=1", "--runs", "8", "--updates", "60"]
    process = subprocess.Popen([sys.executable, "-m", "deepnmt", "tune", str(recipe_file), *words],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("trial 4 of 8"):
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = lines(tmp_path / "run")
    assert len(before) == 3
    assert main("tune", [str(recipe_file), *words]) == 0
    said, records = capsys.readouterr().err, lines(tmp_path / "run")
    assert "trial 4 of 8" in said and "trial 3 of 8" not in said
    assert records[:3] == before and len(records) == 8 and records[-1]["source_gain"] > 0.05
    left = {file.name for file in (tmp_path / "run" / "tune").iterdir()}
    assert left - {"tune.json"} == {"trials.jsonl", "training.log", "tune.md", "tune.png"}
    recipe = read_recipe(recipe_file, {"model.encoder.layers": 2, "model.decoder.layers": 1})
    data = open_prepared(recipe).fingerprint
    other = Trials(recipe, recipe, tmp_path, data, Budget(8, math.inf, 60, 3), processes=1)
    again = other.run("search", records[3]["point"], 30, recipe.seed)
    assert {**again, "seconds": 0} == {**records[3], "seconds": 0}


MASKED = {"task": "masked_lm", "vocab": {"kind": "bpe", "size": 60}, "optimizer": {"lr": 0.01},
          "data": {"length": 24, "unit": "documents", "test": None, "block": None},
          "model": {"encoder": {"block": "pre_ln", "layers": 2}, "decoder": None}}


@pytest.mark.parametrize("task", ["language_model", "masked_lm"])
def test_a_task_without_a_source_goes_by_its_loss(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path)
    file, tree = tmp_path / "lm.yaml", language_model_tree(tmp_path, train={"updates": 12})
    if task == "masked_lm":
        tree = language_model_tree(tmp_path, train={"updates": 12}, **MASKED)
        tree["data"] = {name: value for name, value in tree["data"].items() if value is not None}
    file.write_text(yaml.safe_dump(tree))
    prepare_task(load_recipe(file))
    tune(file, runs="8")
    said, records = capsys.readouterr().out, lines(tmp_path / "run")
    assert f"Chosen by the loss of the validation text, since task: {task} does not measure" in said
    assert all(record["source_gain"] is None for record in records)
    assert all(("encoder" in record["point"]) == (task == "masked_lm") for record in records)
    longest = [record for record in records if record["updates"] == 12]
    best = min(longest, key=lambda record: record["loss"])
    tuned = file.with_name("lm_tuned.yaml")
    rate = load_recipe(tuned).optimizer.lr if tuned.exists() else 0.01
    assert best["point"]["lr"] == rate


@pytest.mark.parametrize(("words", "said"), [
    ("--runs 3", "--runs is 3, must be 8 or more"),
    ("--minutes 0", "--minutes is 0, must be above 0"),
    ("--updates 500", "--updates is 500, must be from 2 to train.updates (400)"),
    ("--seeds 0", "--seeds is 0, must be 1 or more"),
    ("--write mine", "--write mine is no name of a recipe; give one that ends in .yaml, for example mine.yaml"),
    ("--write {}/a.yaml --replace", "a.yaml cannot be written: Is a directory; set --write to a file"),
    ("train.init_from=runs/x", "train.init_from is runs/x, but tune trains smaller models from new weights"),
    ("data.folder=nowhere", "nowhere"),
    ("optimizer.lr_factors.encodr=0.1", "optimizer.lr_factors names 'encodr', but no parameter of the model has a"),
])
def test_mistakes(words: str, said: str, recipe_file: Path, refused: Refused) -> None:
    folder = recipe_file.parent
    (folder / "a.yaml").mkdir()
    assert said in refused("tune", str(recipe_file), *words.format(folder).split())
    assert not (recipe_file.parent / "run").exists()


def test_it_is_no_command_for_a_launcher(
    recipe_file: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "tune was started on 2 processes, but it trains one model after the other in one; start it alone" in refused(
        "tune", str(recipe_file))
