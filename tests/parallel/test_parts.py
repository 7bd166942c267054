"""Parts of a model with rates of their own (`optimizer.lr_factors`), frozen parts (`train.freeze`) and the running
average of the weights (`train.ema`): the same in every layout."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engines import VOCAB, batches, export_state, parallel, recipe_with, step
from warm import Warm

from deepnmt.config import Recipe
from deepnmt.optim.groups import is_in
from deepnmt.optim.optimizers import build_optimizer
from deepnmt.optim.schedules import factors_risen, set_rate
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.process_group import processes

LONG = bool(os.environ.get("DEEPNMT_LONG"))
UPDATES, DECAY = (20 if LONG else 13), 0.9  # the factors have risen to one after twelve
FROZEN = ["encoder", "embeddings", "decoder.layers.*.rule"]
HELD = 0.5  # moments of what was trained before


def recipe(layout: str, stages: int, accumulation: int) -> Recipe:
    return recipe_with(
        batch={"accumulation": accumulation},
        model={"width": 16, "heads": 2, "ffn": 25, "dropout": 0.1,
               "encoder": {"block": "pre_ln", "layers": 2}, "decoder": {"block": "pre_ln", "layers": 2}},
        optimizer={"name": "adamw", "weight_decay": 0.1, "decay_norms_and_biases": False,
                   "lr_factors": {"decoder": 0.5, "decoder.layers.1.ffn": 0.25}, "lr_factors_until": 6},
        train={"updates": UPDATES, "clip": 0.5, "freeze": FROZEN, "ema": DECAY},
        parallel=parallel(layout, stages))


def compute(folder: str, layout: str, stages: str) -> None:
    """Runs on each rank: makes updates; writes the first and last weights, the average, what it must be by the
    recursion in float64, and what the exchanged engine holds."""
    with processes(threads=1, group=True) as ranks:
        count = int(stages) or 1
        settings = recipe(layout, int(stages), 2 * count // ranks.world)
        engine = start_engine(settings, layout_of(settings, ranks.world), (VOCAB, VOCAB), ranks)
        start = {s.name: s.weight.clone() for s in export_state(engine)}

        def moment(name: str) -> torch.Tensor:
            weight = start[name.rpartition(".")[0]]
            return weight if name.endswith(".ema") else torch.full_like(weight, HELD)

        engine.fill(start.__getitem__, moment, step=3)  # as a run that goes on
        expected = {name: weight.double() for name, weight in start.items()}
        trace = []
        for update in range(UPDATES):
            loss, norm, _, applied = step(engine, batches(update, 2), ranks)
            assert applied
            trace.append([loss, norm])
            for s in export_state(engine):
                expected[s.name] = DECAY * expected[s.name] + (1 - DECAY) * s.weight.double()
        end = {s.name: s.weight.clone() for s in export_state(engine)}
        ema = {s.name: s.kept["ema"].clone() for s in export_state(engine)}
        for s in export_state(engine):
            if any(is_in(part, s.name) for part in FROZEN):
                assert all(bool((s.kept[kept] == HELD).all()) for kept in ("exp_avg", "exp_avg_sq")), s.name
        plan = batches(99, 2)[engine.data_rank :: engine.data_world]
        before = ranks.sum([engine.evaluate(plan)[0][0]])
        engine.swap_average()
        held = {s.name: s.weight.clone() for s in export_state(engine)}
        average = ranks.sum([engine.evaluate(plan)[0][0]])
        engine.swap_average()
        after = ranks.sum([engine.evaluate(plan)[0][0]])
        same = all(torch.equal(end[s.name], s.weight) and torch.equal(ema[s.name], s.kept["ema"])
                   for s in export_state(engine))
        if ranks.first:
            for name, group in (("start", start), ("end", end), ("ema", ema), ("held", held), ("expected", expected)):
                save_file(group, f"{folder}/{name}")
            Path(folder, "facts").write_text(json.dumps(
                {"trace": trace, "same": same, "losses": [before, average, after]}))
        engine.close()


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    folder = tmp_path_factory.mktemp("local")
    warm.run(1, "test_parts:compute", folder, "local", 0)
    return folder


LAYOUTS = [(1, "local", 0), (2, "zero1_fp32", 0), pytest.param(2, "zero3_fp32", 0, marks=pytest.mark.slow),
           (2, "zero1_fp32", 2), (2, "zero0_fp32", 2)]
if LONG:
    LAYOUTS += [(2, "zero0_fp32", 0), (2, "zero2_fp32", 0), (4, "zero1_fp32", 2), (2, "zero1_bf16", 2),
                (2, "zero1_bf16", 0), (2, "zero0_bf16", 0), (2, "zero3_bf16", 0), (2, "zero1_fp16", 0)]


@pytest.mark.parametrize(("world", "layout", "stages"), LAYOUTS)
def test_frozen_parts_rates_and_average(
    world: int, layout: str, stages: int, control: Path, tmp_path: Path, warm: Warm
) -> None:
    folder = control
    if layout != "local":
        folder = tmp_path
        warm.run(world, "test_parts:compute", folder, layout, stages)
    start, end, ema, held, expected = (load_file(folder / name) for name in ("start", "end", "ema", "held", "expected"))
    for name in start:
        frozen = any(is_in(part, name) for part in FROZEN)
        assert torch.equal(start[name], end[name]) == frozen, name
        torch.testing.assert_close(ema[name].double(), expected[name], rtol=0, atol=1e-6)
        assert torch.equal(held[name], ema[name])
    facts, reference = (json.loads((of / "facts").read_text()) for of in (folder, control))
    before, average, after = facts["losses"]
    assert facts["same"] and before == after != average
    if layout.endswith("fp32"):
        torch.testing.assert_close(torch.tensor(facts["trace"]), torch.tensor(reference["trace"]), rtol=1e-4, atol=1e-4)


def test_rates_are_multiplied_by_the_factors() -> None:
    """Adam's first step is the rate, whatever the gradient."""
    settings = recipe_with(optimizer={"lr_factors": {"encoder": 0.5, "encoder.layers.1": 0.1, "*.norm": 2.0}},
                           train={"updates": 1, "freeze": ["decoder"]})
    names = ["encoder.layers.0.ffn.fc1.weight", "encoder.layers.1.ffn.fc1.weight", "encoder.norm.weight",
             "decoder.norm.weight", "embeddings.shared.weight"]
    parameters = {name: torch.nn.Parameter(torch.ones(3, 2)) for name in names}
    optimizer = build_optimizer(parameters, settings)
    for p in parameters.values():
        p.grad = torch.full_like(p, 7.0)
    set_rate(optimizer, 1e-2)
    optimizer.step()
    moved = [round(1 - p[0, 0].item(), 6) for p in parameters.values()]
    assert moved == [5e-3, 1e-3, 2e-2, 0.0, 1e-2]


