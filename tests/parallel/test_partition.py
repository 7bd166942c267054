"""The pipeline's partition: as good as the best of all; impossible ones are rejected with the numbers."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from tiny_engines import VOCAB, micro_batch, recipe_of

from deepnmt.config import Model, with_settings
from deepnmt.config.choices import BLOCKS, TYINGS
from deepnmt.errors import UserError
from deepnmt.model.init import new_model
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.ds_config import layout_of
from deepnmt.parallel.pipeline.boundary import Boundary
from deepnmt.parallel.pipeline.partition import Partition, Unit, cost_units, partition, unit_names


def model(encoder: int, decoder: int, width: int = 16) -> Model:
    return Model.model_validate({
        "width": width, "heads": 2, "ffn": 4 * width, "encoder": {"layers": encoder, "block": "post_ln"},
        "decoder": {"layers": decoder, "block": "post_ln"},
    })


def slowest(units: tuple[Unit, ...], bounds: tuple[int, ...]) -> float:
    return max(sum(u.cost for u in units[a:b]) for a, b in pairwise(bounds))


@pytest.mark.parametrize(("encoder", "decoder", "stages"), [(3, 3, 2), (6, 2, 3), (2, 5, 4), (5, 5, 1), (1, 2, 3)])
def test_no_partition_is_better(encoder: int, decoder: int, stages: int) -> None:
    units = cost_units(model(encoder, decoder), 50, 50)
    found = partition(units, stages)
    everything = [(0, *cuts, len(units)) for cuts in combinations(range(1, len(units)), stages - 1)]
    assert found.stages == stages and found.bounds in everything
    best = min(slowest(units, bounds) for bounds in everything)
    border = unit_names(model(encoder, decoder)).index("target")
    assert slowest(units, found.bounds) <= best * (1.05 if border in found.bounds else 1.0) + 1e-9


def test_of_near_equals_one_with_a_boundary_between_encoder_and_decoder_is_chosen() -> None:
    units = tuple(Unit(name, 1, 1.0) for name in unit_names(model(4, 4)))  # 5 units on each side of the boundary, and 1
    assert partition(units, 2).bounds == (0, 5, 11)
    heavy = (*units[:-1], Unit("output", 1, 6.0))  # a boundary there would now give one stage 2 / 3 of the work
    assert partition(heavy, 2).bounds[1] > 5


def test_costs_are_the_matrix_products() -> None:
    units = {u.name: u for u in cost_units(model(2, 2, width=512), 1000, 1000)}
    d, f = 512, 2048
    assert units["output"].cost == d * 1000
    assert units["encoder.layers.0"].cost == pytest.approx(4 * d * d + 2 * d * f, rel=0.1)
    assert units["decoder.layers.1"].cost == pytest.approx(8 * d * d + 2 * d * f, rel=0.1)
    twice = {u.name: u for u in cost_units(model(2, 2, width=512), 1000, 1000, ratio=2.0)}
    assert twice["encoder.layers.0"].cost == 2 * units["encoder.layers.0"].cost
    assert twice["output"].cost == units["output"].cost


BOUNDS = [(0, 9), (0, 4, 9), (0, 6, 9), (0, 1, 5, 8, 9)]


@pytest.mark.parametrize(("block", "tied", "cuts"), [
    *((block, "all", [(0, 1, 5, 8, 9)]) for block in BLOCKS), *(("pre_ln", tied, BOUNDS) for tied in TYINGS)
])
def test_parameters_are_those_of_the_stages(block: str, tied: str, cuts: list[tuple[int, ...]]) -> None:
    """A table that two units of a stage share counts once; a block's own parameters and a stack's final norm are
    included."""
    shape = Model.model_validate({
        "width": 8, "heads": 2, "ffn": 12, "tied": tied, "max_length": 4,
        "encoder": {"layers": 3, "block": block, "input_gain": True}, "decoder": {"layers": 3, "block": block},
    })
    target = 20 if TYINGS[tied].joint else 30
    units = cost_units(shape, 20, target)
    for bounds in cuts:
        found = Partition(units, bounds)
        built = [Transformer(shape, 20, target, 1, units=range(*ends)) for ends in pairwise(bounds)]
        held = [sum(p.numel() for p in stage.parameters()) for stage in built]
        assert [found.parameters(stage) for stage in range(found.stages)] == held, bounds
        rows = found.table(4).splitlines()[1:-1]
        assert [row.split()[-3] for row in rows] == [f"{number:,}" for number in held]


def test_bubble() -> None:
    even = Partition(tuple(Unit(str(i), 1, 1.0) for i in range(4)), (0, 1, 2, 3, 4))
    for count in (1, 2, 8):
        assert even.bubble(count) == pytest.approx(3 / (count + 3))
    uneven = Partition(tuple(Unit(str(i), 1, 1.0) for i in range(4)), (0, 3, 4))
    assert uneven.bubble(10**9) == pytest.approx(1 - 4 / (2 * 3))  # stage 1 has a third of stage 0's work


def test_table_names_every_stage() -> None:
    table = partition(cost_units(model(3, 3), 50, 60), 2).table(4)
    for words in ("stage", "source ... ", " ... output", "expected bubble with 4 micro-batches"):
        assert words in table
    assert table.count("%") == 3


@pytest.mark.parametrize(("layout", "stages", "world", "words"), [
    ("local", 2, 2, ["pipeline_stages is 2", "ds_config is null", "zero1.json"]),
    ("zero2_fp32", 2, 2, ["pipeline_stages is 2", "zero2.json has ZeRO stage 2", "ZeRO 0 or 1"]),
    ("zero3_fp32", 2, 2, ["ZeRO stage 3"]),
    ("zero1_fp32", 3, 4, ["pipeline_stages is 3", "4 processes", "one of 1, 2, 4"]),
    ("zero1_fp32", 2, 1, ["pipeline_stages is 2", "1 process cannot"]),
    ("zero1_fp32", 8, 8, ["pipeline_stages is 8, but the model has 4 layers (2 encoder, 2 decoder)", "4 or less"]),
])
def test_impossible_layouts_are_rejected(layout: str, stages: int, world: int, words: list[str]) -> None:
    recipe = with_settings(recipe_of(layout), {"parallel.pipeline_stages": stages})
    with pytest.raises(UserError) as caught:
        layout_of(recipe, world)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("block", BLOCKS)
def test_stages_compute_what_the_model_computes(block: str) -> None:
    """Two and three stages in one process, with a boundary below every unit: the same loss and gradients, whatever
    streams the block carries; and what is sent has the shape that the next stage expects."""
    shape = Model.model_validate({
        "width": 8, "heads": 2, "ffn": 12, "max_length": 16, "dropout": 0.1, "tied": "decoder",
        "encoder": {"layers": 2, "block": block, "layer_drop": 0.3},
        "decoder": {"layers": 2, "block": block, "width": 12}})
    names, batch = unit_names(shape), micro_batch(1, 3, 5, 4, key=3)
    whole = new_model(shape, VOCAB, VOCAB, 1).train()
    expected = whole(batch).loss
    expected.backward()
    weights = whole.state_dict()
    for bounds in [*((0, cut, len(names)) for cut in range(1, len(names))), (0, 2, 5, len(names))]:
        stages = [Transformer(shape, VOCAB, VOCAB, 1, units=range(*ends)).train() for ends in pairwise(bounds)]
        held: tuple[Any, ...] = ()
        for stage, end in zip(stages, bounds[1:], strict=True):
            stage.load_state_dict(weights, strict=False)
            memory, hidden = stage.run(batch, *held)
            if end < len(names):
                boundary = Boundary(shape, names[end])
                sent = boundary.pack(memory, hidden)
                assert sent.shape == boundary.shape(batch), (names[end], sent.shape)
                held = boundary.unpack(sent, batch)
        loss = stages[-1].objective.loss(hidden, stages[-1].output_weight, batch).loss
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=1e-5)
        loss.backward()
        for stage in stages:
            for name, p in stage.named_parameters():
                if not name.startswith("embeddings."):
                    torch.testing.assert_close(p.grad, whole.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
