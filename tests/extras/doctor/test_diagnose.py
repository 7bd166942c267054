"""`deepnmt diagnose`: on a recipe before training, on checkpoints of a run, and its mistakes."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Refused
from run_files import records, scalars

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import load_model
from deepnmt.cli import main
from deepnmt.config import Recipe, load_recipe, with_settings
from deepnmt.data.batching import Stream
from deepnmt.data.prepared import open_prepared
from deepnmt.errors import UserError
from deepnmt.extras.doctor import diagnose as doctor
from deepnmt.extras.doctor.diagnose import (
    Clock,
    Subject,
    checkpoint_displacements,
    course,
    default_checkpoint,
    default_output,
    first_batch,
    growth,
    judge,
    loss_scale,
    one_update,
    subject_of,
    take_update,
    update_rate,
)
from deepnmt.extras.doctor.measures import HalfZeros, dependency, gradients, noise_change, update_change
from deepnmt.extras.doctor.variants import BF16, alternatives
from deepnmt.extras.doctor.verdict import Node, VerdictRule
from deepnmt.model.admin_profile import AdminProfile
from deepnmt.model.blocks import Block
from deepnmt.model.transformer import Transformer
from deepnmt.processes.ranks import Ranks
from deepnmt.training.profile import profile_for

ONE = "parallel.threads=1"
RISING = "'optimizer.lr_factors={encoder: 0.1}' optimizer.lr_factors_until=3"  # a quarter of the recipe's updates
LAYOUTS = Path(__file__).parents[3] / "ds_configs"
PICTURES = {"dependency", "change", "gradients", "matrices", "places", "likeness", "ranges", "half"}


def small(prepared: Path, *changes: str) -> Recipe:
    """The recipe of the prepared text with settings changed."""
    return load_recipe(prepared / "recipe.yaml", changes)


def subject_for(recipe: Recipe, checkpoint: Path | None = None, tokens: int = 60) -> Subject:
    """The model to examine, with a batch of the recipe's data."""
    data = open_prepared(recipe)
    return subject_of(recipe, data, first_batch(recipe, data, tokens, torch.device("cpu")), checkpoint)


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "diagnosis.json").read_text()))


def write_rule(folder: Path, learns: bool) -> str:
    """The file of a rule: a model that learns translates after many updates."""
    few, some, many = ([0.0, 1.0, 0.0], [0.0, 0.3, 0.7], [0.0, 0.1, 0.9]) if learns else [[1.0, 0.0, 0.0]] * 3
    tree = [Node(some, "budget", 0.4, 1, 2), Node(few), Node(some, "budget", 1.2, 3, 4), Node(some), Node(many)]
    VerdictRule([tree], 1.0, {"budget": [-3.0, 3.0]}, {
        "runs": 9, "held_out": {"text": 0.8, "block": 0.9}, "outcomes": {"stuck": 4, "target only": 5}}).save(
        folder / "rule.json")
    return str(folder / "rule.json")


def test_a_recipe_before_training(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(prepared / "recipe.yaml"), f"run={tmp_path}", "train.updates=5000", ONE]
    folder = tmp_path / "diagnosis"
    folder.mkdir()
    (folder / "moved.png").write_text("of an earlier one")
    assert main("diagnose", [*words, "--rule", write_rule(tmp_path, True)]) == 0
    said = capsys.readouterr()
    assert re.search(r"^verdict +after 5,000 updates: translates 0\.\d\d, the target side only 0\.\d\d, stuck or "
                     r"diverging 0\.\d\d", said.out, flags=re.MULTILINE)
    assert [line.split(", after ")[0] for line in said.err.splitlines() if " of 7, after " in line] == [
        f"{part} of 7" for part in range(1, 8)]
    found = read(folder)
    assert {file.stem for file in folder.glob("*.png")} == PICTURES | {"last_ffn", "trial"}
    page = (folder / "diagnosis.html").read_text()
    assert page.count("data:image/png;base64,") == 10 and "http" not in page.replace("http-equiv", "")
    assert "it was right on 80 to 90 %." in page and "how good the translations get" in page
    assert "<b>Yes: after 5,000 updates it will probably" in page
    assert len(found["dependency"]["decoder"]) == 3 * 2 + 1 and len(found["likeness"]["encoder"]) == 2
    assert found["growth"].keys() == {"1 % noise on the matrices", "one update at the peak rate 0.005"}
    assert found["last_ffn"]["depths"] == [1, 2] and all(math.isfinite(n) for n in found["last_ffn"]["norms"])
    assert found["change"]["update"]["loss_after"] != found["change"]["update"]["loss_before"]
    assert found["about"]["sentences"] >= 2 and found["about"]["target tokens"] <= 256
    verdict = found["verdict"]
    assert verdict["outcome"] == "translates" and verdict["instead"] == {} and verdict["left out"] == []
    assert [*verdict["course"]] == ["50", "150", "500", "1500", "5000"]
    rising = [each["translates"] for each in verdict["course"].values()]
    assert rising == sorted(rising) and verdict["course"]["5000"] == verdict["probabilities"]
    assert main("diagnose", [*words, "--rule", str(tmp_path / "rule.json"), "--updates", "50"]) == 0
    assert re.search(r"^verdict +after 50 updates: the target side only 0\.", capsys.readouterr().out, re.MULTILINE)
    assert read(folder)["verdict"]["probabilities"] == verdict["course"]["50"]


