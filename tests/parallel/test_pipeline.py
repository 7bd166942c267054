"""A pipeline computes the same as the local engine: gradients, losses and norms, for all numbers of stages, of
micro-batches and of data-parallel ranks, all blocks, tyings and partitions, with clipping and recomputation.

After a first update Adam's first moment is (1 - β1) times the gradient, so the exported moments are compared. Many
layouts share one set of processes, since starting one takes seconds.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_engines import VOCAB, export_state, micro_batch, parallel, poison, recipe_with
from warm import Warm

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.config.choices import TYINGS
from deepnmt.model.init import Initialiser
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.pipeline.partition import Partition, cost_units
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks

VALID = 5
BLOCKS = [("post_ln", "pre_ln"), ("admin", "b2t"), ("pre_ln", "deepnorm"), ("b2t", "post_ln"), ("deepnorm", "admin")]


@dataclass(frozen=True)
class Case:
    """A layout to compare; `dropout`: also of words; `blocks`: which of BLOCKS; `bounds`: of the stages, if not the
    partitioner's (units: 0 source, 1 to 3 encoder, 4 target, 5 to 7 decoder, 8 output)."""

    stages: int
    accumulation: int
    blocks: int = 0
    config: str = "zero1_fp32"
    dropout: float = 0.2
    tied: str = "all"
    recompute: int = 0
    updates: int = 4
    bounds: tuple[int, ...] = ()
    clip: float = 0.0


def recipe(case: Case, accumulation: int, control: str = "") -> Recipe:
    encoder, decoder = BLOCKS[case.blocks]
    stages, recompute = (0, 0) if control else (case.stages, case.recompute)
    return recipe_with(
        vocab={"shared": TYINGS[case.tied].joint},
        batch={"accumulation": accumulation},
        # a ReLU within a rounding of zero has either of two gradients: 1e-4 of a norm, seen on one kind of CPU
        model={"width": 16, "heads": 2, "ffn": 24, "activation": "gelu", "dropout": case.dropout, "tied": case.tied,
               "encoder": {"block": encoder, "layers": 3, "word_dropout": case.dropout},
               "decoder": {"block": decoder, "layers": 3, "word_dropout": case.dropout}},
        train={"updates": 10, "clip": case.clip},
        parallel=parallel(control or case.config, stages, recompute_layers=recompute))


def batches(update: int, count: int) -> list[Batch]:
    """Micro-batches of unequal sizes and lengths, with padding."""
    return [micro_batch(100 * update + n, 2 + n % 3, 4 + 2 * (n % 5), 9 - n % 4, (update << 32) + n)
            for n in range(count)]


def update(engine: Engine, number: int, count: int, ranks: Ranks, rate: float) -> list[float]:
    """Makes one update of `count` micro-batches over all data-parallel ranks; returns loss and plain loss a token, and
    the norm."""
    plan = batches(number, count)
    tokens = sum(batch.tokens for batch in plan)
    stats = engine.train_step(plan[engine.data_rank :: engine.data_world], tokens, rate)
    assert stats.applied
    return [stats.loss / tokens, stats.nll / tokens, stats.grad_norm]


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    return {s.name: s.kept["exp_avg"].clone() for s in export_state(engine)}


