"""Optimizer, learning-rate schedule, gradient clipping and dynamic loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import nn

from deepnmt import config
from deepnmt.config.plugins import Table
from deepnmt.errors import UserError

# Tensors of each weight's shape that every layout writes to checkpoints and reads from them. To add one: add its name
# here and in `moment_names`, the setting that switches it on to `MOMENT_SETTINGS`, its value before the first update to
# `initial_moment`, and update it in a `register_step_post_hook` of the optimizer that `build_optimizer` returns, which
# keeps it in `state[p]` (absent until the hook puts it there), as `_keep_average` does.
Moment = Literal["exp_avg", "exp_avg_sq", "momentum_buffer", "ema"]


class Kind(NamedTuple):
    """What the parameters of a group have in common: weight decay, the factor of their learning rate, which is 0 if
    they are frozen, and whether they are matrices that Muon updates."""

    weight_decay: float
    factor: float
    muon: bool = False


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], recipe: config.Recipe, fused: bool = False
) -> torch.optim.Optimizer:
    """PyTorch's optimizer for the recipe: Adam, AdamW, RAdam (also with decoupled weight decay: radamw), SGD or Muon.

    RAdam has no rectification for its first updates. PyTorch's then takes a step along the running mean of the
    gradient; with `unrectified: skip` there is none, as in the code of Liu et al. 2020 (Admin).

    Args:
        parameters: by their canonical names.
        fused: update in one kernel, which saves several passes over weights and moments. RAdam has no such kernel.
    """
    optimizer = _optimizer(parameter_groups(parameters, recipe), recipe.optimizer, fused)
    if recipe.train.ema is not None:
        _keep_average(optimizer, recipe.train.ema)
    return optimizer


def _optimizer(groups: list[dict[str, Any]], settings: config.Optimizer, fused: bool) -> torch.optim.Optimizer:
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=fused or None)
    if settings.name == "muon":
        return MuonAndAdam(groups, settings, fused)
    beta1, beta2 = settings.betas
    if settings.name in ("radam", "radamw"):
        radam = torch.optim.RAdam(groups, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps,
                                  decoupled_weight_decay=settings.name == "radamw")
        if settings.unrectified == "skip":
            _skip_unrectified(radam)
        return radam
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps, fused=fused or None)


class MuonAndAdam(torch.optim.Optimizer):
    """Muon for the matrices of the layers, AdamW for tables and vectors. Jordan et al. 2024, Muon; a matrix's rate is
    that of Liu et al. 2025, Muon is Scalable for LLM Training, section 2.2, so that one rate suits both.

    It keeps what Adam keeps: of a matrix `exp_avg` is Muon's momentum, and `exp_avg_sq` stays 0.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: config.Optimizer, fused: bool) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"optimizer.name is muon, which PyTorch has from 2.9 on, but {torch.__version__} is here; "
                            "install a newer one, or set another optimizer")
        super().__init__(groups, {"lr": settings.lr})
        matrices, rest = ([group for group in self.param_groups if group["muon"] is muon] for muon in (True, False))
        beta1, beta2 = settings.betas
        self.parts: list[torch.optim.Optimizer] = []  # their groups are those of this one, rates included
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, lr=settings.lr, momentum=settings.momentum,
                                               adjust_lr_fn="match_rms_adamw"))
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps,
                                                fused=fused or None))
            self.parts[-1].state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups if group["muon"] for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if "exp_avg" not in state:
                state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            self.parts[0].state[p] = {"momentum_buffer": state["exp_avg"]}
        for part in self.parts:
            part.step()


