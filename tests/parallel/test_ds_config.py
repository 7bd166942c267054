"""The DeepSpeed JSON and the recipe: which values are filled in, and which are rejected with a message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from tiny_engines import ROOT, recipe_with

from deepnmt.config import Precision, Recipe, with_settings
from deepnmt.errors import UserError
from deepnmt.parallel.ds_config import layout_of, untested_deepspeed

SHIPPED = sorted((ROOT / "ds_configs").glob("*.json"))
Write = Callable[..., Path]


def recipe_of(path: Path | None = None, precision: str = "fp32", stages: int = 0, **loss_scale: float) -> Recipe:
    parallel = {"ds_config": path and str(path), "precision": precision, "pipeline_stages": stages}
    return recipe_with(train={"updates": 9, "clip": 0.5}, batch={"accumulation": 2}, loss_scale=loss_scale,
                       parallel=parallel)


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


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_fit_every_recipe(path: Path, precision: Precision) -> None:
    """With the JSON files that version 0.1 had for each precision, and in pipelines."""
    for stages in (0, *([2] if path.stem in ("zero0", "zero1") else [])):
        layout = layout_of(recipe_of(path, precision, stages, initial_power=5, window=7), 3 * max(stages, 1))
        tree = layout.config or {}
        assert (tree["gradient_clipping"], tree["gradient_accumulation_steps"], tree["train_batch_size"]) == (0.5, 2, 6)
        assert f"zero{layout.stage}" in path.stem
        assert (layout.precision, layout.stages, layout.data_ranks) == (precision, stages, 3)
        assert {key: tree[key] for key in ("bf16", "fp16") if key in tree} == {
            "fp32": {}, "bf16": {"bf16": {"enabled": True}},
            "fp16": {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 5, "loss_scale_window": 7,
                              "hysteresis": 1}}}[precision]
        assert "auto" not in json.dumps(tree)


def test_zero_3_keeps_vectors_whole(write: Write) -> None:
    """The longest has 75 elements, of query, key and value, or those of a gated FFN; a matrix has 25 x 25 at least. A
    number of one's own stays."""
    key = "stage3_param_persistence_threshold"
    recipe = recipe_of(ROOT / "ds_configs" / "zero3.json")
    model = recipe.model.model_copy(update={"width": 25, "ffn": 25})
    for name in ("zero3", "zero3_offload"):
        recipe = recipe_of(ROOT / "ds_configs" / f"{name}.json").model_copy(update={"model": model})
        assert (layout_of(recipe, 2).config or {})["zero_optimization"][key] == 75
    recipe = recipe_of(ROOT / "ds_configs" / "zero3.json")
    for changes, longest in (({"tied": "none", "decoder.width": 1024}, 3072),
                             ({"activation": "swiglu", "encoder.ffn": 3000}, 6000)):
        other = with_settings(recipe, {f"model.{name}": value for name, value in changes.items()})
        assert (layout_of(other, 2).config or {})["zero_optimization"][key] == longest
    assert (layout_of(recipe_of(write("zero3", "zero_optimization", **{key: 7})), 2).config or {})[
        "zero_optimization"][key] == 7


def test_a_json_for_one_precision(write: Write) -> None:
    for sections in ({"bf16": {"enabled": True}}, {"bf16": {"enabled": True}, "fp16": {"enabled": False}}):
        config = layout_of(recipe_of(write("zero1", **sections), "bf16"), 1).config or {}
        assert config["bf16"] == {"enabled": True} and not config.get("fp16", {}).get("enabled")


def test_values_equal_to_the_recipes_are_accepted(write: Write) -> None:
    path = write("zero1", "fp16", initial_scale_power=5, loss_scale_window=7, hysteresis=1, loss_scale=0)
    assert layout_of(recipe_of(path, "fp16", initial_power=5, window=7), 1).precision == "fp16"


def refused(path: Path, precision: str, stages: int = 0) -> str:
    with pytest.raises(UserError) as caught:
        layout_of(recipe_of(path, precision, stages), max(stages, 1))
    assert str(caught.value).count("\n") == 1
    return str(caught.value)


