"""The first non-finite tensor is named, in models broken on purpose, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_models
import small_text
import tiny_run
import torch
import yaml
from refusals import Refused

from deepnmt import config
from deepnmt.batch import Batch
from deepnmt.cli import main
from deepnmt.extras.doctor import nonfinite
from deepnmt.extras.doctor.nonfinite import NonFinite, RankReport, advise, explain, first_non_finite
from deepnmt.model.init import new_model
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.parallel.engine import StepStats
from deepnmt.processes.ranks import Ranks
from deepnmt.training.divergence import diverged
from deepnmt.training.updates import LIMIT, DroppedUpdates

STACK = config.Stack(block="post_ln", layers=2)
SETTINGS = config.Model(width=8, heads=2, ffn=12, max_length=16, encoder=STACK, decoder=STACK)


def model_of() -> Transformer:
    return new_model(SETTINGS, 20, 20, seed=1, label_smoothing=0.1)


def batch_of(key: int = 5) -> Batch:
    ids = torch.randint(4, 20, (2, 6), generator=torch.Generator().manual_seed(key))
    return small_models.batch_of(ids, torch.tensor([6, 4]), ids, ids, key=key)


def test_a_finite_model_is_left_as_it_was() -> None:
    model = model_of().eval()
    assert first_non_finite(model, [batch_of(), batch_of(6)], 1e3) is None
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", [
    "encoder.layers.0.self_attn.qkv", "encoder.layers.1.rule.adds.1", "encoder.layers.1.rule.norms.0",
    "decoder.input", "decoder.layers.0.cross_attn.kv", "decoder.layers.1.ffn", "embeddings.shared",
])
def test_output(name: str) -> None:
    model = model_of()
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: output * float("inf"))
    first = first_non_finite(model, [batch_of()])
    assert str(first) == f"the output of {name}"
    assert (first and 0 < first.largest < 100) or name == "embeddings.shared"  # the first tensor of all


def test_a_sum_between_modules_is_the_next_input() -> None:
    model = model_of()
    with torch.no_grad():  # each branch is finite, their sum is not
        model.encoder.layers[1].ffn.fc2.bias.fill_(3e38)
        model.encoder.layers[1].rule.norms[0].bias.fill_(3e38)
        model.encoder.layers[1].ffn.fc1.weight.zero_()
    first = first_non_finite(model, [batch_of()])
    largest = pytest.approx(3e38 / 0.9, rel=1e-3)  # after dropout
    assert first == NonFinite("input", "encoder.layers.1.rule.norms.1", largest)
    assert str(first) == "the input of encoder.layers.1.rule.norms.1"


@pytest.mark.parametrize("name", ["decoder.layers.1.ffn.fc1", "decoder.layers.0.rule.adds.1", "encoder.layers.0"])
def test_gradient_of_an_output(name: str) -> None:
    def poison(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * float("nan"))

    model = model_of()
    model.get_submodule(name).register_forward_hook(poison)
    assert str(first_non_finite(model, [batch_of()])) == f"the gradient of the output of {name}"


def test_gradient_of_a_parameter() -> None:
    model = model_of()
    hook = model.get_parameter("encoder.layers.1.rule.norms.1.weight").register_hook(lambda g: g * float("inf"))
    assert str(first_non_finite(model, [batch_of()])) == "the gradient of encoder.layers.1.rule.norms.1.weight"
    hook.remove()
    assert first_non_finite(model, [batch_of()]) is None


def test_weight_and_loss() -> None:
    model = model_of()
    with torch.no_grad():
        model.get_parameter("decoder.layers.0.ffn.fc2.bias")[3] = float("nan")
    assert str(first_non_finite(model, [batch_of()])) == "the weight of decoder.layers.0.ffn.fc2.bias"
    model = model_of()
    with torch.no_grad():  # logits beyond fp32, from finite numbers
        model.get_parameter("embeddings.shared.weight")[7] = 1e38
        model.get_parameter("decoder.layers.1.rule.norms.2.bias").fill_(10.0)
    ids = torch.full((2, 6), 5)
    batch = small_models.batch_of(ids, torch.tensor([6, 4]), ids, torch.full((2, 6), 7), key=5)
    first = first_non_finite(model, [batch])
    assert str(first) == "the loss"


def test_fp16_overflows_where_fp32_is_finite() -> None:
    model = model_of().half()
    with torch.no_grad():  # 70,000 is beyond fp16
        model.get_parameter("encoder.layers.1.ffn.fc1.bias").fill_(35000.0)
        model.get_parameter("encoder.layers.1.ffn.fc2.weight").fill_(1.0)
    assert str(first_non_finite(model, [batch_of()])) == "the output of encoder.layers.1.ffn.fc2"
    assert first_non_finite(model.float(), [batch_of()]) is None
    assert str(first_non_finite(model_of().half(), [batch_of()], factor=1e6)).startswith("the gradient")


def test_only_drops_at_one_scale_count() -> None:
    drops = DroppedUpdates()

    def add(scale: float, applied: bool = False) -> bool:
        return drops.count(StepStats(0.0, 0.0, 1.0, scale, applied))

    scales = [2.0**k for k in range(10, -6, -1)]
    assert not any(add(scale) for scale in scales), "a smaller scale may still help"
    assert [add(scales[-1]) for _ in range(LIMIT - 1)] == [False] * (LIMIT - 2) + [True]
    assert not add(scales[-1], applied=True)
    assert not any(add(1.0) for _ in range(LIMIT - 1)) and add(1.0)


def test_advice(tmp_path: Path) -> None:
    run = tiny_run.recipe_of(tmp_path)
    narrow = RankReport("fp16", "the output of X", 6e4)
    wide = replace(narrow, fp32="the input of Y")
    assert "fp16 is too narrow" in advise(narrow, run)[0]
    assert advise(narrow, run)[1].startswith("Try parallel.precision=bf16 or fp32")
    where, advice = advise(wide, run)
    assert "first in the input of Y" in where and "optimizer.lr (now 0.0005)" in advice
    assert "each micro-batch of the last update is finite" in advise(RankReport("bf16"), run)[0]
    assert "not enough memory left" in advise(RankReport("bf16", enough_memory=False), run)[0]


def test_blocks_that_are_advised_are_those_that_the_task_and_the_run_can_have(tmp_path: Path) -> None:
    stack: Any = {"block": "post_ln", "layers": 2}
    classifier: dict[str, Any] = {
        "task": "classify", "run": "r", "train": {"updates": 9}, "vocab": {"model": "v"},
        "data": {"train": "a", "valid": "b", "labels": ["a", "b"], "columns": {"text": 1, "label": 2}}}
    for recipe, blocks in (
        (tiny_run.recipe_of(tmp_path, model={"encoder": stack, "decoder": stack}), "admin, b2t, deepnorm, pre_ln"),
        (small_text.recipe(tmp_path, model={"decoder": stack}), "admin, b2t, deepnorm, pre_ln"),
        (config.check_recipe(classifier, ""), "b2t, deepnorm, pre_ln"),
        (config.check_recipe(classifier | {"train": {"updates": 9, "init_from": "bert"}}, ""), ""),
    ):
        advice = advise(RankReport("fp32"), recipe)[1]
        assert (f"in a new run, a block made for depth ({blocks})" in advice) == bool(blocks)
        assert ("made for depth" in advice) == bool(blocks)


def test_a_run_of_another_task_that_diverged(tmp_path: Path, refused: Refused) -> None:
    small_text.write_texts(tmp_path)
    recipe = tmp_path / "lm.yaml"
    recipe.write_text(yaml.safe_dump(small_text.tree(tmp_path, optimizer={"lr": 1e36})), encoding="utf-8")
    assert main("prepare", [str(recipe)]) == 0
    assert "First non-finite in fp32: the output of decoder.layers.0." in refused("train", str(recipe))


def test_it_recomputes_as_the_last_update_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what `model.encoder.ramp` leaves of the branches then."""
    stack = {"block": "post_ln", "layers": 1}
    shape: Any = {"encoder": {**stack, "ramp": 10}, "decoder": stack}
    recipe, shares = tiny_run.recipe_of(tmp_path, model=shape), list[Any]()
    engine = start_engine(recipe, layout_of(recipe, 1), (20, 20), Ranks.alone())
    for _ in range(2):
        engine.train_step([batch_of()], 10, 1e-3)
    monkeypatch.setattr(nonfinite, "first_non_finite",
                        lambda model, *_: shares.append(model.get_submodule("encoder.layers.0.rule").share))
    explain(recipe, engine, Ranks.alone(), [batch_of()], 1.0, 1.0)
    assert shares == [0.3]


@pytest.mark.parametrize("failing", ["gather_model", "copy_weights"])
def test_too_little_memory_for_the_check(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gather_model` fails on all processes at once, so they need not communicate; `copy_weights` may fail on one."""
    recipe, sent = tiny_run.recipe_of(tmp_path), []

    def full(*_: object) -> Transformer:
        raise torch.OutOfMemoryError

    class Ranks:
        first = True

        def gather_bytes(self, data: bytes) -> list[bytes]:
            sent.append(data)
            return [data]

    module = new_model(recipe.model, 40, 40, 1).bfloat16()
    engine: Any = SimpleNamespace(module=module, gather_model=lambda: module, scaler_state=lambda: None,
                                  build=lambda _: module, optimizer_step=0)
    if failing == "copy_weights":
        monkeypatch.setattr(nonfinite, failing, full)
    else:
        engine.gather_model = full
    ranks: Any = Ranks()
    message = str(diverged(recipe, engine, ranks, [], 1.0, 1.0, explain))
    assert "so the run ends.\n  There was not enough memory left" in message
    assert "No checkpoint was written yet" in message
    assert len(sent) == (failing == "copy_weights")
