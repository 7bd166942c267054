"""The loss scale through real engines in fp16: fairseq's trace, whole updates at every growth, a floor that holds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_engines import ROOT, batches, build, recipe_of, step
from warm import Warm

from deepnmt.parallel.launch import Ranks, processes

INITIAL, WINDOW, FLOOR, BETA = 4.0, 3, 0.03125, 0.9
# clean updates past two growths, an overflow just before a third, a fall to the floor and below it, and up again
OVERFLOWS = [*map(bool, (0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1)), *[True] * 14, *[False] * 7, True, False, False]


def fairseq_rule(overflows: list[bool], scale: float, window: int, floor: float) -> list[float]:
    """The scale each update is computed with, by the rule of fairseq's scaler with tolerance 0."""
    trace, last_overflow = [], -1
    for number, overflow in enumerate(overflows):
        trace.append(scale)
        if overflow:
            last_overflow = number
            scale = max(scale / 2, floor)
        elif (number - last_overflow) % window == 0:
            scale *= 2
    return trace


def layout(folder: Path, stage: int, window: int) -> str:
    tree = json.loads((ROOT / "ds_configs" / f"zero{stage}_fp16.json").read_text())
    tree["fp16"] |= {"initial_scale_power": int(math.log2(INITIAL)), "loss_scale_window": window}
    path = folder / f"zero{stage}-{window}.json"
    path.write_text(json.dumps(tree))
    return str(path)


def gradients(
    folder: Path, stage: int, window: int, overflows: list[bool], ranks: Ranks
) -> tuple[list[float], list[torch.Tensor]]:
    """The scale of every update, and the gradient that each applied one used, from Adam's first moment."""
    engine = build(recipe_of(layout(folder, stage, window)), ranks)
    factor = [1.0]
    engine.module.encoder.layers[1].register_forward_hook(lambda module, inputs, output: output * factor[0])
    scales, used, before = [], [], torch.zeros(())
    for update, overflow in enumerate(overflows):
        factor[0] = math.inf if overflow and ranks.first else 1.0
        seed = sum(not o for o in overflows[:update])  # the control, which has no overflow, sees the same batches
        _, norm, scale, applied = step(engine, batches(seed, ranks.world), ranks)
        assert applied is not overflow and math.isfinite(norm) is applied
        scales.append(scale)
        if applied:
            moment = torch.cat([state.exp_avg.flatten() for state in engine.export_state()])
            used.append((moment - BETA * before) / (1 - BETA))
            before = moment
    engine.close()
    return scales, used


def trial(folder: str, stage: str) -> None:
    """Runs on each rank."""
    with processes(threads=1, group=True) as ranks:
        scales, used = gradients(Path(folder), int(stage), WINDOW, OVERFLOWS, ranks)
        constant, control = gradients(Path(folder), int(stage), 10**6, [False] * len(used), ranks)
    assert scales == fairseq_rule(OVERFLOWS, INITIAL, WINDOW, FLOOR)
    assert FLOOR in scales and max(scales) == 4 * INITIAL, "the sequence must reach the floor and grow twice"
    assert set(constant) == {INITIAL}
    for number, (ours, theirs) in enumerate(zip(used, control, strict=True)):
        difference = float((ours - theirs).norm() / theirs.norm())
        assert difference < 0.1, f"applied update {number}: the gradient is off by {difference:.3f}"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_scale_in_fp16(stage: int, tmp_path: Path, warm: Warm) -> None:
    warm.run(2, "test_loss_scale:trial", tmp_path, stage)
