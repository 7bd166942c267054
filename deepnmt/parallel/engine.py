"""What the training loop calls to make updates: the interface of engines, what they share, and the plain one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.checkpoint.tensors import Part
from deepnmt.config import Recipe
from deepnmt.config.choices import OPTIMIZERS
from deepnmt.device import upload
from deepnmt.model.blocks import set_clock
from deepnmt.model.init import Source, fill
from deepnmt.model.loss import LossSums
from deepnmt.model.objective import objective_of
from deepnmt.model.transformer import Transformer
from deepnmt.optim.optimizers import build_optimizer, initial_moment, moment_names
from deepnmt.optim.scaler import ScalerState
from deepnmt.optim.schedules import factors_risen, set_rate

# Builds the whole model with its weights still to be set, and calls its argument with each part as soon as that is
# built; see `Transformer`.
Build = Callable[[Callable[[nn.Module], None]], Transformer]
BuildStage = Callable[[range], Transformer]  # from the units of a stage


def build_of(recipe: Recipe, vocabs: tuple[int, int]) -> Build:
    """Builds the recipe's translation model; `vocabs`: source and target vocabulary sizes."""
    return lambda after_build: Transformer(
        recipe.model, *vocabs, recipe.seed, objective_of(recipe, vocabs[1]), after_build=after_build)


def stage_of(recipe: Recipe, vocabs: tuple[int, int]) -> BuildStage:
    """Builds the stages of a pipeline of the recipe's translation model."""
    return lambda units: Transformer(recipe.model, *vocabs, recipe.seed, objective_of(recipe, vocabs[1]), units=units)


@dataclass(frozen=True)
class StepStats:
    """The figures of one update, the same on all processes.

    `loss` and `nll` are sums over the target tokens of all processes, in nats, and so are the further `figures` of the
    objective. `applied` is False, and `grad_norm` inf, if the update was dropped because a gradient was not finite.
    `flags` are the sums over all processes of what they passed to `train_step`.
    """

    loss: float
    nll: float
    grad_norm: float
    loss_scale: float
    applied: bool
    figures: Mapping[str, float] = field(default_factory=dict)
    flags: Sequence[float] = ()


# Returns numbers that are summed over all processes together with the loss, and called shortly before.
Flags = Callable[[], Sequence[float]]


class Reading:
    """What the host learns of one update. It waits for the device once, when it needs the norm of the gradients.

    Args:
        names: of the objective's further figures.

    Attributes:
        figures: once `read`: sums over all processes of loss, nll, the further figures, and of the flags.
    """

    def __init__(self, device: torch.device, world: int, names: Sequence[str] = (), flags: Flags = tuple) -> None:
        self._world, self._names, self._flags = world, names, flags
        self._sums = torch.zeros(2 + len(names), dtype=torch.float64, device=device)
        self.figures: list[float] = []

    def add(self, sums: LossSums) -> None:
        """Adds a micro-batch's sums to those before; nothing waits for it."""
        none = torch.zeros_like(sums.nll)
        others = [sums.others.get(name, none) for name in self._names]
        self._sums.add_(torch.stack([sums.loss.detach(), sums.nll, *others]))

    def read(self, *norms: Tensor) -> list[Tensor]:
        """Copies the figures, and `norms` of one number each, to the host; returns these. Collective."""
        device, flags = self._sums.device, torch.tensor(self._flags(), dtype=torch.float64, device="cpu")
        figures = torch.cat([self._sums, upload(flags, device)])
        if self._world > 1:
            dist.all_reduce(figures)
        count = len(figures)
        read = torch.cat([figures, *(norm.detach().double().view(1).to(device) for norm in norms)]).tolist()
        self.figures = read[:count]
        return [torch.tensor(value, dtype=norm.dtype, device="cpu")
                for value, norm in zip(read[count:], norms, strict=True)]

    def stats(self, norm: float, scale: float, applied: bool) -> StepStats:
        """The update's figures."""
        if not self.figures:  # DeepSpeed dropped the update before it came to the norm
            self.read()
        loss, nll, *rest = self.figures
        count = len(self._names)
        figures = dict(zip(self._names, rest[:count], strict=True))
        return StepStats(loss, nll, norm if applied else math.inf, scale, applied, figures, rest[count:])


