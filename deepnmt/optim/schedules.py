"""The learning rate of every update: warm-up and curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deepnmt import config
from deepnmt.config.plugins import Table

# Of a rate. Whatever an optimizer divides it by, PyTorch can still put it into fp32, where it would raise else; and one
# step of this size makes the model's next numbers overflow, as a larger one would.
_LARGEST = 1e20


class RunProgress(NamedTuple):
    """The current update (the first counts as `schedule.count_from`), the run's last one, passes over the training text
    before this update, and the values of the validations before it, of which a lower one is better."""

    update: int
    last_update: int
    passes: float
    validations: Sequence[float] = ()


def learning_rate(
    peak: float, schedule: config.Schedule, update: int, last_update: int, passes: float = 0.0,
    validations: Sequence[float] = (),
) -> float:
    """The learning rate of an update. It is a pure function, so that a resumed run has nothing to restore.

    The rate rises linearly from `schedule.start` to `peak` over `schedule.warmup` updates, then follows the schedule's
    curve in `SCHEDULES`. The first update counts as `schedule.count_from`.

    Args:
        update: the number of the update, from 1.
        passes, validations: see `RunProgress`; `schedule.step_epoch` and plateau need them.
    """
    update += schedule.count_from - 1
    if update < schedule.warmup:
        return schedule.start + (peak - schedule.start) * update / schedule.warmup
    return SCHEDULES[schedule.name](peak, schedule, RunProgress(update, last_update, passes, validations))


def set_rate(optimizer: Any, rate: float, risen: float = 0.0) -> None:
    """Sets the learning rate of every group; `optimizer` is PyTorch's, or one of DeepSpeed's around it.

    Args:
        risen: of `factors_risen`.
    """
    for group in optimizer.param_groups:
        group["lr"] = min(rate * group["factor"] * group["part"] ** -risen, _LARGEST)


def factors_risen(settings: config.Optimizer, update: int) -> float:
    """How far `optimizer.lr_factors` have risen to 1 in an update, on a logarithmic scale: 0 as given, 1 at the end."""
    until = settings.lr_factors_until
    return min(max(update - until, 0) / until, 1.0) if until else 0.0


def _inverse_sqrt(peak: float, schedule: config.Schedule, now: RunProgress) -> float:
    """peak · sqrt(warmup / update); without a warm-up, peak / sqrt(update)."""
    return peak * (max(schedule.warmup, 1) / max(now.update, 1)) ** 0.5


def _inverse_sqrt_decay(peak: float, schedule: config.Schedule, now: RunProgress) -> float:
    """peak · sqrt(P / (P + k)) for k updates after the warm-up: the schedule of T-Fixup's code (Huang et al. 2020)."""
    period = schedule.decay_period or 1
    return peak * (period / (period + now.update - schedule.warmup)) ** 0.5


def _constant(peak: float, schedule: config.Schedule, now: RunProgress) -> float:
    return peak


def _linear(peak: float, schedule: config.Schedule, now: RunProgress) -> float:
    """A straight line to `schedule.final` at the last update."""
    return peak + (schedule.final - peak) * _done(schedule.warmup, now)


def _cosine(peak: float, schedule: config.Schedule, now: RunProgress) -> float:
    """Half a cosine to `schedule.final` at the last update. Loshchilov and Hutter 2017, SGDR, eq. 5, one period."""
    return schedule.final + (peak - schedule.final) * (1 + math.cos(math.pi * _done(schedule.warmup, now))) / 2


def _wsd(peak: float, schedule: config.Schedule, now: RunProgress) -> float:
    """Warm-up, stable, decay: the peak, and in the last `schedule.decay` updates a straight line to `schedule.final`.
    Hu et al. 2024, MiniCPM, section 4; the line is that of Hägele et al. 2024, Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations."""
    return peak + (schedule.final - peak) * _done(now.last_update - (schedule.decay or 1), now)


def _done(first: int, now: RunProgress) -> float:
    """How much of the way from update `first` to the last one is done, 0 to 1."""
    return min(1.0, max(0, now.update - first) / max(1, now.last_update - first))


def _plateau(peak: float, schedule: config.Schedule, now: RunProgress) -> float:
    """The peak times `step_factor` for every `schedule.patience` validations in a row without a new best."""
    best, waited, drops = math.inf, 0, 0
    for value in now.validations:
        waited = 0 if value < best else waited + 1
        best = min(best, value)
        if waited == schedule.patience:
            waited, drops = 0, drops + 1
    return peak * schedule.step_factor**drops


def _step(peak: float, schedule: config.Schedule, now: RunProgress) -> float:
    """The peak before the step; from there on times `step_factor`, and with inverse_sqrt also times sqrt(step / now).

    If the step is an epoch, both are counted in passes over the text. With equally long epochs that equals counting
    updates, and it does not change if the run is resumed with another number of processes.
    """
    step, at = schedule.step_update or 0, float(now.update)
    if schedule.step_epoch is not None:
        step, at = schedule.step_epoch - 1, now.passes
    if at < step:
        return peak
    return peak * (schedule.step_factor * (1.0 if schedule.after_step == "constant" else (step / at) ** 0.5))


# The rate after the warm-up. To add a schedule: a function and a row here, a row in
# config/choices.py, settings of its own in `config.Schedule`.
SCHEDULES: Table[Callable[[float, config.Schedule, RunProgress], float]] = Table("SCHEDULES", {
    "inverse_sqrt": _inverse_sqrt,
    "inverse_sqrt_decay": _inverse_sqrt_decay,
    "constant": _constant,
    "linear": _linear,
    "step": _step,
    "cosine": _cosine,
    "wsd": _wsd,
    "plateau": _plateau,
}, lambda curve: None if callable(curve) else f"is {curve!r}, must be a function of peak, schedule and progress")


def warmup_note(recipe: config.Recipe) -> str | None:
    """A warning if the run ends before its warm-up does, else None."""
    warmup, updates = recipe.schedule.warmup, recipe.train.updates
    if warmup < updates + recipe.schedule.count_from:
        return None
    reached = learning_rate(recipe.optimizer.lr, recipe.schedule, updates, updates)
    return (f"schedule.warmup ({warmup}) ends after train.updates ({updates}): the rate rises to {reached:.3g} and "
            f"never reaches optimizer.lr ({recipe.optimizer.lr:g})")
