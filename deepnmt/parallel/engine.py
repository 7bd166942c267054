"""The seam between the training loop and whatever computes the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.model.init import Source
from deepnmt.model.transformer import Transformer
from deepnmt.optim import Moment, ScalerState

# Builds the whole model, its weights not filled in, and calls its argument with every part once that is built; see
# `Transformer`.
Build = Callable[[Callable[[nn.Module], None]], Transformer]


def build_of(recipe: Recipe, vocabs: tuple[int, int]) -> Build:
    """The recipe's translation model."""
    return partial(Transformer, recipe.model, *vocabs, recipe.seed, recipe.train.label_smoothing)


@dataclass(frozen=True)
class StepStats:
    """One update. `loss` and `nll`: this process's sums over its target tokens, undivided (in a pipeline the last stage
    has them, the others 0). `applied`: False where a non-finite gradient kept the update from the weights; then
    `grad_norm` is inf."""

    loss: float
    nll: float
    grad_norm: float
    loss_scale: float
    applied: bool


@dataclass(frozen=True)
class ParameterState:
    """One parameter under its canonical name, fp32 on the CPU. `kept`: what the optimizer keeps of it from update to
    update (see `optim.moment_names`), before the first `optim.initial_moment`."""

    name: str
    weight: torch.Tensor
    kept: Mapping[Moment, torch.Tensor]

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: NAME.exp_avg and so on."""
        return {f"{self.name}.{moment}": tensor for moment, tensor in self.kept.items()}


class Engine(Protocol):
    """What the loop asks for. Every call is made by all processes, in the same order.

    `data_rank` of `data_world`: whose micro-batches this process computes on; the stages of a pipeline share theirs.
    `parameters`: trainable numbers of the whole model.
    """

    data_rank: int
    data_world: int
    parameters: int

    @property
    def module(self) -> nn.Module:
        """What this process computes with: the model, or a pipeline's stage, layers under their canonical names."""

    def train_step(self, batches: Sequence[Batch], update_tokens: int, rate: float) -> StepStats:
        """One update from this process's micro-batches; `update_tokens`: target tokens of all processes' together."""

    def evaluate(self, batches: Sequence[Batch]) -> list[tuple[float, float]]:
        """Each micro-batch's sums (smoothed loss, plain nll), without dropout and gradients; zeros in a pipeline before
        its last stage. All processes give equally many; the more, the better a pipeline is filled."""

    def export_state(self) -> Iterator[ParameterState]:
        """Full parameters one after the other; a collective: every process runs it to the end."""

    def fill(self, source: Source, moments: Source | None = None, step: int = 0) -> None:
        """Sets weights and moments, one after the other, which is how an engine begins: built, it has none.

        Args:
            source: the weight of each canonical name.
            moments: the same of `ParameterState.moments`' names; without, see `optim.initial_moment`.
            step: updates applied, as the optimizer counts them.

        Raises:
            ValueError: see `weight_from`.
        """

    def gather_model(self) -> Transformer:
        """A model whose forward talks to no other process, with the present weights in the float type of training.

        For decoding, where processes take different numbers of steps. It may be the module itself: it is not trained,
        and not kept over an update.

        Raises:
            torch.OutOfMemoryError: on every process, where one has no room for it.
        """

    @property
    def optimizer_step(self) -> int:
        """Updates applied, as the optimizer counts them."""

    def scaler_state(self) -> ScalerState | None: ...

    def restore_scaler(self, state: ScalerState) -> None: ...

    def close(self) -> None: ...
