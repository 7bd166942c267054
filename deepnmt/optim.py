"""Optimizer, learning-rate schedule and dynamic loss scale: what the recipe says about an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import nn

from deepnmt import config

# Tensors beside each weight, of its shape, that go into checkpoints and out of them under every layout. To add one (an
# average of the weights, say): its name here and in `moments_of`, its first value in `first_moment`, and what changes
# it in a `register_step_post_hook` of the optimizer that `build_optimizer` returns, which keeps it in `state[p]`.
Moment = Literal["exp_avg", "exp_avg_sq", "momentum_buffer"]


def build_optimizer(
    parameters: Iterable[nn.Parameter], settings: config.Optimizer, fused: bool = False
) -> torch.optim.Optimizer:
    """PyTorch's Adam, RAdam or SGD (weight decay in the gradient), AdamW or RAdam (decoupled decay: radamw).

    `fused`: the update in one kernel (RAdam has none), which spares several passes over weights and moments.
    """
    groups = parameter_groups(parameters, settings)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=fused or None)
    beta1, beta2 = settings.betas
    if settings.name in ("radam", "radamw"):
        return torch.optim.RAdam(groups, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps,
                                 decoupled_weight_decay=settings.name == "radamw")
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps, fused=fused or None)


def parameter_groups(parameters: Iterable[nn.Parameter], settings: config.Optimizer) -> list[dict[str, Any]]:
    """The groups of an optimizer, each with its weight decay.

    One, or, where norms and biases are spared, the matrices with and all else (biases, gains of norms, ω and other
    vectors, single numbers) without.
    """
    everything = list(parameters)
    if not settings.weight_decay or settings.decay_norms_and_biases:
        return [{"params": everything, "weight_decay": settings.weight_decay}]
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in everything:  # under ZeRO-3 what is left of a matrix here has no shape; DeepSpeed keeps the whole one's
        by_kind[len(getattr(p, "ds_shape", p.shape)) > 1].append(p)
    groups = [{"params": by_kind[True], "weight_decay": settings.weight_decay},
              {"params": by_kind[False], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """The Euclidean norm of all gradients as one vector; where it is above `limit` (0: never) they are scaled to that.

    Norms of rows in fp32, of all rows in float64: PyTorch's own norm adds the squares of a tensor in one go, and on a
    CPU loses 6.5e-4 of it over an embedding of 32,000 × 512.

    Returns:
        The norm before; inf or nan where a gradient is.
    """
    found = [p.grad for p in parameters if p.grad is not None]
    rows = [torch.linalg.vector_norm(g, dim=-1).flatten() if g.dim() else g.abs().reshape(1) for g in found]
    norm = float(torch.linalg.vector_norm(torch.cat(rows).double())) if rows else 0.0
    if limit and norm + 1e-6 > limit:  # 1e-6 as in PyTorch's and DeepSpeed's clipping
        for gradient in found:
            gradient.mul_(limit / (norm + 1e-6))
    return norm


def moments_of(settings: config.Optimizer) -> tuple[Moment, ...]:
    """What the optimizer keeps of each parameter from update to update, under PyTorch's and a checkpoint's names."""
    if settings.name == "sgd":
        return ("momentum_buffer",) if settings.momentum else ()
    return ("exp_avg", "exp_avg_sq")


# What `optimizer.*` settings, another value of which makes other moments; a run keeps them.
MOMENT_SETTINGS = ("optimizer.name", "optimizer.momentum")


def first_moment(moment: Moment, weight: torch.Tensor) -> torch.Tensor:
    """What a moment of a weight is before the first update."""
    return torch.zeros_like(weight)


class Progress(NamedTuple):
    """How far a run is: the number of the update (from 1), the run's last, and how often the training text was seen
    before this update."""

    update: int
    last_update: int
    passes: float


def learning_rate(
    peak: float, schedule: config.Schedule, update: int, last_update: int, passes: float = 0.0
) -> float:
    """The rate of update number `update` (counted from 1); a pure function, so a resumed run has nothing to restore.

    Rises linearly to `peak` over `schedule.warmup` updates, then follows its curve in `SCHEDULES`. `passes`: how often
    the training text was seen before this update; `schedule.step_epoch` needs it.
    """
    if update < schedule.warmup:
        return peak * update / schedule.warmup
    return SCHEDULES[schedule.name](peak, schedule, Progress(update, last_update, passes))


def _inverse_sqrt(peak: float, schedule: config.Schedule, now: Progress) -> float:
    """peak · sqrt(warmup / update), with no warm-up peak / sqrt(update)."""
    return peak * (max(schedule.warmup, 1) / now.update) ** 0.5


def _constant(peak: float, schedule: config.Schedule, now: Progress) -> float:
    return peak


def _linear(peak: float, schedule: config.Schedule, now: Progress) -> float:
    """A straight line to `schedule.final` at the last update."""
    done = min(1.0, (now.update - schedule.warmup) / max(1, now.last_update - schedule.warmup))
    return peak + (schedule.final - peak) * done


def _step(peak: float, schedule: config.Schedule, now: Progress) -> float:
    """The peak before the step, times `step_factor` from there on, under inverse_sqrt times sqrt(step / now) as well.

    Where the step is an epoch, both are counted in passes over the text: with equally long epochs that is the same as
    in updates, and it stays so for a run that goes on with other processes.
    """
    step, at = schedule.step_update or 0, float(now.update)
    if schedule.step_epoch is not None:
        step, at = schedule.step_epoch - 1, now.passes
    if at < step:
        return peak
    return peak * (schedule.step_factor * (1.0 if schedule.after_step == "constant" else (step / at) ** 0.5))


# The rate after the warm-up. To add one: a function and a row here, its name and settings in `config.Schedule`.
SCHEDULES: dict[str, Callable[[float, config.Schedule, Progress], float]] = {
    "inverse_sqrt": _inverse_sqrt,
    "constant": _constant,
    "linear": _linear,
    "step": _step,
}


def warmup_note(recipe: config.Recipe) -> str | None:
    """A sentence where the warm-up is cut off by the end of the run; None where the peak rate is reached."""
    warmup, updates = recipe.schedule.warmup, recipe.train.updates
    if warmup <= updates:
        return None
    reached = learning_rate(recipe.optimizer.lr, recipe.schedule, updates, updates)
    return (f"schedule.warmup ({warmup}) ends after train.updates ({updates}): the rate rises to {reached:.3g} and "
            f"never to optimizer.lr ({recipe.optimizer.lr:g})")


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
        """Takes up a scale, or the floor where that has been raised above it since."""
        self.cur_scale, self.clean, self._grow = max(float(state["scale"]), self.floor), int(state["clean"]), False