def test_factors_hold_and_then_rise_to_one() -> None:
    settings = recipe_with(optimizer={"lr_factors": {"encoder": 0.25, "encoder.norm": 4.0}, "lr_factors_until": 10},
                           train={"updates": 1, "freeze": ["decoder"]})
    names = ["encoder.layers.0.ffn.fc1.weight", "encoder.norm.weight", "decoder.norm.weight", "embeddings.weight"]
    optimizer = build_optimizer({name: torch.nn.Parameter(torch.ones(2)) for name in names}, settings)
    rates = {}
    for update in (1, 10, 15, 20, 99):
        set_rate(optimizer, 0.5, factors_risen(settings.optimizer, update))
        rates[update] = sorted(group["lr"] for group in optimizer.param_groups)
    assert rates[1] == rates[10] == [0.0, 0.125, 0.5, 2.0]
    assert rates[15] == [0.0, 0.25, 0.5, 1.0]  # halfway on a logarithmic scale
    assert rates[20] == rates[99] == [0.0, 0.5, 0.5, 0.5]


def test_a_dropped_update_leaves_the_average() -> None:
    """The engines then step without gradients."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer({"p": parameter}, recipe_with(train={"updates": 1, "ema": 0.5}))
    set_rate(optimizer, 0.5)
    # it begins with the weight before the first step
    for gradient, average in ((torch.ones(2), 0.75), (None, 0.75), (torch.ones(2), 0.375)):
        parameter.grad = gradient
        optimizer.step()
        torch.testing.assert_close(optimizer.state[parameter]["ema"], torch.full((2,), average))