def _keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Keeps the running average of the weights in the optimizer's state, `ema`: after every step it becomes
    decay · average + (1 - decay) · weights. Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by
    Averaging, with exponential weights."""

    @torch.no_grad()
    def after(*_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in parameters):
            return  # an update that was dropped
        for p in parameters:
            if "ema" not in optimizer.state[p]:
                optimizer.state[p]["ema"] = p.detach().clone()
        torch._foreach_lerp_([optimizer.state[p]["ema"] for p in parameters], parameters, 1 - decay)

    optimizer.register_step_post_hook(after)


def _skip_unrectified(radam: torch.optim.RAdam) -> None:
    """Makes the updates that RAdam cannot rectify update the moments alone, and decay the weights where that is
    decoupled."""
    kept: list[float] = []  # the groups' rates during a step; ZeRO-3 takes several steps an update

    @torch.no_grad()
    def before(*_: Any) -> None:
        kept[:] = [group["lr"] for group in radam.param_groups]
        for group in radam.param_groups:
            done = max((float(radam.state[p]["step"]) for p in group["params"] if radam.state.get(p)), default=0.0)
            if rectifiable(group["betas"][1], int(done) + 1):
                continue
            if group["decoupled_weight_decay"]:
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(1 - group["lr"] * group["weight_decay"])
            group["lr"] = 0.0

    def after(*_: Any) -> None:
        for group, rate in zip(radam.param_groups, kept, strict=True):
            group["lr"] = rate

    radam.register_step_pre_hook(before)
    radam.register_step_post_hook(after)


def rectifiable(beta2: float, step: int) -> bool:
    """Whether RAdam can rectify the variance of its rate at this step, from 1 (Liu et al. 2020, On the Variance of the
    Adaptive Learning Rate and Beyond, algorithm 2; the bound of 5 is that of its code and of PyTorch)."""
    power = beta2**step
    most = 2 / (1 - beta2) - 1
    return most - 2 * step * power / (1 - power) > 5


def parameter_groups(parameters: Mapping[str, nn.Parameter], recipe: config.Recipe) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, one for each `Kind`, whose `factor` `set_rate` multiplies the rate by."""
    groups: dict[Kind, list[nn.Parameter]] = {}
    for name, p in parameters.items():  # a weight that ZeRO-3 has partitioned is flat and empty
        groups.setdefault(kind_of(name, getattr(p, "ds_shape", p.shape), recipe), []).append(p)
    return [{"params": groups[kind], **kind._asdict()} for kind in sorted(groups, reverse=True)]


def kind_of(name: str, shape: Sequence[int], recipe: config.Recipe) -> Kind:
    """The group of a parameter.

    If `decay_norms_and_biases` is false, matrices are decayed, and vectors and scalars (biases, gains of norms, ω) are
    not. What is frozen has neither rate nor decay.
    """
    settings = recipe.optimizer
    if any(is_in(part, name) for part in recipe.train.freeze):
        return Kind(0.0, 0.0)
    factors = [factor for part, factor in settings.lr_factors.items() if is_in(part, name)]
    decayed = settings.decay_norms_and_biases is not False or len(shape) > 1
    muon = settings.name == "muon" and len(shape) == 2 and ".layers." in name
    return Kind(settings.weight_decay if decayed else 0.0, factors[-1] if factors else 1.0, muon)


def is_in(part: str, name: str) -> bool:
    """Whether a part of a model has the parameter of this name: the part is its name, the beginning of it, or a pattern
    of one of these with `*`."""
    return fnmatchcase(name, part) or fnmatchcase(name, f"{part}.*")


def set_rate(optimizer: Any, rate: float) -> None:
    """Sets the learning rate of every group; `optimizer` is PyTorch's, or one of DeepSpeed's around it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The Euclidean norm of all gradients, taken as one vector, in float64; inf or nan if one is not finite.

    The norm of each row is computed in fp32, that of all rows in float64. PyTorch's own norm sums the squares of a
    whole tensor at once; on a CPU it loses 6.5e-4 of the norm of an embedding of 32,000 × 512.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    rows = [torch.linalg.vector_norm(g, dim=-1).flatten() if g.dim() else g.abs().reshape(1) for g in gradients]
    return torch.linalg.vector_norm(torch.cat(rows).double()) if rows else torch.zeros((), dtype=torch.float64)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scales all gradients, whose `gradient_norm` is given, so that it is at most `limit` (0: no limit)."""
    if limit and norm + 1e-6 > limit:  # 1e-6 as in PyTorch's and DeepSpeed's clipping
        for gradient in (p.grad for p in parameters if p.grad is not None):
            gradient.mul_(limit / (norm + 1e-6))


def moment_names(recipe: config.Recipe) -> tuple[Moment, ...]:
    """The tensors that the optimizer keeps for each parameter, by their names in PyTorch and in checkpoints."""
    average: tuple[Moment, ...] = () if recipe.train.ema is None else ("ema",)
    if recipe.optimizer.name == "sgd":
        return ("momentum_buffer", *average) if recipe.optimizer.momentum else average
    return ("exp_avg", "exp_avg_sq", *average)


# The settings that decide which moments there are; they cannot change when a run is resumed.
MOMENT_SETTINGS = ("optimizer.name", "optimizer.momentum", "train.ema")


def initial_moment(moment: Moment, weight: torch.Tensor) -> torch.Tensor:
    """A moment of a weight before the first update: zeros of its shape, or the weight itself as its running average."""
    return weight.clone() if moment == "ema" else torch.zeros_like(weight)


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


# The rate after the warm-up. To add a schedule: a function and a row here, its name and settings in `config.Schedule`.
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
