"""The local engine: plain PyTorch, one process, fp32. The reference that tests compare every other layout with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from deepnmt.batch import Batch
from deepnmt.checkpoint.tensors import Part
from deepnmt.config import Recipe
from deepnmt.config.choices import OPTIMIZERS
from deepnmt.model.blocks import set_clock
from deepnmt.model.init import Source, fill
from deepnmt.model.transformer import Transformer
from deepnmt.optim.gradients import clip_gradients, gradient_norm
from deepnmt.optim.groups import set_rate
from deepnmt.optim.optimizers import build_optimizer, initial_moment, moment_names
from deepnmt.optim.scaler import ScalerState
from deepnmt.parallel.engine import Flags, Reading, StepStats, figures_of, read_sums


class LocalEngine:
    """See `Engine`. If `module` has its weights already, `fill` is not needed."""

    def __init__(self, module: Transformer, recipe: Recipe, device: torch.device) -> None:
        self.module = module.to(device)
        self.data_rank, self.data_world = 0, 1
        self.parameters = sum(p.numel() for p in module.parameters())
        self.clip = recipe.train.clip
        self.optimizer = build_optimizer(dict(self.module.named_parameters()), recipe)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(group["factor"] > 0)  # no backward pass for what is frozen
        self.moments = moment_names(recipe)
        self.counts = OPTIMIZERS[recipe.optimizer.name].counts  # whether the optimizer counts its steps
        self._applied = 0

    def train_step(
        self, batches: Sequence[Batch], update_tokens: int, rate: float, flags: Flags = tuple
    ) -> StepStats:
        self.module.train()
        set_clock(self.module, self._applied + 1)
        reading = Reading(next(self.module.parameters()).device, 1, figures_of(self.module), flags)
        for batch in batches:
            sums = self.module(batch)
            (sums.loss / update_tokens).backward()
            reading.add(sums)
        norm = float(*reading.read(gradient_norm(self.module.parameters())))
        applied = math.isfinite(norm) and math.isfinite(reading.figures[0])
        if applied:
            clip_gradients(self.module.parameters(), norm, self.clip)
            set_rate(self.optimizer, rate)
            self.optimizer.step()
            self._applied += 1
        self.optimizer.zero_grad(set_to_none=True)
        return reading.stats(norm, 1.0, applied)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[tuple[float, float]]:
        self.module.eval()
        return read_sums([self.module(batch) for batch in batches])

    def owned(self) -> Iterator[Part]:
        for name, parameter in self.module.named_parameters():
            weight, state = parameter.detach(), self.optimizer.state[parameter]
            moments = {moment: state[moment] if moment in state else initial_moment(moment, weight)
                    for moment in self.moments}
            yield Part(name, tuple(weight.shape), 0, weight.view(-1), {m: t.view(-1) for m, t in moments.items()})

    def fill(self, source: Source, moments: Source | None = None, step: int = 0) -> None:
        fill(self.module, source)
        for name, parameter in self.module.named_parameters():
            own_moments = {m: moments(f"{name}.{m}").to(parameter) if moments else initial_moment(m, parameter.detach())
                    for m in self.moments}
            counted = {"step": torch.tensor(float(step))} if self.counts else {}
            self.optimizer.state[parameter] = {**counted, **own_moments}
        self._applied = step
        set_clock(self.module, step)

    @torch.no_grad()
    def swap_average(self) -> None:
        for parameter in self.module.parameters():
            average = self.optimizer.state[parameter]["ema"]
            weight = parameter.clone()
            parameter.copy_(average)
            average.copy_(weight)

    def gather_model(self) -> Transformer:
        return self.module

    @property
    def optimizer_step(self) -> int:
        return self._applied

    def scaler_state(self) -> ScalerState | None:
        return None

    def restore_scaler(self, state: ScalerState) -> None:
        """Does nothing: fp32 needs no loss scale."""

    def close(self) -> None:
        """Does nothing: the engine holds no resources."""