def test_the_model_is_as_before_after_its_trial(prepared: Path, tmp_path: Path) -> None:
    subject = subject_for(small(prepared))
    before = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    half = HalfZeros(1.0, True, {}, {})
    judge(subject, VerdictRule.load(Path(write_rule(tmp_path, True))), half, Clock(), updates=100)
    assert all(torch.equal(tensor, before[name]) for name, tensor in subject.model.state_dict().items())


def test_numbers_of_updates() -> None:
    assert course(20_000) == [200, 600, 2000, 6000, 20_000] and course(300) == [90, 300] and course(3) == [3]


def test_a_predicted_failure_rates_other_recipes(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "MAX_LOST", -1.0)  # so that fp16 always fails
    measured, shares = doctor.half_zeros, []

    def keep(model: Transformer, batch: Batch, scale: float, accumulation: int = 1) -> HalfZeros:
        shares.append(accumulation)
        return measured(model, batch, scale, accumulation)

    monkeypatch.setattr(doctor, "half_zeros", keep)
    words = [str(prepared / "recipe.yaml"), f"run={tmp_path}", "schedule.warmup=0", "batch.accumulation=3", ONE,
             "train.updates=40", "--tokens", "60"]
    fp16 = f"parallel.ds_config={LAYOUTS}/zero1_fp16.json"
    assert main("diagnose", [*words, fp16, "--rule", write_rule(tmp_path, False)]) == 0
    verdict = read(tmp_path / "diagnosis")["verdict"]
    assert set(shares) == {3}  # each of an update's 3 micro-batches gets a third of the scale
    said = capsys.readouterr().out
    assert re.search(r"^verdict +predicted to fail in fp16: \d+ % of a layer's gradients are lost to fp16 at loss "
                     r"scale 8192 \(the rule alone, after 40 updates: stuck or diverging 0\.", said, flags=re.MULTILINE)
    assert re.search(rf"^better +{BF16}: stuck", said, flags=re.MULTILINE)
    assert verdict["instead"][BF16] == verdict["probabilities"]
    assert verdict["outcome"] == "stuck" and verdict["probabilities"]["stuck"] > 0.5
    assert verdict["instead"][f"{BF16} train.updates=400"]["stuck"] == verdict["probabilities"]["stuck"]
    page = (tmp_path / "diagnosis" / "diagnosis.html").read_text()
    assert "<b>No: it will probably fail in fp16, because " in page
    assert re.findall("<code>(.*?)</code>", page)[0] == BF16
    changes = {"'optimizer.lr_factors={encoder: 0.1}' optimizer.lr_factors_until=10", "schedule.warmup=4",
               "train.updates=120", "model.encoder.block=pre_ln model.decoder.block=pre_ln",
               "model.encoder.init=depth_scaled model.decoder.init=depth_scaled"}
    assert {f"{BF16} {change}" for change in changes} <= verdict["instead"].keys(), "their trials were in fp32"
    assert verdict["left out"] == []


def test_the_page_begins_with_the_answer_and_what_to_change(prepared: Path, tmp_path: Path) -> None:
    """A verdict that depends on the rate: at a tenth of it the rule expects the model to translate."""
    tree = [Node([0.5, 0.0, 0.5], "rate", -2.9, 1, 2), Node([0.0, 0.0, 1.0]), Node([1.0, 0.0, 0.0])]
    rule = VerdictRule([tree], 1.0, {"rate": [-9.0, 0.0], "updates": [0.0, 2.0]}, {
        "runs": 9, "held_out": {"text": 0.8, "block": 0.9}, "outcomes": {"stuck": 4, "target only": 5},
        "fresh": {"runs": 120, "right": 0.742, "sure": 64, "sure_right": 0.922}})
    rule.save(tmp_path / "rule.json")
    words = [str(prepared / "recipe.yaml"), f"run={tmp_path}", "train.updates=40", ONE, "--tokens", "60", "--rule",
             str(tmp_path / "rule.json")]
    assert main("diagnose", words) == 0
    page, verdict = (tmp_path / "diagnosis" / "diagnosis.html").read_text(), read(tmp_path / "diagnosis")["verdict"]
    shown, folded = page[:page.index("<details>")], page[page.index("<details>"):]
    assert "<b>No: after 40 updates it will probably be stuck or have diverged (9" in shown
    assert shown.index("<b>No: ") < shown.index("<code>optimizer.lr=0.0005</code>") < shown.index("The course of the")
    assert [*verdict["best"]] == ["optimizer.lr=0.0005"]
    assert [point["update"] for point in verdict["trial"]["source"]] == [0, 10, 20, 30, 40]
    assert all(0 <= point["encoder_common"] <= 1 for point in verdict["best"]["optimizer.lr=0.0005"]["source"])
    assert "it was right on 74 %, and on 92 % of the 64 where it gave an outcome 0.8 or more." in folded
    assert "right on 80 to 90 %. Always saying the commonest outcome is right on 56 %." in folded
    assert "log peak" not in shown and "peak learning rate of 0.005" in folded
    assert "judged by the trial of the recipe as it is" in shown
    assert "train.updates=120" not in page, "longer than any run that the rule was fitted on"
    assert shown.count("<img") == 1 < folded.count("<img")


