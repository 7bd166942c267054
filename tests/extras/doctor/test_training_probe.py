"""The probe of training: right numbers, no trace on the update, nothing where it is off."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
import torch
from probe_models import batch, model_of
from tiny_run import recipe_of
from torch import Tensor

from deepnmt.config import Model, with_settings
from deepnmt.extras.doctor.measures import gradients
from deepnmt.extras.doctor.probes import watching
from deepnmt.extras.doctor.training_probe import TrainingProbe
from deepnmt.model.blocks import BLOCKS, SUBLAYERS
from deepnmt.model.init import new_model
from deepnmt.parallel.engine import LocalEngine
from studies.toy_task import ToyTask

TOKENS = 13


def test_output_and_gradient_of_every_layer(tmp_path: Path) -> None:
    model, recipe = model_of("post_ln"), recipe_of(tmp_path)
    shape = with_settings(recipe.model, {"encoder.layers": 2, "decoder.layers": 2})
    probe = TrainingProbe(model, shape, every=3)
    assert [probe.due(update) for update in range(1, 7)] == [False, False, True, False, False, True]
    plain = model_of("post_ln")
    seen: list[tuple[Tensor, Tensor]] = []
    plain.get_submodule("encoder.layers.1").register_forward_hook(
        lambda _m, given, output: seen.append((given[0], output)))
    loss = plain(batch()).loss / TOKENS
    [(below, output)] = seen
    [expected] = torch.autograd.grad(loss, [output])
    engine = LocalEngine(model, recipe, torch.device("cpu"))
    with probe.watching(True):
        engine.train_step([batch()], TOKENS, 0.0)
    found = probe.read(1.0)
    below, output = below.detach(), output.detach()
    alike = (output * below).sum(dim=-1) / output.norm(dim=-1) / below.norm(dim=-1)
    for name, value in (("gradient_norm", expected.norm()), ("output_rms", output.square().mean().sqrt()),
                        ("output_variance", output.var(correction=0)), ("cosine_below", alike.mean())):
        assert found[f"encoder.layers.1/{name}"] == pytest.approx(float(value), rel=1e-5), name
    assert found["encoder.layers.1/output_largest"] == float(output.abs().max())
    assert len(found) == 6 * 4 + 3 * 2 * 2 + 3 * 2 * 3
    with probe.watching(True):  # two micro-batches: the squares add up
        engine.train_step([batch(), batch()], TOKENS, 0.0)
    twice = probe.read(2.0)
    assert twice["encoder.layers.1/gradient_norm"] == pytest.approx(float(expected.norm()) * math.sqrt(2) / 2, rel=1e-5)
    for name in ("output_rms", "output_largest"):
        assert twice[f"encoder.layers.1/{name}"] == pytest.approx(found[f"encoder.layers.1/{name}"], rel=1e-6)


@pytest.mark.parametrize("block", ["post_ln", "b2t", "pre_ln", "admin_closed_form", "rezero", "dlcl_post", "keel",
                                   "siamese", "mhc", "attn_res"])
def test_sub_layers_against_the_doctor(block: str, tmp_path: Path) -> None:
    """Branches and residual sums against plain hooks, gradients against `gradients`."""
    model, recipe = model_of(block), recipe_of(tmp_path)
    with torch.no_grad():  # the initial a = 0 would stop all gradients
        for name, parameter in model.named_parameters():
            if name.endswith("rule.a"):
                parameter.fill_(0.5)
    shape = with_settings(recipe.model, {f"{side}.{key}": value for side in SUBLAYERS
                                         for key, value in (("layers", 2), ("block", block))})
    places = gradients(model, batch()).places
    branches: dict[str, torch.Tensor] = {}
    inside: dict[str, float] = {}
    with watching(model, lambda name, tensor: branches.__setitem__(name, tensor.detach())):
        model(batch())
    for name, tensor in branches.items():
        if ".adds." in name or name.endswith(".in"):
            layer = name.partition(".rule.")[0]
            inside[layer] = max(inside.get(layer, 0.0), float(tensor.abs().max()))
    engine, probe = LocalEngine(model, recipe, torch.device("cpu")), TrainingProbe(model, shape, 1)
    with probe.watching(True):
        engine.train_step([batch()], batch().tokens, 0.0)
    found = probe.read(1.0)
    for side, parts in SUBLAYERS.items():
        for layer in (f"{side}.layers.{index}" for index in range(2)):
            assert found[f"{layer}/inside_largest"] == pytest.approx(inside[layer], rel=1e-5), layer
            for number, part in enumerate(parts):
                rms = float(branches[f"{layer}.rule.adds.{number}"].square().mean().sqrt())
                assert found[f"{layer}.{part}/branch_rms"] == pytest.approx(rms, rel=1e-5)
                assert (f"{layer}.{part}/norm_gradient" in found) == BLOCKS[block].layer_norms
            if side == "decoder" and block in ("post_ln", "b2t", "admin_closed_form", "dlcl_post"):
                five = [found[f"{layer}.{part}/{kind}_gradient"] for part in parts for kind in ("branch", "norm")][:5]
                assert five == pytest.approx(places[layer], rel=1e-4), layer
    if not BLOCKS[block].layer_norms:  # d loss / d F = a · d loss / d x, and the layer's output follows its last branch
        assert found["decoder.layers.1.ffn/branch_gradient"] == pytest.approx(
            0.5 * found["decoder.layers.1/gradient_norm"], rel=1e-5)


def test_a_probe_changes_no_weights(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    weights = []
    for every in (0, 1):
        model = model_of("b2t", layers=(1, 1))
        probe = TrainingProbe(model, recipe.model, every)
        engine = LocalEngine(model, recipe, torch.device("cpu"))
        with probe.watching(probe.due(1)):
            hooked = any(module._forward_hooks for module in model.modules())
            engine.train_step([batch()], TOKENS, 1e-3)
        assert hooked == bool(every) and not any(module._forward_hooks for module in model.modules())
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_sums_of_processes_are_combined_and_missing_layers_are_zero(tmp_path: Path) -> None:
    recipe, model = recipe_of(tmp_path), model_of("b2t", layers=(1, 1))
    probe = TrainingProbe(model.get_submodule("encoder"), recipe.model, 1)  # names no layer that the probe knows
    with probe.watching(True):
        model(batch())
    assert set(probe.read(1.0, lambda sums: [2 * each for each in sums]).values()) == {0.0}
    probe = TrainingProbe(model, recipe.model, 1)
    with probe.watching(True):
        model(batch())
    found = probe.read(1.0, lambda sums: [2 * each for each in sums], lambda tops: [each + 100.0 for each in tops])
    assert all((value > 100.0) == name.endswith("_largest") for name, value in found.items())


@pytest.mark.skipif(not os.environ.get("DEEPNMT_LONG"), reason="half a minute of one core; DEEPNMT_LONG=1 runs it")
def test_its_cost(tmp_path: Path) -> None:
    """At most 2 % of the step time with one update in a hundred probed; see studies/results/speed.md (`-s`)."""
    stack = {"block": "admin", "layers": 18}
    shape = Model.model_validate({"width": 64, "heads": 4, "ffn": 128, "encoder": stack, "decoder": stack})
    task = ToyTask()
    model, looked_at = new_model(shape, task.vocabulary, task.vocabulary, 1), task.batch(0, 73)
    engine, probe = LocalEngine(model, recipe_of(tmp_path), torch.device("cpu")), TrainingProbe(model, shape, 1)
    positions = looked_at["trg_out"].numel()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for update in range(2 * 12):
        started, probed = time.process_time(), update % 2 == 0
        with probe.watching(probed):
            engine.train_step([looked_at], positions, 1e-4)
        if probed:
            probe.read(1.0)
        seconds[probed].append(time.process_time() - started)
    probed_s, plain_s = (sorted(seconds[probed][2:])[5] for probed in (True, False))  # medians, the first two left out
    share = (probed_s - plain_s) / plain_s / 100
    print(f"{positions} positions, {plain_s:.3f} s an update, {probed_s:.3f} s probed: {100 * share:.2f} %")
    assert share <= 0.02
