"""The DeepSpeed JSON against the recipe: what is filled in, and what is refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepnmt.config import Recipe, check_recipe
from deepnmt.errors import UserError
from deepnmt.parallel.settings import load_ds_config, untried_deepspeed

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "ds_configs").glob("*.json"))
Write = Callable[..., Path]


def recipe_of(stages: int = 0, **loss_scale: float) -> Recipe:
    corpus = {"tsv": "x"}
    return check_recipe({
        "run": "unused", "train": {"updates": 9, "clip": 0.5}, "batch": {"accumulation": 2}, "loss_scale": loss_scale,
        "data": {"folder": "unused", "src_lang": "a", "trg_lang": "b", "train": corpus, "valid": corpus},
        "parallel": {"pipeline_stages": stages},
    }, "test")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a shipped configuration with keys of one section changed; returns its path."""

    def changed(name: str, section: str = "", **keys: Any) -> Path:
        tree = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
        (tree[section] if section else tree).update(keys)
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(tree))
        return path

    return changed


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_ones_take_what_the_recipe_says(path: Path) -> None:
    stages = 2 if path.stem.startswith("pipeline") else 0
    settings = load_ds_config(path, recipe_of(stages, initial_power=5, window=7), 3)
    tree = settings.tree
    assert (tree["gradient_clipping"], tree["gradient_accumulation_steps"], tree["train_batch_size"]) == (0.5, 2, 6)
    assert f"zero{settings.stage}" in path.stem and path.stem.endswith(settings.precision)
    if "fp16" in tree:
        assert (tree["fp16"]["initial_scale_power"], tree["fp16"]["loss_scale_window"]) == (5, 7)
    assert "auto" not in json.dumps(tree)


def test_values_equal_to_the_recipe_s_may_stand(write: Write) -> None:
    path = write("zero1_fp16", "fp16", initial_scale_power=5, loss_scale_window=7, hysteresis=1, loss_scale=0)
    assert load_ds_config(path, recipe_of(initial_power=5, window=7), 1).precision == "fp16"


@pytest.mark.parametrize(("keys", "said"), [
    ({"initial_scale_power": 10000}, "fp16.initial_scale_power is 10000, but the recipe's loss_scale.initial_power "
                                     'makes it 13; write "auto"'),
    ({"loss_scale_window": 0.5}, "fp16.loss_scale_window is 0.5, but the recipe's loss_scale.window makes it 256"),
    ({"loss_scale": 128}, "fp16.loss_scale is 128, but the loss scale is dynamic"),
    ({"hysteresis": 2}, "fp16.hysteresis is 2, but every overflow halves the loss scale; write 1, or remove it"),
    ({"min_loss_scale": 1}, "fp16.min_loss_scale is given, but the recipe's loss_scale.floor owns it"),
    ({"enabled": "yes"}, "fp16.enabled must be written, true or false"),
])
def test_a_second_loss_scale_is_refused(write: Write, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_ds_config(write("zero1_fp16", "fp16", **keys), recipe_of(), 1)
    assert said in str(caught.value) and str(caught.value).count("\n") == 1


@pytest.mark.parametrize(("keys", "said"), [
    ({"communication_data_type": "fp31"}, 'communication_data_type is "fp31", must be one of fp32, bf16, fp16'),
    ({"data_types": {"grad_accum_dtype": "half"}}, 'data_types.grad_accum_dtype is "half", must be one of'),
])
def test_float_types_that_are_none(write: Write, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_ds_config(write("zero1_fp32", **keys), recipe_of(), 1)
    assert said in str(caught.value)


def test_pipelines_and_their_files(write: Write) -> None:
    with pytest.raises(UserError, match=r"parallel\.pipeline_stages is 0; set .* or take ds_configs/zero1_bf16\.json"):
        load_ds_config(ROOT / "ds_configs" / "pipeline_zero1_bf16.json", recipe_of(), 1)
    path = write("pipeline_zero1_fp32", "pipeline", activation_checkpoint_interval=2)
    with pytest.raises(UserError, match=r"activation_checkpoint_interval is 2, but the recipe's parallel\.recompute_"):
        load_ds_config(path, recipe_of(2), 1)


@pytest.mark.parametrize(("name", "section", "keys", "said"), [
    ("zero1_fp32", "", {"activation_checkpointing": {"partition_activations": True}},
     "activation_checkpointing is given, but the recipe's parallel.recompute_layers owns it"),
    ("zero1_fp32", "", {"activation_checkpointing": {}}, "parallel.recompute_layers owns it; remove it from the JSON"),
    ("zero1_fp32", "", {"torch_autocast": {"enabled": True, "dtype": "float16"}},
     "torch_autocast is given, but only the sections bf16 and fp16 choose the float type; remove it from the JSON"),
    ("zero1_fp32", "", {"amp": {"enabled": True, "opt_level": "O1"}},
     "amp is given, but only the sections bf16 and fp16 choose the float type; remove it from the JSON"),
    ("pipeline_zero1_fp32", "pipeline", {"stages": 8}, "pipeline.stages is given, but has no say here: the recipe's"),
    ("pipeline_zero1_fp32", "pipeline", {"partition": "parameters"}, "pipeline.partition is given, but has no say"),
    ("pipeline_zero1_fp32", "pipeline", {"no_such_key": 1}, "pipeline.no_such_key is given, but has no say here"),
    ("pipeline_zero1_fp32", "", {"pipeline": 8}, "pipeline is 8, must be an object"),
])
def test_what_would_change_nothing_is_refused(
    name: str, section: str, keys: dict[str, Any], said: str, write: Write
) -> None:
    with pytest.raises(UserError) as caught:
        load_ds_config(write(name, section, **keys), recipe_of(2 if name.startswith("pipeline") else 0), 1)
    assert said in str(caught.value) and str(caught.value).count("\n") == 1


@pytest.mark.parametrize(("settings", "said"), [
    ({"initial_power": 33}, "loss_scale.initial_power: is 33, must be less than or equal to 32"),
    ({"window": 0}, "loss_scale.window: is 0"),
    ({"floor": 0}, "loss_scale.floor: is 0"),
    ({"floor": 16.0, "initial_power": 3}, "floor (16) must not be above 2^initial_power (8)"),
])
def test_loss_scales_that_cannot_be(settings: dict[str, float], said: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe_of(**settings)
    assert said in str(caught.value)


def test_a_deepspeed_that_was_not_tried_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnmt.parallel.settings.version", lambda _: "0.19.8")
    assert untried_deepspeed() is None
    monkeypatch.setattr("deepnmt.parallel.settings.version", lambda _: "0.19.99")
    assert untried_deepspeed() == "DeepSpeed 0.19.99 is installed, with which deepnmt was not tried; it was with 0.19.8"