def test_with_no_minutes_there_is_the_verdict_alone(prepared: Path, tmp_path: Path) -> None:
    words = [str(prepared / "recipe.yaml"), f"run={tmp_path}", "train.updates=40", ONE, "--minutes", "0"]
    rule = VerdictRule.load(Path(write_rule(tmp_path, False)))
    replace(rule, spans=rule.spans | {"updates": [0.0, 1.7]}).save(tmp_path / "rule.json")
    assert main("diagnose", [*words, "--tokens", "60", "--rule", str(tmp_path / "rule.json")]) == 0
    verdict = read(tmp_path / "diagnosis")["verdict"]
    assert verdict["outcome"] == "stuck" and verdict["instead"] == verdict["best"] == {}
    assert "No other recipe was tried" in (tmp_path / "diagnosis" / "diagnosis.html").read_text()


def test_no_other_recipe_is_tried_when_time_is_up(prepared: Path, tmp_path: Path) -> None:
    recipe = small(prepared, "train.updates=40")
    subject, rule = subject_for(recipe), VerdictRule.load(Path(write_rule(tmp_path, False)))
    found = judge(subject, rule, HalfZeros(1.0, True, {}, {}), Clock(seconds=0.1))
    assert [*found["instead"]] == ["train.updates=120", "train.updates=400"]  # which need no further trial
    assert found["left out"] == [*alternatives(recipe)]
    few = judge(subject, rule, HalfZeros(1.0, True, {}, {}), Clock(seconds=0.1), updates=15)["instead"]
    assert [*few] == ["train.updates=45", "train.updates=150"], "three and ten times what the verdict is about"
    warm = replace(subject, recipe=with_settings(recipe, {"schedule.name": "linear", "schedule.warmup": 30}))
    none = judge(warm, rule, HalfZeros(1.0, True, {}, {}), Clock(seconds=0.1), updates=3)["instead"]
    assert none == {}, "neither 9 nor 30 updates have room for this warm-up"


def test_other_initial_weights_are_tried_only_if_they_differ(prepared: Path) -> None:
    recipe = small(prepared, "model.encoder.block=b2t", "model.decoder.init=depth_scaled")
    assert not any("init" in name for name in alternatives(recipe))


@pytest.mark.parametrize(("block", "first"), [
    ("admin", [RISING, "'optimizer.lr_factors={encoder: 0.05, decoder: 0.2}'",
               "model.encoder.block=t_fixup model.decoder.block=t_fixup", "optimizer.lr=0.00167",
               "optimizer.lr=0.0005"]),
    ("rezero", ["model.encoder.block=t_fixup model.decoder.block=t_fixup", "optimizer.lr=0.00167",
                "optimizer.lr=0.0005", RISING])])
def test_what_has_helped_most_is_tried_first(block: str, first: list[str], prepared: Path) -> None:
    words = [f"model.{side}.block={block}" for side in ("encoder", "decoder")]
    found = alternatives(small(prepared, *words))
    assert [*found][:len(first)] == first
    optimizer = found[RISING].optimizer
    assert optimizer.lr_factors == {"encoder": 0.1} and optimizer.lr_factors_until == 3
    slow = alternatives(small(prepared, *words, "optimizer.lr_factors={encoder: 0.3}"))
    assert slow["'optimizer.lr_factors={encoder: 0.03}'"].optimizer.lr_factors == {"encoder": pytest.approx(0.03)}
    parts = alternatives(small(prepared, *words, "optimizer.lr_factors={encoder.layers: 0.5}"))
    assert "'optimizer.lr_factors={encoder: 0.1, encoder.layers: 0.05}'" in parts


