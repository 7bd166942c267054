"""The seam between the training loop and whatever computes the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deepnmt.model.transformer import Transformer
from deepnmt.optim import ScalerState

# src [B,S], src_lengths [B], trg_in [B,T], trg_out [B,T] (int64, on the device), and the global micro-batch number
MicroBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]


@dataclass(frozen=True)
class StepStats:
    """One update. `loss` and `nll`: this process's sums over its target tokens, undivided. `applied`: False where a
    non-finite gradient kept the update from the weights; then `grad_norm` is inf."""

    loss: float
    nll: float
    grad_norm: float
    loss_scale: float
    applied: bool


@dataclass(frozen=True)
class ParameterState:
    """One parameter under its canonical name: fp32 on CPU. Moments are None before the first update."""

    name: str
    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class Engine(Protocol):
    """What the loop asks for. Every call is made by all processes, in the same order."""

    module: Transformer

    def train_step(self, micro_batches: Sequence[MicroBatch], update_tokens: int, rate: float) -> StepStats:
        """One update from this process's micro-batches; `update_tokens`: target tokens of all processes' together."""

    def evaluate(self, micro_batch: MicroBatch) -> tuple[float, float]:
        """This micro-batch's sums (smoothed loss, plain nll), without dropout and gradients."""

    def export_state(self) -> Iterator[ParameterState]:
        """Full parameters one after the other; a collective: every process runs it to the end."""

    def import_state(self, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor], step: int) -> None:
        """Puts `export_state`'s content back; moments under NAME.exp_avg and NAME.exp_avg_sq."""

    @property
    def optimizer_step(self) -> int:
        """Updates applied, as the optimizer counts them."""

    def scaler_state(self) -> ScalerState | None: ...

    def restore_scaler(self, state: ScalerState) -> None: ...

    def close(self) -> None: ...
