"""The doctor's probes against references of a few lines on tiny models."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import small_models
import torch
from probe_models import PAD, VOCAB, batch, model_of
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.batch import Batch
from deepnmt.config import load_recipe
from deepnmt.config.choices import BLOCKS
from deepnmt.data.prepared import PreparedData
from deepnmt.extras.doctor import measures
from deepnmt.extras.doctor.diagnose import Subject, fp16_fault, working_scale
from deepnmt.extras.doctor.measures import (
    Growth,
    change,
    dependency,
    displacement,
    fit_line,
    gradients,
    half_zeros,
    layer_similarity,
    noise_change,
    perturbed,
    ranges,
    token_similarity,
)
from deepnmt.extras.doctor.probes import block_of, mean_loss, sublayers, watching
from deepnmt.model.blocks import SIDES
from deepnmt.model.transformer import Transformer

every_block = pytest.mark.parametrize("block", BLOCKS)


def real_of(data: Batch) -> dict[str, Tensor]:
    return {"encoder": torch.arange(6) < data["src_lengths"][:, None], "decoder": data["trg_out"] != PAD}


def inputs_and_outputs(model: Transformer, data: Batch) -> dict[str, list[Any]]:
    """The input (`NAME in`) and output (`NAME`) of every module in one forward pass."""
    seen: dict[str, list[Any]] = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            def keep(_m: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                seen.setdefault(name, []).append(output)
                seen.setdefault(f"{name} in", []).append(inputs[0] if inputs else None)
            hooks.enter_context(module.register_forward_hook(keep))
        model(data)
    return seen


# -- layer dependency --------------------------------------------------------------------------------------------------


def normed(parts: list[Tensor], norm: Any, whole: Tensor) -> list[Tensor]:
    sigma = (whole.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    return [(part - part.mean(-1, keepdim=True)) / sigma * norm.weight for part in parts]


def reference_dependency(model: Transformer, data: Batch, side: str, block: str) -> list[list[float]]:
    """β of Post-LN, Pre-LN and Admin stacks by definition, one sub-layer after the other."""
    seen, real = inputs_and_outputs(model, data), real_of(data)[side]
    x, rows = seen[f"{side}.input"][0], []
    parts = [x]

    def row(parts: list[Tensor], whole: Tensor) -> None:
        rows.append([float(part[real].std(correction=0) / whole[real].std(correction=0)) for part in parts])

    for index in range(2):
        for j in range(2 if side == "encoder" else 3):
            rule = model.get_submodule(f"{side}.layers.{index}.rule")
            norm, a = rule.norms[j], seen[f"{side}.layers.{index}.rule.adds.{j}"][0]
            if block == "pre_ln":
                row(normed(parts, norm, x), norm(x))
                x, parts = x + a, [*parts, a]
            else:
                row(parts, x)
                omega = rule.omegas[j] if block == "admin" else 1.0
                y, parts = omega * x + a, [*(omega * part for part in parts), a]
                x, parts = norm(y), normed(parts, norm, y)
    if block == "pre_ln":
        top = model.get_submodule(f"{side}.norm")
        x, parts = top(x), normed(parts, top, x)
    row(parts, x)
    return rows


@pytest.mark.parametrize("block", ["post_ln", "pre_ln", "admin"])
@pytest.mark.parametrize("side", SIDES)
def test_dependency_by_definition(block: str, side: str) -> None:
    model, data = model_of(block), batch()
    with torch.no_grad():
        expected = reference_dependency(model, data, side, block)
    found = dependency(model, data, side)  # type: ignore[arg-type]
    assert len(found) == (5 if side == "encoder" else 7)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@every_block
def test_parts_add_up_to_the_whole(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[tuple[Tensor, Tensor]] = []

    def check(parts: Tensor, whole: Tensor, real: Tensor) -> list[float]:
        sums.append((parts.sum(0), whole))
        return [0.0] * len(parts)

    monkeypatch.setattr(measures, "_shares", check)
    for side in SIDES:
        rows = dependency(model_of(block), batch(), side)
        assert [len(row) for row in rows] == list(range(1, len(rows) + 1))
    assert len(sums) == 5 + 7
    for total, whole in sums:
        torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-5)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ["post_ln", "pre_ln", "fixup", "dlcl", "siamese"])
def test_gradients_of_outputs_and_matrices(block: str) -> None:
    model, data = model_of(block), batch()
    found = gradients(model, data)
    assert all(p.grad is None for p in model.parameters())
    seen = inputs_and_outputs(model, data)
    inside = {"post_ln": "rule.norms.0", "fixup": "cross_attn in"}.get(block, "rule.norms.1 in")
    where = {"encoder.layers.0.ffn": seen["encoder.layers.0"][0], "decoder.layers.1.ffn": seen["decoder.layers.1"][0],
             "decoder.layers.0.self_attn": seen[f"decoder.layers.0.{inside}"][0]}
    tensors = [x[-1] if isinstance(x, tuple) else x for x in where.values()]
    loss = seen[""][0].loss / data.tokens
    stacked = model.get_parameter("decoder.layers.1.cross_attn.kv.weight")
    expected = torch.autograd.grad(loss, [*tensors, stacked])
    for name, gradient in zip(where, expected[:-1], strict=True):
        assert found.outputs[name] == pytest.approx(float(gradient.norm()), rel=1e-4)
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert list(found.outputs) == [*sublayers(model, "encoder"), *sublayers(model, "decoder")]
    for part, rows in zip("kv", expected[-1].chunk(2), strict=True):
        assert found.matrices[f"decoder.layers.1.cross_attn.{part}"] == pytest.approx(float(rows.norm()), rel=1e-4)
    assert found.last_ffn == found.matrices["decoder.layers.1.ffn.fc2"]


def test_five_points_of_a_decoder_layer() -> None:
    model, data = model_of("post_ln"), batch()
    found = gradients(model, data).places
    seen = inputs_and_outputs(model, data)
    places = [seen[f"decoder.layers.1.rule.norms.{point}"][0] for point in ("0 in", "0", "1 in", "1", "2 in")]
    expected = torch.autograd.grad(seen[""][0].loss / data.tokens, places)
    assert found["decoder.layers.1"] == pytest.approx([float(each.norm()) for each in expected], rel=1e-4)
    assert list(found) == ["decoder.layers.0", "decoder.layers.1"]
    assert gradients(model_of("pre_ln"), data).places == {} == gradients(model_of("rezero"), data).places


@every_block
def test_every_point_is_observed_once_and_hooks_are_removed(block: str) -> None:
    model, data = model_of(block), batch()

    def hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    before, seen = hooks(), list[str]()
    with watching(model, lambda name, tensor: seen.append(name)):
        mean_loss(model, data)
    assert len(seen) == len(set(seen)) and before == hooks()
    assert {*sublayers(model, "encoder"), *sublayers(model, "decoder"), "encoder.input", "encoder", "decoder.input",
            "decoder"} <= set(seen)


def test_half_precision_zeros() -> None:
    model, data = model_of("post_ln", tied="none"), batch()
    small, large = half_zeros(model, data, 2.0**-22), half_zeros(model, data, 256.0)
    assert small.lost > 0.5 > 0.05 > large.lost and large.finite
    assert not half_zeros(model, data, 1e7).finite
    assert replace(half_zeros(model, data, 4096.0, accumulation=16), scale=256.0) == large
    used = len({*data["src"][real_of(data)["encoder"]].tolist(), PAD})
    tables = [p for name, p in model.named_parameters() if name.startswith("embeddings.")]
    unused = sum(float((g == 0).sum()) for g in torch.autograd.grad(mean_loss(model, data), tables))
    assert large.shares_fp32["embeddings"] == pytest.approx(unused / (3 * VOCAB * 8)) and used < VOCAB
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())


def test_fp16_fails_if_no_loss_scale_works() -> None:
    demo = Path(__file__).parents[3] / "recipes" / "demo" / "admin_18l-18l.yaml"
    recipe = load_recipe(demo, ["loss_scale.floor=0.25"])
    data = cast(PreparedData, None)  # which the check of fp16 does not read
    subject = Subject(recipe, data, model_of("post_ln", noise=0.2), batch(), (40, 40), None)

    def fault(scale: float, **changes: float) -> str | None:
        scales = recipe.loss_scale.model_copy(update=changes)
        other = replace(subject, recipe=recipe.model_copy(update={"loss_scale": scales}))
        half = working_scale(other, half_zeros(subject.model, subject.batch, scale), 1)
        assert half.finite or half.scale == other.recipe.loss_scale.floor
        return fp16_fault(other, half)

    assert fault(256.0) is None and fault(1e7) is None  # the overflow ends at a smaller scale
    assert fault(1e7, floor=1e7) == "gradients overflow in fp16 at every loss scale down to 1e+07"
    reason = fault(2.0**-22)
    assert reason and re.fullmatch(r"\d+ % of a layer's gradients are lost to fp16 at loss scale 2.38419e-07", reason)
    many = recipe.model_copy(update={"loss_scale": recipe.loss_scale.model_copy(update={"floor": 9e6})})
    fits = working_scale(replace(subject, recipe=many), half_zeros(subject.model, subject.batch, 1e7), 1024)
    assert fits.finite and fp16_fault(subject, fits) is None


# -- change ------------------------------------------------------------------------------------------------------------


def test_change_and_fit_by_hand() -> None:
    before, after = torch.tensor([[0.0, 2.0], [4.0, 2.0]]), torch.tensor([[1.0, 2.0], [4.0, 0.0]])
    assert change(before, after) == pytest.approx((1 + 4) / 4 / 2.0)
    x, y = [1.0, 2.0, 4.0, 7.0], [0.3, 1.1, 1.6, 4.2]
    found = fit_line(x, y)
    assert (found.slope, found.offset) == pytest.approx(tuple(np.polyfit(x, y, 1)))
    assert found.r2 == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)
    assert math.isnan(fit_line([1.0, 2.0], [1.0, 2.0]).r2)
    growth = Growth.of([1, 2, 4, 8], [1.0, 2.0, 3.0, 4.0])
    assert growth.logarithmic.r2 == pytest.approx(1.0) and growth.linear.r2 < 0.95


def test_noise_is_added_and_removed() -> None:
    model = model_of("pre_ln", width=32)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with perturbed(model, 0.5, seed=1):
        moved_by = {name: p.detach() - kept[name] for name, p in model.named_parameters()}
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    assert not any(moved_by[name].any() for name in moved_by if ".layers." not in name or moved_by[name].ndim < 2)
    assert float(moved_by["encoder.layers.0.self_attn.qkv.weight"].std()) == pytest.approx(
        0.5 * math.sqrt(2 / 64), rel=0.05)
    assert float(moved_by["decoder.layers.1.ffn.fc1.weight"].std()) == pytest.approx(0.5 * math.sqrt(2 / 48), rel=0.1)


def test_noise_change_of_a_stack_is_that_of_its_last_layer() -> None:
    model, data = model_of("post_ln"), batch()
    assert noise_change(model, data, size=0.0) == {"encoder": [0.0], "decoder": [0.0]}
    whole, layers = (noise_change(model, data, wanted, 0.05) for wanted in (False, True))
    for side in SIDES:
        assert len(layers[side]) == 2 and layers[side][-1] == pytest.approx(*whole[side], rel=1e-5)
        assert 0 < layers[side][0] < layers[side][-1]


# -- activations and updates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ["post_ln", "rezero", "dlcl", "keel", "siamese", "mhc", "block_attn_res"])
def test_ranges_and_similarity(block: str) -> None:
    model, data = model_of(block), batch()
    found, seen, real = ranges(model, data), inputs_and_outputs(model, data), real_of(data)
    outputs = {side: [block_of(model.get_submodule(f"{side}.layers.{i}")).value(seen[f"{side}.layers.{i}"][0])
                      for i in (0, 1)] for side in SIDES}
    for side in SIDES:
        for index, output in enumerate(outputs[side]):
            name = f"{side}.layers.{index}"
            inside = [float(x.detach().abs().max()) for key, values in seen.items() for x in values
                      if key.startswith(f"{name}.")
                      and (not key.endswith(" in") or isinstance(model.get_submodule(key[:-3]), nn.LayerNorm))
                      and isinstance(x, Tensor)]
            variance = float(output[real[side]].detach().var(correction=0))
            assert found[name]["variance"] == pytest.approx(variance, rel=1e-5)
            assert found[name]["largest"] == pytest.approx(max(*inside, float(output.detach().abs().max())), rel=1e-5)
            assert found[name]["headroom"] == pytest.approx(65504 / found[name]["largest"])
        low, high = (output[real[side]] for output in outputs[side])
        cosine = float(F.cosine_similarity(low, high, dim=-1).mean().detach())
        square = layer_similarity(model, data, side)
        assert [square[0][1], square[1][0], square[0][0]] == pytest.approx([cosine, cosine, 1.0], abs=1e-5)


def test_the_residual_sum_counts_as_an_activation() -> None:
    """ω · x + F(x) is no module's output, and at 100L-100L ten times larger than any module's output."""
    model, data = model_of("admin"), batch()
    with torch.no_grad():
        for omega in (p for name, p in model.named_parameters() if name.endswith("omegas.0")):
            omega.fill_(50.0)
    found = ranges(model, data)["encoder.layers.1"]
    below = inputs_and_outputs(model, data)["encoder.layers.0"][0]
    assert found["where"] == "rule.norms.0 (input)" and found["largest"] > 40 * float(below.detach().abs().max())


def test_token_similarity_is_the_mean_over_pairs() -> None:
    rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    pairs = [float(F.cosine_similarity(rows[i], rows[j], dim=0)) for i in range(5) for j in range(5) if i != j]
    assert token_similarity(rows) == pytest.approx(sum(pairs) / 20, abs=1e-6)


def test_updates_against_gradients_by_hand() -> None:
    names = ["encoder.layers.0.self_attn.qkv.weight", "encoder.layers.0.self_attn.out.weight",
             "encoder.layers.0.ffn.fc1.weight", "encoder.layers.0.self_attn.out.bias"]
    before = {name: torch.zeros(6, 2) if "qkv" in name else torch.zeros(2, 2) for name in names[:3]}
    before[names[3]] = torch.zeros(2)
    after = {name: tensor.clone() for name, tensor in before.items()}
    after[names[0]][0, 0], after[names[0]][2, 0], after[names[1]][0, 1] = 3.0, 4.0, 1.0
    after[names[2]] += 100.0
    norms = {f"encoder.layers.0.self_attn.{part}": value for part, value in zip("qkv", (1.0, 2.0, 8.0), strict=True)}
    found = displacement(before, after, {**norms, "encoder.layers.0.self_attn.out": 4.0})
    for kind, expected in (("updates", [0.75, 1.0, 0.0, 0.25]), ("gradients", [0.125, 0.25, 1, 0.5])):
        parts = zip(("q", "k", "v", "out"), expected, strict=True)
        assert found[kind] == {f"encoder.layers.0.self_attn.{part}": value for part, value in parts}


def test_depth_makes_post_ln_shake_more_than_pre_ln() -> None:
    """Corollaries 1 and 2 in the smallest form: from 2 to 16 layers Post-LN's change grows far more than Pre-LN's."""
    grown = {}
    for block in ("post_ln", "pre_ln"):
        few, many = (noise_change(model_of(block, layers=(n, 1), noise=0.0, width=32), batch())["encoder"][0]
                     for n in (2, 16))
        grown[block] = many / few
    assert grown["post_ln"] > 1.5 * grown["pre_ln"] > 1.5


def test_the_gradient_of_a_mean_of_streams_is_that_of_a_shift_of_all() -> None:
    model, data = small_models.model_of("hyper"), small_models.batch_of(*small_models.batch([7, 3, 5], [6, 2, 4]))
    found = gradients(model, data).outputs["decoder.layers.0.ffn"]
    shift = torch.zeros(3, 6, 16, requires_grad=True)
    model.decoder.layers[0].register_forward_hook(lambda _m, _i, streams: tuple(x + shift for x in streams))
    (model(data).loss / data.tokens).backward()
    assert shift.grad is not None and found == pytest.approx(float(shift.grad.norm()), rel=1e-5)
