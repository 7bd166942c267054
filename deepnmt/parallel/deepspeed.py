"""What deepnmt's two engines over DeepSpeed share: its start, the rate, the loss scale, and the way in and out of the
weights and moments of every parameter.

What is done here by hand, and why (each has a canary test):
- the optimizer's moments exist only after a first step, so one step on zero gradients at rate 0 is taken, from weights
  of 0, before `fill` sets weights and moments;
- with several parameter groups DeepSpeed looks for all moments after the step of the first group alone, and never
  again: `link_moments` makes it look once more;
- weights and moments go in and out one parameter at a time through DeepSpeed's per-parameter calls, in fp32, and past
  them without ZeRO, where they give nothing;
- the fp16 loss scale is deepnmt's own (`optim.LossScaler`);
- 16 bits without ZeRO are deepnmt's own too (`HalfPrecisionCopy`): DeepSpeed would not scale the loss but divide by the
  scale, step while it initialises, and sum gradients in 16 bits. It is given fp32 there, and loss scale, clipping and
  the check for non-finite gradients stand in the two engines.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import nn

from deepnmt.config import Recipe
from deepnmt.errors import UserError
from deepnmt.model.init import Source, weight_from
from deepnmt.model.transformer import Transformer
from deepnmt.optim import LossScaler, ScalerState, build_optimizer, initial_moment, moment_names
from deepnmt.parallel.engine import Build
from deepnmt.parallel.settings import Layout

Module = TypeVar("Module", bound=nn.Module)

# On a CPU DeepSpeed compiles a shared-memory all-reduce that only its inference uses: a minute with a compiler, and a
# lock file that hangs every later start if that minute is interrupted. Not wanted.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def link_moments(optimizer: Any) -> None:
    """Shows the per-parameter calls the moments of every group of a ZeRO-1 or 2 optimizer, which has stepped."""
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


class HalfPrecisionCopy(Generic[Module]):
    """16 bits without ZeRO: `module`, a copy of the model `weights` in `dtype`, computes in its place; buffers stay as
    they were.

    DeepSpeed is given the fp32 weights, whose reduction, schedule and update it does right, and knows nothing of the
    copy. Each micro-batch's gradient comes from the copy in 16 bits and is summed, reduced and applied in fp32; after
    the update `refresh` brings the weights, rounded, to the copy. ZeRO-1 computes the same (Micikevicius et al. 2018,
    Mixed Precision Training, section 3.1).
    """

    def __init__(self, weights: Module, dtype: torch.dtype) -> None:
        self.module = copy.deepcopy(weights)
        self._pairs = list(zip(weights.parameters(), self.module.parameters(), strict=True))
        for weight, rounded in self._pairs:
            rounded.data = rounded.data.to(dtype)
            rounded.register_post_accumulate_grad_hook(partial(_add_to_master_grad, weight))

    @torch.no_grad()
    def refresh(self) -> None:
        for weight, rounded in self._pairs:
            rounded.copy_(weight)


def _add_to_master_grad(weight: nn.Parameter, rounded: torch.Tensor) -> None:
    """Moves the gradient of a 16-bit weight to the fp32 one, which it is added to."""
    if rounded.grad is not None:
        weight.grad = rounded.grad.float() if weight.grad is None else weight.grad.add_(rounded.grad)
        rounded.grad = None


class MasterWeights(nn.Module):
    """What DeepSpeed is given beside a copy: all weights are those of `weights`, the computing is done by `module`."""

    def __init__(self, weights: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.weights = weights
        self.computing = (module,)  # in a tuple, so that its weights are not counted among this module's

    def forward(self, *inputs: Any) -> Any:
        return self.computing[0](*inputs)

    def train(self, mode: bool = True) -> MasterWeights:
        self.computing[0].train(mode)
        return super().train(mode)


class DeepSpeedEngine:
    """The common half of `ZeroEngine` and `PipelineEngine`.

    `build` makes the whole model, `engine` is DeepSpeed's, `zero` its ZeRO stage, `local` the parameters that this
    process computes with, under their canonical names (in 16 bits without ZeRO the fp32 weights, not the copy that
    computes). `_start` and then `_create_optimizer_state` belong at the end of a constructor.
    """

    def __init__(
        self, build: Build, recipe: Recipe, device: torch.device, layout: Layout, local: dict[str, nn.Parameter]
    ) -> None:
        self.build, self.recipe, self.device, self.local = build, recipe, device, local
        self.zero, self.clip = layout.stage, recipe.train.clip
        self.moments = moment_names(recipe.optimizer)
        self.scaler: LossScaler | None = None
        self._half: HalfPrecisionCopy[Any] | None = None
        self._applied = 0
        self._full = torch.zeros(1, device=device)  # made now: a full device has no room for it
        _check_device(layout)
        for p in local.values():  # until `fill` sets them; the step that makes the moments needs finite ones
            p.detach().zero_()

    def _compute_module(self, module: Module, layout: Layout) -> Module:
        """`module`, or, in 16 bits without ZeRO, the copy of it that computes."""
        if self.zero or layout.precision == "fp32":
            return module
        dtype = torch.float16 if layout.precision == "fp16" else torch.bfloat16
        self._half = half = HalfPrecisionCopy(module.to(self.device), dtype)
        return half.module

    def _start(self, module: nn.Module, layout: Layout) -> None:
        """Puts `module` under DeepSpeed."""
        config = layout.config or {}
        if self.zero == 0:  # deepnmt clips by itself, and 16 bits are its own (`HalfPrecisionCopy`)
            config = {key: value for key, value in config.items() if key not in ("bf16", "fp16")}
            config["gradient_clipping"] = 0.0
        optimizer = build_optimizer(module.parameters(), self.recipe.optimizer, fused=True)
        with contextlib.redirect_stdout(io.StringIO()):
            self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        if layout.precision == "fp16":
            scale = self.recipe.loss_scale
            self.scaler = LossScaler(2.0**scale.initial_power, scale.window, scale.floor)
            if self.zero:
                self.engine.optimizer.loss_scaler = self.scaler
        if self._half:
            refresh = self._half.refresh
            optimizer.register_step_post_hook(lambda *_: refresh())

    def _create_optimizer_state(self, update: Callable[[], None]) -> None:
        """Makes the optimizer create its moments.

        Args:
            update: takes one update with gradients of zero.
        """
        self._set_rate(0.0)
        update()
        if self.zero in (1, 2):
            link_moments(self.engine.optimizer)
        self.engine.skipped_steps = self.engine.global_steps = 0
        if self.scaler:
            self.scaler.restore({"scale": self.scaler.cur_scale, "clean": 0})

    # -- state -------------------------------------------------------------------------------------------------------

    def _read(self, p: nn.Parameter) -> list[torch.Tensor]:
        """A parameter's weight and moments, whole, in fp32."""
        if self.zero == 0:
            state = self._optimizer.state[p]
            found = [p, *(state[moment] for moment in self.moments)]
        else:
            found = [safe_get_full_fp32_param(p), *(safe_get_full_optimizer_state(p, m) for m in self.moments)]
        return [tensor.detach().float() for tensor in found]

    def _write(self, p: nn.Parameter, weight: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
        """Sets a parameter's weight and moments, given whole, in fp32."""
        if self.zero == 0:
            p.copy_(weight)
            for moment, value in states.items():
                self._optimizer.state[p][moment].copy_(value)
            return
        safe_set_full_fp32_param(p, weight)
        for moment, value in states.items():
            safe_set_full_optimizer_state(p, value, moment)

    @torch.no_grad()
    def fill(self, source: Source, moments: Source | None = None, step: int = 0) -> None:
        for name, p in self.local.items():
            weight = weight_from(source, name, getattr(p, "ds_shape", p.shape)).to(self.device, torch.float32)
            kept = {m: moments(f"{name}.{m}") if moments else initial_moment(m, weight) for m in self.moments}
            self._write(p, weight, {m: value.to(self.device, torch.float32) for m, value in kept.items()})
        if self.zero in (1, 2):
            self.engine.optimizer.update_lp_params()
        if self._half:
            self._half.refresh()
        for state in self._optimizer.state.values():
            if "step" in state:  # SGD counts none
                state["step"] = torch.full_like(torch.as_tensor(state["step"]), float(step))
        self._applied = step

    def _allocate_full_model(self, dtype: torch.dtype) -> Transformer:
        """A model whose weights are still to be filled in, in `dtype`, on every process. Collective.

        Raises:
            torch.OutOfMemoryError: on every process, where one has no room for it.
        """
        try:
            model = self.build(lambda part: cast_onto(part, dtype, self.device))
            if self.zero == 3:  # which holds one more weight while it is gathered, filled up to equal shares
                torch.empty(max(p.numel() for p in model.parameters()) + dist.get_world_size(), dtype=dtype,
                            device=self.device)
        except torch.OutOfMemoryError:
            self._full.fill_(1.0)
        dist.all_reduce(self._full)  # else the others would wait for this process
        full = self._full.item()
        self._full.zero_()
        if full:
            raise torch.OutOfMemoryError("a process has no room for the whole model beside what it trains")
        return model

    # -- the rest ----------------------------------------------------------------------------------------------------

    @property
    def _factor(self) -> float:
        """What the loss is to be multiplied by for fp16, where DeepSpeed does not do it."""
        return self.scaler.cur_scale if self.scaler and not self.zero else 1.0

    def _unscale(self) -> None:
        """Divides the gradients by `_factor`."""
        for p in self.local.values() if self._factor != 1 else ():
            if p.grad is not None:
                p.grad /= self._factor

    def _set_rate(self, rate: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self.engine.basic_optimizer

    @property
    def optimizer_step(self) -> int:
        counted = [float(state["step"]) for state in self._optimizer.state.values() if "step" in state]
        return int(max(counted)) if counted else self._applied

    def scaler_state(self) -> ScalerState | None:
        return self.scaler.state() if self.scaler else None

    def restore_scaler(self, state: ScalerState) -> None:
        if self.scaler:
            self.scaler.restore(state)

    def close(self) -> None:
        self.engine.destroy()


def supported_precisions() -> list[str]:
    """What the device of this process computes in."""
    device = get_accelerator()
    asked = {"fp32": True, "bf16": device.is_bf16_supported(), "fp16": device.is_fp16_supported()}
    return [precision for precision, supported in asked.items() if supported]


def _check_device(layout: Layout) -> None:
    """Raises `UserError` for a float type that the device does not compute with (fp16 on most CPUs)."""
    device, supported = get_accelerator(), supported_precisions()
    if layout.precision not in supported:
        raise UserError(
            f"parallel.precision is {layout.precision}, but this machine's {device.device_name()} has no "
            f"{layout.precision}; set parallel.precision={'bf16 or fp32' if 'bf16' in supported else 'fp32'}"
        )


def cast_onto(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Gives `model` parameters of type `dtype` on `device`, which never holds them in another; buffers keep
    theirs: training adds the tables of positions in fp32 as well."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    model.to(device)