def test_no_rate_of_what_is_frozen_and_no_part_that_another_block_lacks_is_tried(prepared: Path) -> None:
    encoder_alone = [RISING, "'optimizer.lr_factors={encoder: 0.05}'"]
    for frozen, tried in (("encoder", []), ("encoder.layers", []), ("enc*", []), ("decoder", encoder_alone)):
        found = alternatives(small(prepared, f"train.freeze=[{frozen}]"))
        assert [name for name in found if "lr_factors" in name] == tried
        assert "optimizer.lr=0.0005" in found
    omega = alternatives(small(prepared, 'optimizer.lr_factors={"*.omegas": 0.1}'))
    assert omega and not any("block=" in name for name in omega)


def test_higher_and_lower_rates_and_the_blocks_of_a_hybrid_are_tried(prepared: Path) -> None:
    recipe = small(prepared, "model.encoder.block=post_ln", "model.decoder.block=pre_ln")
    found = alternatives(recipe)
    tried = found["model.encoder.block=pre_ln model.decoder.block=pre_ln"].model
    assert (tried.encoder.block, tried.decoder.block) == ("pre_ln", "pre_ln")
    rates = {name: each.optimizer.lr for name, each in found.items() if name.startswith("optimizer.lr=")}
    assert rates == {f"optimizer.lr={name}": pytest.approx(rate, rel=1e-9) for name, rate in (
        ("0.0005", 5e-4), ("0.00167", 5e-3 / 3), ("0.015", 1.5e-2), ("0.05", 5e-2))}
    plain = small(prepared, "model.encoder.block=pre_ln", "model.decoder.block=pre_ln")
    assert "model.encoder.block=pre_ln model.decoder.block=pre_ln" not in alternatives(plain)
    blocks = {other.model.encoder.block for other in alternatives(plain).values()}
    assert blocks == {"pre_ln", "b2t", "deepnorm", "admin", "t_fixup"}


@pytest.mark.parametrize("overrides", [
    ("schedule.name=step", "schedule.warmup=0", "schedule.step_update=2", "train.updates=100"),
    ("model.encoder.block=admin", "model.decoder.block=post_ln", "admin.profile=omegas.json"),
    ("model.encoder.block=dlcl", "model.encoder.history_window=2", "model.encoder.history_softmax=true",
     "model.decoder.block=admin_closed_form", "model.decoder.output_change=constant"),
    ("model.encoder.block=pre_ln", "model.decoder.block=pre_ln", "model.tuned_at.encoder_layers=1"),
    ("schedule.start=0.002",), ('optimizer.lr_factors={"*.ffn": 2.0}',),
    ("schedule.name=wsd", "schedule.decay=12", "schedule.warmup=0")])
def test_alternatives_work_on_the_command_line(overrides: tuple[str, ...], prepared: Path) -> None:
    recipe = small(prepared, *overrides)
    offers = alternatives(recipe)
    assert any(line.startswith("'optimizer.lr_factors={encoder: 0.1") for line in offers)
    for line, offered in offers.items():
        given = small(prepared, *overrides, *shlex.split(line))
        assert given.optimizer.lr == pytest.approx(offered.optimizer.lr, rel=1e-2)
        for name in ("lr_factors", "lr_factors_until"):
            assert getattr(given.optimizer, name) == getattr(offered.optimizer, name)
        assert (given.model, given.schedule, given.batch, given.admin) == (
            offered.model, offered.schedule, offered.batch, offered.admin), line


def test_admin_starts_from_the_same_profile_as_in_the_run(prepared: Path, tmp_path: Path) -> None:
    odd = AdminProfile([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5, 5.5, 6.5], {})
    odd.save(tmp_path / "odd.json")
    ours = small(prepared, f"admin.profile={tmp_path}/odd.json")

    def omegas(recipe: Recipe) -> list[float]:
        parameters = subject_for(recipe).model.named_parameters()
        return [float(tensor.detach()[0]) for name, tensor in parameters if ".omegas." in name]

    assert omegas(ours) == [*odd.encoder, *odd.decoder]
    measured = small(prepared)
    begun = profile_for(measured, open_prepared(measured), Ranks.alone())  # on admin.tokens, not on the batch
    assert begun is not None and omegas(measured) == pytest.approx([*begun.encoder, *begun.decoder])


