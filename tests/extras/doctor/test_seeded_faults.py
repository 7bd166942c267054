"""Faults are put into a model, a batch or a recipe, and the examination must name each; sound models have none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import deepnmt.extras.doctor.diagnose
import deepnmt.extras.doctor.verdict
from deepnmt.batch import Batch
from deepnmt.config import load_recipe
from deepnmt.config.choices import BLOCKS
from deepnmt.data.prepared import open_prepared
from deepnmt.extras.doctor.diagnose import Clock, Subject, examine, first_batch, judge, subject_of
from deepnmt.extras.doctor.faults import wrong_sizes, wrong_training, wrong_wiring
from deepnmt.extras.doctor.measures import HalfZeros, dependency
from deepnmt.extras.doctor.page import summary, write_page
from deepnmt.extras.doctor.verdict import SHIPPED, VerdictRule
from deepnmt.model import loss, transformer
from deepnmt.model.blocks import SIDES
from deepnmt.model.sublayers import SelfAttention
from deepnmt.model.transformer import Transformer
from deepnmt.training.state import TrainState


def subject_for(prepared: Path, *settings: str) -> Subject:
    recipe = load_recipe(prepared / "recipe.yaml", ["model.width=64", *settings])
    data = open_prepared(recipe)
    return subject_of(recipe, data, first_batch(recipe, data, 60, torch.device("cpu")), None)


def block_settings(block: str, layers: int = 2) -> list[str]:
    return [f"model.{side}.{name}={value}" for side in SIDES for name, value in (("block", block), ("layers", layers))]


def found_in(model: Transformer, batch: Batch) -> list[str]:
    """The faults that are seen without training."""
    return wrong_wiring(model, batch) + wrong_sizes(model, batch, {side: dependency(model, batch, side)
                                                                   for side in SIDES})


@pytest.mark.parametrize("block", list(BLOCKS))
def test_a_sound_model_has_no_fault(block: str, prepared: Path) -> None:
    subject = subject_for(prepared, *block_settings(block))
    assert found_in(subject.model, subject.batch) == []


# -- without training --------------------------------------------------------------------------------------------------


def shifted_labels(_model: Transformer, batch: Batch, _patch: pytest.MonkeyPatch) -> Batch:
    return batch.with_tensors(trg_in=batch["trg_in"][:, :-1], trg_out=batch["trg_out"][:, 1:])


def no_padding_mask(_model: Transformer, _batch: Batch, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transformer, "key_mask", lambda *_: None)


def padding_in_the_loss(_model: Transformer, _batch: Batch, patch: pytest.MonkeyPatch) -> None:
    smoothed = loss.label_smoothed_loss
    patch.setattr(loss, "label_smoothed_loss", lambda hidden, weight, trg, smoothing, _pad, _tokens: smoothed(
        hidden, weight, trg, smoothing, -1))


def no_causal_mask(_model: Transformer, _batch: Batch, patch: pytest.MonkeyPatch) -> None:
    attend = SelfAttention.forward
    patch.setattr(SelfAttention, "forward", lambda self, x, mask, causal: attend(self, x, mask, False))


def unscaled_embeddings(model: Transformer, _batch: Batch, _patch: pytest.MonkeyPatch) -> None:
    model.encoder.input.scale = 1.0


def embeddings_of_variance_one(model: Transformer, _batch: Batch, _patch: pytest.MonkeyPatch) -> None:
    model.table("out").weight.data *= math.sqrt(model.output_weight.size(1))


def gain_of_ten(model: Transformer, _batch: Batch, _patch: pytest.MonkeyPatch) -> None:
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.ndim == 2:
            parameter.data *= 10


@pytest.mark.parametrize(("seed", "named"), [
    (shifted_labels, "labels: the decoder's input is not the target one position later"),
    (no_causal_mask, "causal mask: later target tokens change earlier outputs"),
    (no_padding_mask, "padding: what stands in the source's padding changes"),
    (padding_in_the_loss, "padding: the target's padding counts in the loss"),
    (unscaled_embeddings, r"embeddings: at the encoder's input words have 0\.1\d where the positions have 0\.71"),
    (embeddings_of_variance_one, "logits: before training the logits spread by"),
    (gain_of_ten, "branches: in 4 of 4 sub-layers of the encoder the branch makes up more than 90 %"),
])
def test_a_fault_is_named_before_training(
    seed: Callable[..., Batch | None], named: str, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_for(prepared, *block_settings("post_ln"))
    batch = seed(subject.model, subject.batch, monkeypatch) or subject.batch
    first, *_ = found_in(subject.model, batch)
    assert re.match(named, first), first


# -- in the trial ------------------------------------------------------------------------------------------------------


def frozen_layer(model: Transformer) -> None:
    for parameter in model.get_submodule("encoder.layers.1.ffn").parameters():
        parameter.register_hook(torch.zeros_like)


def dead_relu(model: Transformer) -> None:
    model.get_parameter("decoder.layers.0.ffn.fc1.bias").data.fill_(-100.0)


def cut_source(model: Transformer) -> None:
    norm = model.get_submodule("encoder.layers.1.rule.norms.1")
    assert isinstance(norm, nn.Module)
    norm.register_forward_hook(lambda _m, _i, output: output.mean((0, 1), keepdim=True).expand_as(output))


def trial_of(subject: Subject, seed: Callable[[Transformer], None] | None = None) -> list[str]:
    """The faults that a trial of six updates shows."""
    if seed is not None:
        seed(subject.model)
    found = judge(subject, VerdictRule.load(SHIPPED), HalfZeros(1.0, True, {}, {}), Clock(0.0))["faults"]
    return list(found)


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepnmt.extras.doctor.verdict, "TRIAL", 6)


@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize("block", ["post_ln", "admin", "fixup", "rezero", "dlcl"])
def test_a_trial_of_a_sound_recipe_shows_no_fault(block: str, prepared: Path) -> None:
    assert trial_of(subject_for(prepared, *block_settings(block))) == []


@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize(("seed", "named"), [
    (frozen_layer, "frozen: encoder.layers.1.ffn.fc1, encoder.layers.1.ffn.fc2 did not change in 6 updates"),
    (dead_relu, "dead branch: decoder.layers.0.ffn put out the same, whatever comes in"),
    (cut_source, "collapse: the encoder collapsed and put out nearly the same vector at every position, so there is no "
     "source to read; lower the encoder's learning rate alone, for a quarter of the updates: 'optimizer.lr_factors={"
     "encoder: 0.1}' and optimizer.lr_factors_until"),
])
def test_a_fault_is_named_by_the_trial(seed: Callable[[Transformer], None], named: str, prepared: Path) -> None:
    subject = subject_for(prepared, *block_settings("post_ln"))
    assert named in trial_of(subject, seed)


@pytest.mark.usefixtures("short_trials")
def test_an_examination_names_all_faults(prepared: Path, tmp_path: Path) -> None:
    """Two seeds of different kinds, in the findings, in the table for the terminal and at the head of the page; at a
    rate 100 times too high."""
    subject = subject_for(prepared, *block_settings("post_ln"), "optimizer.lr=0.5", "train.clip=0")
    frozen_layer(subject.model)
    subject.model.decoder.input.scale = 1.0
    found = examine(subject, VerdictRule.load(SHIPPED), clock=Clock(0.0))
    kinds = [fault.partition(":")[0] for fault in found["faults"]]
    assert kinds == ["embeddings", "rising loss", "frozen", "collapse"], found["faults"]
    [row] = [line for line in summary(found).splitlines() if line.startswith("faults ")]
    assert all(fault in row for fault in found["faults"])
    assert "rate is too high, or the warm-up too short" in row
    head = write_page(found, tmp_path).read_text(encoding="utf-8").partition("<details")[0]
    assert "At the decoder&#x27;s input words have 0.12" in head
    assert " encoder.layers.1.ffn.fc1, encoder.layers.1.ffn.fc2 did not change in" in head


def test_a_checkpoint_is_tested_for_what_training_does_not_change(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepnmt.extras.doctor.diagnose, "has_moments", lambda folder: False)
    monkeypatch.setattr(deepnmt.extras.doctor.diagnose, "load_state", lambda folder: TrainState(update=1))
    subject = subject_for(prepared, *block_settings("post_ln"))
    dead_relu(subject.model)
    subject.model.encoder.input.scale = 1.0  # of a trained model it is not judged
    found = examine(replace(subject, checkpoint=prepared / "checkpoints" / "update-00000001"), None)
    assert [fault.partition(":")[0] for fault in found["faults"]] == ["dead branch"]


def test_a_loss_that_is_not_finite_is_named_with_its_update() -> None:
    model = nn.Linear(2, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert wrong_training(model, before, [5.0, 4.0, math.nan], [1.0, 1.0, 1.0]) == [  # type: ignore[arg-type]
        "divergence: loss or gradient is not finite at update 3 of the trial"]


def test_a_loss_of_other_sentences_is_no_rise() -> None:
    model = nn.Linear(2, 2)
    before = [parameter.detach() + 1 for parameter in model.parameters()]
    for end, faults in ((6.19, 0), (6.3, 1)):
        assert len(wrong_training(model, before, [6.15] + [end] * 10, [1.0] * 11)) == faults  # type: ignore[arg-type]


# -- in the recipe -----------------------------------------------------------------------------------------------------


def whole_trial(prepared: Path, *settings: str) -> list[str]:
    return trial_of(subject_for(prepared, "train.updates=300", "model.width=32", *settings))


def test_a_rate_that_is_thirty_times_too_high(prepared: Path) -> None:
    good, wild = (whole_trial(prepared, *block_settings("post_ln"), f"optimizer.lr={rate}") for rate in (0.005, 0.15))
    assert good == [] and wild[-1].startswith("collapse: the encoder and the decoder collapsed and put out")


def test_a_deep_post_ln_without_warm_up(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepnmt.extras.doctor.verdict, "TRIAL", 20)
    bare, good = (whole_trial(prepared, *block_settings(block, 8), "schedule.warmup=0", "optimizer.lr=0.01")
                  for block in ("post_ln", "pre_ln"))
    assert good == [] and bare[-1].startswith("collapse: the encoder"), bare


# -- what the guide says that no test sees -----------------------------------------------------------------------------


def small_gain(model: Transformer, _batch: Batch, _patch: pytest.MonkeyPatch) -> None:
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.ndim == 2:
            parameter.data /= 10


def other_sources(_model: Transformer, batch: Batch, _patch: pytest.MonkeyPatch) -> Batch:
    return batch.with_tensors(src=batch["src"].roll(1, 0), src_lengths=batch["src_lengths"].roll(1, 0))


@pytest.mark.parametrize(("block", "seed"), [("post_ln", small_gain), ("pre_ln", gain_of_ten),
                                             ("post_ln", other_sources)])
def test_a_fault_that_stays_unseen(
    block: str, seed: Callable[..., Batch | None], prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_for(prepared, *block_settings(block))
    assert found_in(subject.model, seed(subject.model, subject.batch, monkeypatch) or subject.batch) == []
