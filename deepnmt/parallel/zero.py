"""DeepSpeed with ZeRO 0 to 3 as an `Engine`.

What it does by hand beside `parallel/deepspeed.py`, and why (each has a canary test):
- ZeRO-3 partitions the model part by part as it is built, so that no process ever holds it whole;
- under ZeRO-3 each process takes its own share of a weight, because DeepSpeed fails where the shares are uneven;
- without ZeRO DeepSpeed applies non-finite gradients in fp32, and its clipping fails where gradients are missing: this
  engine clips by itself and drops such an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import nn

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.model.blocks import set_clock
from deepnmt.model.transformer import Transformer, fill_with_nan
from deepnmt.parallel.deepspeed import DeepSpeedEngine, MasterWeights, cast_onto
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import (
    Build,
    Flags,
    Reading,
    StepStats,
    clip_gradients,
    figures_of,
    gradient_norm,
    read_sums,
)
from deepnmt.processes.host import give_memory_back


class ZeroEngine(DeepSpeedEngine):
    """See `Engine`. `module` is the model, or its copy in 16 bits without ZeRO; DeepSpeed makes the update."""

    def __init__(self, build: Build, recipe: Recipe, layout: Layout, device: torch.device) -> None:
        def keep_share(part: nn.Module) -> None:
            """Keeps only this process's share of a part's parameters."""
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[layout.precision]
            for p in part.parameters():
                p.detach().zero_()
            cast_onto(part, dtype, device)
            deepspeed.zero.Init(module=part, config_dict_or_path=layout.config, dtype=dtype)

        after_build: Callable[[nn.Module], None] = fill_with_nan
        if layout.stage == 3:
            give_memory_back()
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # uses the open process group
            after_build = keep_share
        module = build(after_build)
        module.recompute = recipe.parallel.recompute_layers
        super().__init__(build, recipe, device, layout, dict(module.named_parameters()))
        self.module = self._compute_module(module, layout)
        self.data_rank, self.data_world = dist.get_rank(), dist.get_world_size()
        self.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
        trained: nn.Module = module
        if module is not self.module:
            trained = MasterWeights(module, self.module)
        self._start(trained, layout)
        self._create_optimizer_state(self._update_with_zero_gradients)

    def train_step(
        self, batches: Sequence[Batch], update_tokens: int, rate: float, flags: Flags = tuple
    ) -> StepStats:
        self.engine.train()
        set_clock(self.module, self._applied + 1)
        self._reading = Reading(self.device, self.data_world, figures_of(self.module), flags)
        self._set_rate(rate)
        # DeepSpeed averages over processes, but sums over accumulated micro-batches
        scale = self._loss_factor * self.data_world / update_tokens
        scale_used = self.scaler.cur_scale if self.scaler else 1.0
        for number, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
            sums = self.engine(batch)
            self.engine.backward(sums.loss * scale, scale_wrt_gas=False)
            self._reading.add(sums)
            if number < len(batches) - 1:
                self.engine.step()
        norm, applied = self._apply()
        self._applied += applied
        if self.scaler:
            self.scaler.after_step()
        return self._reading.stats(norm, scale_used, applied)

    def _apply(self) -> tuple[float, bool]:
        if self.zero == 0:
            self._unscale()
            norm = float(*self._reading.read(gradient_norm(self.local.values())))
            finite = math.isfinite(norm)
            if self.scaler:
                self.scaler.update_scale(not finite)
            if finite:
                clip_gradients(self.local.values(), norm, self.clip)
            else:
                self.engine.optimizer.zero_grad(set_to_none=True)  # PyTorch's optimizers skip missing gradients
            self.engine.step()
            return norm, finite
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        return norm, self.engine.was_step_applied() and math.isfinite(norm) and norm >= 0

    def _update_with_zero_gradients(self) -> None:
        """Takes one update with gradients of zero."""
        batch = self.module.smallest_batch(self.device)
        self.engine.eval()  # no dropout, but still gradients
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.backward(self.engine(batch).loss * 0.0, scale_wrt_gas=False)
        self.engine.step()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[tuple[float, float]]:
        self.engine.eval()
        return read_sums([self.engine(batch) for batch in batches])

    def _own_range(self, p: Any) -> tuple[int, int]:
        if self.zero < 3:
            return super()._own_range(p)
        return self._share(p.ds_numel)

    def _state(self, p: Any) -> list[torch.Tensor]:
        if self.zero < 3:
            return super()._state(p)
        start, stop = self._own_range(p)
        padded = [safe_get_local_fp32_param(p)]
        for moment in self.moments:
            padded.append(safe_get_local_optimizer_state(p, moment))
        return [tensor[: stop - start] for tensor in padded]

    def _write(self, p: Any, values: Sequence[torch.Tensor]) -> None:
        if self.zero < 3:
            super()._write(p, values)
            return
        size = -(-p.ds_numel // self.data_world)
        weight, *moments = [nn.functional.pad(value, (0, size - len(value))) for value in values]
        safe_set_local_fp32_param(p, weight)
        for moment, value in zip(self.moments, moments, strict=True):
            safe_set_local_optimizer_state(p, value, moment)

    def _refresh(self) -> None:
        super()._refresh()
        if self.zero == 3:  # what DeepSpeed does after an update
            optimizer = self.engine.optimizer
            optimizer.checkpoint_event_prologue()  # so that no parameter stays whole with its old values
            for group in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            optimizer.checkpoint_event_epilogue()

    @torch.no_grad()
    def gather_model(self) -> Transformer:
        if self.zero < 3:
            return self.module
        whole = self._allocate_full_model(next(self.module.parameters()).dtype)
        for copied, p in zip(whole.parameters(), self.module.parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([p]):
                copied.copy_(p)
        return whole