@pytest.mark.parametrize(("keys", "precision", "stages", "message"), [
    ({"bf16": {"enabled": True}}, "fp32", 0, "bf16.enabled is true, but the recipe's parallel.precision is fp32; write "
                                             '"auto", or set parallel.precision=bf16'),
    ({"bf16": {"enabled": False}}, "bf16", 0, "or set parallel.precision=fp32"),
    ({"bf16": {}, "fp16": {"enabled": True}}, "bf16", 0, "or set parallel.precision=fp16"),
    ({"communication_data_type": "fp31"}, "fp32", 0,
     'communication_data_type is "fp31", must be one of fp32, bf16, fp16'),
    ({"data_types": {"grad_accum_dtype": "half"}}, "fp32", 0,
     'data_types.grad_accum_dtype is "half", must be one of'),
    ({"activation_checkpointing": {"partition_activations": True}}, "fp32", 0,
     "activation_checkpointing is given, but the recipe's parallel.recompute_layers owns it"),
    ({"activation_checkpointing": {}}, "fp32", 0, "parallel.recompute_layers owns it; remove it from the JSON"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "fp32", 0,
     "torch_autocast is given, but the recipe's parallel.precision chooses the float type; remove it from the JSON"),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, "fp32", 0,
     "amp is given, but the recipe's parallel.precision chooses the float type; remove it from the JSON"),
    ({"pipeline": {}}, "fp32", 0, "parallel.pipeline_stages is 0; set "),
    ({"pipeline": {}}, "fp32", 0, " or remove the section"),
    ({"pipeline": {"activation_checkpoint_interval": 2}}, "fp32", 2,
     "activation_checkpoint_interval is 2, but the recipe's parallel.recompute_"),
    ({"pipeline": {"stages": 8}}, "fp32", 2, "pipeline.stages is given, but has no effect here: the recipe's"),
    ({"pipeline": {"partition": "parameters"}}, "fp32", 2, "pipeline.partition is given, but has no effect"),
    ({"pipeline": {"no_such_key": 1}}, "fp32", 2, "pipeline.no_such_key is given, but has no effect here"),
    ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "fp32", 0,
     "zero_optimization.offload_param is given, but has no effect below stage 3; remove it"),
    ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "fp32", 0,
     "zero_optimization.offload_optimizer is given, but has no effect below stage 1; remove it"),
    ({"pipeline": 8}, "fp32", 2, "pipeline is 8, must be an object"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "fp32", 0,
     'zero_optimization.offload_optimizer.device is "nvme", must be "cpu" or "none"'),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "fp32", 0, "hpz_partition_size is 2, but"),
    ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "fp32", 0, "is false, but every update is meas"),
    ({"bf16": {"enabled": "auto", "check_grad_overflow": False}}, "bf16", 0, "is false, but an update that is not fin"),
    ({"bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}}, "bf16", 0, "is true, but weights and sums "),
    ({"zero_allow_untested_optimizer": False}, "fp32", 0, "is false, but the recipe chooses the optimizer; write true"),
    ({"zero_force_ds_cpu_optimizer": True}, "fp32", 0, "is true, but every optimizer is PyTorch's; write false"),
    ({"tensor_parallel": {"autotp_size": 2}}, "fp32", 0, "tensor_parallel is given, but deepnmt divides"),
    ({"data_efficiency": {"enabled": True}}, "fp32", 0, "data_efficiency is given, but deepnmt reads the text"),
])
def test_a_json_that_contradicts_the_recipe_or_has_no_effect(
    write: Write, keys: dict[str, Any], precision: str, stages: int, message: str
) -> None:
    assert message in refused(write("zero1", **keys), precision, stages)


@pytest.mark.parametrize(("keys", "message"), [
    ({"initial_scale_power": 10000}, "fp16.initial_scale_power is 10000, but the recipe's loss_scale.initial_power "
                                     'makes it 13; write "auto"'),
    ({"loss_scale_window": 0.5}, "fp16.loss_scale_window is 0.5, but the recipe's loss_scale.window makes it 256"),
    ({"loss_scale": 128}, "fp16.loss_scale is 128, but the loss scale is dynamic"),
    ({"hysteresis": 2}, "fp16.hysteresis is 2, but every overflow halves the loss scale; write 1"),
    ({"min_loss_scale": 1}, "fp16.min_loss_scale is given, but the recipe's loss_scale.floor owns it"),
    ({"enabled": "yes"}, 'fp16.enabled must be written, true, false or "auto"'),
])
def test_a_second_loss_scale_is_rejected(write: Write, keys: dict[str, Any], message: str) -> None:
    assert message in refused(write("zero1", "fp16", **keys), "fp16")


@pytest.mark.parametrize(("settings", "message"), [
    ({"initial_power": 33}, "loss_scale.initial_power: is 33, must be less than or equal to 32"),
    ({"window": 0}, "loss_scale.window: is 0"),
    ({"floor": 0}, "loss_scale.floor: is 0"),
    ({"floor": 16.0, "initial_power": 3}, "floor (16) must not be above 2^initial_power (8)"),
])
def test_impossible_loss_scales(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe_of(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_offload_by_pytorchs_optimizers(write: Write, device: str) -> None:
    """Without a word about it in the file, which may begin with a byte order mark."""
    path = write("zero1", "zero_optimization", offload_optimizer={"device": device})
    path.write_text(path.read_text(), encoding="utf-8-sig")
    layout = layout_of(recipe_of(path), 1)
    assert layout.offloads("optimizer") == (device == "cpu") and layout.config
    assert layout.config["zero_force_ds_cpu_optimizer"] is False


def test_a_json_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text('{"a": ' + "[" * 200_000)
    with pytest.raises(UserError, match=r"deep\.json is not valid JSON: "):
        layout_of(recipe_of(tmp_path / "deep.json"), 1)


def test_an_untested_deepspeed_causes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnmt.parallel.ds_config.version", lambda _: "0.19.8")
    assert untested_deepspeed() is None
    monkeypatch.setattr("deepnmt.parallel.ds_config.version", lambda _: "0.19.99")
    assert untested_deepspeed() == "DeepSpeed 0.19.99 is installed, but deepnmt was tested with 0.19.8 only"
