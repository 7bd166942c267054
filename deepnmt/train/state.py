"""Where a run stands: what its checkpoints keep in state.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from deepnmt.checkpoint.checkpoint import TrainingState
from deepnmt.data.batching import START, Position
from deepnmt.optim import ScalerState


@dataclass
class Interval:
    """Sums between two progress lines, over all processes; `rate` and `loss_scale` are those of the last update."""

    loss: float = 0.0
    nll: float = 0.0
    tokens: int = 0
    gradient_norm: float = 0.0
    seconds: float = 0.0
    applied: int = 0
    updates: int = 0
    rate: float = 0.0
    loss_scale: float = 1.0


@dataclass
class TrainState:
    """Where a run stands.

    Attributes:
        update: updates applied; optimizer_step: as the optimizer counts them.
        position: of the next micro-batch.
        loss_scale: of fp16, or the last one of a run that has left fp16, else None.
        best: value, update, and how many validations since were no better (`waited`).
        skipped: updates dropped because a gradient was not finite.
        seconds: of updates.
        validations: figures of each, with `update` and `value`, where lower is better.
        data_fingerprint: of the prepared data. processes: how many wrote this.
        interval: since the last progress line.
        out_of_time: whether `train.max_seconds` had passed before the last update, on any process; not saved.
    """

    update: int = 0
    position: Position = START
    optimizer_step: int = 0
    loss_scale: ScalerState | None = None
    best: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    validations: list[dict[str, Any]] = field(default_factory=list)
    interval: Interval = field(default_factory=Interval)
    data_fingerprint: str = ""
    processes: int = 1
    out_of_time: bool = False

    def saved(self) -> TrainingState:
        """As state.json holds it."""
        names = ("skipped", "target_tokens", "seconds", "validations", "interval", "data_fingerprint", "processes")
        own = asdict(self)
        return TrainingState(self.update, self.position.epoch, self.position.index, self.optimizer_step,
                             own["loss_scale"], self.best, {name: own[name] for name in names})

    @classmethod
    def of(cls, saved: TrainingState) -> TrainState:
        """From the state.json of a checkpoint of a run (not of an average)."""
        extra = saved.extra
        scale = saved.loss_scale
        return cls(saved.update, Position(saved.epoch, saved.micro_batch), saved.optimizer_step,
                   {"scale": float(scale["scale"]), "clean": int(scale["clean"])} if scale else None, saved.best,
                   extra["skipped"], extra["target_tokens"], extra["seconds"], extra["validations"],
                   Interval(**extra.get("interval", {})), extra["data_fingerprint"], extra["processes"])
