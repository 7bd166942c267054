"""Optimizer, learning-rate schedule and dynamic loss scale: what the recipe says about an update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

import torch
from torch import nn

from deepnmt import config


def build_optimizer(
    parameters: Iterable[nn.Parameter], settings: config.Optimizer, fused: bool = False
) -> torch.optim.Optimizer:
    """PyTorch's Adam (L2 decay in the gradient), AdamW (decoupled decay) or RAdam over one parameter group.

    Weight decay, where set, applies to every parameter, norms and biases included. `fused`: Adam and AdamW in one
    kernel (RAdam has none), which on a GPU spares several passes over weights and moments.
    """
    beta1, beta2 = settings.betas
    if settings.name == "radam":
        return torch.optim.RAdam(
            list(parameters), lr=settings.lr, betas=(beta1, beta2), eps=settings.eps, weight_decay=settings.weight_decay
        )
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(
        list(parameters), lr=settings.lr, betas=(beta1, beta2), eps=settings.eps, weight_decay=settings.weight_decay,
        fused=fused or None,
    )


def learning_rate(peak: float, schedule: config.Schedule, update: int, last_update: int) -> float:
    """The rate of update number `update` (counted from 1); a pure function, so a resumed run has nothing to restore.

    Rises linearly to `peak` over `schedule.warmup` updates; then inverse_sqrt: peak · sqrt(warmup / update) (with no
    warm-up: peak / sqrt(update)); constant: peak; linear: a straight line to `schedule.final` at `last_update`.
    """
    warmup = schedule.warmup
    if update < warmup:
        return peak * update / warmup
    if schedule.name == "inverse_sqrt":
        return peak * (max(warmup, 1) / update) ** 0.5
    if schedule.name == "linear":
        done = min(1.0, (update - warmup) / max(1, last_update - warmup))
        return peak + (schedule.final - peak) * done
    return peak


class ScalerState(TypedDict):
    """What a checkpoint keeps of the loss scale."""

    scale: float
    clean: int


class LossScaler:
    """Dynamic loss scale by fairseq's rule, with a floor that is a floor.

    An overflow halves the scale, never below `floor`, and that update is dropped; after every `window` clean updates
    in a row the scale doubles. DeepSpeed's own scaler doubles before it divides the gradient of the same update, needs
    `window` + 1 updates, and ends the run at its floor; this object takes its place (the attributes `cur_scale`,
    `dynamic` and the methods `scale_loss`, `update_scale` are what DeepSpeed's optimizers call). `update_scale` only
    notes a growth; `after_step` applies it, so no update is divided by a scale it was not computed with.
    """

    dynamic = True

    def __init__(self, initial: float, window: int, floor: float) -> None:
        self.cur_scale = initial
        self.window = window
        self.floor = floor
        self.clean = 0  # updates without overflow since the last one with
        self._grow = False

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.float() * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale = max(self.cur_scale / 2, self.floor)
            self.clean = 0
            return
        self.clean += 1
        self._grow = self.clean % self.window == 0

    def after_step(self) -> None:
        """Applies a growth that `update_scale` noted; called once the optimizer has stepped."""
        if self._grow:
            self.cur_scale *= 2
            self._grow = False

    def state(self) -> ScalerState:
        return {"scale": self.cur_scale, "clean": self.clean}

    def restore(self, state: ScalerState) -> None:
        self.cur_scale, self.clean, self._grow = float(state["scale"]), int(state["clean"]), False
