"""The plain engine: PyTorch alone, one process, fp32. The control that every other layout is compared with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from deepnmt.config import Recipe
from deepnmt.model.transformer import Transformer
from deepnmt.optim import ScalerState, build_optimizer
from deepnmt.parallel.engine import MicroBatch, ParameterState, StepStats


class LocalEngine:
    """See `Engine`."""

    def __init__(self, module: Transformer, recipe: Recipe, device: torch.device) -> None:
        self.module = module.to(device)
        self.clip = recipe.train.clip
        self.optimizer = build_optimizer(self.module.parameters(), recipe.optimizer)
        self._applied = 0

    def train_step(self, micro_batches: Sequence[MicroBatch], update_tokens: int, rate: float) -> StepStats:
        self.module.train()
        loss = nll = 0.0
        for *tensors, key in micro_batches:
            sums = self.module(*tensors, key)
            (sums.loss / update_tokens).backward()
            loss += sums.loss.item()
            nll += sums.nll.item()
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip or math.inf))
        applied = math.isfinite(norm) and math.isfinite(loss)
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._applied += 1
        self.optimizer.zero_grad(set_to_none=True)
        return StepStats(loss, nll, norm if applied else math.inf, 1.0, applied)

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> tuple[float, float]:
        self.module.eval()
        *tensors, key = micro_batch
        sums = self.module(*tensors, key)
        return sums.loss.item(), sums.nll.item()

    def export_state(self) -> Iterator[ParameterState]:
        for name, parameter in self.module.named_parameters():
            weight = parameter.detach().float().cpu().clone()
            state = self.optimizer.state[parameter]
            if state:
                yield ParameterState(name, weight, state["exp_avg"].cpu().clone(), state["exp_avg_sq"].cpu().clone())
            else:
                yield ParameterState(name, weight, torch.zeros_like(weight), torch.zeros_like(weight))

    @torch.no_grad()
    def import_state(self, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor], step: int) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.copy_(weights[name])
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": moments[f"{name}.exp_avg"].to(parameter),
                "exp_avg_sq": moments[f"{name}.exp_avg_sq"].to(parameter),
            }
        self._applied = step

    @property
    def optimizer_step(self) -> int:
        return self._applied

    def scaler_state(self) -> ScalerState | None:
        return None

    def restore_scaler(self, state: ScalerState) -> None:
        """fp32 needs no loss scale; a run that had one under fp16 goes on without."""

    def close(self) -> None:
        """Nothing is held open."""
