"""DeepSpeed's engine with ZeRO 0-3 behind deepnmt's seam.

What is done here by hand, and why (each has a canary test):
- the optimizer's moments exist only after a first step, so one step on zero gradients at rate 0 is taken and undone;
- with several parameter groups DeepSpeed looks for all moments after the step of the first group alone, and never
  again: `link_moments` makes it look once more;
- weights and moments go in and out one parameter at a time through DeepSpeed's per-parameter calls, in fp32; under
  ZeRO-3 each process cuts its own share, because DeepSpeed's cut fails where the shares do not come out even;
- the fp16 loss scale is deepnmt's own (`optim.LossScaler`);
- without ZeRO in fp32 DeepSpeed lets non-finite gradients into the weights (and its clipping fails where there are
  none): clipping is done here then, and such an update is dropped.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from deepnmt.config import Recipe
from deepnmt.model.transformer import Transformer
from deepnmt.optim import LossScaler, ScalerState, build_optimizer, moments_of
from deepnmt.parallel.ds_config import DsConfig
from deepnmt.parallel.engine import MicroBatch, ParameterState, StepStats
from deepnmt.parallel.tensors import take_over

# On a CPU DeepSpeed compiles a shared-memory all-reduce that only its inference uses: a minute with a compiler, and a
# lock file that hangs every later start if that minute is interrupted. Not wanted.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def link_moments(optimizer: Any) -> None:
    """Shows the per-parameter calls the moments of every group of a ZeRO-1 or 2 optimizer, which has stepped."""
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


class ZeroEngine:
    """See `Engine`. `module` stays the model itself; DeepSpeed owns the update."""

    def __init__(self, module: Transformer, recipe: Recipe, ds_config: DsConfig, device: torch.device) -> None:
        self.module = module
        self.stage = ds_config.stage
        self.world = self.data_world = dist.get_world_size()
        self.data_rank = dist.get_rank()
        self.parameters = sum(p.numel() for p in module.parameters())
        self.device = device
        self.clip = recipe.train.clip
        self.recipe = recipe
        self.moments = moments_of(recipe.optimizer)
        self._applied = 0
        tree = {**ds_config.tree, "gradient_clipping": 0.0} if self.stage == 0 else ds_config.tree
        initial = {name: p.detach().clone() for name, p in module.named_parameters()}
        optimizer = build_optimizer(module.parameters(), recipe.optimizer, fused=device.type == "cuda")
        with contextlib.redirect_stdout(io.StringIO()):
            self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=tree)
        self.scaler: LossScaler | None = None
        if ds_config.precision == "fp16":
            self.scaler = LossScaler(ds_config.initial_scale, ds_config.window, ds_config.floor)
            self.engine.optimizer.loss_scaler = self.scaler
        self._prime()
        zeros = {f"{name}.{moment}": torch.zeros_like(p) for name, p in initial.items() for moment in self.moments}
        self.import_state(initial, zeros, 0)

    def train_step(self, micro_batches: Sequence[MicroBatch], update_tokens: int, rate: float) -> StepStats:
        self.engine.train()
        self._set_rate(rate)
        scale = self.world / update_tokens  # DeepSpeed averages over processes; accumulation is left as a plain sum
        scale_used = self.scaler.cur_scale if self.scaler else 1.0
        loss = nll = 0.0
        for number, (*tensors, key) in enumerate(micro_batches):
            self.engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
            sums = self.engine(*tensors, key)
            self.engine.backward(sums.loss * scale, scale_wrt_gas=False)
            loss += sums.loss.item()
            nll += sums.nll.item()
            if number < len(micro_batches) - 1:
                self.engine.step()
        norm, applied = self._apply()
        self._applied += applied
        if self.scaler:
            self.scaler.after_step()
        return StepStats(loss, nll, norm, scale_used, applied)

    def _apply(self) -> tuple[float, bool]:
        if self.stage == 0:
            norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip or math.inf))
            finite = math.isfinite(norm)
            if not finite:
                self.engine.optimizer.zero_grad(set_to_none=True)  # PyTorch's optimizers pass over missing gradients
            self.engine.step()
            return (norm, True) if finite else (math.inf, False)
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        if not self.engine.was_step_applied() or not math.isfinite(norm) or norm < 0:
            return math.inf, False
        return norm, True

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> tuple[float, float]:
        self.engine.eval()
        *tensors, key = micro_batch
        sums = self.engine(*tensors, key)
        return sums.loss.item(), sums.nll.item()

    def export_state(self) -> Iterator[ParameterState]:
        for name, p in self.module.named_parameters():
            if self.stage == 0:
                state = self._optimizer.state[p]
                tensors = [p.detach(), *(state[m] for m in self.moments)]
            else:
                tensors = [safe_get_full_fp32_param(p), *(safe_get_full_optimizer_state(p, m) for m in self.moments)]
            weight, *rest = (t.detach().float().cpu().clone() for t in tensors)
            kept: dict[str, torch.Tensor] = dict(zip(self.moments, rest, strict=True))
            yield ParameterState(name, weight, **kept)

    @torch.no_grad()
    def import_state(self, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor], step: int) -> None:
        for name, p in self.module.named_parameters():
            weight = weights[name].to(self.device, torch.float32)
            states = {m: moments[f"{name}.{m}"].to(self.device, torch.float32) for m in self.moments}
            if self.stage == 0:
                p.copy_(weight)
                for moment, value in states.items():
                    self._optimizer.state[p][moment].copy_(value)
                continue
            if self.stage == 3:
                safe_set_local_fp32_param(p, self._share(weight))
                for moment, value in states.items():
                    safe_set_local_optimizer_state(p, self._share(value), moment)
                with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
                    p.copy_(weight)
                continue
            safe_set_full_fp32_param(p, weight)
            for moment, value in states.items():
                safe_set_full_optimizer_state(p, value, moment)
        if self.stage in (1, 2):
            self.engine.optimizer.update_lp_params()
        for state in self._optimizer.state.values():
            if "step" in state:  # SGD counts none
                state["step"] = torch.full_like(torch.as_tensor(state["step"]), float(step))
        self._applied = step

    def _share(self, value: torch.Tensor) -> torch.Tensor:
        """This process's share of a whole tensor under ZeRO-3: flat, equal parts, the last one filled up with zeros."""
        size = -(-value.numel() // self.world)
        flat = torch.nn.functional.pad(value.flatten(), (0, size * self.world - value.numel()))
        return flat[size * dist.get_rank() :][:size]

    def gather_model(self) -> Transformer:
        if self.stage < 3:
            return self.module
        source, target = (self.module.table(use).num_embeddings for use in ("src", "trg"))
        whole = Transformer(self.recipe.model, source, target, self.recipe.seed, self.module.label_smoothing)
        take_over(whole, self.module, lambda p: deepspeed.zero.GatheredParameters([p]))
        return whole

    def _prime(self) -> None:
        """Makes the optimizer create its moments: one update on zero gradients at rate 0 (overwritten afterwards)."""
        token = torch.full((1, 2), 4, dtype=torch.int64, device=self.device)
        self._set_rate(0.0)
        self.engine.eval()  # no dropout; gradients flow all the same
        self.engine.set_gradient_accumulation_boundary(True)
        sums = self.engine(token, torch.tensor([2], device=self.device), token, token, 0)
        self.engine.backward(sums.loss * 0.0, scale_wrt_gas=False)
        self.engine.step()
        if self.stage in (1, 2):
            link_moments(self.engine.optimizer)
        self.engine.skipped_steps = self.engine.global_steps = 0
        if self.scaler:
            self.scaler.restore({"scale": self.scaler.cur_scale, "clean": 0})

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
