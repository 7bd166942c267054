"""`model.tuned_at`: factors worked out by hand, a model with the paper's multipliers in its forward pass beside ours,
the same bits at the tuned sizes, and layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import VOCAB, micro_batch, parallel, recipe_with, step
from warm import Warm

from deepnmt.config import Model, Recipe, TunedAt
from deepnmt.model.init import Initialiser, new_model
from deepnmt.model.transfer import Factors, factors_of
from deepnmt.model.transformer import Transformer
from deepnmt.optim.groups import group_key, parameter_groups
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.parallel.engine import LocalEngine
from deepnmt.processes.process_group import processes

SMALL = {"width": 16, "heads": 4, "ffn": 32}


def model_of(encoder: int, decoder: int, block: str = "pre_ln", **more: Any) -> dict[str, Any]:
    return {"width": 64, "heads": 4, "ffn": 256, "dropout": 0.0, "activation": "gelu",
            "encoder": {"block": block, "layers": encoder}, "decoder": {"block": block, "layers": decoder}, **more}


# w = 4, f = 8, h = 4 with c = 4^-1/4, and the depth: by the rule's table, in terms of the weights as they are held
Q, DEEP = 4**-0.25, {(32, 2): (16, 1), (2, 32): (1, 16)}


@pytest.mark.parametrize(("depths", "deeper"), DEEP.items())
def test_factors_by_hand(depths: tuple[int, int], deeper: tuple[int, int]) -> None:
    model = Model(**model_of(*depths, tuned_at={**SMALL, "encoder_layers": 2, "decoder_layers": 2}))
    expected = {"embeddings.shared.weight": (1, 0.5, 0.5), "encoder.norm.weight": (1, 1, 1 / 4),
                "decoder.norm.weight": (0.5, 0.5, 0.5), "decoder.norm.bias": (0.5, 0.5, 0.5)}
    # Xavier's deviation would be √(2/320), but is that of [32, 16], √(2/48), over √4 in fc1 and over √8 in fc2
    fc1, fc2 = (320 / 48 / 4) ** 0.5, (320 / 48 / 8) ** 0.5
    for side, last, deep in (("encoder", depths[0] - 1, deeper[0]), ("decoder", depths[1] - 1, deeper[1])):
        for part in ["self_attn.qkv"] if side == "encoder" else ["self_attn.qkv", "cross_attn.q", "cross_attn.kv"]:
            expected[f"{side}.layers.{last}.{part}.weight"] = (Q, Q / 4, 1 / (4 * deep * Q))
            expected[f"{side}.layers.{last}.{part}.bias"] = (Q, Q, 1 / (4 * deep * Q))
        for part in ["self_attn"] if side == "encoder" else ["self_attn", "cross_attn"]:
            expected[f"{side}.layers.{last}.{part}.out.weight"] = (1 / Q / deep, 1 / Q / deep / 4, Q / 4)
            expected[f"{side}.layers.{last}.{part}.out.bias"] = (1 / deep, 1 / deep, 1 / 4)
        expected |= {f"{side}.layers.{last}.ffn.fc1.weight": (fc1, 1 / 4, 1 / (8 * deep)),
                     f"{side}.layers.{last}.ffn.fc2.weight": (fc2 / deep, 1 / (8 * deep), 1 / 4),
                     f"{side}.layers.{last}.ffn.fc2.bias": (1 / deep, 1 / deep, 1 / 4),
                     f"{side}.layers.{last}.rule.norms.1.weight": (1, 1, 1 / (4 * deep))}
    for name, factors in expected.items():
        assert factors_of(name, model) == pytest.approx(factors), name
    # Muon's step on [32, 16] and on [256, 64] has the norms √32 and √256, but may grow by √(8 / 4) alone
    for linear, rate in (("ffn.fc1", (8 / 4 * 32 / 256) ** 0.5), ("self_attn.qkv", Q / 2)):
        assert factors_of(f"encoder.layers.0.{linear}.weight", model, muon=True).rate == pytest.approx(rate)


def test_peri_ln_has_its_depth_in_the_second_norm() -> None:
    model = Model(**model_of(8, 2, "peri_ln", tuned_at={"encoder_layers": 2}))
    assert factors_of("encoder.layers.0.rule.out_norms.1.weight", model) == (1 / 4, 1 / 4, 1.0)
    assert factors_of("encoder.layers.0.ffn.fc2.weight", model) == (1, 1, 1 / 4)
    assert factors_of("decoder.layers.0.rule.out_norms.1.weight", model) == Factors()


@pytest.mark.parametrize("name", ["decoder.norm.slope", "encoder.layers.0.rule.norms.1.slope",
                                  "decoder.layers.0.rule.out_norms.1.slope"])
def test_an_unknown_parameter_of_a_norm_is_no_gain(name: str) -> None:
    model = Model(**model_of(8, 2, "peri_ln", tuned_at={**SMALL, "encoder_layers": 2}))
    with pytest.raises(ValueError, match=f"whether model.tuned_at scales {name}"):
        factors_of(name, model)


def test_a_decoder_by_itself() -> None:
    model = Model(width=64, heads=4, ffn=256, encoder={"layers": 0}, decoder={"block": "pre_ln", "layers": 6},
                  tuned_at={**SMALL, "decoder_layers": 2})
    built = Transformer(model, VOCAB, VOCAB, 1)
    factors = {name: factors_of(name, model) for name, _ in built.named_parameters()}
    assert factors["decoder.norm.weight"] == (0.5, 0.5, 0.5)
    assert factors["decoder.layers.5.ffn.fc2.bias"] == pytest.approx((1 / 3, 1 / 3, 1 / 4))
    assert [value for name, value in factors.items() if "embeddings" in name] == [(1, 0.5, 0.5)]


def recipe_of(**settings: Any) -> Recipe:
    optimizer = {"name": "adamw", "lr": 0.01, "eps": 1e-4, "weight_decay": 0.1, "decay_norms_and_biases": True}
    return recipe_with(model=model_of(4, 2, **settings), optimizer=optimizer)


def losses_of(model: Transformer, recipe: Recipe, updates: int = 5) -> list[float]:
    engine = LocalEngine(model, recipe, torch.device("cpu"))
    batches = [micro_batch(k, 4, 7, 7, k) for k in range(updates)]
    return [engine.train_step([batch], batch.tokens, 0.01).loss / batch.tokens for batch in batches]


def test_at_the_tuned_sizes_and_without_the_setting_every_bit_is_the_same() -> None:
    plain = recipe_of()
    same = recipe_of(tuned_at={"width": 64, "heads": 4, "ffn": 256, "encoder_layers": 4, "decoder_layers": 2})
    assert plain.model.tuned_at == TunedAt()
    models = [new_model(recipe.model, VOCAB, VOCAB, 1) for recipe in (plain, same)]
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), name
        assert group_key(name, p.shape, plain) == group_key(name, p.shape, same)
        assert group_key(name, p.shape, plain)[3] == 1e-4
    assert losses_of(models[0], plain) == losses_of(models[1], same)


@torch.no_grad()
def with_multipliers(recipe: Recipe, ours: Transformer) -> tuple[Transformer, torch.optim.AdamW]:
    """The paper's own form: multipliers in the forward pass, weights, rates, eps and decay by its table. w = 4, f = 8,
    h = 4, and the encoder is twice as deep."""
    plain = recipe_of()
    model = new_model(plain.model, VOCAB, VOCAB, 1)
    groups, own = [], dict(ours.named_parameters())
    for name, p in model.named_parameters():
        deeper = 2.0 if name.startswith("encoder.layers") else 1.0
        hidden = p.ndim == 2 and ".layers." in name
        fan_in, fan_out = (8 if "fc2" in name else 4), (8 if "fc1" in name else 4)
        if "embeddings" in name:
            p *= 2  # σ² is that of width 16
        elif hidden:
            std = own[name].std() if "fc1" in name else None
            p *= (320 / 48 / fan_in) ** 0.5 if "fc" in name else 1.0
            assert std is None or p.std() == pytest.approx(std)
        eps = 1e-4 / (fan_out * deeper) if ".layers." in name else 1e-4 / 4
        rate = 0.01 / (fan_in if hidden else 1)
        groups.append({"params": [p], "lr": rate, "eps": eps, "weight_decay": 0.1 * 0.01 / rate})
    for name, module in model.named_modules():
        if ".rule.adds." in name and name.startswith("encoder"):
            module.register_forward_hook(lambda _m, _i, x: x / 2)
        if name.endswith("qkv"):  # scores over d_head, as over its root at width 16
            module.register_forward_hook(lambda _m, _i, x: x * torch.cat([torch.full((64,), 0.5), torch.ones(128)]))
        if name.endswith("cross_attn.q"):
            module.register_forward_hook(lambda _m, _i, x: x * 0.5)
    model.encoder.input.scale = model.decoder.input.scale = 16**0.5
    model.decoder.norm.register_forward_hook(lambda _m, _i, x: x / 4)
    return model, torch.optim.AdamW(groups, betas=(0.9, 0.98))


def test_multipliers_in_the_weights_train_as_those_in_the_forward_pass() -> None:
    recipe = recipe_of(tuned_at={**SMALL, "encoder_layers": 2})
    ours = new_model(recipe.model, VOCAB, VOCAB, 1)
    theirs, optimizer = with_multipliers(recipe, ours)
    expected = []
    for number in range(5):
        batch = micro_batch(number, 4, 7, 7, number)
        loss = theirs(batch).loss / batch.tokens
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    clipped = recipe.model_copy(update={"train": recipe.train.model_copy(update={"clip": 0.0})})
    assert losses_of(ours, clipped) == pytest.approx(expected, rel=2e-5)
    assert abs(expected[-1] - losses_of(new_model(recipe_of().model, VOCAB, VOCAB, 1), recipe_of())[-1]) > 0.01


def test_muon_keeps_its_own_eps() -> None:
    recipe = recipe_with(model=model_of(2, 2, tuned_at=SMALL), optimizer={"name": "muon", "momentum": 0.95})
    model = new_model(recipe.model, VOCAB, VOCAB, 1)
    groups = parameter_groups(dict(model.named_parameters()), recipe)
    assert all(("eps" in group) != group["muon"] for group in groups)
    assert losses_of(model, recipe)


def engines(folder: str, layout: str, stages: str) -> None:
    """Runs on each rank: losses of updates in a layout."""
    recipe = recipe_with(model=model_of(2, 4, tuned_at={**SMALL, "decoder_layers": 2}),
                         optimizer={"name": "adamw", "weight_decay": 0.1, "decay_norms_and_biases": False, "eps": 1e-4},
                         train={"updates": 10, "clip": 0.5}, batch={"accumulation": 2 if stages == "2" else 1},
                         parallel=parallel(layout, int(stages)))
    with processes(threads=1, group=True) as ranks:
        engine = start_engine(recipe, layout_of(recipe, ranks.world), (VOCAB, VOCAB), ranks)
        assert layout == "local" or isinstance(engine.gather_model(), Transformer)
        plans = [[micro_batch(10 * k + n, 3, 6, 7, 10 * k + n) for n in range(2)] for k in range(6)]
        trace = [step(engine, plan, ranks, 0.01)[:2] for plan in plans]
        if ranks.first:
            Path(folder, f"{layout}{stages}").write_text(json.dumps(trace))
        engine.close()


def test_layouts_agree(tmp_path: Path, warm: Warm) -> None:
    warm.run(1, "test_transfer:engines", tmp_path, "local", "0")
    warm.run(2, "test_transfer:engines", tmp_path, "zero1_fp32", "0")
    warm.run(2, "test_transfer:engines", tmp_path, "zero1_fp32", "2")
    alone, zero, pipeline = (torch.tensor(json.loads((tmp_path / name).read_text()))
                             for name in ("local0", "zero1_fp320", "zero1_fp322"))
    for found in (zero, pipeline):
        assert torch.allclose(found[:, 0], alone[:, 0], rtol=1e-6, atol=0.0)  # losses
        assert torch.allclose(found[:, 1], alone[:, 1], rtol=1e-5, atol=0.0)  # gradient norms


def test_initial_weights_are_scaled() -> None:
    tuned = Model(**model_of(2, 8, tuned_at={"decoder_layers": 2}))
    plain = Model(**model_of(2, 8))
    name = "decoder.layers.3.ffn.fc2.weight"
    assert torch.equal(Initialiser(tuned, 9, 9, 1)(name), Initialiser(plain, 9, 9, 1)(name) / 4)
