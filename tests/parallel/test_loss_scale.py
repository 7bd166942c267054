"""The loss scale in real fp16 engines: fairseq's trace, full updates at every growth, a floor that is kept."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import pytest
import torch
from refusals import user_error
from tiny_engines import batches, build, fairseq_rule, recipe_of, step
from warm import Warm

from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks

INITIAL, WINDOW, FLOOR, BETA = 4.0, 3, 0.03125, 0.9
# clean updates past two growths, an overflow just before a third, overflows down to the floor and on, then growth
OVERFLOWS = [*map(bool, (0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1)), *[True] * 14, *[False] * 7, True, False, False]


def gradients(
    layout: str, stages: int, window: int, overflows: list[bool], ranks: Ranks
) -> tuple[list[float], list[torch.Tensor]]:
    """The scale of every update, and the gradient that each applied one used, from Adam's first moment in this process.

    An update has two micro-batches. An overflow starts on the first process, which holds the encoder's layers.
    """
    scale = {"initial_power": int(math.log2(INITIAL)), "window": window, "floor": FLOOR}
    engine: Any = build(recipe_of(layout, max(stages, 1), stages, scale), ranks)
    factor = [1.0]
    layer = dict(engine.module.named_modules()).get("encoder.layers.1")
    assert layer is not None or not ranks.first
    if layer is not None:
        layer.register_forward_hook(lambda module, inputs, output: output * factor[0])
    scales, used, before = [], [], torch.zeros(())
    for update, overflow in enumerate(overflows):
        factor[0] = math.inf if overflow and ranks.first else 1.0
        seed = sum(not o for o in overflows[:update])  # the control, which has no overflow, sees the same batches
        _, norm, scale, applied = step(engine, batches(seed, 2), ranks)
        assert applied is not overflow and math.isfinite(norm) is applied
        scales.append(scale)
        if applied:
            moment = torch.cat([state["exp_avg"].flatten() for state in engine._optimizer.state.values()])
            used.append((moment - BETA * before) / (1 - BETA))
            before = moment
    engine.close()
    return scales, used


def trial(layout: str, stages: str) -> None:
    """Runs on each rank."""
    with processes(threads=1, group=True) as ranks:
        scales, used = gradients(layout, int(stages), WINDOW, OVERFLOWS, ranks)
        constant, control = gradients(layout, int(stages), 10**6, [False] * len(used), ranks)
    assert "torch._inductor.compile_fx" not in sys.modules, "PyTorch's compiler, a second of every start"
    assert scales == fairseq_rule(OVERFLOWS, INITIAL, WINDOW, FLOOR)
    assert FLOOR in scales and max(scales) == 4 * INITIAL, "the sequence must reach the floor and grow twice"
    assert set(constant) == {INITIAL}
    for number, (ours, theirs) in enumerate(zip(used, control, strict=True)):
        difference = float((ours - theirs).norm() / theirs.norm())
        assert difference < 0.1, f"applied update {number}: the gradient is off by {difference:.3f}"


ROWS = [("zero0_fp16", 0), ("zero1_fp16", 0), pytest.param("zero3_fp16", 0, marks=pytest.mark.slow), ("zero1_fp16", 2)]
if os.environ.get("DEEPNMT_LONG"):
    ROWS += [("zero2_fp16", 0), ("zero0_fp16", 2)]  # DeepSpeed uses one class for ZeRO-1 and 2


@pytest.mark.parametrize(("layout", "stages"), ROWS)
def test_scale_in_fp16(layout: str, stages: int, warm: Warm) -> None:
    warm.run(2, "test_loss_scale:trial", layout, stages)


def refused() -> None:
    """Runs on one process."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: False
    with processes(threads=1, group=True) as ranks:
        for layout in ("zero0_fp16", "zero1_fp16"):
            with user_error(r"precision is fp16, but this machine's cpu has no fp16; set "):
                build(recipe_of(layout), ranks)


def test_fp16_is_rejected_on_a_device_without_it(warm: Warm) -> None:
    warm.run(1, "test_loss_scale:refused")
