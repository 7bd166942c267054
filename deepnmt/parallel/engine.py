"""The interface between the training loop and the engines that compute its updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.checkpoint.tensors import Part
from deepnmt.config import Recipe
from deepnmt.model.guided import guided
from deepnmt.model.init import Source
from deepnmt.model.loss import LossSums
from deepnmt.model.transformer import Transformer
from deepnmt.optim import ScalerState

# Builds the whole model with its weights still to be set, and calls its argument with each part as soon as that is
# built; see `Transformer`.
Build = Callable[[Callable[[nn.Module], None]], Transformer]


def build_of(recipe: Recipe, vocabs: tuple[int, int]) -> Build:
    """Builds the recipe's translation model; `vocabs`: source and target vocabulary sizes."""
    train = recipe.train
    build = partial(Transformer, recipe.model, *vocabs, recipe.seed, train.label_smoothing, r_drop=train.r_drop)
    return partial(guided, build, train.guided_layer, train.guided_alignment) if train.guided_alignment else build


@dataclass(frozen=True)
class StepStats:
    """The figures of one update.

    `loss` and `nll` are this process's sums over its target tokens, in nats (in a pipeline the last stage has them, the
    others 0). `applied` is False, and `grad_norm` inf, if the update was dropped because a gradient was not finite.
    `alignment`: the sum of guided alignment's loss, without its weight.
    """

    loss: float
    nll: float
    grad_norm: float
    loss_scale: float
    applied: bool
    alignment: float = 0.0


def add_sums(total: Tensor | None, sums: LossSums) -> Tensor:
    """Adds a micro-batch's sums to those before, in float64 and on the device, so that nothing waits for it."""
    own = torch.stack([each.detach() for each in sums]).double()
    return own if total is None else total.add_(own)


def read_sums(sums: Sequence[LossSums]) -> list[tuple[float, float]]:
    """(loss, nll) of each micro-batch; waits for the device once."""
    return [(loss, nll) for loss, nll in torch.stack([torch.stack((each.loss, each.nll)) for each in sums]).tolist()]


class Engine(Protocol):
    """What the training loop calls. Every method is collective: all processes call it, in the same order.

    `data_rank` of `data_world`: this process's data-parallel rank, the same for all stages of one pipeline.
    `parameters`: number of trainable parameters of the whole model.
    """

    data_rank: int
    data_world: int
    parameters: int

    @property
    def module(self) -> nn.Module:
        """The module this process runs: the model or a pipeline stage, its layers under their canonical names."""

    def train_step(self, batches: Sequence[Batch], update_tokens: int, rate: float) -> StepStats:
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
