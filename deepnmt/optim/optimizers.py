"""The optimizers, and what they keep of every weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from deepnmt import config
from deepnmt.config import choices
from deepnmt.errors import UserError
from deepnmt.optim.groups import parameter_groups

Groups = list[dict[str, Any]]  # see `parameter_groups`

# Tensors of each weight's shape that every layout writes to checkpoints and reads from them. To add one: add its name
# here and in `moment_names`, mark the setting that switches it on with `Fact.MOMENTS`, add its value before the first
# update to `initial_moment`, and update it in a `register_step_post_hook` of the optimizer that `build_optimizer`
# returns, which keeps it in `state[p]` (absent until the hook puts it there), as `_keep_average` does.
Moment = Literal["exp_avg", "exp_avg_sq", "momentum_buffer", "ema"]


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
    settings = recipe.optimizer
    optimizer = OPTIMIZERS[settings.name](parameter_groups(parameters, recipe), settings, fused)
    if recipe.train.freeze:
        _keep_moments_of_frozen(optimizer)
    if recipe.train.ema is not None:
        _keep_average(optimizer, recipe.train.ema)
    return optimizer


def _sgd(groups: Groups, settings: config.Optimizer, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=fused or None)


def _adam(
    groups: Groups, settings: config.Optimizer, fused: bool,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
) -> torch.optim.Optimizer:
    beta1, beta2 = settings.betas
    return kind(groups, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps, fused=fused or None)


def _radam(groups: Groups, settings: config.Optimizer, fused: bool, decoupled: bool = False) -> torch.optim.Optimizer:
    beta1, beta2 = settings.betas
    radam = torch.optim.RAdam(groups, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps,
                              decoupled_weight_decay=decoupled)
    if settings.unrectified == "skip":
        _skip_unrectified(radam)
    return radam


class MuonAndAdam(torch.optim.Optimizer):
    """Muon for the matrices of the layers, AdamW for tables and vectors. Jordan et al. 2024, Muon; a matrix's rate is
    that of Liu et al. 2025, Muon is Scalable for LLM Training, section 2.2, so that one rate suits both.

    It keeps what Adam keeps: of a matrix `exp_avg` is Muon's momentum, and `exp_avg_sq` stays 0.
    """

    def __init__(self, groups: Groups, settings: config.Optimizer, fused: bool) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"optimizer.name is muon, which PyTorch has from 2.9 on, but {torch.__version__} is here; "
                            "install a newer one, or set another optimizer")
        super().__init__(groups, {"lr": settings.lr})
        matrices = [group for group in self.param_groups if group["muon"]]
        rest = [group for group in self.param_groups if not group["muon"]]
        self.parts: list[torch.optim.Optimizer] = []  # their groups are those of this one, rates included
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, lr=settings.lr, momentum=settings.momentum,
                                               adjust_lr_fn="match_rms_adamw"))
        if rest:
            self.parts.append(_adam(rest, settings, fused, torch.optim.AdamW))
            self.parts[-1].state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        matrices = [p for group in self.param_groups if group["muon"] for p in group["params"]]
        for p in matrices:
            if p.grad is None:
                continue
            state = self.state[p]
            if "exp_avg" not in state:
                state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            self.parts[0].state[p] = {"momentum_buffer": state["exp_avg"]}
        for part in self.parts:
            part.step()


OPTIMIZERS: dict[str, Callable[[Groups, config.Optimizer, bool], torch.optim.Optimizer]] = {
    "adam": _adam,
    "adamw": partial(_adam, kind=torch.optim.AdamW),
    "radam": _radam,
    "radamw": partial(_radam, decoupled=True),
    "sgd": _sgd,
    "muon": MuonAndAdam,
}


def _keep_moments_of_frozen(optimizer: torch.optim.Optimizer) -> None:
    """Steps without the parameters that are frozen, which DeepSpeed has gradients of zero for: their moments would
    decay. The first step takes them along, since it creates the moments."""
    gradients: dict[torch.Tensor, torch.Tensor] = {}

    def before(*_: Any) -> None:
        for group in optimizer.param_groups:
            if group["factor"] > 0:
                continue
            for p in group["params"]:
                state = optimizer.state.get(p)
                if p.grad is not None and state:
                    gradients[p], p.grad = p.grad, None
                    if "step" in state:
                        state["step"] += 1

    def after(*_: Any) -> None:
        for p, gradient in gradients.items():
            p.grad = gradient
        gradients.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Keeps the running average of the weights in the optimizer's state, `ema`: after every step it becomes
    decay · average + (1 - decay) · weights, from the initial weights on. Polyak and Juditsky 1992, Acceleration of
    Stochastic Approximation by Averaging, with exponential weights."""
    initial: dict[torch.Tensor, torch.Tensor] = {}  # until after the first step: before it Adam wants no state

    @torch.no_grad()
    def before(*_: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if "ema" not in optimizer.state[p]:
                initial[p] = p.detach().clone()

    @torch.no_grad()
    def after(*_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in parameters):
            return  # an update that was dropped
        for p in parameters:
            if p in initial:
                optimizer.state[p]["ema"] = initial.pop(p)
        torch._foreach_lerp_([optimizer.state[p]["ema"] for p in parameters], parameters, 1 - decay)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _skip_unrectified(radam: torch.optim.RAdam) -> None:
    """Makes the updates that RAdam cannot rectify update the moments alone, and decay the weights where that is
    decoupled."""
    rates: list[float] = []  # the groups' rates during a step; ZeRO-3 takes several steps an update

    @torch.no_grad()
    def before(*_: Any) -> None:
        rates[:] = [group["lr"] for group in radam.param_groups]
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
        for group, rate in zip(radam.param_groups, rates, strict=True):
            group["lr"] = rate

    radam.register_step_pre_hook(before)
    radam.register_step_post_hook(after)


def rectifiable(beta2: float, step: int) -> bool:
    """Whether RAdam can rectify the variance of its rate at this step, from 1 (Liu et al. 2020, On the Variance of the
    Adaptive Learning Rate and Beyond, algorithm 2; the bound of 5 is that of its code and of PyTorch)."""
    power = beta2**step
    most = 2 / (1 - beta2) - 1
    return most - 2 * step * power / (1 - power) > 5


def moment_names(recipe: config.Recipe) -> tuple[Moment, ...]:
    """The tensors that the optimizer keeps for each parameter, by their names in PyTorch and in checkpoints."""
    average: tuple[Moment, ...] = () if recipe.train.ema is None else ("ema",)
    moments = choices.OPTIMIZERS[recipe.optimizer.name].moments
    if not recipe.optimizer.momentum:
        moments = tuple(name for name in moments if name != "momentum_buffer")
    return (*moments, *average)


def initial_moment(moment: Moment, weight: torch.Tensor) -> torch.Tensor:
    """A moment of a weight before the first update: zeros of its shape, or the weight itself as its running average."""
    return weight.clone() if moment == "ema" else torch.zeros_like(weight)