def test_a_run_and_its_checkpoints(
    prepared: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    stepped = ["schedule.name=step", "schedule.warmup=0", "schedule.step_epoch=2", "batch.tokens=2048",
               "batch.accumulation=4"]
    assert main("train", [str(prepared / "recipe.yaml"), f"run={run}", "train.updates=6", "train.valid_bleu=false",
                          "train.probe_every=2", ONE, *stepped]) == 0
    rates = [record["learning_rate"] for record in records(run, "train")]
    subject = subject_for(load_recipe(run), run / "checkpoints" / "update-00000003")
    assert len(rates) == 6 and subject.passes > 1 and subject.passes % 1 > 0
    assert update_rate(subject) == pytest.approx(rates[3], rel=1e-6) != pytest.approx(0.1 * rates[0], rel=1e-2)
    ended = with_settings(subject.recipe, {"schedule.name": "linear", "schedule.step_epoch": None, "train.updates": 3})
    assert update_rate(replace(subject, recipe=ended)) == ended.optimizer.lr  # not 0, at the very end
    assert main("diagnose", [str(run), "--tokens", "60", ONE]) == 0
    output = capsys.readouterr().out
    folder = run / "diagnosis-update-00000006"
    found = read(folder)
    assert "verdict" not in found and "verdict" not in output
    measured = found["outcome"]
    assert measured["outcome"] in ("stuck", "target only") and 0 < measured["own"] < 10
    assert measured["gain"] == pytest.approx(measured["shuffled"] - measured["own"])
    assert re.search(r"^outcome +(stuck or diverging|the target side only): validation loss \d\.\d{3} nats a target "
                     r"token, [+-]0\.\d{3} with shuffled sources; the tokens' frequencies alone have \d\.\d{3}$",
                     output, flags=re.MULTILINE)
    assert "--updates 3 has no effect here because only a verdict asks for it" in refused(
        "diagnose", run, "--updates", "3", ONE)
    assert "optimizer.lr=1e-3 has no effect here because " in refused("diagnose", run, "optimizer.lr=1e-3", ONE)
    output = refused("diagnose", run, "--rule", f"{tmp_path}/none.json", ONE)
    assert f"--rule {tmp_path}/none.json has no effect here because a rule judges models bef" in output
    assert {file.stem for file in folder.glob("*.png")} == PICTURES | {"moved"}
    assert (found["moved"][0]["update"], found["moved"][-1]["until"]) == (3, 6)
    assert max(found["moved"][0]["updates"].values()) == 1.0
    noise, update = found["growth"].values()
    assert all(min(each[side]["changes"]) > 0 for each in (noise, update) for side in ("encoder", "decoder"))
    assert [growth["depths"] for growth in (*noise.values(), *update.values())] == [[1, 2]] * 4
    assert f"one update at rate {found['change']['update']['rate']:g}, layer by layer" in found["growth"]
    assert found["about"]["checkpoint"].endswith("update-00000006")
    monkeypatch.setattr(doctor, "SHIPPED", tmp_path / "none.json")
    assert main("diagnose", [str(run), "--fresh", "--tokens", "60", ONE]) == 0
    assert read(run / "diagnosis")["verdict"] is None and "this version has no verdict rule" in capsys.readouterr().out
    probed = {tag: points for tag, points in scalars(run).items() if tag.startswith("probe/")}
    assert len(probed) == 6 * 4 + 3 * 2 * (2 + 3)  # of four layers, and of each of their sub-layers
    points = probed["probe/decoder.layers.1/gradient_norm"]
    assert [*points] == [2, 4, 6] and min(points.values()) > 0


def test_another_runs_checkpoint_has_a_folder_of_its_own(prepared: Path, tmp_path: Path) -> None:
    """That of this run's own checkpoint of the same update stays as it is."""
    recipe = with_settings(small(prepared), {"run": str(tmp_path / "mine")})
    for checkpoint, name in {"mine/checkpoints/update-00000006": "diagnosis-update-00000006",
                             "mine/averaged": "diagnosis-averaged",
                             "other/checkpoints/update-00000006": "diagnosis-other-update-00000006",
                             "other/averaged": "diagnosis-other-averaged"}.items():
        assert default_output(recipe, tmp_path / checkpoint) == tmp_path / "mine" / name
    assert default_output(recipe, None) == tmp_path / "mine" / "diagnosis"


def test_each_stack_grows_by_its_own_depth(prepared: Path) -> None:
    subject = subject_for(small(prepared, "model.encoder.layers=6", "model.decoder.layers=2"))
    model, batch = subject.model, subject.batch
    whole = noise_change(model, batch)
    moved = update_change(model, batch, lambda: one_update(model, subject.recipe, batch))[0]
    found, last = growth(subject, whole, moved, gradients(model, batch))
    for sides in found.values():
        assert sides["encoder"].depths == [1, 2, 4, 6] and sides["decoder"].depths == [1, 2]
        assert len(sides["encoder"].changes) == 4 and len(sides["decoder"].changes) == 2
    assert last["depths"] == [1.0, 2.0] and len(last["norms"]) == 2
    for (kind, sides), known in zip(found.items(), (whole, moved), strict=True):
        for side in ("encoder", "decoder"):
            assert sides[side].changes[-1] == known[side][0], kind


def test_shallower_models_lack_the_layer_that_a_setting_names(prepared: Path) -> None:
    recipe = small(prepared, "train.guided_layer=2")
    subject = subject_for(recipe)
    nothing = {"encoder": [0.0], "decoder": [0.0]}
    assert growth(subject, nothing, nothing, gradients(subject.model, subject.batch))[1]["depths"] == [1.0, 2.0]


def test_frozen_parts_are_examined_like_the_others(prepared: Path) -> None:
    """The gradients of a part do not depend on what was trained before they were measured."""
    norms = []
    for frozen in ("[]", "[embeddings,encoder,decoder.layers.1]"):
        subject = subject_for(small(prepared, f"train.freeze={frozen}"))
        model, batch = subject.model, subject.batch
        update_change(model, batch, lambda: one_update(model, subject.recipe, batch))  # noqa: B023
        norms.append(gradients(model, batch))
    assert norms[0] == norms[1]


def test_a_ramp_is_as_the_first_update_has_it(prepared: Path) -> None:
    """An update that changes no weight then changes no output."""
    ramps = ["model.encoder.ramp=100", "model.decoder.ramp=100"]
    subject = subject_for(small(prepared, "optimizer.lr=1e-30", *ramps))
    model, batch = subject.model, subject.batch
    changes, _ = update_change(model, batch, lambda: one_update(model, subject.recipe, batch))
    assert changes == {"encoder": [0.0], "decoder": [0.0]}
    assert max(row[-1] for row in dependency(model, batch, "encoder")[1:]) < 0.05


def test_an_average_stays_as_far_as_its_run_was(prepared: Path, tmp_path: Path) -> None:
    """Without moments, and with layers that rise: an update is that of the trained model, and is undone with its
    shares."""
    run, ramps = tmp_path / "run", ["model.encoder.ramp=2", "model.decoder.ramp=2"]
    assert main("train", [str(prepared / "recipe.yaml"), f"run={run}", "train.updates=4", "train.valid_bleu=false",
                          *ramps, ONE]) == 0
    assert main("average", [str(run), "average_last=1"]) == 0
    subject = subject_for(load_recipe(run), run / "averaged")
    blocks = [part for part in subject.model.modules() if isinstance(part, Block)]
    seen: list[float] = []
    blocks[0].register_forward_pre_hook(lambda block, _: seen.append(block.share))
    update_change(subject.model, subject.batch, lambda: take_update(subject))
    assert set(seen) == {1.0} and {block.share for block in blocks} == {1.0}
    blocks[0].share = 0.5
    update_change(subject.model, subject.batch, lambda: take_update(subject))
    assert blocks[0].share == 0.5


def test_radam_is_examined_with_adams_first_update(prepared: Path) -> None:
    """RAdam's first updates are plain momentum, and not scaled as its later ones are."""
    weights = []
    for name in ("adam", "radam"):
        subject = subject_for(small(prepared, f"optimizer.name={name}"))
        one_update(subject.model, subject.recipe, subject.batch)
        weights.append(subject.model.state_dict())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_damaged_checkpoint_is_skipped(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = str(prepared / "recipe.yaml")
    assert main("train", [recipe, f"run={tmp_path}", "train.updates=6", "train.save_every=2", "train.keep_last=3",
                          "train.validate_every=6", "train.valid_bleu=false", "average_last=1", ONE]) == 0
    (tmp_path / "checkpoints" / "update-00000004" / "weights.safetensors").write_bytes(b"torn")
    newest = tmp_path / "checkpoints" / "update-00000006"
    loaded = load_model(newest)
    reached = replace(loaded, state=replace(loaded.state, loss_scale={"scale": 512.0, "clean": 3}))
    monkeypatch.setattr(doctor, "load_model", lambda _folder: reached)
    subject = subject_for(load_recipe(tmp_path), newest)
    assert [(pair["update"], pair["until"]) for pair in checkpoint_displacements(subject)] == [(2, 6)]
    assert "update-00000004 is damaged" in capsys.readouterr().err
    assert loss_scale(subject) == 512.0
    other = load_recipe(tmp_path, ["loss_scale.initial_power=4"])  # so the checkpoint's is not used
    assert subject_for(other, newest).scale is None


def test_an_update_of_a_run_that_averages_its_weights(prepared: Path, tmp_path: Path) -> None:
    """It moves the average that is examined, and not from there to the weights beside it."""
    run = tmp_path / "run"
    assert main("train", [str(prepared / "recipe.yaml"), f"run={run}", "train.updates=4", "train.valid_bleu=false",
                          "train.ema=0.9", ONE]) == 0
    subject = subject_for(load_recipe(run), run / "checkpoints" / "update-00000004")
    subject = replace(subject, recipe=with_settings(subject.recipe, {"optimizer.lr": 1e-30}))
    changes, _ = update_change(subject.model, subject.batch, lambda: take_update(subject))
    assert changes == {"encoder": [0.0], "decoder": [0.0]}


def test_checkpoints_of_every_kind(prepared: Path, tmp_path: Path) -> None:
    """An average and a folded model, which have no moments; the latter has no checkpoints next to it either. And a run
    by SGD, which has none, with a Fixup encoder, which has no norms, and a DLCL decoder."""
    short = ["train.updates=4", "train.save_every=2", "train.validate_every=4", "train.valid_bleu=false", ONE]
    admin, mixed = tmp_path / "admin", tmp_path / "mixed"
    recipe = str(prepared / "recipe.yaml")
    assert main("train", [recipe, f"run={admin}", *short]) == 0
    assert main("average", [str(admin), "--last", "2"]) == 0 and main("fold", [str(admin)]) == 0
    assert main("train", [recipe, f"run={mixed}", *short, "optimizer.name=sgd", "optimizer.lr=0.1",
                          "model.encoder.block=fixup", "model.decoder.block=dlcl"]) == 0

    def look(folder: Path, run: Path) -> dict[str, Any]:
        found = doctor.examine(subject_for(load_recipe(run), folder), None)
        assert folder.name in doctor.summary(found) and "verdict" not in found
        change = found["change"]["update"]
        assert math.isfinite(change["loss_after"]) and change["loss_after"] != change["loss_before"]
        return found

    averaged, folded = look(admin / "averaged", admin), look(admin / "folded", admin)
    assert averaged["change"]["update"]["rate"] == 5e-3  # no moments: one update of a new optimizer, at the peak
    assert [(pair["update"], pair["until"]) for pair in averaged["moved"]] == [(2, 4)] and folded["moved"] == []
    assert averaged["about"]["encoder"] == "2 layers, admin" and folded["about"]["encoder"] == "2 layers, post_ln"
    assert folded["gradients"].loss == pytest.approx(averaged["gradients"].loss, rel=1e-5)
    found = look(mixed / "checkpoints" / "update-00000004", mixed)
    assert found["change"]["update"]["rate"] == pytest.approx(0.1 * (4 / 5) ** 0.5)  # what is due at update 5
    assert [(pair["update"], pair["until"]) for pair in found["moved"]] == [(2, 4)]
    assert min(found["moved"][0]["updates"].values()) > 0 and len(found["dependency"]["decoder"]) == 3 * 2 + 1
    assert found["gradients"].places == {}
    (admin / "checkpoints").rename(tmp_path / "gone")
    assert default_checkpoint(load_recipe(admin), None, True) == admin / "averaged"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_what_a_cpu_finds(prepared: Path, tmp_path: Path) -> None:
    recipe = small(prepared, f"run={tmp_path}")
    found = []
    for name in ("cpu", "cuda"):
        doctor.diagnose(recipe, torch.device(name), output=tmp_path / name, tokens=60)
        found.append(read(tmp_path / name))
    cpu, gpu = found
    assert cpu["about"]["device"] == "cpu" and gpu["about"]["device"].startswith("cuda")
    for key in ("outputs", "matrices"):
        assert gpu["gradients"][key] == pytest.approx(cpu["gradients"][key], rel=1e-3, abs=1e-5)
    for side in ("encoder", "decoder"):
        for kind in ("dependency", "likeness"):
            for ours, theirs in zip(gpu[kind][side], cpu[kind][side], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert gpu["change"]["noise"] == pytest.approx(cpu["change"]["noise"], rel=1e-2)
    assert gpu["verdict"]["probabilities"] == pytest.approx(cpu["verdict"]["probabilities"], abs=0.05)


def test_the_verdict_counts_the_tokens_of_all_processes(prepared: Path, tmp_path: Path) -> None:
    recipe = small(prepared, "batch.accumulation=3", "train.updates=10")
    subject, rule = subject_for(recipe), VerdictRule.load(Path(write_rule(tmp_path, True)))
    half = HalfZeros(1.0, True, {}, {})
    alone, four = (judge(subject, rule, half, Clock(0.1), count)["features"]["batch"] for count in (1, 4))
    stream = Stream(open_prepared(recipe).split("train"), recipe.batch.tokens, recipe.seed)
    mean = int(stream.split(0).trg_lengths.sum()) / stream.epoch_size(0)
    assert 10**alone == pytest.approx(3 * mean) and 10**four == pytest.approx(4 * 10**alone)


def test_fp16_is_measured_with_the_micro_batches_of_a_rank(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The more ranks there are, the fewer of an update's micro-batches each has, with larger gradients."""
    subject = subject_for(small(prepared, "batch.update_tokens=4096", f"parallel.ds_config={LAYOUTS}/zero1_fp16.json"))
    measured, shares = doctor.half_zeros, []

    def overflowing(model: Transformer, batch: Batch, scale: float, accumulation: int = 1) -> HalfZeros:
        shares.append(accumulation)
        return replace(measured(model, batch, scale, accumulation), finite=len(shares) > 1)

    monkeypatch.setattr(doctor, "half_zeros", overflowing)
    doctor.examine(subject, None, 4)
    assert shares == [4, 4] and subject.recipe.batch.per_rank(1) == 16


def test_a_batch_of_one_sentence_is_rejected(prepared: Path) -> None:
    recipe = small(prepared)
    data = open_prepared(recipe)
    split = data.split("train")
    longest = max(int(split.src_lengths.max()), int(split.trg_lengths.max()))
    short, messages = recipe.batch.model_copy(update={"tokens": longest}), set()
    for seed in range(40):
        other = recipe.model_copy(update={"batch": short, "seed": seed})
        try:
            assert len(first_batch(other, data, 100, torch.device("cpu"))["src"]) >= 2
        except UserError as error:
            messages.add(str(error))
    assert messages == {f"batch.tokens is {longest}, so the first micro-batch has only one sentence, but diagnose "
                    "compares sentences with each other; set it higher, for example "
                    f"batch.tokens={2 * longest}"}


def test_a_validation_text_of_one_sentence_is_rejected(prepared: Path, tmp_path: Path, refused: Refused) -> None:
    """Another sentence's source would be its own, and cost nothing: of any model, the target side only."""
    words = [str(prepared / "recipe.yaml"), f"run={tmp_path / 'run'}", f"data.folder={tmp_path / 'data'}"]
    for side, lang in (("src", "en"), ("trg", "de")):
        file = tmp_path / f"one.{lang}"
        with (prepared / "text" / f"valid.{lang}").open(encoding="utf-8") as lines:
            file.write_text(next(lines), encoding="utf-8")
        words.append(f"data.valid.{side}={file}")
    assert refused("diagnose", *words).startswith("deepnmt: there is no prepared data in")  # and no part of seven
    assert main("prepare", words) == 0
    assert f"the validation text in {tmp_path / 'data'} has only one sentence" in refused("diagnose", *words)
    assert not (tmp_path / "run").exists()


def test_mistakes(prepared: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = prepared / "recipe.yaml", f"run={tmp_path}"
    plain = "model.encoder.block=b2t model.decoder.block=pre_ln"
    (tmp_path / "file").write_text("")
    for command, message in (
        (f"diagnose --checkpoint {tmp_path}/none", "none, but there is no such folder"),
        ("diagnose --tokens 0", "--tokens is 0"),
        (f"diagnose --rule {tmp_path}/none.json", "none.json cannot be read"),
        ("diagnose --minutes 0 optimizer.lr_factors.encodr=0.1", "optimizer.lr_factors names 'encodr', but no"),
        ("diagnose --coordinates train.freeze=[encodr]", "train.freeze names 'encodr', but no parameter of the model"),
        ("diagnose --fresh", f"--fresh has no effect here because {recipe} is a recipe"),
        ("diagnose --processes 0", "--processes is 0, must be 1"),
        ("diagnose --minutes -1", "--minutes is -1, must be 0 or more; with 0 no other recipe is tried"),
        ("diagnose --updates 9 train.updates=8", "--updates is 9, must be from 1 to train.updates (8)"),
        (f"diagnose parallel.pipeline_stages=2 parallel.ds_config={LAYOUTS}/pipeline_zero1_fp32.json --processes 3",
         "--processes is 3, must be a multiple of parallel.pipeline_stages (2)"),
        (f"diagnose {ONE} --output {tmp_path}/file",
         f"folder {tmp_path}/file cannot be written: File exists; set --output to a folder that can be"),
        ("diagnose admin.profile=omega.json admin.tokens=99",
         "admin.tokens=99 has no effect here because the profile is read from admin.profile (omega.json); remove"),
        (f"train {plain} admin.tokens=99",
         "admin.tokens=99 has no effect here because model.encoder.block is b2t and model.decoder.block is pre_ln, n"),
        (f'train {plain} admin={{"input_variance":one}}',
         "admin.input_variance=one has no effect here because model.encoder.block is b2t and "),
        (f"train {plain} admin.method=separate", "admin.method=separate has no effect here because "),
        (f"train {plain} admin.count_padding=true", "admin.count_padding=True has no effect here because "),
    ):
        name, *words = command.split()
        assert message in refused(name, recipe, run, *words)
    monkeypatch.setattr(doctor, "examine", lambda *_: torch.empty(2**60))
    assert "there is not enough memory" in refused("diagnose", recipe, run, ONE)
    # in the recipe file itself the setting is allowed
    assert main("train", [str(recipe), f"run={tmp_path}/dry", *plain.split(), "--dry-run"]) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "diagnose was started on 2 processes, but it looks at one model by itself; start it alone, and say" in (
        refused("diagnose", recipe, run))