def measured(engine: Engine, ranks: Ranks, count: int, updates: int) -> dict[str, Any]:
    """Initial weights, figures and gradients of a first update, figures of more, losses of a few validation batches."""
    start = {s.name: s.weight.clone() for s in export_state(engine)}
    first = update(engine, 0, count, ranks, 1e-3)
    gradient = gradients(engine)
    later = [update(engine, k, count, ranks, 1e-3) for k in range(1, updates)]
    sums = [value for pair in engine.evaluate(batches(99, VALID)) for value in pair]
    valid = [value / engine.data_world for value in ranks.sum(sums)]
    return {"start": start, "gradient": gradient, "figures": [first, *later], "valid": valid}


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Whether the initial weights are equal; the largest relative differences of a gradient, a figure and a validation
    loss; and the smallest norm."""
    far = {name: float((ours["gradient"][name] - g).norm() / g.norm()) for name, g in theirs["gradient"].items()}
    pairs = [(torch.tensor(ours[key]), torch.tensor(theirs[key])) for key in ("figures", "valid")]
    return {
        "start": all(torch.equal(ours["start"][name], weight) for name, weight in theirs["start"].items()),
        "names": sorted(ours["start"]) == sorted(theirs["start"]),
        "gradient": max((value, name) for name, value in far.items()),
        "figures": max(float(((a - b) / b).abs().max()) for a, b in pairs),
        "norm": min(norm for _, _, norm in theirs["figures"]),
    }


def pipeline(case: Case, ranks: Ranks) -> Engine:
    made = recipe(case, case.accumulation)
    if not case.bounds:
        return start_engine(made, layout_of(made, ranks.world), (VOCAB, VOCAB), ranks)
    from deepnmt.parallel.pipeline.engine import PipelineEngine

    partition = Partition(cost_units(made.model, VOCAB, VOCAB), tuple(case.bounds))
    engine = PipelineEngine(made, (VOCAB, VOCAB), partition, layout_of(made, ranks.world), ranks)
    engine.fill(Initialiser(made.model, VOCAB, VOCAB, made.seed))
    return engine


def controls(world: str, cases: str, folder: str) -> None:
    """Runs on one process: the reference of each case, in fp32 the local engine, in 16 bits ZeRO-1."""
    with processes(threads=1, group=True) as ranks:
        found = []
        for case in (Case(**values) for values in json.loads(cases)):
            count = int(world) // case.stages * case.accumulation
            name = "local" if case.config.endswith("fp32") else f"zero1_{case.config[-4:]}"
            made = recipe(case, count, control=name)
            engine = start_engine(made, layout_of(made, ranks.world), (VOCAB, VOCAB), ranks)
            found.append(measured(engine, ranks, count, case.updates))
            engine.close()
        torch.save(found, Path(folder, "controls.pt"))


def trial(cases: str, folder: str) -> None:
    """Runs on each rank: every case against its control."""
    theirs = torch.load(Path(folder, "controls.pt"), weights_only=True)
    with processes(threads=1, group=True) as ranks:
        found = []
        for number, case in enumerate(Case(**values) for values in json.loads(cases)):
            engine = pipeline(case, ranks)
            assert engine.data_world == ranks.world // case.stages
            mine = measured(engine, ranks, engine.data_world * case.accumulation, case.updates)
            whole = dict(engine.gather_model().named_parameters())
            state = {s.name: s.weight for s in export_state(engine)}
            near = all(torch.allclose(whole[n].float(), w, rtol=0.01, atol=1e-3) for n, w in state.items())
            if ranks.first:
                found.append({"case": case.__dict__, "gathered": near, **compared(mine, theirs[number])})
            engine.close()
        if ranks.first:
            Path(folder, "results.json").write_text(json.dumps(found))


ZERO0 = "zero0_fp32"

# By number of processes. Stages 1, 2, 3, 4 × accumulation 1, 2, 8 × data-parallel ranks 1, 2 (`test_grid_is_complete`);
# for every number of stages all blocks on both sides, all tyings, recomputation, ZeRO 0 and 1, dropout off and on, and
# MANY updates; embeddings and output as separate stages; and clipping of norms that are at least ten times CLIP. If
# DEEPNMT_LONG is set, each row also runs with dropout on where it was off, and off where it was on.
LONG = bool(os.environ.get("DEEPNMT_LONG"))
CLIP, MANY = 0.05, (20 if LONG else 8)
GRID = {
    1: [Case(1, 1, 0, dropout=0.0), Case(1, 8, 1, ZERO0), Case(1, 2, 4, recompute=2, updates=MANY)],
    2: [
        Case(2, 1, 0),
        Case(2, 2, 1, updates=MANY),
        Case(2, 8, 2),
        Case(2, 2, 3, tied="decoder", bounds=(0, 8, 9)),
        Case(2, 2, 4, tied="none"),
        Case(2, 2, 1, ZERO0, clip=CLIP),
        Case(2, 2, 2, recompute=1, bounds=(0, 1, 9)),
        Case(2, 2, 3, dropout=0.0, bounds=(0, 5, 9), clip=CLIP),
        Case(1, 1, 2),
        Case(1, 2, 3, ZERO0),
        Case(1, 8, 0, dropout=0.0),
    ],
    3: [
        Case(3, 1, 2, dropout=0.0),
        Case(3, 2, 3, updates=MANY),
        Case(3, 8, 4, bounds=(0, 4, 5, 9)),
        Case(3, 2, 0, ZERO0, recompute=2),
    ],
    4: [
        Case(4, 1, 3),
        Case(4, 2, 4, dropout=0.0, updates=MANY),
        Case(4, 8, 0),
        Case(4, 8, 1, tied="decoder", recompute=2),
        Case(2, 1, 2, clip=CLIP),
        Case(2, 2, 0, ZERO0, updates=MANY, clip=CLIP),
        Case(2, 8, 4, bounds=(0, 8, 9)),
        Case(4, 2, 1, ZERO0),
    ],
    6: [
        Case(3, 1, 1),
        Case(3, 2, 4, dropout=0.0, recompute=1),
        Case(3, 8, 2, tied="decoder"),
        Case(6, 2, 1, bounds=(0, 1, 4, 5, 7, 8, 9)),
    ],
    8: [Case(4, 1, 2, recompute=1), Case(4, 2, 3, tied="none"), Case(4, 8, 4, ZERO0)],
}


def test_grid_is_complete() -> None:
    """Every combination has a row, and everything else occurs with every number of stages."""
    cases = [(world // case.stages, case) for world, row in GRID.items() for case in row if case.stages <= 4]
    assert {(case.stages, case.accumulation, data) for data, case in cases} == set(
        product((1, 2, 3, 4), (1, 2, 8), (1, 2))
    )
    for stages in (1, 2, 3, 4):
        mine = [case for _, case in cases if case.stages == stages]
        assert {case.config for case in mine} == {ZERO0, Case(1, 1).config}
        assert {bool(case.dropout) for case in mine} == {bool(case.recompute) for case in mine} == {True, False}
        assert max(case.updates for case in mine) == MANY
        assert {block for case in mine for block in BLOCKS[case.blocks]} == {block for pair in BLOCKS for block in pair}
    clipped = {(case.stages, data, case.config) for data, case in cases if case.clip}
    assert clipped == set(product((2,), (1, 2), (ZERO0, Case(1, 1).config)))
    assert {case.bounds for _, case in cases} > {(0, 1, 9), (0, 5, 9), (0, 8, 9), (0, 4, 5, 9)}


# 16 bits compared with ZeRO-1 in the same precision, by number of processes: only the order of sums differs. A tied
# table whose copies are not summed differs by 0.74. If DEEPNMT_LONG is set: every accumulation, and dropout reversed.
BF16, FP16 = "zero1_bf16", "zero1_fp16"
ZERO0_BF16, ZERO0_FP16 = "zero0_bf16", "zero0_fp16"
ROUNDED = {
    2: [
        Case(2, 2, 1, BF16),
        Case(2, 2, 4, BF16, recompute=2, bounds=(0, 8, 9)),
        Case(2, 2, 2, FP16, clip=CLIP),
        Case(1, 2, 3, FP16),
        Case(2, 2, 0, ZERO0_BF16, recompute=1),
    ],
    4: [Case(2, 2, 0, BF16)],
}
if LONG:
    ROUNDED[1] = [Case(1, 1, 1, BF16, dropout=0.0), Case(1, 8, 2, FP16), Case(1, 8, 0, ZERO0_FP16, dropout=0.0)]
    ROUNDED[2] += [Case(2, 2, 3, ZERO0_FP16, clip=CLIP), Case(1, 2, 4, ZERO0_BF16), Case(2, 1, 3, BF16, dropout=0.0)]
    ROUNDED[2] += [Case(2, 8, 0, BF16, clip=CLIP), Case(2, 1, 4, FP16), Case(2, 8, 1, FP16, dropout=0.0)]
    ROUNDED[2] += [Case(2, 1, 2, ZERO0_BF16, dropout=0.0), Case(2, 8, 0, ZERO0_FP16)]
    ROUNDED[2] += [Case(2, 2, 1, FP16, bounds=(0, 8, 9))]
    ROUNDED[3] = [Case(3, 3, 4, BF16), Case(3, 3, 0, FP16), Case(3, 1, 1, FP16, dropout=0.0), Case(3, 8, 2, BF16)]
    ROUNDED[4] += [Case(2, 2, 3, FP16), Case(4, 4, 2, BF16, tied="decoder"), Case(4, 4, 1, FP16, clip=CLIP)]
    ROUNDED[4] += [Case(2, 2, 1, ZERO0_FP16), Case(4, 4, 3, ZERO0_BF16), Case(2, 1, 4, BF16), Case(2, 8, 0, FP16)]
    ROUNDED[4] += [Case(4, 1, 2, FP16), Case(4, 8, 3, BF16, dropout=0.0), Case(2, 1, 1, ZERO0_BF16, dropout=0.0)]
    ROUNDED[6] = [Case(3, 3, 3, BF16), Case(3, 1, 0, ZERO0_FP16), Case(3, 8, 1, FP16)]
    ROUNDED[8] = [Case(4, 4, 4, FP16, recompute=1), Case(4, 1, 0, BF16), Case(4, 8, 2, ZERO0_BF16)]


# six and eight processes if DEEPNMT_LONG is set
WORLDS = [world for world in sorted(GRID) if world <= 4 or LONG]


@pytest.mark.parametrize("turned", [False, True] if LONG else [False])
@pytest.mark.parametrize("world", [pytest.param(w, marks=[pytest.mark.slow] * (w > 3)) for w in WORLDS])
def test_pipeline_equals_the_local_engine(world: int, turned: bool, tmp_path: Path, warm: Warm) -> None:
    """`turned`: dropout on where the row has it off, and off where the row has it on."""
    cases = GRID[world] + ROUNDED.get(world, [])
    if turned:
        cases = [replace(case, dropout=0.0 if case.dropout else 0.2) for case in cases]
    found = results(world, cases, tmp_path, warm)
    for case in found[: len(GRID[world])]:
        check(case, 1e-5, 1e-5)
    for case in found[len(GRID[world]) :]:
        check(case, 1e-2, 2e-2)  # four updates; Adam amplifies even gradients that are only rounding error


def results(world: int, cases: list[Case], folder: Path, warm: Warm) -> list[dict[str, Any]]:
    rows = json.dumps([case.__dict__ for case in cases])
    warm.run(1, "test_pipeline:controls", world, rows, folder)
    warm.run(world, "test_pipeline:trial", rows, folder)
    found = json.loads((folder / "results.json").read_text())
    assert len(found) == len(cases)
    return found


def check(found: dict[str, Any], gradient: float, figures: float) -> None:
    assert found["start"] and found["names"] and found["gathered"], found
    assert found["gradient"][0] < gradient, found
    assert found["figures"] < figures, found
    assert found["norm"] > 10 * found["case"]["clip"], "nothing to clip"


def poisoned(configs: str) -> None:
    """Runs on each rank: a NaN in one gradient of one stage."""
    with processes(threads=1, group=True) as ranks:
        for config in json.loads(configs):
            print(config, flush=True)  # shown if it fails
            engine = pipeline(Case(2, 2, 1, config=config), ranks)
            update(engine, 0, 2, ranks, 1e-2)
            poison(engine, "decoder.layers.2.ffn.fc1.bias", batches(1, 2), here=True)
            update(engine, 2, 2, ranks, 1e-2)
            engine.close()


def test_non_finite_gradient_of_one_stage_changes_no_weights(warm: Warm) -> None:
    configs = [f"zero{stage}_{bits}" for stage, bits in product((0, 1), ("fp32", "bf16", "fp16"))]
    warm.run(2, "test_pipeline:poisoned", json.dumps(configs))


def timed_pass() -> None:
    """Runs in a process that has imported DeepSpeed: the device is synchronised before the clock is read."""
    from deepnmt.parallel.pipeline import engine as of_pipelines

    events: list[str] = []
    steps, kind = of_pipelines.schedule, of_pipelines.schedule.ForwardPass
    inner = SimpleNamespace(_INSTRUCTION_MAP={
        step: lambda _: events.append("pass") for step in (kind, steps.BackwardPass, steps.LoadMicroBatch)})
    engine: Any = SimpleNamespace(engine=inner)
    device = SimpleNamespace(synchronize=lambda: events.append("wait"))
    with patch.object(of_pipelines, "get_accelerator", lambda: device):
        of_pipelines.PipelineEngine.time_instructions(engine, lambda seconds: events.append("add"))
    inner._INSTRUCTION_MAP[kind](inner)
    assert events == ["wait", "pass", "wait", "add"]


def test_a_pass_is_timed_to_its_end(warm: Warm) -> None:
    warm.run(1, "test_pipeline:timed_pass")
