"""The coordinate check: flat with `model.tuned_at`, not without, and what the command says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from refusals import user_error
from tiny_engines import VOCAB, micro_batch, recipe_with
from torch import Tensor

from deepnmt.config import Recipe
from deepnmt.extras.doctor.commands import diagnose
from deepnmt.extras.doctor.coordinates import (
    ALL_LOGITS,
    FLAT,
    LOG_PROBABILITIES,
    RULES,
    Measured,
    Size,
    at_size,
    measure,
    quantities,
    spread,
    table,
)
from deepnmt.model.init import new_model
from deepnmt.parallel.engine import LocalEngine

SIZES = {"width": [Size(32, 2, 2), Size(128, 2, 2)], "depth": [Size(32, 2, 2), Size(32, 16, 16)],
         "encoder": [Size(32, 2, 2), Size(32, 16, 2)], "decoder": [Size(32, 2, 2), Size(32, 2, 16)]}


def recipe(**optimizer: object) -> Recipe:
    return recipe_with(model={"width": 32, "heads": 4, "ffn": 128, "encoder": {"block": "pre_ln"},
                              "decoder": {"block": "pre_ln"}},
                       optimizer={"lr": 4e-3, "eps": 1e-12, **optimizer}, train={"updates": 10, "clip": 0.0})


@pytest.fixture(scope="module")
def found() -> dict[bool, dict[Size, Measured]]:
    """Sizes and changes of quantities by size, carried over or not."""
    batches = [micro_batch(number, 16, 12, 12, number) for number in range(10)]
    sizes = list(dict.fromkeys(size for group in SIZES.values() for size in group))
    return {carried: {size: measure(at_size(recipe(), size, sizes[0] if carried else None), (VOCAB, VOCAB), batches)
                      for size in sizes} for carried in (True, False)}


@pytest.mark.parametrize("axis", SIZES)
def test_coordinates_are_flat_with_the_rule_and_not_without(axis: str, found: dict) -> None:
    def largest(carried: bool) -> float:
        two = [found[carried][size] for size in SIZES[axis]]
        # random references cannot be learned, so what changes of their logits falls as that of all logits
        return max(spread([getattr(one, kind)[name] for one in two])
                   for kind in Measured._fields for name in two[0].size if name not in (ALL_LOGITS, LOG_PROBABILITIES))

    assert largest(carried=True) < FLAT
    assert largest(carried=False) > 2 * FLAT


@torch.no_grad()
def logit_changes(width: int) -> tuple[float, float]:
    """The mean sizes of what ten updates on a batch change of its references' log-probabilities, and of what their
    change of the hidden states is in the logits of a table that no update has seen."""
    small = Size(32, 2, 2)
    sized = at_size(recipe(), small._replace(width=width), small)
    model = new_model(sized.model, VOCAB, VOCAB, 1)
    batch = micro_batch(0, 16, 12, 12, 0)
    engine, seen = LocalEngine(model, sized, torch.device("cpu")), list[Tensor]()
    model.decoder.norm.register_forward_hook(lambda _m, _i, hidden: seen.append(hidden.flatten(0, 1)))
    before = quantities(model, sized, batch)[LOG_PROBABILITIES][0]
    with torch.enable_grad():
        for _ in range(10):
            engine.train_step([batch], batch.tokens, sized.optimizer.lr)
    after = quantities(model, sized, batch)[LOG_PROBABILITIES][0]
    other = torch.randn(1_000, width, generator=torch.Generator().manual_seed(1)) * width**-0.5
    return float((after - before).abs().mean()), float(((seen[-1] - seen[0]) @ other.t()).abs().mean())


def test_what_falls_in_the_logits_is_how_random_vectors_overlap() -> None:
    learned, by_chance = (spread(two) for two in zip(logit_changes(32), logit_changes(128), strict=True))
    assert learned < FLAT
    assert by_chance == pytest.approx(128**0.5 / 32**0.5, rel=0.15)


def test_models_are_measured_without_a_ramp() -> None:
    """It would turn the branches up while they are measured."""
    ramp = {"block": "pre_ln", "ramp": 100}
    ramped = recipe_with(model={"width": 32, "heads": 4, "ffn": 128, "encoder": ramp, "decoder": ramp},
                         train={"updates": 10})
    batch, small = [micro_batch(0, 16, 12, 12, 0)], Size(32, 2, 2)
    assert measure(at_size(ramped, small, small), (VOCAB, VOCAB), batch) == measure(
        at_size(recipe(), small, small).model_copy(update={
            "optimizer": ramped.optimizer, "train": ramped.train, "seed": ramped.seed}), (VOCAB, VOCAB), batch)


def test_spread() -> None:
    assert spread([2.0, 1.0, 3.0]) == 3.0
    assert spread([1.0, 0.0]) == spread([1.0, math.nan]) == math.inf


def test_one_width_is_called_neither_flat_nor_not() -> None:
    def both(values: list[float]) -> dict[str, dict[str, dict[str, list[float]]]]:
        return {rule: {"size": {"x": values}, "change": {"x": values}} for rule in RULES}

    said = table({"width": both([1.0]), "depth": both([1.0, 2.0])})
    assert "by width" not in said and "not flat: x (size by depth), x (change by depth)" in said


def test_the_command(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(prepared / "recipe.yaml"), "model.encoder.block=pre_ln", "model.decoder.block=pre_ln",
             "--coordinates", "--widths", "16", "32", "--depths", "1", "2", "--updates", "2",
             "--seeds", "1", "--output", str(tmp_path)]
    diagnose(words)
    said = capsys.readouterr().out
    assert "decoder: cross-attention" in said and f"within {FLAT:g}:" in said
    values = json.loads((tmp_path / "coordinates.json").read_text())["values"]
    assert len(values["depth"]["plain"]["change"][LOG_PROBABILITIES]) == 2
    assert (tmp_path / "coordinates.png").stat().st_size > 10_000
    for more, sentence in [
        (["--tokens", "9"], "--tokens has no effect with --coordinates; remove one of them"),
        (["--widths", "16", "24"], "--widths has 24; all must be multiples of 8 and of the smallest"),
        (["--widths", "16", "16", "--depths", "2"], "--widths and --depths name one model, compared with none"),
        (["train.init_from=runs/x"], "train.init_from is runs/x, but --coordinates trains models from new weights"),
        (["--depths", "0"], "--depths has 0, must be 1 or more"),
        (["model.encoder.block=b2t"], "tuned_at is known for block: pre_ln or peri_ln, but encoder.block is b2t"),
    ]:
        with user_error(sentence):
            diagnose([*words, *more])
    with user_error("--seeds has no effect without --coordinates"):
        diagnose([words[0], "--seeds", "2"])
