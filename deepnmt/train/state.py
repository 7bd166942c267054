"""Where a training run stands, and what its next progress line will say; both are kept in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepnmt.data.batching import Position


@dataclass
class Progress:
    """Where a run stands; becomes `state.json` of a checkpoint."""

    update: int = 0
    position: Position = field(default_factory=lambda: Position(0, 0))
    skipped: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    best: dict[str, Any] = field(default_factory=dict)  # value, update, validations without a better one
    validations: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Interval:
    """Sums between two progress lines, over all processes."""

    loss: float = 0.0
    nll: float = 0.0
    tokens: int = 0
    gradient_norm: float = 0.0
    seconds: float = 0.0
    applied: int = 0
    updates: int = 0
    rate: float = 0.0
    loss_scale: float = 1.0

    def add(self, loss: float, nll: float, tokens: int, gradient_norm: float) -> None:
        self.loss += loss
        self.nll += nll
        self.tokens += tokens
        self.gradient_norm += gradient_norm
        self.applied += 1
