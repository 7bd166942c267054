"""The dynamic loss scale of fp16."""

from __future__ import annotations

from typing import TypedDict

import torch


class ScalerState(TypedDict):
    """The loss scale's state in a checkpoint."""

    scale: float
    clean: int  # updates without overflow since the last one with


class LossScaler:
    """Dynamic loss scale by fairseq's rule, with a floor at which the run continues.

    An overflow halves the scale, but never below `floor`, and that update is dropped. After every `window` updates in a
    row without an overflow the scale doubles. This object replaces DeepSpeed's scaler, whose attributes `cur_scale` and
    `dynamic` and methods `scale_loss` and `update_scale` its optimizers use. DeepSpeed's doubles the scale before it
    unscales the gradient of the same update, needs `window` + 1 updates, and stops the run at its floor. Here
    `update_scale` only notes that the scale is to double and `after_step` does it, so that each gradient is divided by
    the scale it was computed with.
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
        """Doubles the scale if `update_scale` noted it; to be called after the optimizer's step."""
        if self._grow:
            self.cur_scale *= 2
            self._grow = False

    def state(self) -> ScalerState:
        return {"scale": self.cur_scale, "clean": self.clean}

    def restore(self, state: ScalerState) -> None:
        """Restores the scale, or the floor if the recipe has since raised that above it."""
        self.cur_scale, self.clean, self._grow = max(float(state["scale"]), self.floor), int(state["clean"]), False
