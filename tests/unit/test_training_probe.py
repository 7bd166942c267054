"""The probe of training: right numbers, no trace on the update, nothing where it is off."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from probe_models import batch, model_of
from tiny_run import recipe_of

from deepnmt.analysis.training_probe import TrainingProbe
from deepnmt.parallel.local import LocalEngine

TOKENS = 13


def test_output_and_gradient_of_every_layer(tmp_path: Path) -> None:
    model, recipe = model_of("post_ln"), recipe_of(tmp_path)
    shape = recipe.model.model_copy(update={side: recipe.model.encoder.model_copy(update={"layers": 2})
                                            for side in ("encoder", "decoder")})
    probe = TrainingProbe(model, shape, every=3)
    assert [probe.due(update) for update in range(1, 7)] == [False, False, True, False, False, True]
    plain = model_of("post_ln")
    inputs, outputs = [], []
    layer = plain.get_submodule("encoder.layers.1")
    layer.register_forward_pre_hook(lambda _m, given: inputs.append(given[0]))
    layer.register_forward_hook(lambda _m, _i, out: outputs.append(out))
    loss = plain(*batch()[:4]).loss / TOKENS
    [expected] = torch.autograd.grad(loss, outputs)
    engine = LocalEngine(model, recipe, torch.device("cpu"))
    with probe.watching(True):
        engine.train_step([batch()], TOKENS, 0.0)
    found = probe.read(1.0)
    assert found["encoder.layers.1/gradient_norm"] == pytest.approx(float(expected.norm()), rel=1e-5)
    assert found["encoder.layers.1/output_rms"] == pytest.approx(float(outputs[0].square().mean().sqrt()), rel=1e-5)
    assert found["encoder.layers.1/output_variance"] == pytest.approx(float(outputs[0].var(correction=0)), rel=1e-5)
    alike = (outputs[0] * inputs[0]).sum(dim=-1) / outputs[0].norm(dim=-1) / inputs[0].norm(dim=-1)
    assert found["encoder.layers.1/cosine_below"] == pytest.approx(float(alike.mean()), rel=1e-5)
    assert len(found) == 4 * 4
    with probe.watching(True):  # two micro-batches: the squares add up
        engine.train_step([batch(), batch()], TOKENS, 0.0)
    twice = probe.read(2.0)
    assert twice["encoder.layers.1/gradient_norm"] == pytest.approx(float(expected.norm()) * math.sqrt(2) / 2, rel=1e-5)
    assert twice["encoder.layers.1/output_rms"] == pytest.approx(found["encoder.layers.1/output_rms"], rel=1e-6)


def test_it_leaves_no_trace(tmp_path: Path) -> None:
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


def test_processes_add_up_and_missing_layers_count_nothing(tmp_path: Path) -> None:
    recipe, model = recipe_of(tmp_path), model_of("b2t", layers=(1, 1))
    probe = TrainingProbe(model.get_submodule("encoder"), recipe.model, 1)  # holds no module of canonical name
    with probe.watching(True):
        model(*batch()[:4])
    assert set(probe.read(1.0, lambda sums: [2 * each for each in sums]).values()) == {0.0}
