"""Schedules by hand, and the loss scale against fairseq's rule written out."""

from __future__ import annotations

import random
from typing import Literal

import pytest
import torch

from deepnmt.config import Optimizer, Schedule
from deepnmt.optim import LossScaler, build_optimizer, learning_rate


@pytest.mark.parametrize(("schedule", "update", "rate"), [
    (Schedule(name="inverse_sqrt", warmup=100), 1, 0.01),
    (Schedule(name="inverse_sqrt", warmup=100), 50, 0.5),
    (Schedule(name="inverse_sqrt", warmup=100), 100, 1.0),
    (Schedule(name="inverse_sqrt", warmup=100), 400, 0.5),
    (Schedule(name="inverse_sqrt", warmup=0), 4, 0.5),
    (Schedule(name="constant", warmup=10), 5, 0.5),
    (Schedule(name="constant", warmup=10), 900, 1.0),
    (Schedule(name="linear", warmup=100, final=0.1), 100, 1.0),
    (Schedule(name="linear", warmup=100, final=0.1), 550, 0.55),
    (Schedule(name="linear", warmup=100, final=0.1), 1000, 0.1),
])
def test_learning_rate(schedule: Schedule, update: int, rate: float) -> None:
    assert learning_rate(1.0, schedule, update, 1000) == pytest.approx(rate, abs=1e-12)


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


@pytest.mark.parametrize("seed", range(50))
def test_loss_scale_follows_fairseq(seed: int) -> None:
    draw = random.Random(seed)
    rate = draw.choice([0.0, 0.01, 0.3, 0.9])
    overflows = [draw.random() < rate for _ in range(800)]
    window = draw.choice([1, 4, 16, 256])
    scaler, trace = LossScaler(4.0, window, 0.03125), []
    for overflow in overflows:
        trace.append(scaler.cur_scale)
        scaler.update_scale(overflow)
        if not overflow:
            assert scaler.cur_scale == trace[-1], "a growth must wait until the optimizer has stepped"
        scaler.after_step()
        restored = LossScaler(1.0, window, 0.03125)
        restored.restore(scaler.state())
        scaler = restored  # a resume between any two updates changes nothing
    assert trace == fairseq_rule(overflows, 4.0, window, 0.03125)


def test_floor_holds() -> None:
    scaler = LossScaler(1.0, 256, 0.03125)
    for _ in range(100):
        scaler.update_scale(True)
        scaler.after_step()
    assert scaler.cur_scale == 0.03125


@pytest.mark.parametrize("name", ["adam", "adamw", "radam"])
def test_fused_updates_are_the_plain_ones(name: Literal["adam", "adamw", "radam"]) -> None:
    settings = Optimizer(name=name, lr=1e-2, weight_decay=0.1)
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2)]
    plain, fused = (build_optimizer([p], settings, fused) for p, fused in zip(parameters, (False, True)))
    for step in range(10):
        for parameter, optimizer in zip(parameters, (plain, fused)):
            parameter.grad = torch.sin(torch.arange(50.0) + step)
            optimizer.step()
    assert fused.defaults.get("fused", False) == (name != "radam")
    torch.testing.assert_close(parameters[0], parameters[1], rtol=0, atol=1e-6)