def figures_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the further figures that a task's model has besides loss and nll."""
    return getattr(module, "figures", ())


def read_sums(sums: Sequence[LossSums]) -> list[tuple[float, float]]:
    """(loss, nll) of each micro-batch; waits for the device once."""
    return [(loss, nll) for loss, nll in torch.stack([torch.stack((each.loss, each.nll)) for each in sums]).tolist()]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
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
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], limit / (norm + 1e-6))


class Engine(Protocol):
    """What the training loop calls. Every method is collective: all processes call it, in the same order.

    `data_rank` of `data_world`: this process's data-parallel rank, the same for all stages of one pipeline.
    `parameters`: number of trainable parameters of the whole model.
    `build`: builds another of the same model.
    """

    data_rank: int
    data_world: int
    parameters: int
    build: Build

    @property
    def module(self) -> nn.Module:
        """The module this process runs: the model or a pipeline stage, its layers under their canonical names."""

    def train_step(
        self, batches: Sequence[Batch], update_tokens: int, rate: float, flags: Flags = tuple
    ) -> StepStats:
        """Makes one update from this process's micro-batches, at learning rate `rate`; `update_tokens`: target tokens
        of all processes' micro-batches together."""

    def evaluate(self, batches: Sequence[Batch]) -> list[tuple[float, float]]:
        """The sums (label-smoothed loss, plain nll) of each micro-batch, without dropout or gradients; zeros on all but
        the last stage of a pipeline. All processes pass equally many; the more, the less a pipeline idles."""

    def owned(self) -> Iterator[Part]:
        """What this process writes into a checkpoint, in fp32: all processes' parts together are every parameter once.
        Not collective; the parts are always the same, in the same order."""

    def fill(self, source: Source, moments: Source | None = None, step: int = 0) -> None:
        """Sets all weights and moments, one parameter at a time. A new engine needs this before its first update.
        Of a `RangeSource` each process reads what it keeps.

        Args:
            source: from a canonical name to the weight.
            moments: from a name such as NAME.exp_avg to the moment; without it, `optim.initial_moment`.
            step: updates applied, as the optimizer counts them.

        Raises:
            ValueError: see `weight_from`.
        """

    def swap_average(self) -> None:
        """Exchanges the weights with their running average, which `train.ema` keeps; the next call exchanges them
        back."""

    def gather_model(self) -> Transformer:
        """The whole model on every process, with the present weights in the training precision.

        For decoding, where each process takes its own number of steps. It may be the engine's own module, so do not
        train it, nor keep it across an update.

        Raises:
            torch.OutOfMemoryError: on every process, if any of them has no room for it.
        """

    @property
    def optimizer_step(self) -> int:
        """Updates applied, as the optimizer counts them."""

    def scaler_state(self) -> ScalerState | None: ...

    def restore_scaler(self, state: ScalerState) -> None: ...

    def close(self) -> None: ...


class LocalEngine:
    """The engine in plain PyTorch, one process, fp32: the reference that tests compare every other layout with.

    If `module` has its weights already, `fill` is not needed. `build` is there if `build_engine` has made it.
    """

    build: Build

    def __init__(self, module: Transformer, recipe: Recipe, device: torch.device) -> None:
        self.module = module.to(device)
        self.data_rank, self.data_world = 0, 1
        self.parameters = sum(p.numel() for p in module.parameters())
        self.clip, self.settings = recipe.train.clip, recipe.optimizer
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
            set_rate(self.optimizer, rate, factors_risen(self.settings, self._applied + 1))
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
