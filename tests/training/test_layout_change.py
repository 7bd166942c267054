"""A run of `deepnmt train` that changes its layout at every start equals one that never does.

In fp16; if DEEPNMT_LONG is set, in fp32 too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_files import records
from tiny_engines import options
from warm import Warm

from deepnmt.config import Recipe
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.training.updates import UpdateHook

# processes, layout, pipeline stages; accumulation is chosen so that every update has four micro-batches
Start = tuple[int, str, int]
STARTS: list[Start] = [(1, "local", 0), (2, "zero1_{}", 0), (4, "zero3_{}", 0), (2, "zero1_{}", 2),
                       (2, "zero2_{}", 0), (4, "zero1_{}", 2), (1, "zero0_{}", 0)]
EACH = 4

# In fp16 the scale grows every third update, and one is dropped: in a start of ZeRO-3, after six others.
SCALE = ("loss_scale.initial_power=2", "loss_scale.window=3")
OVERFLOW = 6
TRACE = [4.0] * 3 + [2.0**power for power in range(3, 9) for _ in range(6 if power == 3 else 3)]


def overflowing(*arguments: str) -> int:
    """`deepnmt train` on each rank, but on rank 0 a layer's output is infinite once, after OVERFLOW updates."""
    from deepnmt.cli import main
    from deepnmt.commands import train as command

    def watch(recipe: Recipe, engine: Engine, ranks: Ranks) -> UpdateHook:
        hooks: list[Any] = []

        @contextmanager
        def around(number: int) -> Iterator[None]:
            if number == OVERFLOW + 1 and ranks.first and not hooks:
                layer = engine.module.get_submodule("encoder.layers.1")
                hooks.append(layer.register_forward_hook(lambda module, inputs, output: output * math.inf))
            yield
            for hook in hooks:
                hook.remove()

        return around

    command.find = lambda kind, name: watch if name == "watch" else None
    return main("train", arguments)


def trained(warm: Warm, recipe: Path, run: Path, start: Start, updates: int, *more: str) -> None:
    world, layout, stages = start
    warm.start(world, "test_layout_change:overflowing" if more else "warm:train", recipe, f"run={run}",
               *options(layout, stages), f"batch.accumulation={4 * max(stages, 1) // world}",
               f"train.updates={updates}", "train.validate_every=6", *more)
    assert warm.wait() == [0] * world, warm.said()


PRECISIONS = [("fp16", 2e-2), *([("fp32", 1e-4)] if os.environ.get("DEEPNMT_LONG") else [])]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), PRECISIONS)
def test_layout_changes_between_starts(
    precision: str, tolerance: float, prepared: Path, tmp_path: Path, warm: Warm
) -> None:
    recipe, whole, moved = prepared / "recipe.yaml", tmp_path / "whole", tmp_path / "moved"
    starts = [(world, layout.format(precision), stages) for world, layout, stages in STARTS]
    starts, scale = (starts, ()) if precision == "fp32" else (starts[1:], SCALE)
    trained(warm, recipe, whole, starts[0], EACH * len(starts), *scale)
    for number, start in enumerate(starts, 1):
        trained(warm, recipe, moved, start, EACH * number, *scale)
    ours, theirs = records(moved, "train"), records(whole, "train")
    if scale:
        assert [record["loss_scale"] for record in theirs] == TRACE
        assert [record["skipped_updates"] for record in theirs] == [0] * OVERFLOW + [1] * (len(TRACE) - OVERFLOW)
    assert len(ours) == len(theirs) == EACH * len(starts)
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("update", "epoch", "target_tokens", "learning_rate", "loss_scale", "skipped_updates"):
            assert mine[key] == other[key], key
        assert mine["loss"] == pytest.approx(other["loss"], abs=tolerance)
    valid = {record["update"]: record["loss"] for record in records(moved, "valid")}
    common = [record for record in records(whole, "valid") if record["update"] in valid]
    assert len(common) >= 3
    for record in common:
        assert valid[record["update"]] == pytest.approx(record["loss"], abs=tolerance)
