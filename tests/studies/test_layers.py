"""The studies of the highest rate and of what each layer is worth: their rules by hand, and runs of one block."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from small_models import batch, batch_of, model_of

from deepnmt.config import Recipe, load_recipe
from studies import layers


def recipe_of(prepared: Path) -> Recipe:
    return load_recipe(prepared / "recipe.yaml", ["parallel.threads=1", "train.updates=2", "schedule.warmup=0"])


def test_when_a_loss_has_risen() -> None:
    """It falls for 40 updates, and rises from then on by 0.1 each."""
    means = [6 - 0.1 * t for t in range(41)] + [2 + 0.1 * t for t in range(1, 9)]
    risen = [layers.risen(means[:end]) for end in range(len(means) + 1)]
    assert risen.index(True) == 41 + 4 and all(risen[45:])  # after 3 it is 0.3 above, no more
    assert layers.lowest(means) == 41
    assert layers.risen([5.0, math.nan]) and not layers.risen([5.0, 5.2]) and not layers.risen([])
    assert layers.lowest([5.0, math.nan]) == 1


def test_a_ramp_ends_when_the_loss_rises(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate four times as high in each update it does so soon; the second call trains nothing."""
    monkeypatch.setattr(layers, "RATIO", 4.0)
    words, file = ["keel"], tmp_path / "runs.jsonl"
    [run] = layers.study(recipe_of(prepared), layers.rate_ramp, words, [1], [1], file)
    assert run["risen"] is not None and run["update"] <= run["risen"] < layers.MOST_UPDATES
    assert run["rate"] == pytest.approx(1e-4 * 4.0 ** (run["update"] - 1))
    first = file.read_text(encoding="utf-8")
    assert layers.study(recipe_of(prepared), layers.rate_ramp, words, [1], [1], file) == [run]
    assert file.read_text(encoding="utf-8") == first and len(first.splitlines()) == 1
    assert layers.ramp_table([run]).splitlines()[2].startswith("| keel | 1L-1L | 1 | ")


def test_each_layer_of_a_run_is_measured(prepared: Path, tmp_path: Path) -> None:
    words, file = ["siamese"], tmp_path / "runs.jsonl"
    assert not layers.study(recipe_of(prepared), layers.layer_worth, words, [2], [1], file, seconds=-1)
    [run] = layers.study(recipe_of(prepared), layers.layer_worth, words, [2], [1], file)
    for side in ("encoder", "decoder"):
        figures = [run[side][name] for name in layers.SIDE_FIGURES]
        assert len(figures) == 3 and all(len(values) == 2 for values in figures)
        assert all(math.isfinite(value) for values in figures for value in values)
    assert len(layers.worth_table([run]).splitlines()) == 4


@pytest.mark.parametrize("block", ["pre_ln", "attn_res"])
def test_a_layer_that_adds_nothing_is_worth_nothing(block: str) -> None:
    """Its matrices that write into the stream are 0; a layer that adds something changes the loss."""
    model = model_of(block).eval()
    data = [batch_of(*batch([7, 3, 5], [6, 2, 4]))]
    layer = model.decoder.layers[1]
    assert abs(layers.loss_without(layer, model, data) - layers.loss_of(model, data)) > 1e-3
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if ".out." in name or ".fc2." in name:
                parameter.zero_()
    assert layers.loss_without(layer, model, data) == pytest.approx(layers.loss_of(model, data), abs=1e-6)
